"""The comparison of ranks before they begin: differences that are named, and the agreed number."""

import logging
import types

import numpy as np
import pytest

from scalecom_hvd import ScaleComConfig, __version__
from scalecom_hvd.agreement import (
    Names,
    Numbers,
    agree,
    check_operation,
    describe,
    digest_of,
    is_elastic,
    latest_step,
)

TENSORS = {"b": [(3,), "float32", 1.0], "a": [(40, 50), "float32", 100.0]}
TOPICS = ("version", "settings", "tensors")


def rank(names, step=0, tensors=TENSORS, config=None, version=__version__, **settings):
    config = (config or ScaleComConfig()).resolved().to_dict()
    own = {"name": names.numbers.claim(), "step": step, "version": version}
    return describe(config, settings, tensors) | own


def test_exchanges_of_a_process_have_names_of_their_own():
    numbers = Numbers()
    first, second = Names(numbers), Names(numbers)
    for names in (first, second):
        names.use(numbers.claim())
    assert (first("values"), second("values")) == ("scalecom.values", "scalecom.1.values")
    first.use(7)
    assert first("values") == "scalecom.7.values"
    assert numbers.claim() == 8


def test_ranks_take_a_number_that_is_new_to_all_of_them():
    processes = [Numbers() for _ in range(3)]
    for _ in range(4):
        processes[1].claim()
    ranks = [Names(numbers) for numbers in processes]
    everyone = [rank(names) for names in ranks]
    assert [agree(everyone, TOPICS, names) for names in ranks] == [0, 0, 0]
    assert {names("x") for names in ranks} == {"scalecom.4.x"}
    assert all(numbers.claim() == 5 for numbers in processes)


def test_ranks_go_on_at_the_latest_step_and_say_so(caplog):
    with caplog.at_level(logging.WARNING, "scalecom_hvd"):
        assert latest_step([3, 3]) == 3
        assert not caplog.records
        everyone = [rank(Names(Numbers()), step) for step in (3, 0, 5)]
        assert agree(everyone, TOPICS, Names(Numbers())) == 5
    assert "ranks come from different steps [3, 0, 5]: going on at step 5" in caplog.text


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"config": ScaleComConfig(beta=0.5)},
            "settings differ .*beta is 0.2 on rank 0 and 0.5 on",
        ),
        ({"op": "Sum"}, "settings differ .*op is missing on rank 0 and Sum on rank 1"),
        ({"version": "0.0.1"}, f"version .*{__version__} on rank 0 and 0.0.1 on rank 1"),
        ({"tensors": {"b": TENSORS["b"]}}, "tensors differ .*a is .* on rank 0 and missing on"),
        ({"tensors": TENSORS | {"b": [(4,)]}}, r"tensors differ .*b is \[\(3,\), .* \[\(4,\)\] on"),
    ],
    ids=str,
)
def test_what_differs_is_named_on_all_ranks(other, words):
    names = Names(Numbers())
    everyone = [rank(names), rank(names, **other)]
    for _ in everyone:
        with pytest.raises(RuntimeError, match=words):
            agree(everyone, TOPICS, names)


def test_a_digest_is_that_of_names_and_numbers():
    offsets = {"a": np.arange(3, dtype=np.uint8), "b": np.zeros(2, np.uint8)}
    assert digest_of({}) is None
    assert digest_of(offsets) == digest_of(dict(reversed(offsets.items())))
    assert digest_of(offsets) != digest_of(offsets | {"b": np.ones(2, np.uint8)})
    assert digest_of(offsets) != digest_of({"a": offsets["a"], "c": offsets["b"]})


@pytest.mark.parametrize(
    ("value", "elastic"),
    [("1", True), ("2", True), ("0", False), ("", False), ("true", False), (None, False)],
)
def test_runs_are_elastic_by_the_environment(monkeypatch, value, elastic):
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    if value is not None:
        monkeypatch.setenv("HOROVOD_ELASTIC", value)
    assert is_elastic() is elastic


def test_operations():
    horovod = types.SimpleNamespace(Average=0, Sum=1, Adasum=2, Max=4)
    for op in (0, 1):
        check_operation(op, 1.0, horovod)
    check_operation(0, 2.0, horovod)
    with pytest.raises(ValueError, match="but Adasum does not"):
        check_operation(2, 1.0, horovod)
    with pytest.raises(ValueError, match="works with op=hvd.Average and op=hvd.Sum"):
        check_operation(4, 1.0, horovod)
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported"):
        check_operation(1, 2.0, horovod)
