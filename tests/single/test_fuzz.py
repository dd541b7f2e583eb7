"""Random programs of training steps on simulated workers.

fuzz_model.py checks what must be true of every step. By default the same programs run every time.
They take about ten seconds, and a failing program is printed as it is. With FUZZ_SECONDS=600, new
programs run for 600 s. A failing one is first made as short as possible, which may take minutes.
"""

import copy
import os
import time

import pytest
from fuzz_model import Seen, Truth, draw_setting, draw_step
from hypothesis import HealthCheck, Phase, note, settings, stateful
from hypothesis import strategies as st
from simulated import assert_same

from scalecom_hvd.exchange.kernels import torch_kernel
from scalecom_hvd.exchange.simulator import Simulation

SECONDS = float(os.environ.get("FUZZ_SECONDS", 60))
EXAMPLES = 30

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")


class Broken(Exception):
    """The error that a collective raises when a program asks for it."""


class Training(stateful.RuleBasedStateMachine):
    """n ranks that train step by step. Every rule checks all that must be true after it."""

    @stateful.initialize(data=st.data())
    def begin(self, data):
        self.setting = draw_setting(self.chooser(data), (1, 2, 3, 4))
        self.applied = self.setting.applied()
        self.applied.__enter__()
        self.scale, self.frozen, self.saved = 1.0, set(), None
        self.truth = Truth(self.setting)
        # The last is the current run. If there is one before it, the last was resumed from its
        # checkpoint, and it goes on for comparison.
        self.runs = [self.start()]
        note(self.setting)

    @staticmethod
    def chooser(data):
        return lambda options: data.draw(st.sampled_from(list(options)))

    def start(self):
        return Simulation(
            self.setting.n,
            lambda rank: self.setting.parameters(),
            groups=self.setting.groups,
            config=self.setting.config,
            loss_scale=lambda: self.scale,
        )

    def gradients(self, step):
        return [
            step.gradients(self.setting, rank, self.scale, self.frozen)
            for rank in range(self.setting.n)
        ]

    def take(self, step):
        note(step)
        came = self.gradients(step)
        everyone = []
        for run in self.runs:
            averages = run.step(self.gradients(step), step.orders)
            everyone.append(Seen.of_all(run.compressors, averages))
        *others, current = everyone
        self.truth.check(came, self.scale, self.frozen, current)
        for seen in others:
            for mine, theirs in zip(current, seen, strict=True):
                assert mine.step == theirs.step
                assert_same([mine.averages, mine.residues], [theirs.averages, theirs.residues])

    @stateful.rule(data=st.data(), steps=st.integers(1, 4))
    def some_steps(self, data, steps):
        for _ in range(steps):
            self.take(draw_step(self.chooser(data), self.setting))

    @stateful.rule(data=st.data())
    def step_with_missing_gradients(self, data):
        self.take(draw_step(self.chooser(data), self.setting, missing=True))

    @stateful.rule(data=st.data(), missing=st.booleans())
    def overflow(self, data, missing):
        self.take(draw_step(self.chooser(data), self.setting, missing, overflow=True))

    @stateful.rule(power=st.sampled_from([0, -3, 4, 10, 16]))
    def move_the_loss_scale(self, power):
        self.scale = 2.0**power

    @stateful.rule(data=st.data())
    def freeze_or_thaw(self, data):
        name = data.draw(st.sampled_from(list(self.setting.shapes)))
        self.frozen ^= {name}
        self.tell_who_is_frozen()

    def tell_who_is_frozen(self):
        for run in self.runs:
            for parameters in run.parameters:
                for name, parameter in parameters.items():
                    parameter.requires_grad_(name not in self.frozen)

    def states(self):
        return [copy.deepcopy(compressor.state_dict()) for compressor in self.runs[-1].compressors]

    @stateful.rule()
    def save(self):
        self.saved = (self.states(), self.truth.save())

    @stateful.rule()
    def resume(self):
        """Resume from a new checkpoint in new objects; the old objects go on for comparison."""
        states, old = self.states(), self.runs[-1]
        new = self.start()
        for compressor, state in zip(new.compressors, states, strict=True):
            compressor.load_state_dict(state)
        for mine, theirs in zip(new.compressors, old.compressors, strict=True):
            mine.residues.skipped_steps = theirs.residues.skipped_steps
        self.runs = [old, new]
        self.tell_who_is_frozen()

    @stateful.precondition(lambda self: self.saved is not None)
    @stateful.rule()
    def go_back(self):
        states, truth = self.saved
        for run in self.runs:
            for compressor, state in zip(run.compressors, states, strict=True):
                compressor.load_state_dict(copy.deepcopy(state))
        self.truth.load(truth)

    @stateful.rule(data=st.data())
    def fail_in_the_middle(self, data):
        """Make a collective, or a kernel between two of its tensors, fail on one rank.

        The other ranks wait for it in vain.
        """
        choose = self.chooser(data)
        step, rank = draw_step(choose, self.setting), choose(range(self.setting.n))
        came, calls = self.gradients(step), choose(range(4))
        self.runs = self.runs[-1:]
        run = self.runs[0]
        # Plain torch's kernel asks for a tensor's gradient after it has moved the tensors before.
        place, name = choose([(run.collectives[rank], "all_reduce"), (torch_kernel, "usable")])
        whole = getattr(place, name)

        def failing(*arguments):
            nonlocal calls
            calls -= 1
            if calls == -1:
                raise Broken
            return whole(*arguments)

        setattr(place, name, failing)
        try:
            averages = run.step(self.gradients(step), step.orders)
        except Broken:
            skipped = [compressor.residues.skipped_steps for compressor in run.compressors]
            residues = [own.residues for own in Seen.of_all(run.compressors, [None] * len(skipped))]
            self.truth.given_up(came, self.scale, residues, skipped)
        else:  # the failing call was never reached
            seen = Seen.of_all(run.compressors, averages)
            self.truth.check(came, self.scale, self.frozen, seen)
        finally:
            setattr(place, name, whole)

    def teardown(self):
        for run in getattr(self, "runs", []):
            run.network.close()
        if hasattr(self, "applied"):
            self.applied.__exit__(None, None, None)


def check(**fields):
    how = settings(
        max_examples=EXAMPLES,
        stateful_step_count=25,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        **fields,
    )
    stateful.run_state_machine_as_test(Training, settings=how)


def test_random_programs():
    check(derandomize=True, phases=[Phase.generate])


@pytest.mark.long
@pytest.mark.timeout(0)
def test_new_random_programs():
    begun = time.monotonic()
    while time.monotonic() - begun < SECONDS:
        check()
