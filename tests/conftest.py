"""For all tests: what is sent whole they say themselves; what each does stands in a diary.

The library's defaults, a dense warm-up and a dense output layer, would leave little to see of
compression in a few steps of a small model; tests of the defaults take these variables away.
"""

import os

os.environ.setdefault("SCALECOM_DENSE", "[]")
os.environ.setdefault("SCALECOM_WARMUP_STEPS", "0")
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
