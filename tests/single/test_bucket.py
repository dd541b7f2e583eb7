"""One bucket without its reducer: what is taken back when a step is given up while a kernel runs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from scalecom_hvd.bucket_layout import cut
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.torch.accumulators import Accumulators
from scalecom_hvd.torch.bucket import Bucket, Wait
from scalecom_hvd.torch.moves import Moves
from scalecom_hvd.torch.residues import CompressedTensor, Residues


def new_bucket(numel=1_000_000, **settings):
    parameters = {"weight": torch.nn.Parameter(torch.zeros(numel)), "bias": torch.nn.Parameter(torch.zeros(10))}
    residues = Residues(ScaleComConfig(beta=0.5, **settings))
    residues.attach(parameters)
    residues.tensors["weight"].residue.normal_()
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    return Bucket(0, list(parameters), parameters, residues), residues.tensors["weight"].residue


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_step_given_up_while_a_kernel_runs_is_taken_back(look_ahead):
    bucket, residue = new_bucket()
    before = residue.clone()
    worker = ThreadPoolExecutor(1)

    def exchange():
        bucket.begin(False, 1.0)
        assert bucket.runs_beside_python
        move = (bucket.gather_and_filter, 2, None) if look_ahead else (bucket.filter, bucket.offsets)
        bucket.job = worker.submit(*move)
        yield Wait("kernel", bucket.job.done, bucket.job.result, needs_others=False)
        raise AssertionError("nobody goes on with a step that was given up")

    bucket.start(exchange())
    bucket.stop()
    assert bucket.job.done()
    assert not torch.equal(residue, before)
    bucket.undo()
    bucket.forget()
    torch.testing.assert_close(residue, before, rtol=1e-6, atol=1e-6)
    assert bucket.grads == {}


def test_impatient_buckets_wait_for_nothing_and_patient_ones_only_for_what_may_be_waited_for():
    bucket, _ = new_bucket()
    waited, came = [], set()

    def wait(what, needs_others):
        return Wait(what, lambda: what in came, lambda: (waited.append(what), came.add(what)), needs_others)

    def exchange():
        yield wait("kernel", False)
        yield wait("offsets", True)
        came.add("values")

    bucket.start(exchange())
    bucket.advance()
    assert waited == []
    bucket.advance(patient=True)
    assert waited == ["kernel"]
    bucket.advance(patient=True, needs_others=True)
    assert waited == ["kernel", "offsets"]
    assert "values" in came


def test_moves_on_two_threads_have_ranges_of_their_own_in_a_profile():
    """The first one's ends when it ends, although a second one has begun."""
    first, second, over = (threading.Event() for _ in range(3))

    def moves(meanwhile):
        made = Moves([CompressedTensor("weight", torch.zeros(3000), 10, ScaleComConfig())])
        made.begin([torch.zeros(3000)], 1.0, [False])
        (kernel, _), *_ = made._kernels
        kernel.filter = lambda *_: meanwhile() or 0
        return made

    def in_first():
        first.set()
        assert second.wait(30)

    def in_second():
        second.set()
        assert over.wait(30)

    def others():
        assert first.wait(30)
        other.filter()

    ours, other = moves(in_first), moves(in_second)
    with ThreadPoolExecutor(1) as worker, torch.autograd.profiler.profile() as profile:
        job = worker.submit(others)
        ours.filter()
        with torch.profiler.record_function("after"):
            pass
        over.set()
        job.result()
    ranges = {event.name: event.time_range for event in profile.function_events}
    assert ranges["scalecom.filter"].end <= ranges["after"].start


@pytest.mark.parametrize("kind", [Moves, Accumulators])
def test_gradients_on_another_device_than_residues_are_refused(kind):
    """As after model.to(device), behind the optimizer's back: kernels follow addresses."""
    moves = kind([CompressedTensor("weight", torch.zeros(3000), 10, ScaleComConfig())])
    with pytest.raises(RuntimeError, match="of weight has 3000 elements on meta, and its parameter had 3000 on cpu when.*is on its device"):
        moves.begin([torch.zeros(3000, device="meta")], 1.0, [False])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_sent_whole_is_the_gradient_itself_where_its_dtype_travels(dtype):
    parameters = {"weight": torch.nn.Parameter(torch.zeros(5000, dtype=dtype)), "bias": torch.nn.Parameter(torch.zeros(10, dtype=dtype))}
    residues = Residues(ScaleComConfig())
    residues.attach(parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    bucket = Bucket(0, list(parameters), parameters, residues)
    bucket.begin(True, 1.0)
    averaged = bucket.fill()
    if dtype == torch.bfloat16:  # Horovod has no bfloat16
        assert {buffer.dtype for buffer in averaged.values()} == {torch.float32}
    else:
        assert [buffer.data_ptr() for buffer in averaged.values()] == [p.grad.data_ptr() for p in parameters.values()]
    for buffer in averaged.values():
        buffer.mul_(0.5)
    assert bucket.is_sound()
    bucket.scatter()
    for name, gradient in bucket.end().items():
        assert gradient.dtype == dtype
        assert gradient.eq(0.5).all(), name


def test_buckets_get_smaller_towards_the_end_and_hold_every_name_once():
    for sizes in ([1] * 100, [5, 1, 50, 3] * 10, [1000], [0, 0, 0], [1, 1, 400, 1], list(range(40))):
        names = [f"{i}" for i in range(len(sizes))]
        for limit in (1, 10, 100, 10_000):
            buckets = cut(sizes, names, limit)
            assert [name for bucket in buckets for name in bucket] == names
            filled = [sum(sizes[int(name)] for name in bucket) for bucket in buckets]
            assert all(size <= limit or len(bucket) == 1 for size, bucket in zip(filled[:-1], buckets[:-1], strict=True))
    assert [len(bucket) for bucket in cut([1] * 100, list(range(100)), 40)] == [40, 30, 15, 7, 8]
