"""What the ranks of an elastic run tell each other whenever Horovod starts.

New ranks must learn how far the others' exchanges have come. They cannot ask in a training step: a
function that was traced before they came is not traced again, so no rank would answer. Therefore
all ranks meet once, before any step. A new rank keeps here what the others told it until it makes
the exchange.

Called by elastic.py and compressor.py. Imports exchange, transport and agreement.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scalecom_hvd.agreement import Names
from scalecom_hvd.tensorflow.exchange import Exchange
from scalecom_hvd.tensorflow.transport import Arguments, Transport

# {label: what other ranks agreed on}, for exchanges that this process has not made yet. None until
# the ranks have met.
_kept: dict[str, dict[str, Any]] | None = None


def have_met() -> bool:
    """Whether ranks have met since Horovod started."""
    return _kept is not None


def meet(exchanges: Iterable[Exchange]) -> None:
    """Meet all ranks, and go on at the agreed step. Blocks until all ranks have called it.

    Raises UnknownError if a rank is lost. exchanges: all that this process takes part in.
    """
    global _kept
    _kept = None
    mine: dict[str, Exchange] = {}
    for exchange in exchanges:
        label = exchange.progress.label
        same = sum(1 for other in mine if other.partition(".")[0] == label)
        mine[f"{label}.{same}" if same else label] = exchange
    transport = Transport(Arguments(), Names())
    agreements = {label: exchange.agreement() for label, exchange in mine.items()}
    everyone = transport.gather_objects(agreements, "agreements")
    agreed: dict[str, dict[str, Any]] = {}
    for theirs in reversed(everyone):  # the first rank's agreement counts, as its weights do
        agreed |= theirs
    for label, exchange in mine.items():
        ahead = agreed[label]["ahead"]
        alike = all(theirs.get(label, {}).get("ahead") == ahead for theirs in everyone)
        exchange.go_on(agreed.pop(label)["step"], alike)
    _kept = agreed


def take_agreement(label: str) -> dict[str, Any] | None:
    """What others agreed on about an exchange that is about to be made; None: it is new to all."""
    found = next((known for known in _kept or {} if known.partition(".")[0] == label), None)
    return None if found is None else _kept.pop(found)
