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
from scalecom_hvd.native import (
    CHOOSE_ACCUMULATOR,
    CHOOSE_AHEAD,
    CHOOSE_NOTHING,
    CHOOSE_RESIDUE,
    REFUSED,
)
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

    def accumulate(self, residues, beta, scale, choose):
        """Return the updated residues, the chosen offsets, and the number of bad elements."""
        updated, chosen, bad = [], np.zeros(self.layout.offsets_bytes, np.uint8), 0
        for (name, shape), gradient, m in zip(
            self.shapes.items(), self.gradients, residues, strict=True
        ):
            g, count = gradient.usable(scale)
            bad += count
            updated.append(m + gradient.kind.type(beta) * g)
            if choose != CHOOSE_NOTHING and shape.k:
                keys = {
                    CHOOSE_ACCUMULATOR: m + g,
                    CHOOSE_RESIDUE: updated[-1],
                    CHOOSE_AHEAD: updated[-1] + g,
                }
                winners = select(keys[choose], shape, "lanes")
                chosen[self.layout.offsets[name]] = offsets_of(shape, winners).view(np.uint8)
        return updated, chosen, bad

    def take(self, residues, beta, scale, share):
        """Return the residues after sending, and the values that are sent."""
        rest, values = [], np.zeros(self.layout.n_values, self.kind)
        for at, gradient, m, index in zip(
            self.layout.values.values(), self.gradients, residues, self.indices(), strict=True
        ):
            kind = gradient.kind.type
            g = gradient.usable(scale)[0][index]
            waited = m[index] - kind(0 if share == 1 else beta) * g
            more = np.where(waited * g >= 0, kind(1 / beta - 1) * waited, kind(0))
            value = m[index] + kind(share) * g + more
            values[at] = value
            rest.append(m.copy())
            rest[-1][index] -= kind(beta) * value
        return rest, values

    def choose(self, residues, beta, scale):
        """Return the choice, with the scales of integers, before anything is accumulated."""
        chosen = self.accumulate(residues, beta, scale, CHOOSE_ACCUMULATOR)[1]
        for (name, shape), gradient, m in zip(
            self.shapes.items(), self.gradients, residues, strict=True
        ):
            offsets = chosen[self.layout.offsets[name]].view(shape.offset_dtype)
            value = self.sendable(gradient, m, shape.indices(offsets), beta, scale)
            chosen[self.layout.scales[name]] = (
                scales(value, self.levels)[::BLOCK].astype(np.float32).view(np.uint8)
            )
        return chosen

    def sendable(self, gradient, m, index, beta, scale):
        g, kind = gradient.usable(scale)[0][index], gradient.kind.type
        return m[index] + g + np.where(m[index] * g >= 0, kind(1 / beta - 1) * m[index], kind(0))

    def take_integers(self, beta, scale):
        """Return the residues after sending, and the integers that are sent at `offsets`."""
        rest, values = [], np.zeros(self.layout.n_values, np.int8)
        for name, gradient, m, index in zip(
            self.shapes, self.gradients, self.residues, self.indices(), strict=True
        ):
            value = self.sendable(gradient, m, index, beta, scale)
            of_blocks = self.offsets[self.layout.scales[name]].view(np.float32)
            scale_of = np.repeat(of_blocks, BLOCK)[: len(value)].astype(m.dtype)
            q = integers(value, scale_of, self.levels)
            values[self.layout.values[name]] = q
            rest.append(m.copy())
            rest[-1][index] -= gradient.kind.type(beta) * (q * scale_of)
        return rest, values

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
            m[index] += kind(beta) * sent[at].astype(m.dtype)
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

    def accumulate(self, beta, scale, choose):
        return self.call("accumulate", beta, scale, choose, self.chosen if choose else None)

    def take(self, beta, scale, share):
        return self.call("take", beta, scale, share, 1 / beta - 1, self.offsets, self.values)

    def take_and_accumulate(self, beta, scale, choose):
        chosen = self.chosen if choose else None
        wire = self.offsets, self.values
        return self.call("take_and_accumulate", beta, scale, 1 / beta - 1, *wire, choose, chosen)

    def scatter(self, scale):
        return self.call("scatter", scale, self.offsets, self.values)

    def roll_back(self, beta, scale, accumulated, taken=True):
        offsets = self.offsets if taken else None
        return self.call("roll_back", beta, scale, accumulated, offsets, self.values)


def same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)


def check_moves(library, bucket, beta, scale):
    """Check all moves of lanes.c, separately and one after the other."""
    for choose in (CHOOSE_NOTHING, CHOOSE_ACCUMULATOR, CHOOSE_RESIDUE, CHOOSE_AHEAD):
        kernel = Kernel(library, bucket)
        updated, chosen, bad = bucket.accumulate(bucket.residues, beta, scale, choose)
        assert kernel.accumulate(beta, scale, choose) == bad
        same([*kernel.residues, kernel.chosen], [*updated, chosen])
        rest, values = bucket.take(updated, beta, scale, 1 - beta)
        assert kernel.take(beta, scale, 1 - beta) == 0
        same([*kernel.residues, kernel.values], [*rest, values])
        before = kernel.residues
        assert kernel.roll_back(beta, scale, True) == 0
        same(before, bucket.roll_back(rest, beta, scale, values))
        assert kernel.scatter(1 / scale) == 0
        same(kernel.grads, bucket.scatter(1 / scale, values))
    for choose in (CHOOSE_NOTHING, CHOOSE_AHEAD):
        kernel = Kernel(library, bucket)
        rest, values = bucket.take(bucket.residues, beta, scale, 1)
        updated, chosen, bad = bucket.accumulate(rest, beta, scale, choose)
        assert kernel.take_and_accumulate(beta, scale, choose) == bad
        same([*kernel.residues, kernel.chosen, kernel.values], [*updated, chosen, values])
    kernel = Kernel(library, bucket)
    kernel.table["frozen"] = 1
    kernel.values[:] = 1
    kernel.take_and_accumulate(beta, scale, CHOOSE_NOTHING)
    kernel.roll_back(beta, scale, True, taken=False)
    same([*kernel.residues, kernel.values], [*bucket.residues, np.zeros_like(kernel.values)])


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
            lambda k=kernel: k.take(0.3, 1.0, 0.7),
            lambda k=kernel: k.take_and_accumulate(0.3, 1.0, CHOOSE_NOTHING),
            lambda k=kernel: k.scatter(1.0),
        ]
        if fits:
            assert [call() == REFUSED for call in calls] == [False] * 3
            continue
        refused += 1
        assert [call() for call in calls] == [REFUSED] * 3
        kernel.roll_back(0.3, 1.0, False)
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
    n = len(bucket.shapes)
    kind, grad_dtype = bucket.kind.name, bucket.gradients[0].dtype
    settings, values_at = np.array([beta, scale, 1 / beta - 1]), slice(n, None)
    for chooses in (False, True):
        flag = np.array([chooses])
        updated, chosen, bad = bucket.accumulate(
            bucket.residues, beta, scale, CHOOSE_ACCUMULATOR if chooses else CHOOSE_NOTHING
        )
        inputs = [*bucket.gradients, *bucket.residues, settings, flag]
        found = operate(
            library, "ScalecomAccumulate", bucket, inputs, [*[kind] * n, "uint8", "int64"], False
        )
        same(found, [*updated, chosen if chooses else [], [bad]])
        rest, values = bucket.take(bucket.residues, beta, scale, 1)
        updated, chosen, bad = bucket.accumulate(
            rest, beta, scale, CHOOSE_AHEAD if chooses else CHOOSE_NOTHING
        )
        outputs = [*[kind] * n, kind, "uint8", "int64"]
        found = operate(
            library, "ScalecomTakeAndAccumulate", bucket, [*inputs, bucket.offsets], outputs, False
        )
        same(found, [*updated, values, chosen if chooses else [], [bad]])
    rest, values = bucket.take(bucket.residues, beta, scale, 1 - beta)
    averages = bucket.scatter(1 / scale, values)
    for forwards in (False, True):
        inputs = [*bucket.residues, *bucket.gradients, settings, bucket.offsets]
        found = operate(
            library, "ScalecomTake", bucket, inputs, [*[kind] * n, kind, "int64"], forwards
        )
        same(found[:n] + found[values_at], [*rest, values, [0]])
        inputs = [*bucket.gradients, settings, bucket.offsets, values]
        same(
            operate(library, "ScalecomScatter", bucket, inputs, [grad_dtype] * n, forwards),
            averages,
        )


def check_integers(library, bucket, beta, scale):
    """Check the moves of values sent as integers, both of lanes.c and as operations."""
    n, kind = len(bucket.shapes), bucket.kind.name
    choice = bucket.choose(bucket.residues, beta, scale)
    kernel = Kernel(library, bucket)
    kernel.call("choose", scale, 1 / beta - 1, kernel.chosen)
    same([kernel.chosen], [choice])
    bucket.offsets = choice
    rest, values = bucket.take_integers(beta, scale)
    updated, _, bad = bucket.accumulate(rest, beta, scale, CHOOSE_NOTHING)
    ahead = bucket.choose(updated, beta, scale)
    kernel = Kernel(library, bucket)
    assert kernel.take_and_accumulate(beta, scale, CHOOSE_AHEAD) == bad
    same([*kernel.residues, kernel.values, kernel.chosen], [*updated, values, ahead])
    kernel.roll_back(beta, scale, True)
    settings = np.array([beta, scale, 1 / beta - 1])
    for chooses in (False, True):
        inputs = [*bucket.gradients, *bucket.residues, settings, np.array([chooses])]
        found = operate(library, "ScalecomChoose", bucket, inputs, ["uint8"], False)
        same(found, [choice if chooses else []])
        outputs = [*[kind] * n, "int8", "uint8", "int64"]
        inputs.append(choice)
        found = operate(
            library, "ScalecomTakeAndAccumulate", bucket, inputs, outputs, forwards=False
        )
        same(found, [*updated, values, ahead if chooses else [], [bad]])


def check_refusals(library, random):
    """Check that inputs of wrong sizes and offsets outside of their lanes are refused."""
    bucket = Bucket(random, [Lanes(6401, 100)], ["float32"])
    settings, outputs = np.array([1.0, 1.0, 0.0]), ["float32", "float32", "int64"]

    def take(gradient, residue, offsets):
        return operate(
            library, "ScalecomTake", bucket, [residue, gradient, settings, offsets], outputs, False
        )

    gradient, residue, offsets = bucket.gradients[0], bucket.residues[0], bucket.offsets
    short = Gradient("float32", np.zeros(6400))
    assert "gradient does not have the size" in take(short, residue, offsets)
    assert "residue does not have the size" in take(gradient, residue[1:], offsets)
    assert "exactly one leader" in take(gradient, residue, offsets[1:])
    assert "exactly one leader" in take(gradient, residue, np.concatenate([offsets, offsets]))
    outside = offsets.copy()
    outside[64] = 1
    assert "outside of their lanes" in take(gradient, residue, outside)
    inputs = [gradient, residue, settings, np.array([True]), outside]
    found = operate(
        library,
        "ScalecomTakeAndAccumulate",
        bucket,
        inputs,
        ["float32", "float32", "uint8", "int64"],
        False,
    )
    assert "outside of their lanes" in found
    inputs = [gradient, settings, outside, np.zeros(bucket.layout.n_values, np.float32)]
    assert "outside of their lanes" in operate(
        library, "ScalecomScatter", bucket, inputs, ["float32"], False
    )


# Errors that a sanitizer must report.


def short_residue(kernel):
    kernel.residues[0] = kernel.residues[0][:-1].copy()
    kernel.accumulate(1.0, 1.0, CHOOSE_NOTHING)


def short_values(kernel):
    kernel.values = kernel.values[:-1].copy()
    kernel.take(1.0, 1.0, 0.0)


def misaligned_offsets(kernel):
    kernel.offsets = np.zeros(len(kernel.offsets) + 1, np.uint8)[1:]
    kernel.take(1.0, 1.0, 0.0)


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
            check_integers(library, few, beta, scale)
            count += 1
    for dtype in DTYPES:  # several pieces, each of which fits into a cache
        bucket = Bucket(random, [Lanes(50_001, rate) for rate in (7, 300, 2.5)], [dtype] * 3)
        check_operations(library, bucket, 0.3, 0.5)
        bucket = Bucket(random, [Lanes(100_001, rate) for rate in (7, 30, 2.5)], [dtype] * 3, 3)
        check_integers(library, bucket, 0.3, 0.5)
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
