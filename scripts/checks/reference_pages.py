"""Write the reference from docstrings: docs/api.md, and the options in docs/options.md.

    python scripts/checks/reference_pages.py            write both
    python scripts/checks/reference_pages.py --check    exit with 1 if a page is out of date

The pages are kept in the repository, so that they can be read there, and so that `make docs` needs
neither Horovod nor a framework. A test runs --check. What users import is listed in CONTENTS.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from scalecom_hvd.exchange.quantisers import BLOCK

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BY = "python scripts/checks/reference_pages.py"
MARK = f"<!-- from here on written by: {BY} -->"
WIDTH = 100

Groups = dict[str, dict[str, str]]
"""{heading, or "" for none: {name: its members, separated by spaces; "*": all public members}}"""

STATE = "stats state_dict load_state_dict"
# {module: (a sentence on it, its groups)}
CONTENTS: dict[str, tuple[str, Groups]] = {
    "scalecom_hvd": (
        "The fields of `ScaleComConfig` have a [page of their own](options.md).",
        {"": {"ScaleComConfig": "from_env from_file replace"}},
    ),
    "scalecom_hvd.torch": (
        "This module has all of `horovod.torch`, and the names below. `scalecom_hvd.ddp` has the "
        "same methods, quantisers, `Monitor`, `Diagnostics`, `diloco`, `sparseloco`, "
        "`rates_from_flops`, and what you need to make your own.",
        {
            "": {
                "DistributedOptimizer": "",
                "ScaleCom": STATE,
                "broadcast_parameters": "",
                "join": "",
                "diloco": "",
                "sparseloco": "",
                "Monitor": "step",
            },
            "Other methods": dict.fromkeys(("LocalTopK", "RandomK"), ""),
            "Advanced": dict.fromkeys(("Diagnostics", "rates_from_flops"), ""),
            "Methods for comparisons": dict.fromkeys(("GTopK", "GlobalTopK", "ECQSGD"), ""),
            "Quantisers": dict.fromkeys(("QSGD", "Sign", "BinMeans"), ""),
            "To make your own": {
                "Method": "init init_method step settings equal_state",
                "State": "",
                "BucketCollectives": "*",
                "Quantiser": "*",
            },
        },
    ),
    "scalecom_hvd.ddp": (
        "For `torch.distributed`, without Horovod.",
        {
            "": {
                "ScaleComState": f"attach {STATE}",
                "scalecom_hook": "",
                "DistributedOptimizer": "",
                "broadcast_parameters": "",
                "PerRank": "",
            }
        },
    ),
    "scalecom_hvd.tensorflow": (
        "This module has all of `horovod.tensorflow`, `Monitor`, and the names below.",
        {
            "": {
                "DistributedOptimizer": "",
                "DistributedGradientTape": "",
                "PartialDistributedGradientTape": "",
                "join": "",
                "ScaleCom": STATE,
            }
        },
    ),
    "scalecom_hvd.tensorflow.keras": (
        "This module has all of `horovod.tensorflow.keras`, `ScaleCom`, and the names below.",
        {
            "": {
                "DistributedOptimizer": "",
                "PartialDistributedOptimizer": "",
                "load_model": "",
                "MonitorCallback": "",
            }
        },
    ),
    "scalecom_hvd.exchange": (
        "What new frameworks, transports and studies are built on.",
        {
            "": {
                "Simulation": "*",
                "Exchange": "*",
                "Collectives": "*",
                "Work": "*",
                "Numbers": "",
                "CollectiveError": "",
                "LocalSteps": "",
            }
        },
    ),
    "scalecom_hvd.reference": (
        "The algorithm in NumPy, to which every framework and kernel is held.",
        {"": {"ScaleComReference": "*"}},
    ),
}
# The options that an ordinary user needs. All others are advanced.
FRONT = ("rate", "bits", "total_steps", "rates", "dense")
ITEM = re.compile(r"(\**\w[\w.]*(?:, \**\w[\w.]*)*): (.*)")
SECTION = re.compile(r"(\w+):$")
# What Markdown would take for the start of a list, a heading or a quotation.
MARKUP = re.compile(r"^(?:(?=[-+#>=])|(\d+)(?=[.)] ))")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    stale = 0
    for file, make in PAGES.items():
        text = make()
        if file.read_text() == text:
            continue
        if args.check:
            stale += 1
            print(f"{file.name} is not what the code says: run {BY}", file=sys.stderr)
        else:
            file.write_text(text)
            print(f"written: {file.relative_to(ROOT)}")
    return 1 if stale else 0


def api() -> str:
    """docs/api.md."""
    lines = ["# API", "", "What users import, with the docstrings of the code.", "", MARK]
    for module_name, (sentence, groups) in CONTENTS.items():
        module = importlib.import_module(module_name)
        lines += ["", f"## {module_name}", "", *wrapped(sentence)]
        for heading, names in groups.items():
            if heading:
                lines += ["", f"### {heading}"]
            for name, members in names.items():
                lines += entry(getattr(module, name), name, "####" if heading else "###")
                lines += methods(getattr(module, name), name, members.split())
    return "\n".join(lines) + "\n"


def options() -> str:
    """docs/options.md. What is above the mark is kept."""
    from scalecom_hvd import ScaleComConfig

    kept = (DOCS / "options.md").read_text().partition(MARK)[0].rstrip()
    lines = [kept, "", MARK]
    for name in FRONT:
        lines += field(ScaleComConfig, name, f"## {name}")
    lines += ["", "## Advanced", "", "The defaults suit nearly everybody."]
    for name in fields(ScaleComConfig):
        if name not in FRONT:
            lines += field(ScaleComConfig, name, f"### {name}")
    return "\n".join(lines) + "\n"


PAGES: dict[Path, Callable[[], str]] = {DOCS / "api.md": api, DOCS / "options.md": options}


def entry(thing: Any, name: str, heading: str) -> Iterator[str]:
    """A function, class, method or property: its heading, its call, and its docstring."""
    yield from ["", f"{heading} {name}", ""]
    if isinstance(thing, property):
        yield from ["A property.", ""]
    lines = signature(thing, name)
    if lines:
        yield from ["```", *lines, "```", ""]
    yield from markdown(inspect.getdoc(thing) or "")


def methods(cls: Any, name: str, wanted: list[str]) -> Iterator[str]:
    """Members of a class, each with its own heading."""
    if wanted == ["*"]:
        wanted = [m for m in vars(cls) if not m.startswith("_") and is_documented(vars(cls)[m])]
    for member in wanted:
        if member in fields(cls):
            yield from field(cls, member, f"#### {name}.{member}")
        else:
            yield from entry(inspect.getattr_static(cls, member), f"{name}.{member}", "####")


@functools.cache
def fields(cls: Any) -> dict[str, tuple[ast.AnnAssign, str]]:
    """The attributes of a class that have a docstring, which is behind each of them."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        assigned.target.id: (assigned, inspect.cleandoc(text.value.value))
        for assigned, text in itertools.pairwise(body)
        if isinstance(assigned, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def field(cls: Any, name: str, heading: str) -> Iterator[str]:
    """An attribute: its heading, type, default and docstring."""
    assigned, text = fields(cls)[name]
    default = assigned.value
    kind = ast.unparse(assigned.annotation).replace("'", '"')
    if isinstance(default, ast.Call):  # cast(float, None)
        default = default.args[1]
        kind += " | None"
    yield from ["", heading, "", f"`{kind}`, by default `{ast.unparse(default)}`", ""]
    yield from markdown(text)


def is_documented(member: Any) -> bool:
    """Whether a member of a class is a method or a property with a docstring."""
    kinds = (FunctionType, property, classmethod, staticmethod)
    return isinstance(member, kinds) and bool(inspect.getdoc(member))


def signature(thing: Any, name: str) -> list[str]:
    """How it is called: its arguments without types, which docstrings give, and what it returns."""
    if isinstance(thing, property) or is_protocol(thing):
        return []
    thing = getattr(thing, "__func__", thing)
    is_class = inspect.isclass(thing)
    if is_class:
        if not inspect.isfunction(thing.__init__):
            return [f"{name}()"]
        thing = thing.__init__
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
    except OSError:  # a dataclass has no such source
        parameters = list(inspect.signature(thing).parameters.values())[1:]
        return called(
            f"{name}({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})"
        )
    function = ast.parse(source).body[0]
    returns = "" if is_class or function.returns is None else ast.unparse(function.returns)
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for argument in (arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    first = [*arguments.posonlyargs, *arguments.args][:1]
    if first and first[0].arg in ("self", "cls"):
        (arguments.posonlyargs or arguments.args).pop(0)
    text = f"{name}({ast.unparse(arguments)})"
    return called(text if returns in ("", "None") else f"{text} -> {returns}")


def called(text: str) -> list[str]:
    """Lines of code. Private names, and names of constants, mean nothing to a reader."""
    text = text.replace("_horovod_tensorflow.", "horovod.").replace("=BLOCK", f"={BLOCK}")
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def is_protocol(thing: Any) -> bool:
    return inspect.isclass(thing) and getattr(thing, "_is_protocol", False)


def markdown(docstring: str) -> list[str]:
    """A docstring in Google's style as Markdown."""
    lines: list[str] = []
    rest = docstring.splitlines()
    while rest:
        line = rest.pop(0)
        block: list[str] = []
        while rest and (not rest[0].strip() or rest[0].startswith(" ")):
            if not block and not rest[0].strip() and not line.endswith("::"):
                break
            block.append(rest.pop(0))
        block = textwrap.dedent("\n".join(block)).strip("\n").splitlines()
        section = SECTION.match(line)
        if section and block:
            lines += [*section_of(section[1], block), ""]
        elif line.endswith("::"):
            lines += [prose(line[:-1]), "", "```", *block, "```", ""]
        else:
            lines += [prose(line), *map(prose, block)]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def section_of(name: str, block: list[str]) -> Iterator[str]:
    """A section such as Args or Returns, and its text."""
    if block[0].startswith(">>>"):
        yield from [f"**{name}**", "", "```pycon", *block, "```"]
        return
    yield from [f"**{name}**", ""]
    for line in block:
        item = ITEM.match(line)
        if item and name != "Returns":
            yield from wrapped(f"- `{item[1]}`: {prose(item[2])}")
        else:
            yield prose(line.strip(), indent=line.startswith(" "))


def prose(line: str, indent: bool = False) -> str:
    """A line of text, written so that Markdown shows the same."""
    parts = re.split(r"(`[^`]*`)", line)
    text = "".join(
        part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts
    )
    text = MARKUP.sub(lambda m: f"{m[1] or ''}\\", text, count=1)
    return f"  {text}" if indent and text else text


def wrapped(text: str) -> list[str]:
    """Lines of at most WIDTH columns. Those of a list item are indented."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


if __name__ == "__main__":
    sys.exit(main())
