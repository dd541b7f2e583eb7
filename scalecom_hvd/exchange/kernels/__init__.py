"""The kernels that make a step's moves on residues: in plain torch, in C and in Triton.

base.py is their contract, and choice.py picks one.
"""
