"""The pages: their examples of user-written methods, links, lines, and what examples are run with.

The other examples train on several ranks: see tests/parallel/test_*_pages.py.
"""

import csv
import importlib
import inspect
import re
import statistics
import subprocess
import sys
from collections import defaultdict

import pages
import pytest
import torch
from parallel import rules
from simulated import as_tensors, made_up, residues_of, simulate

from scalecom_hvd.exchange import LocalTopK

EVERY_PAGE = [*pages.PAGES, *sorted(pages.ROOT.glob("C*.md"))]


def anchors(page):
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_lines_have_at_most_100_columns(page):
    assert [line for line in page.read_text().splitlines() if len(line) > 100] == []


def test_every_example_says_what_it_is_run_with():
    for page in pages.PAGES:
        found = pages.examples_of(page)
        assert {example.kind for example in found} <= set(pages.KINDS)
        blocks = re.findall(r"^```python\n", page.read_text(), re.M)
        first = page.read_text().find("```python\n")
        assert not blocks or "<!-- run with: " in page.read_text()[:first], page.name


def test_what_pages_name_is_there():
    """The scripts, tests and make commands that the pages mention exist."""
    rules = re.findall(r"^([a-z -]+):", (pages.ROOT / "Makefile").read_text(), re.M)
    targets = {target for rule in rules for target in rule.split()}
    for page in [*EVERY_PAGE, *pages.ROOT.glob(".github/**/*.*")]:
        text = page.read_text()
        for path in re.findall(r"\b((?:scripts|tests|scalecom_hvd)/[\w/.]+\.\w+)", text):
            assert (pages.ROOT / path).exists(), (page.name, path)
        commands = set(re.findall(r"(?:`|^|run: )make ([a-z-]+)", text, re.M))
        assert commands <= targets, (page.name, commands - targets)


def rows_of(page, heading):
    """Return the columns, and the rows {first cell: others}, of the table with this heading."""
    lines = iter((pages.ROOT / "docs" / page).read_text().splitlines())
    for line in lines:
        if line.startswith("|") and heading in line:
            break
    columns = [cell.strip() for cell in line.strip("| ").split("|")]
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            return columns, found
        first, *others = (cell.strip().replace("**", "") for cell in line.strip("|").split("|"))
        found[first] = others
    return columns, found


def test_the_options_are_those_of_the_code():
    """The page has every option's docstring. The command that it names writes it again."""
    command = [sys.executable, pages.ROOT / "scripts/checks/reference_pages.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_the_api_page_names_is_there():
    """`make docs` finds this too, but it is not part of every day's tests."""
    pytest.importorskip("horovod.tensorflow", exc_type=ImportError)
    text = (pages.ROOT / "docs" / "api.rst").read_text()
    found = 0
    for section in text.split(".. currentmodule:: ")[1:]:
        module = importlib.import_module(section.split()[0])
        for name, members in re.findall(
            r":: (\w+)(?:\(.*\))?\n(?:   :members:(.*))?", section.partition("\n")[2]
        ):
            thing = getattr(module, name)
            assert inspect.getdoc(thing), name
            for member in filter(None, members.strip().split(", ")):
                assert hasattr(thing, member), (name, member)
            found += 1
    assert found == text.count("\n.. auto") - 1  # ScaleComConfig, which comes before any module


def test_numbers_of_the_study_are_those_of_its_file():
    scores = defaultdict(list)
    with open(pages.ROOT / "docs" / "study.csv") as file:
        for row in csv.DictReader(file):
            if row["experiment"] == "defaults":
                scores[row["situation"], row["what"]].append(float(row["score"]))
    situations = {
        "MobileNetV2, batch norm": "MobileNetV2, batch norm, 200 steps",
        "the same 16 ranks, as 4 [nodes](nodes.md) of 4": "the same 16 ranks, as 4 nodes of 4",
        "LSTM, SGD, 500 steps": "LSTM, 500 steps",
        "LSTM, AdamW, 500 steps": "LSTM, 500 steps, AdamW",
        "Transformer, SGD, 250 steps": "Transformer, 250 steps",
        "Transformer, AdamW, 250 steps": "Transformer, 250 steps, AdamW",
    }
    whats = {
        "alone": "one worker alone",
        "32 bits": "32 bits, rate 100",
        "local top-k": "local top-k, rate 100",
    }
    columns, rows = rows_of("results.md", "| dense | the defaults | alone |")
    compared = 0
    for situation, cells in rows.items():
        for column, cell in zip(columns, cells, strict=True):
            found = scores[situations.get(situation, situation), whats.get(column, column)]
            digits = 3 if situation.startswith(("LSTM", "Transformer")) else 1
            assert cell == f"{statistics.mean(found):.{digits}f}", (situation, column)
            compared += 1
    assert compared == 13 * 5


def test_numbers_of_the_bench_are_those_of_its_file():
    with open(pages.ROOT / "docs" / "bench.csv") as file:
        measured = {(row["method"], row["hosts"], row["mbit"]): row for row in csv.DictReader(file)}
    methods = {
        "dense": "dense",
        "Horovod's fp16": "fp16",
        "local top-k, all-gather": "local top-k",
        "ScaleCom, cyclic": "ScaleCom cyclic",
        "look-ahead, staggered": "ScaleCom look-ahead",
        "32 bits, cyclic": "ScaleCom cyclic, 32 bits",
        "32 bits, look-ahead, staggered": "ScaleCom look-ahead, 32 bits",
    }
    networks = [("2", "100"), ("2", "1000"), ("4", "1000"), ("2", ""), ("4", "")]
    _, rows = rows_of("speed.md", "| 2 hosts, 100 Mbit/s | 2 hosts, 1 Gbit/s | 4 hosts, 1 Gbit/s")
    assert set(rows) == set(methods)
    for name, cells in rows.items():
        for network, cell in zip(networks, cells, strict=True):
            row = measured.get((methods[name], *network))
            expected = f"{row['step_ms']} / {row['exposed_ms']}" if row else "not run"
            assert cell == expected, (name, network)


@pytest.mark.usefixtures("one_thread_per_rank")
def test_methods_of_ones_own():
    scope = {}
    (example,) = pages.examples("methods")
    example.run(scope)
    shapes, settings = {"w": (60, 50)}, {"dense": [], "warmup_steps": 0}
    counting = simulate(2, shapes, compression=scope["Counting"], **settings)
    counting.step(as_tensors(made_up(2, 0, shapes)))
    assert counting.compressors[0].run.tensor_states["w"]["steps"] == 1
    # Two widths of offsets in one bucket, the wider of an odd number of bytes in all.
    shapes, settings = {"w": (60, 50), "other": (60, 50)}, {"rates": {"w": 20, "other": 999}}
    simulation = simulate(3, shapes, compression=scope["SignTopK"], min_numel=0, **settings)
    came, went = torch.zeros(60, 50), torch.zeros(60, 50)
    for step in range(5):
        grads = as_tensors(made_up(3, step, shapes))
        came += sum(own["w"] for own in grads) / 3
        went += simulation.step(grads)[0]["w"]
    kept = sum(own["w"].view(60, 50) for own in residues_of(simulation)) / 3
    assert 0 < went.count_nonzero() < came.numel()
    torch.testing.assert_close(went + kept / simulation.compressors[0].config.beta, came)
    # The quantiser is the one that tests hold to the oracle.
    of_page, of_tests = (
        simulate(2, shapes, compression=LocalTopK, quantiser=own, min_numel=0)
        for own in (scope["Sign"], rules.Sign)
    )
    grads = as_tensors(made_up(2, 0, shapes))
    torch.testing.assert_close(of_page.step(grads), of_tests.step(grads))
