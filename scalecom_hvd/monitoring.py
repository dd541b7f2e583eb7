"""Shows what `stats()` says during training: in TensorBoard, the log, or a progress bar.

Framework-free: each face says which rank this is.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("scalecom_hvd")

# The numbers of stats() that are written, if there are such numbers.
NAMES = (
    *("bytes_traffic", "rate", "rung", "residue_norm", "residue_ratio"),
    *("skipped_steps", "local_steps_skipped", "leader"),
)


class Monitor:
    """Writes the numbers of `stats()` every so many steps.

    Only rank 0 reads and writes the numbers. The other ranks only count steps. stats() reads all
    residues, which takes about as long as one pass of the kernel, so it is not called in other
    steps.

    Args:
        source: the optimizer, its `compression`, or the hook's ScaleComState.
        every: the numbers are read once in this many calls of `step`.
        tensorboard: a directory for TensorBoard. There the numbers are called scalecom/<name>:
            bytes_traffic (of one rank, in one step), rate, rung, residue_norm, residue_ratio,
            skipped_steps, local_steps_skipped and leader, as in stats(), and the numbers of
            diagnostics, whenever these are new.
        writer: a writer of your own, besides TensorBoard's. It must have add_scalar(name, number,
            step).

    Attributes:
        line: the last numbers as a short text, for a progress bar. It is empty before the first
            look, and on ranks other than 0. It is also logged at level INFO.

    Raises:
        ImportError: TensorBoard is asked for, but not installed.
        TypeError: `source` has no stats().
        ValueError: `every` is less than one step.

    Example:
        >>> monitor = hvd.Monitor(optimizer, every=50, tensorboard="runs/scalecom")
        >>> for images, labels in batches:
        ...     ...  # a step of training
        ...     monitor.step()
    """

    _rank: Callable[[], int]  # each face has its own

    def __init__(
        self,
        source: Any,
        every: int = 50,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        writer: Any = None,
    ) -> None:
        has_stats = hasattr(source, "stats")
        self._source: Any = source if has_stats else getattr(source, "compression", None)
        if not hasattr(self._source, "stats"):
            raise TypeError(
                f"monitor: {type(source).__name__} has no stats() to write. Give an optimizer that "
                "compresses, its compression, or a ScaleComState"
            )
        if every < 1:
            raise ValueError(f"monitor: every must be a number of steps, at least 1, not {every}")
        self.line = ""
        self._every, self._calls, self._writer = every, 0, writer
        self._looked: Mapping[str, Any] | None = None  # the diagnostics written last
        # It is looked for without an import, which takes seconds if TensorFlow is installed.
        if tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "monitor: tensorboard=... needs TensorBoard, which is not installed. Run pip "
                "install tensorboard"
            )
        self._folder = None if tensorboard is None else os.fspath(tensorboard)
        self._board: Any = None

    def step(self) -> None:
        """Count a step. Call it after every step; not all ranks have to."""
        self._calls += 1
        if self._calls % self._every or self._rank():
            return
        found = self._source.stats()
        # With local steps `step` counts synchronisations.
        step = int(found.get("local_steps_taken", found["step"]))
        numbers = {name: found[name] for name in NAMES if found.get(name) is not None}
        said = []
        if "bytes_traffic" in numbers:
            said.append(f"{numbers['bytes_traffic'] / 1e6:.3g} MB")
            said.append(found.get("stage", f"rate {numbers['rate']:.3g}"))
        if "residue_ratio" in numbers:
            said.append(f"{numbers['residue_ratio']:.2g} gradients wait")
        skipped = numbers.get("skipped_steps", 0) + numbers.get("local_steps_skipped", 0)
        self.line = ", ".join([*said, f"{skipped:g} steps skipped"] if skipped else said)
        log.info("step %d: %s", step, self.line)
        looked = found.get("diagnostics")
        if looked is not None and looked != self._looked:
            self._looked = looked
            numbers |= {n: own for n, own in looked.items() if n != "step" and own is not None}
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(f"scalecom/{name}", number, step)
        if self._folder is not None:
            self._write(self._folder, numbers, step)

    def _write(self, folder: str, numbers: Mapping[str, Any], step: int) -> None:
        # Catch whatever goes wrong: the other ranks are about to go on.
        try:
            if self._board is None:
                from tensorboard.summary import Writer

                self._board = Writer(folder)
            for name, number in numbers.items():
                self._board.add_scalar(f"scalecom/{name}", number, step)
            self._board.flush()
        except Exception as error:
            given_up = "%s cannot be written, so nothing more is written to it: %s"
            log.warning(given_up, folder, error)
            self._folder = None


def for_face(rank: Callable[[], int]) -> type[Monitor]:
    """The Monitor of a face. rank: says which rank this is."""
    return type("Monitor", (Monitor,), {"_rank": staticmethod(rank), "__doc__": Monitor.__doc__})
