"""TensorFlow's operations in C without TensorFlow, with the moves that test_kernels.py makes.

They run over tensorflow_stub.c. Each array is a block of memory of its own, exactly as long as
needed, so sanitizers see whatever lies beyond. kernels_torch.py says what the moves are.
"""

import ctypes

import numpy as np
from kernel_cases import Taken

from scalecom_hvd import native

# TensorFlow's numbers of dtypes.
TYPES = {"float32": 1, "float64": 2, "uint8": 4, "int8": 6, "int64": 9, "bool": 10}
TYPES |= {"bfloat16": 14, "float16": 19}


class Array(ctypes.Structure):
    _fields_ = [
        *(("dtype", ctypes.c_int32), ("forwarded", ctypes.c_int32)),
        *(("elements", ctypes.c_int64), ("data", ctypes.c_void_p)),
    ]


class Operations:
    """TensorFlow's operations."""

    has = frozenset(
        {"no elements", "denormal numbers", "checked offsets", "counted offsets", "checked sizes"}
        | {"large tensors"}
    )
    refusal = RuntimeError

    def __init__(self, case):
        self.case, self.grads, self.residues = case, case.grads, case.residues
        self.settings = np.array([case.beta, case.scale, case.extra])
        places = case.layout
        self.lanes = [
            number
            for name, shape in case.shapes.items()
            for number in (
                *(shape.numel, shape.k, shape.width, shape.rows, shape.offset_width),
                *(places.offsets[name].start, places.values[name].start),
                *(case.levels, places.scales[name].start),
            )
        ]

    def state(self):
        return [*self.grads, *self.residues]

    def _operate(self, name, inputs, outputs, forwards=False):
        """Run an operation, and return its arrays.

        inputs: arrays, in front of which the case's gradients go. outputs: names of dtypes.
        forwards: whether outputs may take over their inputs' memory.
        """
        kept = [array.copy() for array in (*self.grads, *inputs)]
        kinds = [*self.case.dtypes, *(array.dtype.name for array in inputs)]
        given = (Array * len(kept))(
            *(Array(TYPES[k], 0, x.size, x.ctypes.data) for k, x in zip(kinds, kept, strict=True))
        )
        taken = (Array * len(outputs))(*(Array(TYPES[kind], 0, 0, None) for kind in outputs))
        error, library = ctypes.create_string_buffer(1024), native.library()
        lanes = (ctypes.c_int64 * len(self.lanes))(*self.lanes), len(self.lanes)
        arrays = given, len(kept), taken, len(outputs)
        assert library.run(f"Scalecom{name}".encode(), *lanes, *arrays, forwards, error)
        results = []
        for output, kind in zip(taken, outputs, strict=True):
            dtype = np.dtype("uint16" if kind == "bfloat16" else kind)
            size = output.elements * dtype.itemsize if output.data else 0
            results.append(np.frombuffer(ctypes.string_at(output.data, size), dtype))
        library.release(taken, len(outputs))
        if error.value:
            raise RuntimeError(error.value.decode())
        return results

    def choose(self):
        inputs = *self.residues, self.settings
        (nothing,) = self._operate("Choose", [*inputs, np.array([False])], ["uint8"])
        assert not nothing.size
        (chosen,) = self._operate("Choose", [*inputs, np.array([True])], ["uint8"])
        return chosen

    def take_and_accumulate(self, chooses=False):
        assert not chooses
        case = self.case
        inputs = [*self.residues, self.settings, case.offsets]
        outputs = [*[case.kind.name] * len(self.grads), case.wire_dtype.name, "int64"]
        *residues, values, bad = self._operate("TakeAndAccumulate", inputs, outputs)
        return Taken(residues, values, np.zeros(0, np.uint8), int(bad[0]))

    def scatter(self, values, in_place=False):
        inputs = [self.settings, self.case.offsets, values]
        return self._operate("Scatter", inputs, self.case.dtypes, in_place)
