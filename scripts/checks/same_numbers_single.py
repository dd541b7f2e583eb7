"""The cases of simulated ranks, in one process. same_numbers.py runs this.

    python scripts/checks/same_numbers_single.py FILE SHARE PARTS PATTERN

runs the cases with a number that is SHARE modulo PARTS and a name that contains PATTERN. It appends
a line to FILE for each.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import same_numbers_methods as methods
import torch
from same_numbers_digests import Parts, Record, together

from scalecom_hvd import exchange

STEPS = 8
SHAPES: dict[str, tuple[int, ...]] = {
    "first": (60, 50),
    "bias": (60,),
    "odd": (37, 53),
    "conv": (8, 4, 3, 3),
    "scalar": (),
    "second": (3, 1000),
    "output": (10, 65),
}
GROUPS = [["first", "bias", "output"], ["odd"], ["conv", "scalar", "second"]]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# What a case may have besides. The keys of SIMULATIONS and COURSES are explained there. All other
# keys are settings of the method.
CIRCUMSTANCES: dict[str, methods.Settings] = {
    "warm-up": {"warmup_steps": 3},
    "dense": {"dense": ["auto:output", "odd"]},
    "rates": {"dense": ["first"], "rates": {"o*": 5, "second": 200}},
    "small buckets": {"bucket_bytes": 5000},
    "float64 residues": {"residue_dtype": "float64"},
    "groups": {"groups": GROUPS},
    "sums": {"sums": True},
    "predivided": {"predivide": 3.0},
    "missing": {"missing": True},
    "not finite": {"not_finite": True},
    "scaled": {"scaled": True},
    "resumed": {"resumed": True},
    "shuffled": {"shuffled": True},
    "sparse": {"sparse": True},
    "float64": {"dtype": "float64"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "mixed dtypes": {"dtype": "mixed"},
    "torch kernel": {"kernel": "torch"},
}
LOCAL: dict[str, methods.Settings] = {
    "every 3 steps": {"local_steps": 3},
    "1 step, then 2": {"local_steps": {0: 1, 5: 2}},
    "outer": {"local_steps": 2, "outer": "nesterov"},
    "overlap": {"local_steps": 3, "overlap": 2},
    "overlap, outer": {"local_steps": 2, "overlap": 1, "outer": "nesterov"},
    "fragments": {"local_steps": 4, "fragments": 3},
    "fragments, overlap": {"local_steps": 4, "fragments": 2, "overlap": 1, "outer": "nesterov"},
    "clipped": {"local_steps": 2, "clip_changes": 0.7},
    "clipped, overlap": {"local_steps": {0: 2, 4: 3}, "clip_changes": 1.0, "overlap": 1},
}
# Those circumstances that matter to local steps, and one that only local steps have.
LOCAL_CIRCUMSTANCES = {
    name: CIRCUMSTANCES[name]
    for name in (
        "warm-up",
        "rates",
        "small buckets",
        "float64 residues",
        "groups",
        "sums",
        "missing",
        "not finite",
        "resumed",
        "float16",
        "mixed dtypes",
    )
} | {"ended early": {"ended_early": True}}
EXCLUDING = [{"sums", "predivided"}, {"dense", "rates"}]

# Arguments of Simulation.
SIMULATIONS = {
    "sums",
    "predivide",
    "groups",
    "local_steps",
    "outer",
    "overlap",
    "fragments",
    "clip_changes",
}
# How training goes: the dtype of parameters; gradients that are missing on one rank, or on all; a
# gradient that is not finite; a loss scale that changes; a save and a load in the middle; a
# different order of gradients on each rank; sparse gradients; which kernel; and local steps that
# synchronise early.
COURSES = {
    "dtype",
    "missing",
    "not_finite",
    "scaled",
    "resumed",
    "shuffled",
    "sparse",
    "kernel",
    "ended_early",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        name: says what is in it.
        ranks: how many there are.
        method: a name of METHODS.
        settings: the method's.
        simulation: arguments of Simulation.
        course: how training goes.
    """

    name: str
    ranks: int
    method: str
    settings: Mapping[str, Any]
    simulation: Mapping[str, Any]
    course: Mapping[str, Any]


def case(ranks: int, method: str, filters: str, *more: tuple[str, Mapping[str, Any]]) -> Case:
    """The case of a method under a filter, and circumstances by name."""
    # A method's settings override a filter's.
    filters = "beta 1" if "beta" in methods.METHODS[method] else filters
    names = ", ".join(name for name, _ in more)
    merged = {key: value for _, own in more for key, value in own.items()}
    settings = {k: v for k, v in merged.items() if k not in SIMULATIONS | COURSES}
    return Case(
        f"single: {method}; {filters}; {ranks} ranks" + (f"; {names}" if names else ""),
        ranks,
        method,
        methods.settings_of(method, filters) | settings,
        {key: value for key, value in merged.items() if key in SIMULATIONS},
        {key: value for key, value in merged.items() if key in COURSES},
    )


def all_cases() -> list[Case]:
    """Every method under every filter, and a sample of everything else, always the same."""
    chance = random.Random(2104)
    filters, ranks = list(methods.FILTERS), (2, 4)

    def some(names: Mapping[str, Any] | Sequence[str], count: int) -> list[str]:
        return chance.sample(list(names), count)

    cases = [
        case(n, method, own)
        for method, own, n in itertools.product(methods.METHODS, filters, ranks)
    ]
    # Each circumstance with ScaleCom's two forms, and with some other methods.
    for name, own in CIRCUMSTANCES.items():
        cases += [
            case(chance.choice(ranks), method, chance.choice(filters[1:]), (name, own))
            for method in ("ScaleCom", "ScaleCom, look-ahead", *some(list(methods.METHODS)[2:], 4))
        ]
    for _ in range(60):
        names = some(CIRCUMSTANCES, 3)
        if not any(pair.issubset(names) for pair in EXCLUDING):
            drawn = [(name, CIRCUMSTANCES[name]) for name in names]
            method = chance.choice(list(methods.METHODS))
            cases.append(case(chance.choice(ranks), method, chance.choice(filters), *drawn))
    for (name, own), number in itertools.product(LOCAL.items(), range(10)):
        method = ("ScaleCom", "ScaleCom, look-ahead", *some(methods.METHODS, 8))[number]
        besides = [(more, LOCAL_CIRCUMSTANCES[more]) for more in some(LOCAL_CIRCUMSTANCES, 2)]
        besides = besides if number % 2 else []
        cases.append(
            case(chance.choice(ranks), method, chance.choice(filters), (name, own), *besides)
        )
    return list({one.name: one for one in cases}.values())


class Training:
    """A case's simulated ranks, and what moves their parameters."""

    def __init__(self, one: Case) -> None:
        self.case = one
        self.scale = 1.0
        self.records = [Record() for _ in range(one.ranks)]
        self.local = "local_steps" in one.simulation
        self.begin()

    def begin(self) -> None:
        """Make everything anew, as a script does when it starts."""
        one = self.case
        simulation = dict(one.simulation)
        if simulation.get("outer") == "nesterov":
            simulation["outer"] = functools.partial(
                torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True
            )
        self.simulation = exchange.Simulation(
            one.ranks,
            lambda rank: first_parameters(one.course.get("dtype", "float32")),
            compression=methods.class_of(exchange, one.method),
            loss_scale=(lambda: self.scale) if one.course.get("scaled") else None,
            **simulation,
            **methods.arguments_of(exchange, one.settings),
        )
        # Momentum never recovers from a number that is not finite, and no later step would count.
        momentum = 0.0 if one.course.get("not_finite") else 0.9
        self.optimizers = [
            torch.optim.SGD(own.values(), lr=0.05, momentum=momentum)
            for own in self.simulation.parameters
        ]

    def run(self) -> Parts:
        """Take all steps."""
        for step in range(STEPS):
            if step == STEPS // 2 + 1 and self.case.course.get("resumed"):
                self.resume()
            self.take(step)
            for record, method in zip(self.records, self.simulation.compressors, strict=True):
                record.note(method.stats())
        states = self.states()
        ranks = zip(self.records, self.simulation.parameters, states, strict=True)
        return together([record.end(own, state) for record, own, state in ranks])

    def take(self, step: int) -> None:
        """Take one step on all ranks."""
        course, ranks = self.case.course, range(self.case.ranks)
        self.scale = (1.0, 8.0, 8.0, 2.0)[step % 4] if course.get("scaled") else 1.0
        grads = [self.gradients(rank, step) for rank in ranks]
        if self.local:
            for own, parameters in zip(grads, self.simulation.parameters, strict=True):
                for name, parameter in parameters.items():
                    parameter.grad = own.get(name)
            self.simulation.take_steps([optimizer.step for optimizer in self.optimizers])
            if course.get("ended_early") and step == 4:
                self.simulation.synchronise()
            return
        names = list(reversed(SHAPES))
        orders = [random.Random(f"{rank} {step}").sample(names, len(names)) for rank in ranks]
        averages = self.simulation.step(grads, orders if course.get("shuffled") else None)
        # As a GradScaler does, leave out a step that is not finite.
        if all(bool(average.isfinite().all()) for average in averages[0].values()):
            for own, optimizer in zip(averages, self.optimizers, strict=True):
                for average in own.values():
                    average.div_(self.scale)
                optimizer.step()

    def gradients(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        """What a rank computes: noise, and a pull towards zero.

        The pull makes each step affect all later steps.
        """
        course, chance = self.case.course, np.random.default_rng([rank, step])
        grads: dict[str, torch.Tensor] = {}
        for name, parameter in self.simulation.parameters[rank].items():
            noise = chance.standard_normal(SHAPES[name]) * 2.0 ** chance.integers(-3, 2)
            if course.get("not_finite") and (name, rank, step) == ("second", 1, 3):
                noise[1, 17] = np.inf
            pulled = torch.from_numpy(np.asarray(noise)) + 0.1 * parameter.detach().double()
            grads[name] = (pulled * self.scale).to(parameter.dtype)
        if course.get("missing"):
            if rank == 1 and step % 2:
                del grads["second"], grads["bias"]
            if step == 4:
                del grads["odd"]
        if course.get("sparse"):
            grads["odd"][step::3] = 0
            grads["odd"] = grads["odd"].to_sparse(1)
        return grads

    def states(self) -> list[dict[str, Any]]:
        """What each rank saves."""
        if self.local:
            self.simulation.collect()
        return [method.state_dict() for method in self.simulation.compressors]

    def resume(self) -> None:
        """Save everything, and load it into new objects."""
        states = copy.deepcopy(self.states())
        values, optimizers = self.simulation.parameters, self.optimizers
        self.begin()
        for rank, state in enumerate(states):
            with torch.no_grad():
                for name, parameter in self.simulation.parameters[rank].items():
                    parameter.copy_(values[rank][name])
            self.optimizers[rank].load_state_dict(optimizers[rank].state_dict())
            self.simulation.compressors[rank].load_state_dict(state)


def first_parameters(dtype: str) -> dict[str, torch.nn.Parameter]:
    """The parameters with which every rank begins."""
    chance, parameters = np.random.default_rng(7), {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        own = DTYPES[number % len(DTYPES)] if dtype == "mixed" else getattr(torch, dtype)
        value = torch.from_numpy(np.asarray(chance.standard_normal(shape)))
        parameters[name] = torch.nn.Parameter(value.to(own))
    return parameters


@contextlib.contextmanager
def kernel(name: str | None) -> Iterator[None]:
    """Let the package use this kernel. None: let it choose by itself."""
    if name is not None:
        os.environ["SCALECOM_KERNEL"] = name
    try:
        yield
    finally:
        os.environ.pop("SCALECOM_KERNEL", None)


def outcome(one: Case) -> Parts:
    """The result of a case, which may be an error."""
    try:
        with kernel(one.course.get("kernel")):
            return Training(one).run()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    methods.check_package()
    file, share, parts, pattern = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
    torch.set_num_threads(1)
    with file.open("w") as lines:
        for one in all_cases()[share::parts]:
            if pattern in one.name:
                print(json.dumps([one.name, outcome(one)]), file=lines, flush=True)


if __name__ == "__main__":
    main()
