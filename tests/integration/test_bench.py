"""`make bench` in its smallest form, over real hosts: bytes as the formula says, the order of the
methods, a table, JSON, CSV and pictures.
"""

import csv
import json
import os
import sys

import hosts
import pytest
from conftest import ROOT

# one in a hundred of each large tensor; elements of tensors that are sent whole
K, SMALL = 248_190, 35_000


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("hosts")
@pytest.mark.skipif(os.geteuid() != 0, reason="hosts are namespaces, which need root")
def test_the_smallest_benchmark(run, tmp_path):
    hosts.install()
    output = run(
        [sys.executable, ROOT / "scripts" / "bench" / "bench.py", "--quick", "--output", tmp_path],
        limit=250,
    )
    assert "ScaleCom look-ahead" in output
    assert (tmp_path / "steps.png").stat().st_size > 10_000
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "steps.csv").open())}
    with (ROOT / "docs" / "bench.csv").open() as file:
        assert list(rows["dense"]) == next(csv.reader(file))
    assert 90 < float(rows["dense"]["megabytes"]) < 115
    results = {
        r["method"]: r for r in json.loads((tmp_path / "results.json").read_text())["results"]
    }
    # Two hosts: half of the offsets, and every value once. TCP's headers are 5 %.
    expected = K / 2 + 4 * (K + SMALL)
    # What Horovod says while nothing is sent comes on top, and grows with the time that a busy
    # machine takes.
    assert 0.95 * expected < results["ScaleCom look-ahead"]["bytes"] < 1.5 * expected
    assert results["dense"]["bytes"] == pytest.approx(4 * 24_800_000, rel=0.15)
    # Far from what it reaches, so that no busy machine fails it.
    assert results["ScaleCom look-ahead"]["exposed_ms"] < results["dense"]["exposed_ms"] / 3
    assert {"wait for values", "scatter"} <= set(results["ScaleCom look-ahead"]["parts"])

    scaling = ["--results", tmp_path / "results.json", "--output", tmp_path / "scaling.png"]
    assert "where the gain ends" in run(
        [sys.executable, ROOT / "scripts" / "bench" / "scaling_model.py", *scaling]
    )
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_without_results_the_model_says_what_to_do(run, tmp_path):
    output = run(
        [
            sys.executable,
            ROOT / "scripts" / "bench" / "scaling_model.py",
            "--results",
            tmp_path / "none.json",
        ],
        fails=True,
    )
    assert "run make bench first" in output
