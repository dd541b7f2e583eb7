"""The Triton kernel is bit-identical to plain torch.

It is compiled if there is a GPU, and runs in Triton's interpreter on the CPU otherwise.
test_triton.py runs this file in a process of its own, because the interpreter must be requested
before anything imports triton, and torch may import it.
"""

import sys

import pytest
import torch
from test_kernels import (
    all_moves,
    at_the_limit,
    kernel_on,
    moved,
    new_offsets,
    residue_dtype,
)

from scalecom_hvd import triton as tiles
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.exchange.bucket import Bucket
from scalecom_hvd.exchange.bucket_step import BucketStep
from scalecom_hvd.exchange.collectives import finished
from scalecom_hvd.exchange.kernels import choice
from scalecom_hvd.exchange.kernels.base import TensorSlot, Wire
from scalecom_hvd.exchange.kernels.choice import kernel_for
from scalecom_hvd.exchange.kernels.torch_kernel import TorchKernel
from scalecom_hvd.exchange.kernels.triton_kernel import TritonKernel
from scalecom_hvd.exchange.residue import Residues
from scalecom_hvd.integers import levels_of
from scalecom_hvd.lanes import geometry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
RATES = [1, 2, 2.5, 7, 100, 300, 70_000]
CHOICES = [False, True]
# The interpreter takes about 10 ms per tile, or per 8 rows of a last group, so not all combinations
# are tested.
SMALL = [(numel, rate) for numel in (1, 2, 63, 64, 65) for rate in RATES]
LARGE = [
    (1200, 1),
    (1601, 2),
    (2500, 2.5),
    (6401, 7),
    (6399, 100),
    (6400, 100),
    (6401, 100),
    (6399, 300),
    (700, 70_000),
]
LARGE += [(20_000, 100), (20_000, 300)]
CASES = [(*shape, CHOICES[i % 2]) for i, shape in enumerate(SMALL)] + [
    (*shape, choose) for shape in LARGE for choose in CHOICES
]


def some(numel, dtype):
    """Return numbers, many of which have equal magnitudes."""
    return torch.randn(numel, dtype=torch.float64).mul(4).round().div(4).to(dtype)


def assert_alike(geometries, grad_dtypes, choose, kernel=TritonKernel, plain=TorchKernel, shift=0):
    """Assert that all moves give the same with both kernels, for tensors that share their buffers.

    shift: how many elements a gradient is shifted in memory.
    """
    torch.manual_seed(choose)
    # in the order of Layout
    order = sorted(range(len(geometries)), key=lambda i: -geometries[i].offset_dtype.itemsize)
    geometries, grad_dtypes = [geometries[i] for i in order], [grad_dtypes[i] for i in order]
    grads = [some(shape.numel, dtype) for shape, dtype in zip(geometries, grad_dtypes, strict=True)]
    residues = [
        some(shape.numel, residue_dtype(dtype))
        for shape, dtype in zip(geometries, grad_dtypes, strict=True)
    ]
    for grad, residue in zip(grads, residues, strict=True):
        if grad.numel() > 100:
            grad[5], grad[17], grad[30] = float("nan"), float("inf"), -float("inf")
            residue[40] = float("inf")
    expected_bad, expected = all_moves(plain, grads, residues, geometries, 0.3, 0.5, choose, 7 / 3)
    with torch.device(DEVICE):
        there = [torch.cat([grad.new_zeros(shift), grad]).to(DEVICE)[shift:] for grad in grads]
        bad, states = all_moves(
            kernel,
            there,
            [residue.to(DEVICE) for residue in residues],
            geometries,
            0.3,
            0.5,
            choose,
            7 / 3,
        )
    assert bad == expected_bad
    assert len(states) == len(expected)
    for ours, theirs in zip(states, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize(
    "case",
    [
        # Of the large ones make test runs every third, so each with one or two of the choices.
        pytest.param(
            i,
            id="-".join(map(str, case)),
            marks=[pytest.mark.long] * (i >= len(SMALL) and i % 3 != 0),
        )
        for i, case in enumerate(CASES)
    ],
)
def test_agrees_with_plain_torch_to_the_bit(case):
    numel, rate, choose = CASES[case]
    dtype = DTYPES[case % len(DTYPES)]
    other = torch.float64 if dtype == torch.float64 else torch.bfloat16
    assert_alike(
        [geometry(numel, rate, "lanes"), geometry(70, 2.5, "lanes")], [dtype, other], choose
    )


@pytest.mark.parametrize("choose", CHOICES)
def test_tensors_of_different_kinds_share_a_kernel(choose):
    shapes = [(333, 7), (333, 40_000), (900, 300), (1000, 100), (129, 1), (500, 2.5)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16] * 2
    geometries = [geometry(*shape, "lanes") for shape in shapes]
    assert {lanes.offset_dtype.itemsize for lanes in geometries} == {1, 2, 4}
    assert_alike(geometries, dtypes, choose)


@pytest.mark.parametrize(
    "dtype",
    [
        *DTYPES[::3],
        *(pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[1:3]),
    ],
    ids=str,
)
@pytest.mark.parametrize(("bits", "rate"), [(2, 1), (3, 2.5), (3, 16), (8, 300)])
def test_integers_are_those_of_plain_torch_to_the_bit(dtype, bits, rate):
    torch.manual_seed(bits)
    shapes = [geometry(numel, rate, "lanes") for numel in (2500, 333)]  # several scales, and one
    grads = [some(shape.numel, dtype) for shape in shapes]
    residues = [some(shape.numel, residue_dtype(dtype)) for shape in shapes]
    residues[0][:300] *= 1e-38  # denormal, so that scales are zero
    grads[0][:300] *= 1e-30
    grads[0][310], residues[0][320] = float("nan"), float("inf")
    how = shapes, 0.3, 0.5, True, 7 / 3, levels_of(bits)
    expected = all_moves(TorchKernel, grads, residues, *how)
    with torch.device(DEVICE):
        there = ([tensor.to(DEVICE) for tensor in tensors] for tensors in (grads, residues))
        ours = all_moves(TritonKernel, *there, *how)
    assert ours[0] == expected[0] > 0
    for mine, plain in zip(ours[1], expected[1], strict=True):
        assert torch.equal(mine.cpu(), plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [1, 2])
def test_gradients_may_lie_anywhere(dtype, shift):
    assert_alike([geometry(7000, 100, "lanes")], [dtype], True, shift=shift)


def freezing_the_second(kernel):
    class Freezing(kernel):
        def begin(self, grads, frozen, scale):
            super().begin(grads, [i == 1 for i in range(len(grads))], scale)

    return Freezing


@pytest.mark.parametrize("choose", CHOICES)
def test_a_frozen_tensor_stays_and_sends_zeros(choose):
    kernel, plain = freezing_the_second(TritonKernel), freezing_the_second(TorchKernel)
    assert_alike([geometry(900, 7, "lanes")] * 3, [torch.float32] * 3, choose, kernel, plain)


def on_both(move, residue, grad, shape, scale=1.0):
    """Return the results of `move(kernel)` and the residue afterwards, for two kernels.

    They are the Triton kernel, and plain torch's on the CPU.
    """
    results = []
    for kernel, device in ((TritonKernel, DEVICE), (TorchKernel, "cpu")):
        m = residue.to(device, copy=True)
        with torch.device(device):
            made = move(kernel_on(kernel, grad.to(device, copy=True), m, shape, scale))
        results.append([tensor.cpu() for tensor in (*made, m)])
    return zip(*results, strict=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_averages_are_rounded_to_the_gradients_dtype(dtype):
    special = [
        0.0,
        -0.0,
        65519.0,
        65520.0,
        3e38,
        -3.4028e38,
        float("inf"),
        -float("inf"),
        float("nan"),
        1e-40,
        2**-25,
        1.00390625,
    ]
    values = torch.cat([torch.tensor(special), torch.randn(300) * 1e3]).to(residue_dtype(dtype))
    shape = geometry(2 * values.numel(), 2, "lanes")

    def scatter(kernel):
        output = torch.ones(shape.numel, dtype=dtype)
        kernel.scatter([output], new_offsets(shape).to(output.device), values.to(output.device))
        return (output,)

    for scale in (1.0, 3.0):
        for ours, plain in on_both(
            scatter,
            torch.zeros(shape.numel, dtype=values.dtype),
            torch.zeros(shape.numel, dtype=dtype),
            shape,
            scale,
        ):
            torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [70, 900])
def test_what_is_beyond_the_largest_counts_as_not_finite(dtype, numel):
    taken, beyond, scale = at_the_limit(dtype)
    grad, shape = some(numel, dtype), geometry(numel, 7, "lanes")
    grad[:4] = torch.tensor([taken, -taken, beyond, -beyond], dtype=torch.float64).to(dtype)
    results = []
    for kernel, device in ((TritonKernel, DEVICE), (TorchKernel, "cpu")):
        with torch.device(device):
            residue = torch.ones(numel, dtype=residue_dtype(dtype))
            made, bad, values = moved(kernel, grad.to(device), residue, shape, 0.5, scale)
            assert bad == 2
            results.append([values.cpu(), residue.cpu().clone()])
            made.roll_back()
            results[-1].append(residue.cpu())
    for ours, plain in zip(*results, strict=True):
        assert torch.equal(ours, plain)
        assert ours.isfinite().all()


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_what_was_done_is_rolled_back(keep_gradients):
    shape, (grad, before) = geometry(900, 7, "lanes"), torch.randn(2, 900)
    results = []
    for kernel, device in ((TritonKernel, DEVICE), (TorchKernel, "cpu")):
        with torch.device(device):
            residue = before.to(device, copy=True)
            made, _, _ = moved(kernel, grad.to(device), residue, shape, 0.3, 0.5)
            made.roll_back(keep_gradients)
            results.append(residue.cpu())
            made.roll_back()  # there is nothing more
            assert torch.equal(residue.cpu(), results[-1])
    assert torch.equal(*results)
    expected = before + 0.3 * 0.5 * grad if keep_gradients else before
    torch.testing.assert_close(results[0], expected)


def test_a_launch_that_fails_is_not_rolled_back(monkeypatch):
    """Two dtypes need two launches."""
    shape = geometry(900, 7, "lanes")
    wire = Wire(new_offsets(shape, shape).to(DEVICE), torch.zeros(2 * shape.k, device=DEVICE))
    residues = [torch.randn(900, device=DEVICE) for _ in range(2)]
    before = [residue.clone() for residue in residues]
    slots = [TensorSlot(own, shape, i * shape.k, i * shape.k) for i, own in enumerate(residues)]
    grads = [torch.randn(900, device=DEVICE), torch.randn(900, device=DEVICE).bfloat16()]
    kernel = TritonKernel(slots, [grad.dtype for grad in grads])
    kernel.begin(grads, [False, False], 1.0)

    def no_memory(*arguments, **constants):
        raise torch.OutOfMemoryError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(kernel._parts[1][0], "_launch_pass", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="made up"):
            kernel.take_and_accumulate(0.3, 0.0, wire)
    assert not torch.equal(residues[0], before[0])
    kernel.roll_back()
    assert torch.equal(residues[1], before[1])
    torch.testing.assert_close(residues[0], before[0])


def test_the_average_may_replace_the_gradient():
    grad, shape = torch.randn(900), geometry(900, 7, "lanes")
    values = torch.randn(shape.k)
    with torch.device(DEVICE):
        kernel = TritonKernel([TensorSlot(torch.zeros(900), shape, 0, 0)], [grad.dtype])
        grad, offsets = grad.to(DEVICE), new_offsets(shape).to(DEVICE)
        kernel.begin([grad], [False], 1.0)
        kernel.scatter([grad], offsets, values.to(DEVICE))
    assert grad.count_nonzero() == shape.k
    assert torch.equal(
        grad[torch.from_numpy(shape.indices(offsets.cpu().numpy())).to(DEVICE)].cpu(), values
    )


def steps(device, lookahead):
    """Return all that can be observed in several steps of a bucket. One step is rolled back.

    SCALECOM_KERNEL names the kernel.
    """
    torch.manual_seed(0)
    rates = {"0": 7, "1": 300, "2": 2.5}
    config = ScaleComConfig(bits=32, beta=0.3, rates=rates, min_numel=0)
    parameters = {
        name: torch.nn.Parameter(torch.zeros(shape, device=device))
        for name, shape in zip(rates, ((30, 40), (500,), (7, 9, 11)), strict=True)
    }
    residues = Residues(config)
    residues.attach(parameters)
    bucket, seen, ahead = Bucket(0, list(rates), parameters, residues, ranks=2), [], None
    for step in range(4):
        grads = {n: torch.randn(p.numel()).to(device) for n, p in parameters.items()}
        idle = ["1"] * (step == 3)
        if idle:
            grads["1"].zero_()
        unused = {"0"} if step == 1 else set()
        for name in unused:
            grads[name].zero_()
        own = BucketStep(bucket, 0.5, grads, idle=idle)
        if lookahead and step == 0:
            ahead = finished(own.select())
            own.commit()
            own = BucketStep(bucket, 0.5, grads)
        offsets = ahead if lookahead else finished(own.select())
        chosen = finished(own.take_and_accumulate(offsets, choose=lookahead))
        chosen = chosen if lookahead else offsets
        seen += [torch.as_tensor(own.bad), offsets, chosen, own.taken]
        if step == 2:
            own.roll_back()
        else:
            own.receive(offsets, own.taken)
            own.commit(unused)
            ahead = chosen
        seen += [*grads.values(), *(tensor.residue for tensor in bucket.tensors)]
        own.release()
        seen = [
            tensor.cpu().clone() if i >= len(seen) - 10 else tensor for i, tensor in enumerate(seen)
        ]
    return seen


@pytest.mark.parametrize("lookahead", [False, True])
def test_steps_agree_with_the_native_kernel(lookahead, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", "triton")
    ours = steps(DEVICE, lookahead)
    monkeypatch.setenv("SCALECOM_KERNEL", "native")
    for mine, native in zip(ours, steps("cpu", lookahead), strict=True):
        assert torch.equal(mine, native)


MOVES = ["begin", "choose", "take_and_accumulate", "scatter", "roll_back"]


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device: only there can a move wait for one")
@pytest.mark.parametrize("choose", CHOICES)
def test_no_move_waits_for_the_device(choose):
    def forbidding(name):
        def move(self, *arguments):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return getattr(TritonKernel, name)(self, *arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return move

    impatient = type(
        "Impatient", (TritonKernel,), {name: forbidding(name) for name in ("__init__", *MOVES)}
    )
    shapes = [geometry(6401, 7, "lanes"), geometry(333, 300, "lanes")]
    assert_alike(shapes, [torch.float32, torch.bfloat16], choose, impatient)


@pytest.fixture
def asks(monkeypatch):
    """Return a function that sets SCALECOM_KERNEL; clear the caches of earlier answers."""
    choice._why_not_triton.cache_clear()
    choice._warn.cache_clear()
    yield lambda name: monkeypatch.setenv("SCALECOM_KERNEL", name)
    choice._why_not_triton.cache_clear()


def test_which_tensors_it_serves(asks):
    asks("triton")
    device, lanes = torch.device(DEVICE), geometry(900, 7, "lanes")
    assert kernel_for(device, torch.bfloat16, torch.float32, lanes) is TritonKernel
    assert kernel_for(device, torch.float64, torch.float32, lanes) is TorchKernel
    exact = geometry(900, 7, "exact")
    assert kernel_for(device, torch.bfloat16, torch.float32, exact) is TorchKernel
    with pytest.raises(
        RuntimeError, match="SCALECOM_KERNEL=triton, but .*: it is for CUDA devices, not for 'meta'"
    ):
        kernel_for(torch.device("meta"), torch.float32, torch.float32, lanes)


def test_the_cpus_tensors_need_the_interpreter(asks, monkeypatch):
    monkeypatch.setattr(tiles, "INTERPRETED", False)
    asks("triton")
    with pytest.raises(RuntimeError, match="SCALECOM_KERNEL=triton, but .* set TRITON_INTERPRET=1"):
        kernel_for(torch.device("cpu"), torch.float32, torch.float32, geometry(900, 7, "lanes"))


def test_without_triton_plain_torch_serves_cuda_and_says_so(asks, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "scalecom_hvd.exchange.kernels.triton_kernel", None)
    monkeypatch.delattr("scalecom_hvd.exchange.kernels.triton_kernel")
    asks("")
    what = torch.device("cuda"), torch.float32, torch.float32, geometry(900, 7, "lanes")
    assert {kernel_for(*what) for _ in range(3)} == {TorchKernel}
    assert caplog.text.count("the Triton kernel is not used: triton cannot be imported") == 1
    asks("triton")
    with pytest.raises(RuntimeError, match="SCALECOM_KERNEL=triton, but .*: triton cannot"):
        kernel_for(*what)
