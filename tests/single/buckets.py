"""Buckets without ranks and without an exchange."""

import torch

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.residue import Residues


def made(tensors, thread=None, **settings):
    """Return a bucket of these tensors, with residues, and gradients in `came`."""
    residues = Residues(ScaleComConfig(**{"bits": 32} | settings))
    residues.attach(tensors)
    for tensor in residues.tensors.values():
        tensor.residue.normal_()
    bucket = Bucket(0, list(tensors), tensors, residues.tensors, ranks=2, thread=thread)
    bucket.came = {name: torch.randn_like(like) for name, like in tensors.items()}
    return bucket
