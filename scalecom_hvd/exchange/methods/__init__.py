"""The methods, one small file each: ScaleCom, and others to compare it with.

They share residues, buckets, checks and collectives, and differ in how they choose and send. Each
is a `Method` (base.py) whose `step` says how one bucket's accumulators are averaged.
"""

from scalecom_hvd.exchange.methods.base import Method
from scalecom_hvd.exchange.methods.bucket_collectives import BucketCollectives
from scalecom_hvd.exchange.methods.local_top_k import LocalTopK
from scalecom_hvd.exchange.methods.random_k import RandomK
from scalecom_hvd.exchange.methods.scalecom import ScaleCom
from scalecom_hvd.exchange.methods.state import State
