"""A method with state in one file, as users write it. A momentum per tensor chooses the indices."""

import dataclasses
from typing import Any

import torch

from scalecom_hvd.exchange import BucketCollectives, Method, State
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import Step
from scalecom_hvd.exchange.residue import CompressedTensor


class Momentum(Method):
    """The leader chooses the indices where its momentum of the accumulators is largest.

    All ranks send their accumulators at these indices. The momentum is set to zero where values
    were sent. Each rank has a momentum of its own for every tensor. The share of it that is kept
    grows over the first steps, which are counted once for the whole method.

    Args:
        momentum: the largest share of the momentum that is kept from step to step.
        **settings: see Method.
    """

    uses = ("leader", "selection")

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

    def step(self, bucket: BucketStep, collectives: BucketCollectives, state: State) -> Step:
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
