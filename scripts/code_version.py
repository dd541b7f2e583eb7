"""Which code a result was made by. Long runs keep their results, and some may be of older code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "scalecom_hvd"


def of(scripts: Iterable[Path]) -> str:
    """A hash of the package and of these scripts."""
    sources = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".c", ".h")]
    return hashlib.sha256(b"".join(p.read_bytes() for p in [*sources, *scripts])).hexdigest()[:16]


def tell_stale(codes: Mapping[Path, str | None], current: str) -> None:
    """Say which of these results other code made. codes: {file: by which code}."""
    stale = [path for path, code in codes.items() if code != current]
    if not stale:
        return
    named = ", ".join(map(str, stale[:4])) + ", ..." * (len(stale) > 4)
    print(
        f"{len(stale)} of {len(codes)} results were made by another version of the code. To make "
        f"them anew, remove {named}",
        file=sys.stderr,
    )
