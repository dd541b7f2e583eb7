"""The defaults of all tests, and a diary of the tests.

By default tests send 32-bit values, so that a test can tell from what arrived what was sent. Tests
of few bits and of gradients a step ahead ask for them. Tests of the package's defaults delete these
environment variables.
"""

import os

os.environ.setdefault("SCALECOM_BITS", "32")
os.environ.setdefault("SCALECOM_STEP_AHEAD", "0")


def write(word, test):
    """If there is a diary, add a line to it. scripts/checks/diary.py reads the diary.

    Each line is one write, because several ranks write at once, and a rank that hangs is killed.
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
