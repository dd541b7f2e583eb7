"""A method with state in one file, as users write it: a momentum per tensor chooses."""

import dataclasses
from typing import Any

import torch

from scalecom_hvd.exchange import BucketCollectives, Method, State
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.collectives import Step
from scalecom_hvd.exchange.residue import CompressedTensor


class Momentum(Method):
    """The leader chooses where its momentum of accumulators is largest; all send what they have
    there.

    A momentum begins anew where values were sent. Each rank has its own, of every tensor. It grows
    over the first steps, which are counted for the whole method.

    Args:
        momentum: what is kept of it from step to step, at most.
        **settings: see Method.
    """

    has_leader = True

    def __init__(self, *, momentum: float = 0.9, **settings: Any) -> None:
        super().__init__(**settings)
        self.momentum = momentum

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"momentum": self.momentum}

    def init(self, tensor: CompressedTensor) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros_like(tensor.residue)}

    def init_method(self) -> dict[str, int]:
        return {"steps": 0}

    def step(self, bucket: Bucket, collectives: BucketCollectives, state: State) -> Step:
        steps = state.method["steps"]
        before = torch.cat([own["momentum"] for own in state.tensors.values()])
        momentum = min(self.momentum, steps / (steps + 1)) * before + bucket.accumulators
        parts = momentum.split(bucket.sizes)
        largest = [part.abs().topk(k).indices for part, k in zip(parts, bucket.counts, strict=True)]
        places = yield from collectives.broadcast(bucket.places(largest), collectives.leader())
        values = bucket.accumulators[places]
        bucket.send(places, values)
        bucket.receive(places, (yield from collectives.average(values)))
        momentum[places] = 0
        own = {
            name: {"momentum": part} for name, part in zip(bucket.compressed, parts, strict=True)
        }
        return dataclasses.replace(state, tensors=own, method={"steps": steps + 1})
