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
processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator

from scalecom_hvd.doctor import facts, findings, self_test
from scalecom_hvd.plan import positive

__all__ = ["add_arguments", "examine"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor` to a parser."""
    add = parser.add_argument
    looks = "do not start ranks: only look at what is installed"
    add("--no-self-test", action="store_true", help=looks)
    limit = "time limit of each import and each test (default: 120)"
    add("--limit", type=positive, default=120.0, metavar="SECONDS", help=limit)
    add("--gpu", action="store_true", help="test training on this machine's GPUs too")
    add("--json", action="store_true", help="write the report as JSON")


def examine(arguments: argparse.Namespace, found: list[findings.Finding]) -> Iterator[str]:
    """Examine this machine, and report line by line while it is being examined.

    Args:
        arguments: as `add_arguments` reads them.
        found: an empty list, which takes the findings.
    """
    there = facts.collect(arguments.limit)
    found += findings.findings(there)
    tests = [] if arguments.no_self_test else self_test.tests(there)
    if tests and arguments.gpu:
        tests += self_test.gpu_tests(there)
        found += [] if there.gpus else [findings.NO_GPU]
    if not arguments.json:
        two = "training on two ranks of this machine, compared with the reference."
        yield from (*facts.lines(there), "", f"Self-test: {two if tests else 'skipped.'}")
    results, again = [], "its last lines are above. To run it again:"
    for test in tests:
        results.append(result := self_test.run(test, arguments.limit))
        if result.ok is False:
            fails = f"the self-test fails: {test.name}"
            found.append(findings.Finding(findings.WRONG, fails, again, result.command))
        if not arguments.json:
            yield from self_test.lines(result)
    if not arguments.json:
        yield from ("", *findings.lines(found))
        return
    report = {
        "facts": dataclasses.asdict(there),
        "self_test": [result._asdict() for result in results],
        "findings": [finding._asdict() for finding in found],
        "wrong": findings.count_wrong(found) > 0,
    }
    yield json.dumps(report, indent=1)
