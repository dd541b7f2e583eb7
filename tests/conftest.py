"""For all tests: how values travel they say themselves; what each does stands in a diary.

In 32 bits what was sent can be told from what arrived. Tests of few bits, and of gradients a step
ahead, ask for them; tests of the defaults take these variables away.
"""

import os

os.environ.setdefault("SCALECOM_BITS", "32")
os.environ.setdefault("SCALECOM_STEP_AHEAD", "0")


def write(word, test):
    """Add a line to the diary that scripts/checks/diary.py reads, if there is one.

    A rank that hangs is ended without a word, and several write at once: each line is one write.
    """
    if "TEST_DIARY" in os.environ:
        with open(os.environ["TEST_DIARY"], "a") as diary:
            diary.write(f"{word} {test}\n")


def pytest_runtest_logstart(nodeid):
    write("began", nodeid)


def pytest_runtest_logfinish(nodeid):
    write("ended", nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        write("failed", report.nodeid)


def pytest_collectreport(report):
    if report.failed:
        write("failed", report.nodeid)
