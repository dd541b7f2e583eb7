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
    "quantiser": "Sign()",
}


class Source:
    """Counts how often it is asked. Each time, ten more steps have been taken."""

    def __init__(self, **more):
        self.asked, self.more = 0, more

    def stats(self):
        self.asked += 1
        return STATS | {"step": 10 * self.asked} | self.more


class Written(list):
    """A writer. The one of a TensorBoard directory is also flushed."""

    flushed = 0

    def add_scalar(self, name, number, step):
        self.append((name, number, step))

    def flush(self):
        self.flushed += 1


class Monitor(monitoring.Monitor):
    rank = 0

    def _rank(self):
        return self.rank

    def _open_tensorboard(self, directory, step):
        if directory == "full":
            raise OSError("the disk is full")
        self.opened = Written()
        return self.opened


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


def test_the_line_says_what_waits_and_what_was_skipped(caplog):
    monitor = Monitor(Source(residue_ratio=12.34, skipped_steps=2, local_steps_taken=70), every=1)
    with caplog.at_level("INFO", "scalecom_hvd"):
        monitor.step()
    assert monitor.line == "0.0211 MB, rate 33, 12 gradients wait, 2 steps skipped"
    # With local steps, the step is the number of the optimizer's steps.
    assert caplog.messages == [f"step 70: {monitor.line}"]


def test_a_rank_that_does_not_write_asks_nothing():
    source = Source()
    monitor = Monitor(source, every=1, tensorboard="runs", writer=Written())
    monitor.rank = 1
    monitor.step()
    assert (source.asked, monitor.line, hasattr(monitor, "opened")) == (0, "", False)


def test_tensorboard_has_the_same_numbers():
    own = Written()
    monitor = Monitor(Source(), every=1, tensorboard="runs", writer=own)
    monitor.step()
    monitor.step()
    assert monitor.opened == own
    assert monitor.opened.flushed == 2


def test_what_cannot_be_written_stops_no_training(caplog):
    monitor = Monitor(Source(), every=1, tensorboard="full")
    monitor.step()
    monitor.step()
    assert caplog.messages == [
        "TensorBoard's full cannot be written, so nothing more is written to it: the disk is full"
    ]


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
