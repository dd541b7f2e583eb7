"""`python -m scalecom_hvd doctor` and `python -m scalecom_hvd plan`: the command line.

Only this module writes: doctor/ and plan.py give lines. Imports those two, and no framework.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

from scalecom_hvd import __version__, doctor, plan
from scalecom_hvd.doctor.findings import Finding, count_wrong


def main(words: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        words: of the command line, without the program's name; None: this process's.

    Returns:
        The exit code: 0; 1 where the doctor found something wrong. Words that cannot be
        understood end the process with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m scalecom_hvd",
        description="Gradient compression: is it installed, and does it pay?",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="doctor | plan")
    examines = "show what is installed, whether it works, and how to fix what does not"
    predicts = "estimate the time of a step of your model on your network with each method"
    parsers = {}
    for name, module, purpose in (("doctor", doctor, examines), ("plan", plan, predicts)):
        parsers[name] = commands.add_parser(name, help=purpose, description=f"{name}: {purpose}.")
        module.add_arguments(parsers[name])
    arguments = parser.parse_args(words)
    try:
        if arguments.command == "doctor":
            found: list[Finding] = []
            _write(doctor.examine(arguments, found))
            return 1 if count_wrong(found) else 0
        try:
            _write(plan.run(arguments))
        except ValueError as error:  # settings that are wrong together
            parsers["plan"].error(str(error))
    except BrokenPipeError:  # the reader has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
