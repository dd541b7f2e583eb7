"""The scaling model: bytes as the design counts them, constants found again in steps made up with
them, and orders that must hold.
"""

import math

import pytest
import scaling_model as model
from scaling_model import Constants, Setting

TRUE = Constants(
    reached=0.95,
    negotiation=1.0,
    hop=0.3,
    step={method: 5.0 + i for i, method in enumerate(model.METHODS)},
    megabyte=dict.fromkeys(model.METHODS, 1.0),
    cores=2,
)


def made_up():
    found = []
    for method in model.METHODS:
        for hosts, mbit in ((2, 100), (2, 1000), (4, 100), (4, 1000), (4, 10_000), (8, 1000)):
            result = {"method": method, "hosts": hosts, "mbit": mbit, "compute_ms": 160.0}
            found.append(
                result | {"step_ms": model.predict(method, model.setting_of(result), TRUE)}
            )
    return found


def test_bytes_are_those_of_a_ring():
    for n in (2, 4, 8):
        s = Setting(n, 1, 150, numel=1_000_000, rate=100)
        values, offsets = model.traffic("ScaleCom staggered", s)
        assert values == 2 * (n - 1) / n * 4 * 10_000
        assert offsets == (n - 1) / n * 10_000
        assert model.traffic("dense", s)[0] == 100 * values
        assert model.traffic("local top-k", s)[0] == (n - 1) * 80_000


def test_the_fit_finds_the_constants_again():
    found = model.fit(made_up(), cores=2)
    assert found.reached == pytest.approx(TRUE.reached, rel=0.06)
    for result in made_up():
        assert model.predict(result["method"], model.setting_of(result), found) == pytest.approx(
            result["step_ms"], rel=0.03
        )


def test_orders_that_must_hold():
    c = model.own_cores(TRUE)
    for n in (2, 64, 4096):
        slow, fast = Setting(n, 1, 150), Setting(n, 400, 150)
        assert model.predict("ScaleCom look-ahead", slow, c) < model.predict("dense", slow, c)
        assert model.predict("dense", fast, c) < model.predict("dense", slow, c)
        assert (
            model.predict("ScaleCom look-ahead", slow, c)
            <= model.predict("ScaleCom staggered", slow, c) + 2
        )
    ends = [
        model.where_the_gain_ends("ScaleCom look-ahead", model.on_devices(c), 8, compute)
        for compute in (50, 500)
    ]
    assert ends[1] < ends[0] < math.inf, "the more there is to compute, the sooner dense is hidden"


def test_the_report_names_every_measured_point():
    report = model.report(made_up(), TRUE)
    assert report.count("hosts, ") >= len(made_up())
    assert "where the gain ends" in report
