"""Write the options in docs/options.md from the docstrings of ScaleComConfig's fields.

    python scripts/checks/reference_pages.py            write them
    python scripts/checks/reference_pages.py --check    exit with 1 if the page is out of date

The page is kept in the repository, so that it can be read there. A test runs --check. The other
page of reference, docs/api.rst, needs no script: Sphinx makes it of docstrings.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from scalecom_hvd import ScaleComConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
BY = "python scripts/checks/reference_pages.py"
MARK = f"<!-- from here on written by: {BY} -->"
# The options that an ordinary user needs. All others are advanced.
FRONT = ("rate", "bits", "total_steps", "rates", "dense")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    text = options()
    if PAGE.read_text() == text:
        return
    if args.check:
        sys.exit(f"{PAGE.name} is not what the code says: run {BY}")
    PAGE.write_text(text)
    print(f"written: {PAGE}")


def options() -> str:
    """The page. What is above the mark is kept."""
    kept = PAGE.read_text().partition(MARK)[0].rstrip()
    found = fields()
    lines = [kept, "", MARK]
    for name in FRONT:
        lines += [*section(f"## {name}", *found.pop(name))]
    lines += ["", "## Advanced", "", "The defaults suit nearly everybody."]
    for name, field in found.items():
        lines += [*section(f"### {name}", *field)]
    return "\n".join(lines) + "\n"


def fields() -> dict[str, tuple[ast.AnnAssign, str]]:
    """The fields, and the docstring behind each of them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(ScaleComConfig))).body[0].body
    return {
        assigned.target.id: (assigned, inspect.cleandoc(text.value.value))
        for assigned, text in itertools.pairwise(body)
        if isinstance(assigned, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def section(heading: str, assigned: ast.AnnAssign, docstring: str) -> Iterator[str]:
    """A field: its heading, type, default and docstring."""
    default = assigned.value
    kind = ast.unparse(assigned.annotation).replace("'", '"')
    if isinstance(default, ast.Call):  # cast(float, None)
        default = default.args[1]
        kind += " | None"
    yield from ["", heading, "", f"`{kind}`, by default `{ast.unparse(default)}`", ""]
    for line in docstring.splitlines():
        parts = re.split(r"(`[^`]*`)", line)
        yield "".join(
            part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts
        )


if __name__ == "__main__":
    main()
