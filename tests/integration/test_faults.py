"""Ranks that come late, and ranks that take one step more than the others.

The outcome is defined, and nothing is lost.
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
WORKER = Path(__file__).with_name("worker_faults.py")
LAUNCHERS = [pytest.param("mpirun", marks=pytest.mark.nightly), "horovodrun --gloo"]


@pytest.mark.nightly
def test_a_rank_comes_half_a_minute_late(launched):
    """The other rank waits for longer than a message may take in Gloo (30 s)."""
    output = launched("horovodrun --gloo", 2, [WORKER, "late", 31], limit=90)
    assert "everything is as if it had not" in output


def test_horovod_says_what_it_waits_for(launched):
    output = launched(
        "mpirun", 2, [WORKER, "late", 12], limit=60, HOROVOD_STALL_CHECK_TIME_SECONDS="3"
    )
    assert "everything is as if it had not" in output
    assert re.search(r"1: \[.*scalecom\.1\.agreement\.header\b", output)  # perhaps with others


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_takes_a_step_more_than_the_others(launched, launcher):
    output = launched(launcher, 2, [WORKER, "longer"], limit=60)
    assert "a step more: HorovodInternalError" in output
    assert "nothing was lost" in output


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_ends_while_another_submits(launched, launcher):
    """There must be no deadlock between Horovod's lock and Python's (the GIL).

    It would occur if each were held by a thread that waits for the other one.
    """
    assert "the other rank has ended" in launched(launcher, 2, [WORKER, "submits"], limit=60)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_ends_while_averages_travel(launched, launcher):
    """The rank that ends first waits for the others' part, and no rank waits forever."""
    output = launched(launcher, 2, [WORKER, "travels"], limit=60)
    assert all(f"rank {rank} is done" in output for rank in range(2))
