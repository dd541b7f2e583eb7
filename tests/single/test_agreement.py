"""What ranks agree on before they begin: the names of their collectives, and the step.

test_torch_refusals.py and test_tensorflow_refusals.py name what differs between ranks.
"""

import numpy as np
import pytest

from scalecom_hvd import ScaleComConfig, __version__, agreement

TOPICS = ("version", "settings", "tensors")


def rank(names, step=0):
    config = ScaleComConfig().resolved().to_dict()
    own = {"name": names.numbers.claim(), "step": step, "version": __version__}
    return agreement.describe(config, {}, {"weight": [(40, 50), "float32", 100.0]}) | own


def test_exchanges_of_a_process_have_names_of_their_own():
    numbers = agreement.Numbers()
    first, second = agreement.Names(numbers), agreement.Names(numbers)
    for names in (first, second):
        names.use(numbers.claim())
    assert (first("values"), second("values")) == ("scalecom.values", "scalecom.1.values")
    first.use(7)
    assert first("values") == "scalecom.7.values"
    assert numbers.claim() == 8


def test_ranks_take_a_number_that_is_new_to_all_of_them():
    processes = [agreement.Numbers() for _ in range(3)]
    for _ in range(4):
        processes[1].claim()
    ranks = [agreement.Names(numbers) for numbers in processes]
    everyone = [rank(names) for names in ranks]
    assert [agreement.agree(everyone, TOPICS, names) for names in ranks] == [0, 0, 0]
    assert {names("x") for names in ranks} == {"scalecom.4.x"}
    assert all(numbers.claim() == 5 for numbers in processes)


def test_a_digest_is_that_of_names_and_numbers():
    offsets = {"a": np.arange(3, dtype=np.uint8), "b": np.zeros(2, np.uint8)}
    digest = agreement.digest_of(offsets)
    assert agreement.digest_of({}) is None
    assert agreement.digest_of(dict(reversed(offsets.items()))) == digest
    assert agreement.digest_of(offsets | {"b": np.ones(2, np.uint8)}) != digest
    assert agreement.digest_of({"a": offsets["a"], "c": offsets["b"]}) != digest


@pytest.mark.parametrize(
    ("value", "elastic"),
    [("1", True), ("2", True), ("0", False), ("", False), ("true", False), (None, False)],
)
def test_runs_are_elastic_by_the_environment(monkeypatch, value, elastic):
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    if value is not None:
        monkeypatch.setenv("HOROVOD_ELASTIC", value)
    assert agreement.is_elastic() is elastic
