"""`python -m scalecom_hvd plan`: its predictions, its advice on settings, and its errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalecom_hvd import plan
from scalecom_hvd.__main__ import main
from scalecom_hvd.scaling import Setting, bytes_a_step, predict, rung_of_auto
from scalecom_hvd.stages import LADDER, WHOLE

SLOW = "--parameters 350M --workers 16 --mbit 1000 --compute-ms 200"
FAST = "--parameters 25M --workers 8 --mbit 100000 --compute-ms 150 --nccl"


@pytest.fixture
def said(capsys):
    """said(words) -> the standard output of the command."""

    def run(words):
        assert main(["plan", *words.split()]) == 0
        return capsys.readouterr().out

    return run


NUMBERS = {"25000000": 25e6, "350M": 350e6, "1.3B": 1.3e9, "2g": 2e9, "64k": 64e3, "1e6": 1e6}


@pytest.mark.parametrize(("text", "number"), NUMBERS.items())
def test_numbers_take_suffixes(text, number):
    assert plan.count(text) == number


@pytest.mark.parametrize(
    ("words", "tells", "never"),
    [
        (
            SLOW,
            [
                "Set ScaleCom: steps are",
                "compression=hvd.ScaleCom(total_steps=...)  # on Horovod",
                "docs/tuning.md",
                *(f"\n{label} " for label in plan.AVERAGING.values()),
                *(f"local steps, ScaleCom, H = {h}" for h in (4, 16)),
            ],
            "too few",
        ),
        (
            FAST,
            [
                "Leave compression out",
                "ScaleCom would pay on networks slower than",
                "the model assumes that sums cost nothing",
            ],
            "hvd.ScaleCom(",
        ),
        (
            f"{SLOW} --steps 30",
            [
                "30 steps are too few for rate 8: each element is sent 3.8 times",
                "Try --rate 6.",
                "total_steps=30",
            ],
            "Train dense",
        ),
        (f"{SLOW} --steps 3", ["Train dense."], "Leave compression"),
        (f"{SLOW} --steps 100000", ["Set ScaleCom"], "too few"),
        (f"{FAST} --steps 100000", ["Leave compression out", "A run of 100,000 steps"], "Set "),
        (f"{SLOW} --local-steps 50", ["local steps, dense, H = 50"], "too few"),
        (
            f"{SLOW} --gpus-per-node 4",
            [
                "Set ScaleCom, whole in nodes",
                "ScaleComState(model, total_steps=..., mesh=mesh)",
            ],
            "too few",
        ),
    ],
)
def test_what_it_says(said, words, tells, never):
    text = said(words)
    assert [one for one in tells if one not in text] == []
    assert never not in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_stands_in_the_table_is_what_the_model_says():
    s, c = Setting(16, 1, 200, numel=350e6, rate=300, bits=4), plan.constants()
    found = plan.compare(s, c, [16])
    rows = {row.method: row for row in found}
    for method in plan.AVERAGING:
        assert rows[method].milliseconds == predict(method, s, c)
        assert rows[method].megabytes == bytes_a_step(method, s) / 1e6
        assert rows[method].speed_up == predict("dense", s, c) / predict(method, s, c)
    assert rows["dense"].memory == rows["fp16"].memory == 0
    assert rows["ScaleCom staggered"].memory == 4 * 350
    assert rows["ScaleCom local"].memory == 4 * 350 + 8 * 350
    assert [row.method for row in found[:3]] == ["dense", "larger batch 4", "larger batch 16"]
    assert plan.recommended(found).label == "ScaleCom"


def test_what_is_recommended_is_near_the_fastest_and_the_simplest():
    for mbit in (10, 100, 1000, 10_000, 100_000):
        for workers in (2, 8, 64):
            for nccl in (False, True):
                s = Setting(workers, mbit / 1000, 150)
                rows = plan.compare(s, plan.constants(nccl), [4])
                choice = plan.recommended(rows)
                named = {row.method: row.milliseconds for row in rows}
                candidates = ["dense", "fp16", "ScaleCom staggered"]
                fastest = min(named[name] for name in candidates)
                assert choice.milliseconds <= plan.WORTH_IT * fastest
                for simpler in candidates[: candidates.index(choice.method)]:
                    assert named[simpler] > plan.WORTH_IT * fastest


def test_where_it_would_pay_is_where_the_advice_changes(said):
    words = "--parameters 25M --workers 8 --compute-ms 300 --nccl --mbit"
    ends = re.search(r"networks slower than (\S+) Gbit/s", said(f"{words} 100000"))
    mbit = 1000 * float(ends[1])
    assert "Set ScaleCom" not in said(f"{words} {1.1 * mbit}")
    assert "Leave compression out" not in said(f"{words} {0.9 * mbit}")


def test_larger_batches_and_the_whole_run_are_told(said):
    text = said(f"{SLOW} --steps 100000")
    dense, four = (
        float(re.search(rf"^{label} +\S+ +(\S+)", text, re.M)[1].replace(",", ""))
        for label in (r"dense \(no compression\)", "dense, 4 times the batch")
    )
    assert four == pytest.approx(200 + (dense - 200) / 4, rel=0.01)
    took = re.search(r"takes (\S+) instead of (\S+) hours", " ".join(text.split()))
    ours, others = map(float, took.groups())
    said_speed = float(re.search(r"steps are (\S+) times", text)[1])
    assert others / ours == pytest.approx(said_speed, rel=0.02)
    assert others * 3600 == pytest.approx(100_000 * dense / 1e3, rel=0.02)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("", "--parameters, --workers, --mbit, --compute-ms"),
        ("--parameters abc", "such as 25000000, 350M or 1.3B, not 'abc'"),
        ("--workers 1", "a whole number of at least 2 (a single worker sends nothing), not '1'"),
        ("--mbit -5", "a number above 0, such as 1000, not '-5'"),
        ("--rate 0.5", "rate must be at least 1"),
        ("--bits 9", "bits must be from 2 to 8, or 32"),
        ("--gpus-per-node 3", "does not divide --workers 16"),
        ("--gpus-per-node 16", "are one node"),
    ],
)
def test_wrong_input_is_refused_with_what_to_write(capsys, wrong, error):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *(f"{SLOW} {wrong}".split() if wrong else ())])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    command = [sys.executable, "-m", "scalecom_hvd", "plan", *SLOW.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(60) == 0, error
    assert not error


def test_the_faster_the_network_is_the_denser_is_the_rung(said):
    rungs = [
        rung_of_auto(Setting(4, gbit, 400, 124e6), plan.constants(nccl=True))
        for gbit in (0.1, 1, 10, 100, 1000)
    ]
    assert rungs == sorted(rungs, reverse=True)
    assert rungs[0] == len(LADDER) - 1
    assert rungs[-1] == WHOLE
    assert "ScaleCom(rate='auto') would settle on: rate " in said(SLOW)


def test_the_tutorial_shows_what_is_printed(said):
    page = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    (words,) = re.findall(r"^python -m scalecom_hvd plan (.*)$", page, re.M)
    printed = said(words)
    shown = page.partition("These lines are from its table:\n\n```\n")[2].partition("```")[0]
    assert len(shown.splitlines()) == 5
    assert all(line in printed for line in shown.splitlines())
