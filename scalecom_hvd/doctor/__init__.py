"""`python -m scalecom_hvd doctor`: what is installed, whether it works, and what to do if not.

    facts.py      what is installed, as plain values
    probe.py      asks a framework in a separate process, which a broken one may end or hang
    findings.py   what is wrong or missing, and what to do about it
    self_test.py  starts two ranks with each launcher, and on GPUs
    torch_rank.py, tensorflow_rank.py    the ranks' programs: compare steps with the reference
    gpu_steps.py  compares steps on a GPU with those on the CPU
    gpu_overlap.py   reads from a profile how the exchange's kernels overlap with the model's
    rank_check.py    the checks of both ranks' programs
    children.py   starts other processes, with a time limit

Called by __main__, which writes the output. Importing this package imports no framework. Only
probe.py and the ranks' programs do, and they run in other processes. Imports config and reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator

from scalecom_hvd.doctor import facts, findings, self_test

__all__ = ["Examination", "add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor` to a parser."""
    parser.add_argument(
        "--no-self-test",
        action="store_true",
        help="do not start ranks: only look at what is installed",
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="time limit of each import and each test (default: 120)",
    )
    parser.add_argument(
        "--gpu", action="store_true", help="test training on this machine's GPUs too"
    )
    parser.add_argument("--json", action="store_true", help="write the report as JSON")


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return number


class Examination:
    """One examination of this machine. Its lines can be written while it is running.

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
        """Examine the machine and report line by line."""
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
            yield "Self-test: skipped."
        else:
            yield "Self-test: training on two ranks of this machine, compared with the reference."
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
