"""Simulated ranks that take local steps."""

import copy
import math

import torch

from scalecom_hvd.exchange.gradients import NotFinite
from scalecom_hvd.exchange.simulator import Simulation

SETTINGS = {"rate": 4, "min_numel": 0, "dense": [], "warmup_steps": 0}
NAMES = ("a", "b", "c", "d", "e")
SIZE = 40
HALF = torch.float16
WHOLE = {"dense": ["*"]}
GROUPS = [["a", "e"], [], ["b"], [], ["c", "d"]]
# Each step's gradients on two ranks, and those of three.
GRADIENTS = [[0.25, -0.125], [0.5, 0.0], [-0.25, 0.375], [0.125, 0.25], [0.0, -0.5]]
THREE = [0.25, 0.5, -0.125]


class Ranks:
    """n simulated ranks with five parameters of 40 elements, and plain SGD of learning rate 1."""

    def __init__(self, n=2, local_steps=4, dtype=torch.float32, **fields):
        self.settings = {"local_steps": local_steps, "dtype": dtype, **fields}

        def parameters(_):
            values = torch.linspace(-1, 1, SIZE).to(dtype)
            return {name: torch.nn.Parameter(values.clone()) for name in NAMES}

        self.simulation = Simulation(n, parameters, local_steps=local_steps, **(SETTINGS | fields))
        self.own = self.simulation.parameters
        self.locals, self.compressors = self.simulation.locals, self.simulation.compressors

    def step(self, grads, times=1):
        """Take a step on all ranks, or several; return what each rank's last step returned.

        grads: a number, or one for each rank. All elements have this gradient. "bad" is a gradient
        that cannot be used.
        """
        grads = grads if isinstance(grads, list) else [grads] * len(self.own)

        def take(rank):
            if grads[rank] == "bad":
                raise NotFinite(rank)
            with torch.no_grad():
                for parameter in self.own[rank].values():
                    parameter.sub_(grads[rank])
            return rank

        for _ in range(times):
            took = self.simulation.take_steps([lambda r=r: take(r) for r in range(len(self.own))])
        return took

    def train(self, first, end, bad=None):
        """Take these steps. In step `bad`, rank 1's parameters become NaN."""
        for step in range(first, end):
            own = GRADIENTS[step % 5]
            self.step([own[0], math.nan] if step == bad else own)

    def meet(self):
        """End the round. All ranks then have the same parameters."""
        self.simulation.synchronise()
        assert self.alike() == "abcde"

    def stats(self, rank=0):
        return self.compressors[rank].stats()

    def states(self):
        """What a script would save. It waits for averages that travel."""
        self.simulation.collect()
        return [copy.deepcopy(compressor.state_dict()) for compressor in self.compressors]

    def values(self, rank=0):
        return torch.cat([p.detach() for p in self.own[rank].values()])

    def load(self, rank, values):
        torch.nn.utils.vector_to_parameters(values, self.own[rank].values())

    def resumed(self, n=2, ranks=(0, 1), states=None, **changed):
        """n other ranks. These ranks of them load the states, the others are new."""
        other = Ranks(n, **(self.settings | changed))
        saved = dict(zip(ranks, states or self.states(), strict=True))
        for rank in range(n):
            mine = self.values(ranks.index(rank) if rank in saved else 0)
            if "local" in saved.get(rank, {}).get("local_steps", {}):
                mine = other.values(rank)  # the state puts in place what it needs
            other.load(rank, mine)
            if rank in saved:
                other.compressors[rank].load_state_dict(saved[rank])
        return other

    def alike(self, tolerance=0.0):
        """The names of the parameters that are equal on all ranks."""

        def is_alike(name):
            first, *others = (own[name] for own in self.own)
            return all(torch.allclose(first, one, rtol=0, atol=tolerance) for one in others)

        return "".join(filter(is_alike, NAMES))

    def residues(self):
        """The mean of all ranks' residues."""
        self.simulation.collect()
        of_ranks = [[c.residues.tensors[name].residue for name in NAMES] for c in self.compressors]
        return torch.stack([torch.cat(own) for own in of_ranks]).mean(0)

    def outer_state(self, rank=0):
        return self.locals[rank].outer.state_dict()["state"]


def begun():
    return torch.linspace(-1, 1, SIZE).repeat(len(NAMES))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.75, nesterov=True)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=torch.tensor(0.5))
