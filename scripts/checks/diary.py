"""Which tests failed, according to the diary that tests/conftest.py writes.

Ranks that hang are killed before pytest can report, and what they do report is cut and mixed.
"""

from __future__ import annotations

import collections
from pathlib import Path


def failed_tests(diary: Path) -> list[str]:
    """The ids of the failed tests. If none failed, of those that some rank began and none ended.

    Args:
        diary: the file that TEST_DIARY named. It need not exist.
    """
    lines = diary.read_text().splitlines() if diary.exists() else []
    found = [line.partition(" ")[::2] for line in lines]
    failed = [test for word, test in found if word == "failed"]
    under_way = collections.Counter(test for word, test in found if word == "began")
    under_way.subtract(test for word, test in found if word == "ended")
    return list(dict.fromkeys(failed)) or [test for test, ranks in under_way.items() if ranks > 0]
