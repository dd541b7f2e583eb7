"""Local steps: workers step on their own, and average the changes of their parameters now and then.

local_steps.py is the room to begin with. recipes.py has published combinations of settings.
"""
