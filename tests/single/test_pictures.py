"""The documentation's pictures are up to date with their script, and marks tell methods apart."""

import re

import pictures
import pictures_of_docs
import pytest

NUMBER = re.compile(r"-?\d+\.\d+")
# matplotlib's names of shapes. They change with the last digit of any number.
SHAPE = re.compile(r"\b[chmp][0-9a-f]{10}\b")


@pytest.mark.parametrize("draw", pictures_of_docs.DRAWN, ids=lambda draw: draw.__name__)
def test_what_is_shown_is_what_the_script_draws(draw, tmp_path):
    """If this fails, run python scripts/pictures_of_docs.py."""
    name = f"{draw.__name__}.svg"
    pictures.save(draw(), tmp_path / name)
    drawn = SHAPE.sub("", (tmp_path / name).read_text())
    shown = SHAPE.sub("", (pictures_of_docs.DOCS / "pictures" / name).read_text())
    assert NUMBER.sub("", drawn) == NUMBER.sub("", shown)
    numbers = [[float(n) for n in NUMBER.findall(svg)] for svg in (drawn, shown)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.01)
