"""The methods of same_numbers.py's cases, as plain settings.

They are looked up by name in a face when a case begins. If a checkout lacks one, only that case
fails there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import scalecom_hvd

Settings = dict[str, Any]

# Every setting with a default that may change is given: these cases compare code, not defaults.
FILTERS: dict[str, Settings] = {
    "beta 1": {"beta": 1.0, "flush": False},
    "beta 0.2, flush": {"beta": 0.2, "flush": True},
    "beta 0.1": {"beta": 0.1, "flush": False},
    "beta 0.1, flush": {"beta": 0.1, "flush": True},
}
BASE: Settings = {"rate": 20, "bits": 32, "min_numel": 100, "dense": [], "warmup_steps": 0}
STAGGERED: Settings = {"leader": "staggered", "bucket_bytes": 5000}
# A method's settings override a filter's. A quantiser is its class and its arguments.
METHODS: dict[str, Settings] = {
    "ScaleCom": {},
    "ScaleCom, look-ahead": {"lookahead": True},
    "ScaleCom, staggered": STAGGERED,
    "ScaleCom, staggered, look-ahead": STAGGERED | {"lookahead": True},
    "ScaleCom, exact": {"selection": "exact"},
    "ScaleCom, exact, look-ahead": {"selection": "exact", "lookahead": True},
    "ScaleCom, 2 bits": {"quantiser": ("QSGD", {"levels": 1})},
    "ScaleCom, 4 bits": {"quantiser": ("QSGD", {"levels": 7, "norm": 2})},
    "ScaleCom, 8 bits": {"quantiser": ("QSGD", {"levels": 127, "seed": 3})},
    "ScaleCom, sign": {"quantiser": ("Sign", {})},
    "ScaleCom, bin means": {"quantiser": ("BinMeans", {})},
    "ScaleCom, many": {"rate": 2.5},
    "ScaleCom, few": {"rate": 400},
    "ScaleCom, integers": {"rate": 16, "bits": 3},
    "ScaleCom, integers, look-ahead": {"rate": 16, "bits": 3, "lookahead": True},
    "RandomK": {"seed": 1},
    "RandomK, exact": {"selection": "exact"},
    "RandomK, own": {"shared": False, "seed": 2},
    "RandomK, 4 bits": {"quantiser": ("QSGD", {"levels": 7})},
    "RandomK, own, sign": {"shared": False, "quantiser": ("Sign", {})},
    "LocalTopK": {},
    "LocalTopK, exact": {"selection": "exact"},
    "LocalTopK, decay": {"decay": 0.9, "beta": 1.0, "flush": False},
    "LocalTopK, contributors": {"average": "contributors"},
    "LocalTopK, as SparseLoCo": {
        "decay": 0.95,
        "average": "contributors",
        "quantiser": ("BinMeans", {}),
        "beta": 1.0,
        "flush": False,
    },
    "LocalTopK, sign": {"quantiser": ("Sign", {})},
    "LocalTopK, 8 bits": {"quantiser": ("QSGD", {"levels": 127})},
    "GTopK": {},
    "GlobalTopK": {},
    "ECQSGD, 2 bits": {"bits": 2},
    "ECQSGD, 4 bits": {"bits": 4},
    "ECQSGD, 8 bits": {"bits": 8, "seed": 5},
}


def settings_of(method: str, filters: str) -> Settings:
    """All settings of a method under a filter, by the names of both."""
    return BASE | FILTERS[filters] | METHODS[method]


def class_of(face: Any, method: str) -> Any:
    """The class of a method in a face, such as scalecom_hvd.exchange."""
    return getattr(face, method.split(",")[0])


def arguments_of(face: Any, settings: Mapping[str, Any]) -> Settings:
    """Settings in the form that the class takes."""
    arguments = dict(settings)
    if "quantiser" in arguments:
        name, own = arguments["quantiser"]
        arguments["quantiser"] = getattr(face, name)(**own)
    return arguments


def check_package() -> None:
    """Raise RuntimeError unless the package is the checkout's, in the working directory."""
    found = Path(scalecom_hvd.__file__).resolve()
    if not found.is_relative_to(Path.cwd().resolve()):
        raise RuntimeError(f"the package is {found}, and not that of {Path.cwd()}")
