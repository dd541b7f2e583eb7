"""Random programs of training steps on real ranks, held against what must be true of every step
(fuzz_model.py).

Every rank makes the same programs from the same seed. By default they are the same ones in every
run, as many as fit into some seconds but no more than PROGRAMS; FUZZ_SECONDS says for how long to
make ever new ones, FUZZ_SEED with which seed to begin. A program that fails is printed with its
seed.
"""

import copy
import dataclasses
import io
import os
import random
import time
import traceback

import pytest
import torch
from fuzz_model import Seen, Truth, draw_setting, draw_step

import scalecom_hvd.torch as hvd

SECONDS = float(os.environ.get("FUZZ_SECONDS", 12))
PROGRAMS = None if "FUZZ_SECONDS" in os.environ else 30
FIRST_SEED = int(os.environ.get("FUZZ_SEED", 0))
RULES = (
    "step",
    "step",
    "step",
    "missing",
    "overflow",
    "scale",
    "freeze",
    "save",
    "resume",
    "go back",
)


def on_some_rank(fact: bool) -> bool:
    """All ranks ask together, so that none stops alone."""
    return bool(hvd.allreduce(torch.tensor(float(fact)), op=hvd.Sum, name="fuzz.on_some_rank"))


class Training:
    """What a script does on this rank, in the order that a program says."""

    def __init__(self, setting, choose, log):
        self.setting, self.choose, self.log = setting, choose, log
        self.scale, self.frozen, self.saved = 1.0, set(), None
        self.truth = Truth(self.setting, exact_sums=False)
        self.model, self.optimizer = self.start()
        log.append(self.setting)

    def start(self):
        model = self.setting.parameters()
        groups = self.setting.groups and [
            [model[name] for name in group] for group in self.setting.groups
        ]
        compressor = hvd.ScaleCom(config=self.setting.config, loss_scale=lambda: self.scale)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.values(), lr=0.01),
            model.items(),
            compression=compressor,
            groups=groups,
        )
        return model, optimizer

    def take(self, rule):
        self.log.append(rule)
        if rule in ("step", "missing", "overflow"):
            self.step(
                draw_step(
                    self.choose,
                    self.setting,
                    missing=rule == "missing",
                    overflow=rule == "overflow",
                )
            )
        elif rule == "scale":
            self.scale = 2.0 ** self.choose((0, -3, 4, 10, 16))
            self.log.append(self.scale)
        elif rule == "freeze":
            self.frozen ^= {self.choose(list(self.setting.shapes))}
            self.log.append(set(self.frozen))
            self.tell_who_is_frozen()
        elif rule == "save":
            self.saved = (self.state(), self.truth.save())
        elif rule == "resume":
            state = self.state()
            self.model, self.optimizer = self.start()
            self.optimizer.compression.load_state_dict(state)
            self.truth.skipped = 0
            self.tell_who_is_frozen()
        elif self.saved is not None:
            self.optimizer.compression.load_state_dict(copy.deepcopy(self.saved[0]))
            self.truth.load(self.saved[1])

    def tell_who_is_frozen(self):
        for name, parameter in self.model.items():
            parameter.requires_grad_(name not in self.frozen)

    def state(self):
        file = io.BytesIO()
        torch.save(self.optimizer.compression.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def step(self, step):
        self.log.append(step)
        came = [
            step.gradients(self.setting, rank, self.scale, self.frozen)
            for rank in range(hvd.size())
        ]
        if all(grad is None for grads in came for grad in grads.values()):
            before = self.optimizer.compression.stats()["step"]
            averages = self.exchange(step, came[hvd.rank()])
            assert not any(average.any() for average in averages.values())
            assert self.optimizer.compression.stats()["step"] == before
            return
        error, seen = None, None
        try:
            seen = Seen.of(self.optimizer.compression, self.exchange(step, came[hvd.rank()]))
        except Exception:
            error = traceback.format_exc()
        everyone = hvd.allgather_object((error, seen), name="fuzz.seen")
        errors = [error for error, _ in everyone if error]
        assert not errors, errors[0]
        # All see the same, and so judge alike.
        if self.truth.check(came, self.scale, self.frozen, [seen for _, seen in everyone]):
            with self.optimizer.skip_synchronize():
                self.optimizer.step()

    def exchange(self, step, grads):
        self.optimizer.zero_grad()
        # Backward comes by what was added last first.
        loss = torch.zeros((), dtype=torch.float64)
        for name in reversed(step.orders[hvd.rank()]):
            if grads[name] is not None:
                loss = loss + (self.model[name] * grads[name]).sum().double()
        if loss.requires_grad:
            loss.backward()
        self.optimizer.synchronize()
        return {name: parameter.grad for name, parameter in self.model.items()}


@pytest.mark.long  # tests/single/test_fuzz.py has the same programs on simulated ranks
@pytest.mark.timeout(SECONDS + 100)
def test_random_programs():
    # torch imports much of itself when it makes its first optimizer
    torch.optim.SGD([torch.zeros(1)]).zero_grad()
    begun, seed = time.monotonic(), FIRST_SEED
    while not on_some_rank(time.monotonic() - begun > SECONDS or seed - FIRST_SEED == PROGRAMS):
        log, generator = [], random.Random(seed)
        try:
            setting = draw_setting(generator.choice, (hvd.size(),))
            if not hvd.mpi_enabled():
                # Gloo of Horovod 0.28.1 drops a float16 sum equal to its first operand's bits, as
                # in 2**-24 (0x0001) + 1.0.
                setting = dataclasses.replace(setting, fields=setting.fields | {"wire_dtype": None})
            with setting.applied():
                training = Training(setting, generator.choice, log)
                for _ in range(15):
                    training.take(generator.choice(RULES))
        except Exception as error:
            program = "\n".join(map(str, log))
            raise AssertionError(
                f"FUZZ_SEED={seed} on {hvd.size()} ranks fails in\n{program}"
            ) from error
        seed += 1
    print(f"programs {FIRST_SEED} to {seed - 1}")
