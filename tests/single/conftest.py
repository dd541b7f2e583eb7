"""Tests in one process, also of what lies in scripts/."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# fuzz_model.py is for tests on one process and on several; parallel.made_up is a module of theirs.
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS)]
