"""Drives the C kernel, and its operations for TensorFlow, with NumPy only.

test_sanitizers.py runs this program in a process with AddressSanitizer.

sanitizer_cases.py cases LIBRARY    every case, compared with NumPy; arrays have the exact length
sanitizer_cases.py NAME LIBRARY         one of `BROKEN`, which a sanitizer must report
"""

import ctypes
import sys
from itertools import product

import numpy as np

from scalecom_hvd import native
from scalecom_hvd.bucket_layout import Layout
from scalecom_hvd.config import largest_gradient
from scalecom_hvd.integers import BLOCK
from scalecom_hvd.lanes import Lanes
from scalecom_hvd.native import REFUSED
from scalecom_hvd.reference import integers, scales, select

SIZES = [0, 1, 2, 63, 64, 65, 127, 129, 448, 699, 1000, 4099]
RATES = [1, 1.5, 2, 7, 63.7, 256, 257, 1000, 40_000]  # offsets of 1, 2 and 4 bytes
DTYPES = ["float32", "float64", "float16", "bfloat16"]


class Gradient:
    """A gradient as it is in memory (bfloat16 as uint16).

    `usable` returns its elements in the residue's dtype.
    """

    def __init__(self, dtype, values):
        self.dtype, self.kind = dtype, np.dtype("float64" if dtype == "float64" else "float32")
        self.memory = (
            to_bfloat16(values.astype(np.float32)) if dtype == "bfloat16" else values.astype(dtype)
        )

    def usable(self, scale):
        memory = self.memory
        g = (
            (memory.astype(np.uint32) << 16).view(np.float32)
            if self.dtype == "bfloat16"
            else memory.astype(self.kind)
        )
        g = self.kind.type(scale) * g
        good = np.abs(g) <= largest_gradient(self.kind.name)
        return np.where(good, g, 0).astype(self.kind), int((~good).sum())


def to_bfloat16(values):
    bits = values.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(values), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(
        np.uint16
    )


def made_up(random, shape, dtype):
    """Return a gradient and a residue.

    Some elements are not finite, denormal, as large as a gradient may be, or larger.
    """
    values = random.standard_normal(shape.numel)
    if shape.numel > 60:
        largest = largest_gradient("float64" if dtype == "float64" else "float32")
        values[[1, 20, 40, 59]] = np.nan, -np.inf, np.inf, 1e-40
        values[[2, 21, 41]] = largest, -largest * 2, largest * 4
    with np.errstate(over="ignore"):
        gradient = Gradient(dtype, values)
    return gradient, (random.standard_normal(shape.numel) * 200).astype(gradient.kind)


def offsets_of(shape, indices):
    """Return the row of each lane's element; the inverse of Lanes.indices."""
    starts, strides = shape.starts_and_strides()
    return ((indices - starts) // strides).astype(shape.offset_dtype)


def valid_offsets(random, shape):
    """Return the bytes of the offsets of a random selection."""
    return offsets_of(shape, select(random.standard_normal(shape.numel), shape, "lanes")).view(
        np.uint8
    )


class Bucket:
    """Tensors that share their buffers, with the oracle's moves."""

    def __init__(self, random, geometries, dtypes, levels=0):
        self.shapes = {f"t{i}": shape for i, shape in enumerate(geometries)}
        self.levels = levels
        self.layout = Layout(self.shapes, has_scales=levels > 0)
        made = [
            made_up(random, shape, dtype) for shape, dtype in zip(geometries, dtypes, strict=True)
        ]
        self.gradients, self.residues = [g for g, _ in made], [m for _, m in made]
        self.kind = self.gradients[0].kind
        self.offsets = np.zeros(self.layout.offsets_bytes, np.uint8)
        for name, shape in self.shapes.items():
            self.offsets[self.layout.offsets[name]] = valid_offsets(random, shape)

    def indices(self):
        return [
            shape.indices(self.offsets[self.layout.offsets[name]].view(shape.offset_dtype)).astype(
                np.int64
            )
            for name, shape in self.shapes.items()
        ]

    def choose(self, residues, beta, scale):
        """Return the choice, with the scales of integers."""
        chosen = np.zeros(self.layout.offsets_bytes, np.uint8)
        for (name, shape), gradient, m in zip(
            self.shapes.items(), self.gradients, residues, strict=True
        ):
            index = select(m + gradient.usable(scale)[0], shape, "lanes")
            chosen[self.layout.offsets[name]] = offsets_of(shape, index).view(np.uint8)
            if self.levels:
                value = self.sendable(gradient, m, index, beta, scale)
                chosen[self.layout.scales[name]] = (
                    scales(value, self.levels)[::BLOCK].astype(np.float32).view(np.uint8)
                )
        return chosen

    def sendable(self, gradient, m, index, beta, scale):
        g, kind = gradient.usable(scale)[0][index], gradient.kind.type
        return m[index] + g + np.where(m[index] * g >= 0, kind(1 / beta - 1) * m[index], kind(0))

    def take_and_accumulate(self, beta, scale):
        """Return the updated residues, the values, what they stand for, and how many are bad."""
        updated, bad = [], 0
        values = np.zeros(self.layout.n_values, np.int8 if self.levels else self.kind)
        sent = np.zeros(self.layout.n_values, self.kind)
        for name, gradient, m, index in zip(
            self.shapes, self.gradients, self.residues, self.indices(), strict=True
        ):
            m, at, kind = m.copy(), self.layout.values[name], gradient.kind.type
            values[at] = sent[at] = value = self.sendable(gradient, m, index, beta, scale)
            if self.levels:
                of_blocks = self.offsets[self.layout.scales[name]].view(np.float32)
                scale_of = np.repeat(of_blocks, BLOCK)[: len(value)].astype(m.dtype)
                values[at] = q = integers(value, scale_of, self.levels)
                sent[at] = q * scale_of
            m[index] -= kind(beta) * sent[at]
            g, count = gradient.usable(scale)
            updated.append(m + kind(beta) * g)
            bad += count
        return updated, values, sent, bad

    def scatter(self, scale, values):
        outputs = []
        for at, gradient, index in zip(
            self.layout.values.values(), self.gradients, self.indices(), strict=True
        ):
            dense = np.zeros(gradient.memory.size, gradient.kind)
            dense[index] = gradient.kind.type(scale) * values[at].astype(gradient.kind)
            outputs.append(
                to_bfloat16(dense) if gradient.dtype == "bfloat16" else dense.astype(gradient.dtype)
            )
        return outputs

    def roll_back(self, residues, beta, scale, sent):
        result = []
        for at, gradient, m, index in zip(
            self.layout.values.values(), self.gradients, residues, self.indices(), strict=True
        ):
            m, kind = m.copy(), gradient.kind.type
            m[index] += kind(beta) * sent[at]
            result.append(m - kind(beta) * gradient.usable(scale)[0])
        return result


class Kernel:
    """lanes.c on copies of a bucket's arrays.

    Each array is a memory block of its own, exactly as long as needed.
    """

    def __init__(self, library, bucket):
        self.library, self.bucket = library, bucket
        self.grads = [gradient.memory.copy() for gradient in bucket.gradients]
        self.residues = [residue.copy() for residue in bucket.residues]
        self.offsets, self.chosen = bucket.offsets.copy(), np.zeros_like(bucket.offsets)
        self.table = np.zeros(len(self.grads), native.TENSOR)
        for row, (name, shape), gradient in zip(
            self.table, bucket.shapes.items(), bucket.gradients, strict=True
        ):
            row["numel"], row["k"], row["width"], row["rows"] = (
                shape.numel,
                shape.k,
                shape.width,
                shape.rows,
            )
            row["dtype"], row["offset_width"] = (
                native.DTYPES[gradient.dtype],
                shape.offset_dtype.itemsize,
            )
            row["offsets_at"], row["values_at"] = (
                bucket.layout.offsets[name].start,
                bucket.layout.values[name].start,
            )
            row["levels"], row["scales_at"] = bucket.levels, bucket.layout.scales[name].start
        self.values = np.zeros(bucket.layout.n_values, np.int8 if bucket.levels else bucket.kind)

    def call(self, name, *arguments):
        self.table["grad"] = [grad.ctypes.data for grad in self.grads]
        self.table["residue"] = [residue.ctypes.data for residue in self.residues]
        addresses = [
            argument.ctypes.data if isinstance(argument, np.ndarray) else argument
            for argument in arguments
        ]
        return getattr(self.library, f"scalecom_{name}")(
            self.table.ctypes.data, len(self.table), *addresses
        )

    def choose(self, beta, scale):
        return self.call("choose", scale, 1 / beta - 1, self.chosen)

    def take_and_accumulate(self, beta, scale, chooses=False):
        wire, chosen = (self.offsets, self.values), self.chosen if chooses else None
        return self.call("take_and_accumulate", beta, scale, 1 / beta - 1, *wire, chosen)

    def scatter(self, scale):
        return self.call("scatter", scale, self.offsets, self.values)

    def roll_back(self, beta, scale, keeps_gradients=False):
        return self.call("roll_back", beta, scale, self.offsets, self.values, keeps_gradients)


def same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


def check_moves(library, bucket, beta, scale):
    """Check all moves of lanes.c."""
    kernel, choice = Kernel(library, bucket), bucket.choose(bucket.residues, beta, scale)
    assert kernel.choose(beta, scale) == 0
    same([*kernel.residues, kernel.chosen], [*bucket.residues, choice])
    if bucket.levels:
        bucket.offsets = choice
    updated, values, sent, bad = bucket.take_and_accumulate(beta, scale)
    for chooses in (False, True):
        kernel = Kernel(library, bucket)
        assert kernel.take_and_accumulate(beta, scale, chooses) == bad
        same([*kernel.residues, kernel.values], [*updated, values])
        ahead = bucket.choose(updated, beta, scale) if chooses else np.zeros_like(choice)
        same([kernel.chosen], [ahead])
        assert kernel.roll_back(beta, scale) == 0
        same(kernel.residues, bucket.roll_back(updated, beta, scale, sent))
        if not bucket.levels:
            assert kernel.scatter(1 / scale) == 0
            same(kernel.grads, bucket.scatter(1 / scale, values))
    kernel = Kernel(library, bucket)
    kernel.table["frozen"] = 1
    kernel.values[:] = 1
    assert kernel.take_and_accumulate(beta, scale) == bad
    assert kernel.roll_back(beta, scale) == 0
    same([*kernel.residues, kernel.values], [*bucket.residues, np.zeros_like(values)])


def check_broken_peer(library, random, bucket):
    """Check that random bytes are refused as offsets, and that nothing is changed then.

    They are accepted if all of them happen to lie inside their lanes.
    """
    refused = 0
    for _ in range(4):
        kernel = Kernel(library, bucket)
        broken = random.integers(0, len(kernel.offsets), 3) if len(kernel.offsets) else []
        just_beyond = next(iter(bucket.shapes.values())).rows % 256
        kernel.offsets[broken] = random.choice([just_beyond, random.integers(0, 256)], len(broken))
        fits = True
        for name, shape in bucket.shapes.items():
            offsets = (
                kernel.offsets[bucket.layout.offsets[name]]
                .view(shape.offset_dtype)
                .astype(np.int64)
            )
            inside = shape.indices(offsets) < shape.numel
            full = np.arange(shape.k) < shape.full_lanes
            fits &= bool(((offsets >= 0) & inside & (~full | (offsets < shape.rows))).all())
        calls = [
            lambda k=kernel: k.take_and_accumulate(0.3, 1.0),
            lambda k=kernel: k.roll_back(0.3, 1.0),
            lambda k=kernel: k.scatter(1.0),
        ]
        if fits:
            assert [call() == REFUSED for call in calls] == [False] * 3
            continue
        refused += 1
        assert [call() for call in calls] == [REFUSED] * 3
        same(
            kernel.residues + kernel.grads,
            bucket.residues + [gradient.memory for gradient in bucket.gradients],
        )
    return refused


def check_large(library, random):
    """Check large outputs, whose aligned parts are written past the caches."""
    for dtype in DTYPES:
        bucket = Bucket(random, [Lanes(2**20 + 37, 100)], [dtype])
        kernel = Kernel(library, bucket)
        kernel.values[:] = random.standard_normal(len(kernel.values))
        bytes_ = kernel.grads[0].nbytes
        memory = np.empty(bytes_ + 32, np.uint8)
        shift = -memory.ctypes.data % 32
        memory = np.empty(bytes_ + shift, np.uint8)  # it ends with the gradient
        kernel.grads[0] = memory[-memory.ctypes.data % 32 :][:bytes_].view(kernel.grads[0].dtype)
        assert kernel.scatter(2.0) == 0
        same(kernel.grads, bucket.scatter(2.0, kernel.values))


# tensorflow_ops.c, over tensorflow_stub.c.

TYPES = {
    "float32": 1,
    "float64": 2,
    "uint8": 4,
    "int8": 6,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "float16": 19,
}


class Array(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int32),
        ("forwarded", ctypes.c_int32),
        ("elements", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    ]


def operate(library, name, bucket, inputs, outputs, forwards):
    """Run an operation, and return its arrays or the error's text.

    inputs: arrays or Gradients. outputs: names of dtypes.
    """
    lanes = [
        number
        for n, g in bucket.shapes.items()
        for number in (
            g.numel,
            g.k,
            g.width,
            g.rows,
            g.offset_dtype.itemsize,
            bucket.layout.offsets[n].start,
            bucket.layout.values[n].start,
            bucket.levels,
            bucket.layout.scales[n].start,
        )
    ]
    kept = [x.memory.copy() if isinstance(x, Gradient) else x.copy() for x in inputs]
    kinds = [x.dtype if isinstance(x, Gradient) else x.dtype.name for x in inputs]
    given = (Array * len(kept))(
        *(Array(TYPES[k], 0, x.size, x.ctypes.data) for k, x in zip(kinds, kept, strict=True))
    )
    taken = (Array * len(outputs))(*(Array(TYPES[kind], 0, 0, None) for kind in outputs))
    error = ctypes.create_string_buffer(1024)
    numbers = (ctypes.c_int64 * len(lanes))(*lanes)
    assert library.run(
        name.encode(), numbers, len(lanes), given, len(kept), taken, len(outputs), forwards, error
    )
    results = []
    for output, kind in zip(taken, outputs, strict=True):
        dtype = np.dtype("uint16" if kind == "bfloat16" else kind)
        bytes_ = (
            ctypes.string_at(output.data, output.elements * dtype.itemsize) if output.data else b""
        )
        results.append(np.frombuffer(bytes_, dtype))
    library.release(taken, len(outputs))
    return error.value.decode() or results


def check_operations(library, bucket, beta, scale):
    """Check the operations; with levels, at the choice that the bucket makes."""
    n, kind, grad_dtype = len(bucket.shapes), bucket.kind.name, bucket.gradients[0].dtype
    settings, choice = (
        np.array([beta, scale, 1 / beta - 1]),
        bucket.choose(bucket.residues, beta, scale),
    )
    if bucket.levels:
        bucket.offsets = choice
    updated, values, _, bad = bucket.take_and_accumulate(beta, scale)
    ahead = bucket.choose(updated, beta, scale)
    for chooses in (False, True):
        inputs = [*bucket.gradients, *bucket.residues, settings, np.array([chooses])]
        found = operate(library, "ScalecomChoose", bucket, inputs, ["uint8"], False)
        same(found, [choice if chooses else []])
        outputs = [*[kind] * n, values.dtype.name, "uint8", "int64"]
        inputs.append(bucket.offsets)
        found = operate(library, "ScalecomTakeAndAccumulate", bucket, inputs, outputs, False)
        same(found, [*updated, values, ahead if chooses else [], [bad]])
    for forwards in () if bucket.levels else (False, True):
        inputs = [*bucket.gradients, settings, bucket.offsets, values]
        found = operate(library, "ScalecomScatter", bucket, inputs, [grad_dtype] * n, forwards)
        same(found, bucket.scatter(1 / scale, values))


def check_refusals(library, random):
    """Check that inputs of wrong sizes and offsets outside of their lanes are refused."""
    bucket = Bucket(random, [Lanes(6401, 100)], ["float32"])
    settings, outputs = np.array([1.0, 1.0, 0.0]), ["float32", "float32", "uint8", "int64"]

    def take(gradient, residue, offsets):
        inputs = [gradient, residue, settings, np.array([True]), offsets]
        return operate(library, "ScalecomTakeAndAccumulate", bucket, inputs, outputs, False)

    gradient, residue, offsets = bucket.gradients[0], bucket.residues[0], bucket.offsets
    short = Gradient("float32", np.zeros(6400))
    assert "gradient does not have the size" in take(short, residue, offsets)
    assert "residue does not have the size" in take(gradient, residue[1:], offsets)
    assert "exactly one leader" in take(gradient, residue, offsets[1:])
    assert "exactly one leader" in take(gradient, residue, np.concatenate([offsets, offsets]))
    outside = offsets.copy()
    outside[64] = 1
    assert "outside of their lanes" in take(gradient, residue, outside)
    inputs = [gradient, settings, outside, np.zeros(bucket.layout.n_values, np.float32)]
    assert "outside of their lanes" in operate(
        library, "ScalecomScatter", bucket, inputs, ["float32"], False
    )


# Errors that a sanitizer must report.


def short_residue(kernel):
    kernel.residues[0] = kernel.residues[0][:-1].copy()
    kernel.take_and_accumulate(1.0, 1.0)


def short_values(kernel):
    kernel.values = kernel.values[:-1].copy()
    kernel.take_and_accumulate(1.0, 1.0)


def misaligned_offsets(kernel):
    kernel.offsets = np.zeros(len(kernel.offsets) + 1, np.uint8)[1:]
    kernel.take_and_accumulate(1.0, 1.0)


BROKEN = {
    function.__name__: function for function in (short_residue, short_values, misaligned_offsets)
}


def all_cases(library):
    random, count, refused = np.random.default_rng(0), 0, 0
    for i, (numel, rate) in enumerate(product(SIZES, RATES)):
        dtype = DTYPES[i % 4]
        other = "float64" if dtype == "float64" else DTYPES[(i // 4) % 4].replace("64", "32")
        for beta, scale in ((1.0, 1.0), (0.3, 0.5)):
            shapes = [Lanes(numel, rate), Lanes(333, RATES[count % len(RATES)])]
            bucket = Bucket(random, shapes, [dtype, other])
            check_moves(library, bucket, beta, scale)
            refused += check_broken_peer(library, random, bucket)
            alike = Bucket(random, shapes, [dtype, dtype])
            check_operations(library, alike, beta, scale)
            few = Bucket(random, shapes, [dtype, dtype], levels=(1, 3, 127)[count % 3])
            check_moves(library, few, beta, scale)
            check_operations(library, few, beta, scale)
            count += 1
    for dtype in DTYPES:  # several pieces, each of which fits into a cache
        bucket = Bucket(random, [Lanes(50_001, rate) for rate in (7, 300, 2.5)], [dtype] * 3)
        check_operations(library, bucket, 0.3, 0.5)
        bucket = Bucket(random, [Lanes(100_001, rate) for rate in (7, 30, 2.5)], [dtype] * 3, 3)
        check_operations(library, bucket, 0.3, 0.5)
    check_refusals(library, random)
    check_large(library, random)
    # a full group, and offsets of 4 bytes
    long = Bucket(random, [Lanes(64 * 40_000 + 37, 40_000)], ["float32"])
    check_moves(library, long, 0.3, 0.5)
    refused += check_broken_peer(library, random, long)
    print(f"{count} cases, {refused} times offsets were refused")


def main():
    name, path = sys.argv[1:]
    library = ctypes.CDLL(path)
    for function, signature in native._SIGNATURES.items():
        getattr(library, function).argtypes, getattr(library, function).restype = (
            signature,
            ctypes.c_int64,
        )
    if name == "cases":
        all_cases(library)
    else:
        random = np.random.default_rng(0)
        BROKEN[name](Kernel(library, Bucket(random, [Lanes(1000, 300)], ["float32"])))


if __name__ == "__main__":
    main()
