"""`python -m scalecom_hvd doctor`: what is installed, whether it works, and what to do if not.

    facts.py      what is installed, as plain values
    probe.py      asks a framework in a separate process, which a broken one may end or hang
    findings.py   what is wrong or missing, and what to do about it
    self_test.py  starts two ranks with each launcher, and on GPUs
    torch_rank.py, tensorflow_rank.py    the ranks' programs: compare steps with the reference
    rank_check.py    the checks of both ranks' programs
    gpu_steps.py  compares steps on a GPU with those on the CPU
    children.py   starts other processes, with a time limit

Importing this package imports no framework: only probe.py and the ranks' programs do, in other
processes. Imports config, plan and reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import deque
from collections.abc import Iterator

from scalecom_hvd.doctor import facts, findings, self_test
from scalecom_hvd.plan import positive

__all__ = ["Examination", "add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor` to a parser."""
    add = parser.add_argument
    looks = "do not start ranks: only look at what is installed"
    add("--no-self-test", action="store_true", help=looks)
    limit = "time limit of each import and each test (default: 120)"
    add("--limit", type=positive, default=120.0, metavar="SECONDS", help=limit)
    add("--gpu", action="store_true", help="test training on this machine's GPUs too")
    add("--json", action="store_true", help="write the report as JSON")


class Examination:
    """One examination of this machine, for arguments as `add_arguments` reads them.

    Attributes:
        found: the findings so far, `Finding`s.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._facts = facts.Facts()
        self._results: list[self_test.Result] = []
        self.found: list[findings.Finding] = []

    @property
    def wrong(self) -> bool:
        """Whether something that is installed does not work."""
        return any(finding.level == findings.WRONG for finding in self.found)

    def lines(self) -> Iterator[str]:
        """Examine the machine and report line by line, while it is being examined."""
        if not self._arguments.json:
            yield from self._examine()
            return
        deque(self._examine(), maxlen=0)
        report = {
            "facts": dataclasses.asdict(self._facts),
            "self_test": [result._asdict() for result in self._results],
            "findings": [finding._asdict() for finding in self.found],
            "wrong": self.wrong,
        }
        yield json.dumps(report, indent=1)

    def _examine(self) -> Iterator[str]:
        asked = self._arguments
        self._facts = facts.collect(asked.limit)
        yield from facts.lines(self._facts)
        self.found += findings.findings(self._facts)
        tests = [] if asked.no_self_test else self_test.tests(self._facts)
        if tests and asked.gpu:
            tests += self_test.gpu_tests(self._facts)
            self.found += [] if self._facts.gpus else [findings.NO_GPU]
        two = "training on two ranks of this machine, compared with the reference."
        yield from ("", f"Self-test: {two if tests else 'skipped.'}")
        for test in tests:
            result = self_test.run(test, asked.limit)
            self._results.append(result)
            yield from self_test.lines(result)
            if result.ok is False:
                self.found.append(findings.of_failed_test(result.name, result.command))
        yield from ("", *findings.lines(self.found))
