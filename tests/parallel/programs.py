"""Random programs of calls, as scripts make them, which all ranks draw alike and run.

By default every run draws the same programs: as many as fit into some seconds, but at most a number
that the test gives. FUZZ_SECONDS says how long to draw new programs, and FUZZ_SEED is the first
seed. A program that fails, or waits for ever, is printed with its seed.
"""

import os
import random
import time

import pytest

ENDLESS = "FUZZ_SECONDS" in os.environ
SECONDS = float(os.environ.get("FUZZ_SECONDS", 4))
FIRST_SEED = int(os.environ.get("FUZZ_SEED", 0))
OTHER_METHODS = ("LocalTopK", "RandomK")
# ScaleCom as often as all others together.
METHODS = ("ScaleCom",) * len(OTHER_METHODS) + OTHER_METHODS
limited = pytest.mark.timeout(SECONDS + 100, method="thread")


class Program:
    """What is drawn from a seed, and the lines that say so."""

    def __init__(self, seed):
        self.seed, self.dice, self.lines = seed, random.Random(seed), []
        self.choose = self.dice.choice

    def __str__(self):
        return "\n".join(map(str, self.lines))

    def happens(self, probability):
        return self.dice.random() < probability

    def note(self, line):
        """Add a line to this program, print it in case that ranks wait for ever, and return it."""
        self.lines.append(line)
        print(line, flush=True)
        return line

    def number(self):
        """A seed for random numbers."""
        return self.dice.randrange(10**6)


def run_random_programs(check, on_some_rank, most):
    """Draw programs and check them.

    check: runs a Program, and raises if something goes wrong.
    on_some_rank: says whether a fact is true on some rank, so that none stops by itself.
    most: how many programs are drawn if FUZZ_SECONDS is not given.
    """
    begun, seed = time.monotonic(), FIRST_SEED
    while not on_some_rank(
        time.monotonic() - begun > SECONDS or (seed - FIRST_SEED == most and not ENDLESS)
    ):
        program = Program(seed)
        print(f"FUZZ_SEED={seed}", flush=True)
        try:
            check(program)
        except BaseException as error:
            raise AssertionError(f"FUZZ_SEED={seed} fails in\n{program}") from error
        seed += 1
    print(f"programs {FIRST_SEED} to {seed - 1} in {time.monotonic() - begun:.0f} s")
    assert seed > FIRST_SEED


def for_method(method, settings):
    """Those settings that a method takes, of settings of ScaleCom."""
    from scalecom_hvd.exchange.methods import ScaleCom

    unknown = {*ScaleCom.uses} - {*method.uses}
    return {name: value for name, value in settings.items() if name not in unknown}
