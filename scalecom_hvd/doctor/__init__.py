"""`python -m scalecom_hvd doctor`: what is installed, whether it works, and what to do if not.

    facts.py      what there is, as plain values
    probe.py      asks them in a process of its own, which a broken one may end, or hang
    findings.py   what of it is wrong or missing, and what to do about it
    self_test.py  starts two ranks with each launcher, and on GPUs
    torch_rank.py, tensorflow_rank.py    what these run: steps that are held to the reference
    gpu_steps.py  steps on a GPU that are held to those on the CPU
    gpu_overlap.py   what a profile tells of the exchange's kernels beside the model's
    rank_check.py    what both check
    children.py   how other processes are started, with a time limit

Called by __main__, which writes. Importing it imports no framework: only probe.py and the programs
of the ranks do, and those run elsewhere. Imports config and reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator

from scalecom_hvd.doctor import facts, findings, self_test

__all__ = ["Examination", "add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser what `doctor` takes."""
    parser.add_argument(
        "--no-self-test", action="store_true", help="do not start ranks: only look at what there is"
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="of each import and each test (default: 120)",
    )
    parser.add_argument(
        "--gpu", action="store_true", help="test training on this machine's GPUs too"
    )
    parser.add_argument("--json", action="store_true", help="the same for a program")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return number


class Examination:
    """One look at this machine. Its lines can be written while it goes on.

    Args:
        arguments: as `add_arguments` reads them.

    Attributes:
        found: the findings so far, `Finding`s.
        results: of the self-test so far, `Result`s.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.found: list[findings.Finding] = []
        self.results: list[self_test.Result] = []

    @property
    def wrong(self) -> bool:
        """Whether something that is installed does not work."""
        return any(finding.level == findings.WRONG for finding in self.found)

    def lines(self) -> Iterator[str]:
        """Examine, and say it line by line."""
        said = self._examine()
        if self._arguments.json:
            there = [line for line in said if isinstance(line, facts.Facts)][0]
            yield json.dumps(
                {
                    "facts": dataclasses.asdict(there),
                    "self_test": [dataclasses.asdict(result) for result in self.results],
                    "findings": [dataclasses.asdict(finding) for finding in self.found],
                    "wrong": self.wrong,
                },
                indent=1,
            )
            return
        yield from (line for line in said if isinstance(line, str))

    def _examine(self) -> Iterator[str | facts.Facts]:
        limit = self._arguments.limit
        there = facts.collect(limit)
        yield there
        yield from facts.lines(there)
        self.found += findings.findings(there)
        yield ""
        if self._arguments.no_self_test:
            yield "Self-test: left out."
        else:
            yield "Self-test: training on two ranks of this machine, held to the reference."
            yield from self._test(there, limit)
        yield ""
        yield from findings.lines(self.found)

    def _test(self, there: facts.Facts, limit: float) -> Iterator[str]:
        tests = self_test.tests(there)
        if self._arguments.gpu:
            tests += self_test.gpu_tests(there)
            if not there.gpus:
                self.found.append(findings.NO_GPU)
        for test in tests:
            result = self_test.run(test, limit)
            self.results.append(result)
            yield from self_test.lines(result)
            if result.ok is False:
                self.found.append(findings.of_failed_test(result.name, result.command))
