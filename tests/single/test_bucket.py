"""One bucket, and how its step advances, without ranks and without an exchange."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from buckets import made
from torch.utils._python_dispatch import TorchDispatchMode

from scalecom_hvd.exchange.background_thread import BackgroundThread
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import LAST, Wait, finished
from scalecom_hvd.exchange.gradients import as_bytes
from scalecom_hvd.exchange.residue import torch_dtype
from scalecom_hvd.exchange.waves import Progress


def new_bucket(numel=1_000_000, thread=None, dtype=torch.float32, beta=0.5, **settings):
    """Return a bucket of a compressed weight and an uncompressed bias."""
    tensors = {"weight": torch.zeros(numel, dtype=dtype), "bias": torch.zeros(10, dtype=dtype)}
    return made(tensors, thread, beta=beta, **settings)


def many_tensors(bits=32):
    """Return a bucket whose offsets have 0, 1, 2 and 4 bytes."""
    rates = {"one": 1.5, "narrow": 10, "wide": 1000, "widest": 40_000, "other": 7}
    tensors = {name: torch.zeros(1 if name == "one" else 3001) for name in rates}
    return made(tensors, rates=rates, dense=(), min_numel=0, bits=bits)


def begin(bucket, **how):
    return BucketStep(bucket, 1.0, bucket.came, **how)


class Owner:
    """The owner of a kernel's thread, in the role of an exchange."""

    def __init__(self):
        self.thread = BackgroundThread(self, self.go_on)

    def go_on(self):
        return False


TO_ITS_END = """
from scalecom_hvd.exchange.background_thread import BackgroundThread

class Busy:
    left = 200

    def __init__(self):
        self.thread = BackgroundThread(self, self.go_on)

    def go_on(self):
        self.left -= 1
        if not self.left:
            print("it has done all", flush=True)
        return self.left > 0

owner = Busy()
owner.thread.keep_owner()
del owner
"""


def test_an_owner_that_is_dropped_and_its_process_end_when_it_has_done_all():
    ran = subprocess.run([sys.executable, "-c", TO_ITS_END], capture_output=True, check=True)
    assert ran.stdout == b"it has done all\n"


MOVES = {
    "cyclic": lambda own: own.take_and_accumulate(torch.zeros_like(own.choices.new())),
    "look-ahead": lambda own: own.take_and_accumulate(
        torch.zeros_like(own.choices.new()), choose=True
    ),
}


@pytest.mark.parametrize("kind", MOVES)
def test_a_step_given_up_while_a_kernel_runs_is_rolled_back(kind):
    owner, may_begin = Owner(), threading.Event()
    bucket = new_bucket(thread=owner.thread)
    residue = bucket.tensors[0].residue
    before, moved = residue.clone(), []
    own = begin(bucket)
    (kernel, _), *_ = bucket.kernels
    roll_back = kernel.roll_back

    def noting(*arguments):
        moved.append(not torch.equal(residue, before))
        roll_back(*arguments)

    kernel.roll_back = noting
    owner.thread.submit(may_begin.wait, 30)
    move = MOVES[kind](own)
    wait = next(move)
    assert (wait.what, wait.round, wait.work.done()) == ("kernel", 0, False)
    may_begin.set()
    own.roll_back()  # this waits for the kernel; `move` is not resumed
    assert wait.work.done()
    assert moved == [True]
    own.release()
    torch.testing.assert_close(residue, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("numel", [3000, 1_000_000])
def test_small_kernels_run_at_once_and_large_ones_on_the_thread(numel):
    owner = Owner()
    bucket = new_bucket(numel, owner.thread)
    own = begin(bucket)
    waits = list(own.select())
    assert [wait.what for wait in waits] == ["kernel"] * (numel > 3000)
    assert all(wait.work.done() for wait in waits)
    own.roll_back()


class Made:
    """Work that is done when the test says so or when somebody waits for it."""

    def __init__(self, what, waited):
        self.what, self.waited, self.came = what, waited, False

    def done(self):
        return self.came

    def wait(self):
        if not self.came:
            self.waited.append(self.what)
        self.came = True
        return torch.zeros(0)


def progress():
    """The progress of a bucket whose step has begun."""
    bucket = new_bucket(3000)
    own = Progress(bucket)
    own.step = begin(bucket)
    return own


def test_a_step_waits_for_no_round_that_others_have_not_come_to():
    step, waited = progress(), []
    names = ("kernel", "first", "second", "third", "values")
    works = {name: Made(name, waited) for name in names}

    def moves():
        for round, name in enumerate(names[:-1]):
            yield from Wait(name, works[name], round)
        yield from Wait("values", works["values"], LAST)

    step.start(moves())
    step.start(iter([]))  # it has already begun
    # (up to which round it advances, what arrives before, for what it has waited, where it stands)
    for up_to, arrives, new, stands in (
        (None, None, [], "kernel"),
        (0, None, ["kernel"], "first"),
        (None, None, [], "first"),
        (None, "first", [], "second"),
        (1, None, [], "second"),
        (3, None, ["second", "third"], "values"),
        (10, None, [], "values"),
        (None, "values", [], "values"),
        (LAST, None, [], None),
    ):
        before = len(waited)
        if arrives:
            works[arrives].came = True
        step.advance(**({} if up_to is None else {"up_to_round": up_to}))
        assert waited[before:] == new
        assert stands == (step.waits.what if step.waits else None)
        # After the values nothing follows, so there is no need to advance early.
        assert step.has_more == (stands not in ("values", None))
    step.end()
    assert step.waiting == {"weight", "bias"}


def test_moves_on_two_threads_have_ranges_of_their_own_in_a_profile():
    """The first move's range ends with this move, although a second move has begun."""
    first, second, over = (threading.Event() for _ in range(3))

    def moving(meanwhile):
        bucket = new_bucket(3000)
        own = begin(bucket)
        (kernel, _), *_ = bucket.kernels
        kernel.choose = lambda *_: meanwhile()
        return own

    def in_first():
        first.set()
        assert second.wait(30)

    def in_second():
        second.set()
        assert over.wait(30)

    def others():
        assert first.wait(30)
        finished(other.select())

    ours, other = moving(in_first), moving(in_second)
    with ThreadPoolExecutor(1) as worker, torch.autograd.profiler.profile() as profile:
        job = worker.submit(others)
        finished(ours.select())
        with torch.profiler.record_function("after"):
            pass
        over.set()
        job.result()
    ranges = {event.name: event.time_range for event in profile.function_events}
    assert ranges["scalecom.select"].end <= ranges["after"].start


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_gradients_that_kernels_would_misread_are_refused(name):
    """This happens if model.to(device) is called after the optimizer was made.

    Kernels follow addresses.
    """
    bucket = new_bucket(3000)
    grads = dict(bucket.came)
    numel = grads[name].numel()
    grads[name] = grads[name].to("meta")
    message = (
        f"of {name} has {numel} elements on meta, but its parameter had {numel} on cpu when"
        ".*is on its device"
    )
    with pytest.raises(RuntimeError, match=message):
        BucketStep(bucket, 1.0, grads)
    grads[name] = bucket.came[name].repeat_interleave(2)[::2]
    with pytest.raises(RuntimeError, match=f"of {name} is not contiguous: give .contiguous()"):
        BucketStep(bucket, 1.0, grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_sent_whole_leaves_residues_alone(dtype):
    bucket = new_bucket(5000, dtype=dtype)
    for grad in bucket.came.values():
        grad.fill_(1)
    before = bucket.tensors[0].residue.clone()
    own = begin(bucket, whole=True)
    (buffer,) = own.fill()
    # Horovod has no bfloat16.
    assert buffer.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(grad.eq(1).all() for grad in own.grads.values()), "the step may still be skipped"
    buffer.mul_(0.5)
    own.check()
    assert own.sound
    own.commit()
    for name, gradient in own.grads.items():
        assert gradient.dtype == dtype
        assert gradient.eq(0.5).all(), name
    assert torch.equal(bucket.tensors[0].residue, before)


def move(own, form):
    """Make the moves of one form, as if there were one rank."""
    if form == "in place":
        where = finished(own.select())
        finished(own.take_and_accumulate(where))
        values = own.taken.clone()
    else:
        where = own.places_at(own.choose())
        values = own.sendable(where)
        own.send(where, values)
    own.receive(where, values)
    own.fill()
    own.check()
    assert own.sound


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("form", ["in place", "accumulators"])
def test_a_tensor_that_no_rank_uses_sends_nothing(form, kernel, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    bucket = many_tensors()
    bucket.came["wide"].zero_()
    before = {tensor.name: tensor.residue.clone() for tensor in bucket.tensors}
    own = begin(bucket)
    move(own, form)
    own.commit(unused={"wide"})
    for tensor in bucket.tensors:
        stays = torch.allclose(tensor.residue, before[tensor.name], rtol=1e-6, atol=1e-6)
        assert stays == (tensor.name == "wide")
        assert own.grads[tensor.name].any() == (tensor.name != "wide")


def test_a_method_may_send_all():
    bucket = new_bucket(3000)
    gradient, waits = bucket.came["weight"].clone(), bucket.tensors[0].residue.clone()
    own, everything = begin(bucket), slice(None)
    values = own.sendable(everything)
    agrees = gradient * waits >= 0
    torch.testing.assert_close(values, gradient + torch.where(agrees, 2 * waits, waits))
    own.send(everything, values)
    own.receive(everything, values)
    own.fill()
    own.check()
    own.commit()
    assert torch.equal(own.grads["weight"], values)
    left = torch.where(agrees, 0.0, 0.5 * waits)
    torch.testing.assert_close(bucket.tensors[0].residue, left, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "bits"), [("in place", 32), ("in place", 3), ("accumulators", 32)]
)
def test_a_step_whose_average_is_not_finite_does_not_count(form, bits):
    own = begin(many_tensors(bits))
    if form == "in place":
        where = finished(own.select())
        finished(own.take_and_accumulate(where))
    else:
        where = own.places_at(own.choose())
    own.fill()
    averages = own.averages_taken() if form == "in place" else torch.zeros(len(where))
    averages[3] = torch.inf
    own.receive(where, averages)
    own.check()
    assert not own.sound


@pytest.mark.parametrize("bits", [32, 3])
def test_choices_are_split_and_joined(bits):
    """Choices that come from one buffer are joined without a copy."""
    bucket = many_tensors(bits=bits)
    own = begin(bucket)
    chosen, choices = finished(own.select()), bucket.choices
    parts = choices.split(chosen)
    for tensor in bucket.tensors:
        own = parts[tensor.name]
        assert own.keys() == ({"offsets"} if bits == 32 else {"offsets", "scales"})
        assert own["offsets"].dtype == torch_dtype(tensor.geometry.offset_dtype)
        assert own["offsets"].shape == (0 if tensor.name == "one" else tensor.geometry.k,)
    assert choices.join(parts).data_ptr() == chosen.data_ptr()
    copies = {name: {w: v.clone() for w, v in own.items()} for name, own in parts.items()}
    assert choices.join(copies).data_ptr() != chosen.data_ptr()
    assert torch.equal(choices.join(copies), chosen)
    as_bytes = {
        name: own | {"offsets": own["offsets"].view(torch.uint8)} for name, own in copies.items()
    }
    assert torch.equal(choices.join(as_bytes), chosen)
    # These parts come from one buffer, but in another order.
    narrow, other = parts["narrow"]["offsets"], parts["other"]["offsets"]
    swapped = parts | {
        "narrow": parts["narrow"] | {"offsets": other[:301]},
        "other": parts["other"] | {"offsets": torch.cat([narrow] * 2)[:429]},
    }
    joined = choices.join(swapped)
    assert joined.data_ptr() != chosen.data_ptr()
    for name, own in choices.split(joined).items():
        for what, part in own.items():
            assert torch.equal(part, swapped[name][what])


def test_the_two_forms_of_moves_are_not_mixed():
    bucket = new_bucket(3000)
    own = begin(bucket)
    own.accumulators  # noqa: B018
    with pytest.raises(AssertionError, match="a move in place was asked for after accumulators"):
        finished(own.select())
    own = begin(bucket)
    finished(own.select())
    with pytest.raises(AssertionError, match="accumulators were asked for after a move in place"):
        own.choose()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool], ids=str
)
@pytest.mark.parametrize("size", [0, 1, 3])
def test_any_strides_are_the_same_bytes(size, dtype):
    tensor = torch.tensor(1).to(dtype).expand(size)
    assert torch.equal(as_bytes(tensor), as_bytes(torch.ones(size).to(dtype)))
    assert as_bytes(tensor).numel() == size * dtype.itemsize


class Operations(TorchDispatchMode):
    """Notes the names of PyTorch's operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


def test_no_operation_needs_memory_of_cublas():
    bucket = new_bucket(rate=16)
    with Operations() as operations:
        own = begin(bucket)
        offsets = finished(own.select())
        finished(own.take_and_accumulate(offsets))
        own.fill()
        own.receive(offsets, own.averages_taken())
        own.commit()
    assert operations.names.isdisjoint({"dot", "vdot", "mv", "addmv", "mm", "addmm", "bmm"})
