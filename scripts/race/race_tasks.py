"""What the race can train. The tasks have the same functions, which LanguageModel explains."""

from __future__ import annotations

from pathlib import Path

import race_images
import race_language

Task = race_language.LanguageModel | race_images.Images
TASKS = ("language-model", "resnet")


def task(name: str, size: str, folder: Path) -> Task:
    """A task by its name in TASKS.

    Args:
        size: "tiny" for the tests, "full", or another of the language model's sizes.
        folder: where the language model's text is kept, cut into pieces.
    """
    if name == "resnet":
        return race_images.Images(8) if size == "tiny" else race_images.Images()
    return race_language.LanguageModel(race_language.SIZES[size], folder)
