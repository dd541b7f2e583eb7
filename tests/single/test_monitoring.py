"""The monitor: when it reads stats(), what it writes and where, and what its line says."""

import pytest

import scalecom_hvd.ddp
from scalecom_hvd import monitoring

STATS = {
    "step": 0,
    "skipped_steps": 0,
    "bytes_traffic": 21_100,
    "rate": 33.0,
    "residue_norm": 4.0,
    "residue_ratio": None,
    "leader": 1,
    "quantiser": "BinMeans()",
}


class Source:
    """Counts how often it is asked. Each time, ten more steps have been taken."""

    def __init__(self, **more):
        self.asked, self.more = 0, more

    def stats(self):
        self.asked += 1
        return STATS | {"step": 10 * self.asked} | self.more


class Written(list):
    def add_scalar(self, name, number, step):
        self.append((name, number, step))


class Monitor(monitoring.Monitor):
    rank = 0

    def _rank(self):
        return self.rank


def test_it_looks_every_so_many_steps_and_writes_numbers():
    source, written = Source(), Written()
    monitor = Monitor(source, every=3, writer=written)
    for _ in range(8):
        monitor.step()
    assert source.asked == 2
    assert {step for *_, step in written} == {10, 20}
    assert written[0] == ("scalecom/bytes_traffic", 21_100, 10)
    names = {name.removeprefix("scalecom/") for name, *_ in written}
    assert names == {"bytes_traffic", "rate", "residue_norm", "skipped_steps", "leader"}
    assert monitor.line == "0.0211 MB, rate 33"


def test_the_line_says_on_which_rung_a_run_is_and_what_local_steps_left_out():
    more = {"rung": 2, "stage": "rate 2, 4 bits", "skipped_steps": 2, "local_steps_skipped": 3}
    written = Written()
    monitor = Monitor(Source(**more), every=1, writer=written)
    monitor.step()
    assert monitor.line == "0.0211 MB, rate 2, 4 bits, 5 steps skipped"
    assert {("scalecom/rung", 2, 10), ("scalecom/local_steps_skipped", 3, 10)} <= {*written}


def test_the_line_says_what_waits_and_what_was_skipped(caplog):
    monitor = Monitor(Source(residue_ratio=12.34, skipped_steps=2, local_steps_taken=70), every=1)
    with caplog.at_level("INFO", "scalecom_hvd"):
        monitor.step()
    assert monitor.line == "0.0211 MB, rate 33, 12 gradients wait, 2 steps skipped"
    # With local steps, the step is the number of the optimizer's steps.
    assert caplog.messages == [f"step 70: {monitor.line}"]


LOOKED = {"step": 4, "contraction": 0.5, "residue_distance": None}


def test_diagnostics_are_written_once_after_each_look():
    source, written = Source(), Written()
    monitor = Monitor(source, every=1, writer=written)
    for looked in (None, LOOKED, LOOKED, LOOKED | {"step": 6, "residue_distance": 0.25}):
        source.more = {"diagnostics": looked}
        monitor.step()
    of_diagnostics = [each for each in written if each[0] in map("scalecom/{}".format, LOOKED)]
    assert of_diagnostics == [
        ("scalecom/contraction", 0.5, 20),
        ("scalecom/contraction", 0.5, 40),
        ("scalecom/residue_distance", 0.25, 40),
    ]


def test_tensorboard_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        Monitor(Source(), tensorboard="runs")


def test_what_cannot_be_written_does_not_end_training(tmp_path, caplog):
    path = tmp_path / "runs"
    path.touch()
    monitor = Monitor(Source(), every=1, tensorboard=path)
    with caplog.at_level("WARNING", "scalecom_hvd"):
        for _ in range(3):
            monitor.step()
    (said,) = caplog.messages
    assert said.startswith(f"{path} cannot be written, so nothing more ")
    assert monitor.line


def test_a_rank_that_does_not_write_asks_nothing(tmp_path):
    source, written = Source(), Written()
    monitor = Monitor(source, every=1, tensorboard=tmp_path / "runs", writer=written)
    monitor.rank = 1
    monitor.step()
    assert (source.asked, monitor.line, written) == (0, "", [])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("source", "every", "error", "words"),
    [
        (object(), 1, TypeError, "object has no stats"),
        (Source(), 0, ValueError, "at least 1, not 0"),
    ],
)
def test_what_cannot_work_is_refused(source, every, error, words):
    with pytest.raises(error, match=words):
        Monitor(source, every)


def test_an_optimizer_stands_for_its_compression():
    class Optimizer:
        compression = Source()

    Monitor(Optimizer(), every=1).step()
    assert Optimizer.compression.asked == 1
    assert "Args:" in scalecom_hvd.ddp.Monitor.__doc__
