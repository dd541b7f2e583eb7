"""Settings of all tests, and the diary that they write.

All tests leave the optimizer's momentum as it is unless they give nu, or take this variable away.
"""

import os

os.environ.setdefault("SCALECOM_NU", "1")


def write(word, test):
    """If there is a diary, add a line to it. scripts/checks/run_tests.py reads the diary.

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
