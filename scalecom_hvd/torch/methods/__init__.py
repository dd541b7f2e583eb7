"""Methods to compare ScaleCom with, one small file each: same residues, buckets, checks and collectives, other ways to choose and send.

Every method is a `Method` (base.py) whose `exchange` says how the accumulators of one bucket are averaged; they work in this package's
DistributedOptimizer. Imports compressor and accumulators; used by users alone.
"""

from scalecom_hvd.torch.methods.base import Method
from scalecom_hvd.torch.methods.ecqsgd import ECQSGD
from scalecom_hvd.torch.methods.global_topk import GlobalTopK
from scalecom_hvd.torch.methods.gtopk import GTopK
from scalecom_hvd.torch.methods.local_topk import LocalTopK
from scalecom_hvd.torch.methods.randomk import RandomK

__all__ = ["ECQSGD", "GTopK", "GlobalTopK", "LocalTopK", "Method", "RandomK"]
