"""Which code a result was made by. Long runs keep their results, and some may be of older code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "scalecom_hvd"


def of(scripts: Iterable[Path]) -> str:
    """A hash of the package and of these scripts."""
    sources = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".c", ".h")]
    return hashlib.sha256(b"".join(p.read_bytes() for p in [*sources, *scripts])).hexdigest()[:16]


def tell_stale(codes: Iterable[str | None], current: str, folder: Path) -> None:
    """Say how many of these results other code made, and where they lie."""
    codes = list(codes)
    stale = sum(code != current for code in codes)
    if stale:
        print(
            f"{stale} of {len(codes)} results were made by another version of the code: remove "
            f"{folder} to make them anew",
            file=sys.stderr,
        )
