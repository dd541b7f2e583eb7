"""The exchange on a device whose streams run late gives the same numbers as on the CPU, to the bit.

If a wait between two streams is missing, the numbers differ: see delayed/__init__.py. What the
hooks of backward do on this device, tests/parallel/test_ddp_devices.py shows on real ranks.
"""

import threading
import time

import pytest
import torch

import delayed
from scalecom_hvd import lanes
from scalecom_hvd.exchange.devices import HostCopy, Streams
from scalecom_hvd.exchange.kernels import base
from scalecom_hvd.exchange.kernels.base import positions_of
from scalecom_hvd.exchange.methods import LocalTopK, RandomK
from scalecom_hvd.exchange.quantisers import BinMeans
from scalecom_hvd.exchange.simulator import Simulation

RANKS, STEPS = 3, 5
SHAPES = {"weight": (31, 17), "bias": (30,), "odd": (7, 9, 11), "table": (101, 8)}
KINDS = {
    "the defaults": {},
    "few bits, look-ahead": {"lookahead": True},
    "few bits, many buckets": {"bucket_bytes": 600, "leader": "staggered"},
    "32 bits": {"bits": 32, "beta": 0.3, "rate": 10},
    "32 bits, look-ahead, many buckets": {"bits": 32, "lookahead": True, "bucket_bytes": 600},
    "exact, a layer whole, warm-up": {
        "bits": 32,
        "rate": 10,
        "selection": "exact",
        "dense": ["bias"],
        "warmup_steps": 2,
    },
    "local top-k, means": {"compression": LocalTopK, "rate": 10, "quantiser": BinMeans()},
    "local top-k": {"compression": LocalTopK, "rate": 10},
    "random-k": {"compression": RandomK, "rate": 10},
}


def gradients(random, device, step):
    """Return every rank's gradients. In step 3 one element of rank 1's is NaN."""
    everyones = [
        {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
        for _ in range(RANKS)
    ]
    if step == 3:
        everyones[1]["bias"][3] = float("nan")
    return [{name: grad.to(device) for name, grad in own.items()} for own in everyones]


def simulation_on(device, **settings):
    def make(_):
        return {n: torch.nn.Parameter(torch.zeros(s, device=device)) for n, s in SHAPES.items()}

    return Simulation(RANKS, make, **{"min_numel": 0, **settings})


def run(device, **settings):
    """Return all that can be observed: every rank's averages and residues after every step."""
    simulation, random, seen = simulation_on(device, **settings), torch.Generator(), []
    random.manual_seed(0)
    for step in range(STEPS):
        for averages in simulation.step(gradients(random, device, step)):
            seen += [average.cpu().clone() for average in averages.values()]
        for method in simulation.compressors:
            seen += [t.residue.cpu().clone() for t in method.residues.tensors.values()]
    return seen


ORDERS = "early", "late"


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        pytest.param(
            *(KINDS[name], order),
            id=f"{name}-{order}",
            marks=[pytest.mark.long] * (order != ORDERS[number % 2]),
        )
        for number, name in enumerate(KINDS)
        for order in ORDERS
    ],
)
def test_the_same_numbers_as_on_the_cpu(settings, order):
    delayed.set_delay(0.002, order)
    ours, expected = run("delayed", **settings), run("cpu", **settings)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    assert not delayed.synchronous_operations()  # those would show no missing wait


def test_a_step_waits_for_its_device_a_few_times_only():
    simulation, random = simulation_on("delayed"), torch.Generator()
    for number in range(2):
        simulation.step(gradients(random, "delayed", number))
    grads = gradients(random, "delayed", 0)
    before = delayed.host_waits()
    simulation.network.run(
        [lambda r=r: simulation._step(r, grads[r], list(SHAPES)) for r in range(RANKS)]
    )
    assert delayed.host_waits() - before == RANKS


def test_what_an_error_rolled_back_may_be_looked_at_at_once():
    delayed.set_delay(0.2, "late")
    simulation, random = simulation_on("delayed", bits=32, rate=10), torch.Generator()
    simulation.step(gradients(random, "delayed", 0))
    method, exchange = simulation.compressors[0], simulation.exchanges[0]
    before = [t.residue.cpu().clone() for t in method.residues.tensors.values()]
    for name in simulation.parameters[0]:
        exchange.ready(name, torch.randn(SHAPES[name]).to("delayed").view(-1))
    exchange.abort()
    for own, expected in zip(method.residues.tensors.values(), before, strict=True):
        torch.testing.assert_close(own.residue.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_a_copy_on_the_host_says_when_it_is_there():
    delayed.set_delay(0.05, "same")
    numbers = torch.ones(4, device="delayed") * 2
    copy = HostCopy(numbers)
    assert not copy.done()
    assert copy.wait().tolist() == [2.0] * 4
    assert copy.done()
    assert HostCopy(torch.ones(1)).done()


def test_on_a_cpu_there_are_no_streams():
    streams = Streams([torch.device("cpu")])
    with streams.entered(), streams.continued():
        pass
    assert not streams._streams


def test_older_versions_of_pytorch_are_refused(monkeypatch):
    monkeypatch.delattr(torch.accelerator, "device_index")
    with pytest.raises(ValueError, match=r"on delayed:0, which needs PyTorch 2\.8 or newer"):
        Streams([torch.device("delayed", 0)])


def test_threads_leave_other_ranks_devices_alone():
    """The fixture `usual_delay` counts how often another rank's device becomes the current one."""
    streams = Streams([torch.device("delayed", 0)])

    def enter():
        with streams.entered(), streams.left(), streams.continued():
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()


def test_a_copy_waits_for_its_own_device():
    """Every thread begins on another device. There, nothing is under way."""
    tensor = torch.ones(1000, device="delayed")
    torch.accelerator.synchronize()
    delayed.set_delay(0.5, "same")
    tensor.add_(1)
    copies = []

    def copy():
        copies.append(HostCopy(tensor))
        time.sleep(0.1)  # as long as the other device could need
        copies.append(copies[0].done())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert not copies[1]
    assert (copies[0].wait() == 2).all()


def test_what_is_kept_for_later_steps_is_of_one_stream():
    """Otherwise another exchange's stream would have to wait for the stream that made it."""

    def compute():
        offsets = torch.zeros(10, dtype=torch.uint8, device="delayed")
        return positions_of(lanes.geometry(1000, 100, "lanes"), offsets)

    base._starts_and_strides.cache_clear()
    gate = threading.Event()
    with Streams([torch.device("delayed", 0)]).entered(joins=False):
        delayed.enqueue(lambda: gate.wait(5))
        slow = compute()
    with Streams([torch.device("delayed", 0)]).entered(joins=False):
        quick = compute().cpu()
    gate.set()
    torch.accelerator.synchronize()
    assert torch.equal(quick, slow.cpu())
