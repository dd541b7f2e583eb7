"""The study's numbers, on made-up results with known numbers."""

import csv

import pytest
import study_cases
import study_results


def result(score, losses, **more):
    """Return the result of a run, with one step and 100 bytes between two losses."""
    return {
        "score": score,
        "diverged": score is None,
        "losses": [[i + 1, loss] for i, loss in enumerate(losses)],
        "bytes": [[i + 1, 100 * (i + 1)] for i in range(len(losses))],
        "bytes_per_step": 100,
        "bytes_whole_per_step": 40,
        "parameters": 1000,
        "rate": 100,
    } | more


@pytest.fixture
def study():
    make = study_cases.case
    cases = [
        make("rivals", "lstm", "dense", "lstm"),
        make("rivals", "lstm", "the defaults", "lstm", "ScaleCom", 2, None),
        make("rivals", "lstm", "RandomK", "lstm", "RandomK", 1, 100),
        make("rivals", "lstm", "LocalTopK", "lstm", "LocalTopK", 0.5, 100, lr=0.1, beta=1.0),
    ]
    found = [
        result(2.0, [4, 2, 1, 1, 1]),
        result(2.5, [4, 4, 2, 2, 2]),
        result(3.0, [4, 4, 4, 4, 4]),
        result(None, [4, 2]),
    ]
    return study_results.Study(
        cases, {case.runs[0].name: own for case, own in zip(cases, found, strict=True)}
    )


def numbers(study, which):
    scores = study.scores[which]
    return {name: number(study, scores) for name, number in study_results.NUMBERS.items()}


def test_better_is_better_also_where_less_is_better(study):
    assert [numbers(study, i)["better"] for i in range(4)] == [None, -0.5, -1.0, None]


def test_what_was_spent_until_the_loss_that_dense_and_scalecom_come_to(study):
    dense, scalecom, random, _ = (numbers(study, i) for i in range(4))
    assert dense["target loss"] == pytest.approx(1.05 * 2.0)  # ScaleCom's last loss, smoothed
    # Means of three losses are 4, 3, 7/3, 4/3 for dense and 4, 4, 10/3, 8/3, 2 for ScaleCom.
    assert (dense["steps to loss"], scalecom["steps to loss"]) == (4, 5)
    assert scalecom["MB to loss"] == pytest.approx(5e-4)
    assert random["steps to loss"] is None
    # A step takes 150 ms, plus the time for a fortieth of 99.2 MB at 95 % of 1 Gbit/s.
    assert dense["s to loss, 1 Gbit/s"] == pytest.approx(4 * (0.15 + 99.2e6 / 40 * 8 / 0.95e9))


def test_other_numbers_of_a_case(study):
    found = numbers(study, 1)
    assert (found["kB per step"], found["kB compressed"]) == (0.1, 0.06)


def test_what_came_apart_is_said_and_the_csv_holds_all_numbers(study, tmp_path):
    study_results.write_csv(study, tmp_path / "results.csv")
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["mean"] for row in rows] == ["2.0", "2.5", "3.0", ""]
    assert rows[1]["better"] == "-0.5"
    study_results.write_scores(study, tmp_path / "scores.csv")
    runs = list(csv.DictReader((tmp_path / "scores.csv").open()))
    assert [run["score"] for run in runs] == ["2.0000", "2.5000", "3.0000", ""]
    last = {name: runs[3][name] for name in ("what", "lr", "beta", "nu")}
    assert last == {"what": "LocalTopK", "lr": "0.1", "beta": "1.0", "nu": ""}
    study_results.write_tables(study, tmp_path / "tables.md")
    assert (
        "| source code, LSTM | local top-k | 0.5 | came apart (1 of 1) |"
        in (tmp_path / "tables.md").read_text()
    )
