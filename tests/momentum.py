"""A method with state in one file, as users write it: momentum is applied before the choice.

This is Deep Gradient Compression (Lin et al., 2018, arXiv 1712.01887).
"""

import dataclasses

import torch

from scalecom_hvd.exchange import Method


class Momentum(Method):
    """u <- mu*u + g; each rank sends its own largest m + u; u <- 0 where they were sent.

    For every tensor, each rank keeps a velocity u of its own, and counts how often each element was
    sent. The method counts its steps. Both counts are the same on all ranks.
    """

    equal_state = ("sent", "steps")

    def __init__(self, *, mu=0.5, **fields):
        super().__init__(**fields)
        self.mu = mu

    @property
    def settings(self):
        return super().settings | {"mu": self.mu}

    def init(self, tensor):
        return {
            "velocity": torch.zeros_like(tensor.residue),
            "sent": torch.zeros(tensor.residue.numel(), dtype=torch.int32),
        }

    def init_method(self):
        return {"steps": 0, "whole": torch.zeros((), dtype=torch.int64)}

    def step(self, bucket, collectives, state):
        own = self._velocities(bucket, state)
        for name, part in zip(bucket.compressed, bucket.parts, strict=True):
            part.add_(state.tensors[name]["velocity"] * self.mu)
        offsets = bucket.choose()
        places = bucket.places_at(offsets)
        values = bucket.accumulators[places]
        bucket.send(places, values)
        velocity = torch.cat([own[name] for name in bucket.compressed])
        velocity[places] = 0
        sent = torch.cat([kept["sent"] for kept in state.tensors.values()])
        everyones_values = yield from collectives.gather(values, "values")
        everyones_offsets = yield from collectives.gather(offsets, "offsets")
        for theirs, at in zip(everyones_values, everyones_offsets, strict=True):
            there = bucket.places_at(at)
            bucket.receive(there, theirs * collectives.share)
            sent[there] += 1
        parts = zip(velocity.split(bucket.sizes), sent.split(bucket.sizes), strict=True)
        tensors = {
            name: {"velocity": u.clone(), "sent": count.clone()}
            for name, (u, count) in zip(bucket.compressed, parts, strict=True)
        }
        method = {"steps": state.method["steps"] + 1}
        return dataclasses.replace(state, tensors=tensors, method=state.method | method)

    def whole_step(self, bucket, collectives, state):
        """Update the momentum while gradients are sent uncompressed, too."""
        own = self._velocities(bucket, state)
        tensors = {name: kept | {"velocity": own[name]} for name, kept in state.tensors.items()}
        method = {"whole": state.method["whole"] + 1}
        return dataclasses.replace(state, tensors=tensors, method=state.method | method)
        yield

    def _velocities(self, bucket, state):
        return {
            name: kept["velocity"] * self.mu + bucket.grads[name] * bucket.scale
            for name, kept in state.tensors.items()
        }
