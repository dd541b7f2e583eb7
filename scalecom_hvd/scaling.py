"""A model of how long a training step takes, with each method on 2 to 4096 workers.

`python -m scalecom_hvd plan` uses it to say what a method would bring.
scripts/bench/scaling_model.py fits its constants to what `make bench` measured. Framework-free.

This is the model (in `traffic` and `predict`). Gradients become ready evenly over backward, which
is two thirds of the compute. A bucket's collectives follow each other, and those of the last bucket
cannot hide. A collective costs a negotiation, its hops (2(n-1) for a ring's all-reduce, log2 n for
a broadcast), and its bytes at the network's speed. "local top-k" gathers the values and indices of
n choices. Look-ahead hides the broadcast of offsets and scales behind the next forward and
backward. Local steps send what the method sends, once in H steps, and hide none of it.

Five kinds of constants are fitted to the measured steps: the share of the nominal speed that is
reached, one negotiation, one hop, and, for each method, the processor's time per step and per
megabyte (one for all that is ScaleCom). If workers share processors, as those of `make bench` do,
all constants but the first grow. The time per step is for a model of the measured size. For other
sizes, all of it but `FIXED` grows in proportion.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.integers import BLOCK, levels_of, words_of
from scalecom_hvd.rate_controller import RateController
from scalecom_hvd.stages import LADDER

# Methods that average the changes of H steps: whole, and compressed.
LOCAL_METHODS = ["local SGD", "ScaleCom local"]
# Methods that send every element.
WHOLE_METHODS = ["dense", "fp16", "local SGD"]
# Gradients are whole inside nodes and compressed between them. This is "ScaleCom staggered" with
# nodes as workers, and each rank of a node does its share of the work. Traffic inside a node is
# taken to cost nothing.
NODES = "ScaleCom nodes"

# Backward's share of the compute.
BACKWARD = 2 / 3
# Parameters of the model that `make bench` measures.
MEASURED_NUMEL = 24_800_000
# ms that a step of a compressing method costs more than a dense one, however small the model. `make
# demo`, whose models have 0.2 M parameters, measured 13.2 - 9.5 and 18.0 - 13.0 ms.
FIXED = 4.4


@dataclass(frozen=True)
class Constants:
    """The fitted constants. Times are in ms."""

    reached: float  # the share of the network's nominal speed
    negotiation: float  # the time of one
    hop: float  # the time of one
    step: dict[str, float]  # {method: the processor's time} per step
    megabyte: dict[str, float]  # the same per megabyte
    cores: float = math.inf  # that all workers share; infinite: every worker has its own


@dataclass(frozen=True)
class Setting:
    """The setting in which a step is predicted."""

    workers: int  # n, at least 2; each node has a link of its own
    gbit: float  # the link's nominal speed in Gbit/s
    compute: float  # the time of one worker's forward and backward, in ms
    numel: float = MEASURED_NUMEL  # N, the model's parameters, of 4 bytes
    rate: float | None = None  # N/k of compressing methods; None: the default
    bits: int | None = None  # of ScaleCom's values; None: the default
    local_steps: int = 1  # H, for the methods with local steps
    per_node: int = 1  # workers in a node, which a ring of all workers enters and leaves once

    @property
    def of_nodes(self) -> Setting:
        """The same setting, with each node as one worker."""
        return dataclasses.replace(self, workers=self.workers // self.per_node, per_node=1)

    @property
    def buckets(self) -> int:
        """How many buckets the gradients fill."""
        return max(1, math.ceil(4 * self.numel / ScaleComConfig.bucket_bytes))


# Fitted to docs/bench.csv and docs/bench_local_steps.csv, the tables that `make bench` wrote with 2
# cores for all workers, by
#     python scripts/bench/scaling_model.py --cores 2 --results docs/bench.csv \
#         docs/bench_local_steps.csv
# tests/single/test_scaling_model.py checks that they are.
_PROCESSOR = {  # {method: (ms per step, ms per megabyte)}
    "dense": (0.0, 1.657),
    "fp16": (250.0, 7.165),
    "local top-k": (196.93, 0.234),
    "ScaleCom staggered": (32.47, 0.17),
    "ScaleCom look-ahead": (45.22, 0.17),
    "local SGD": (8.64, 6.259),
    "ScaleCom local": (17.74, 0.17),
}
FITTED = Constants(
    reached=0.90,
    negotiation=12.80,
    hop=0.0547,
    step={method: step for method, (step, _) in _PROCESSOR.items()},
    megabyte={method: megabyte for method, (_, megabyte) in _PROCESSOR.items()},
    cores=2,
)


def sends(method: str, s: Setting) -> tuple[float, int]:
    """The rate and the bits of a compressing method."""
    knows_bits = method.startswith("ScaleCom")
    given: dict[str, Any] = {"rate": s.rate, "bits": s.bits if knows_bits else None}
    resolved = ScaleComConfig(**given).resolved(knows_bits=knows_bits)
    return (1, 32) if "*" in (resolved.rates or ()) else resolved.stages[0][1]


def traffic(method: str, s: Setting) -> tuple[float, float]:
    """Bytes that a worker averages or gathers, and broadcasts, each time workers average."""
    if method == NODES:
        return traffic("ScaleCom staggered", s.of_nodes)
    n = s.workers
    ring = 2 * (n - 1) / n
    if method in WHOLE_METHODS:
        return ring * s.numel * (2 if method == "fp16" else 4), 0
    rate, bits = sends(method, s)
    k = s.numel / rate
    offset = 0 if rate == 1 else 0.5 if rate <= 16 else 1 if rate <= 256 else 2
    if method == "local top-k":
        return (n - 1) * k * 8, 0
    if bits == 32:
        return ring * k * 4, k * offset * (n - 1) / n
    words = words_of(math.ceil(k), levels_of(bits), n)
    return ring * words * 4, k * (offset + 4 / BLOCK) * (n - 1) / n


def rung_of_auto(s: Setting, c: Constants) -> int:
    """The rung of the ladder on which rate="auto" settles, if steps take what is predicted."""
    times = []
    for stage in LADDER:
        method = "dense" if stage.is_whole else "ScaleCom staggered"
        there = dataclasses.replace(s, rate=stage.rate, bits=stage.bits)
        times.append(predict(method, there, c))
    controller = RateController(s.workers)
    while not controller.is_settled:
        controller.note(times[controller.rung], times[controller.rung] - s.compute)
    return controller.rung


def bytes_a_step(method: str, s: Setting) -> float:
    """Bytes that a worker sends in a step, on average."""
    return sum(traffic(method, s)) / (s.local_steps if method in LOCAL_METHODS else 1)


def predict(method: str, s: Setting, c: Constants) -> float:
    """A step's time in ms, on average."""
    if method == NODES:
        own = _processor("ScaleCom staggered", s, c) / s.per_node
        others = dataclasses.replace(c, step=dict.fromkeys(c.step, 0.0))
        return own + predict("ScaleCom staggered", s.of_nodes, others)
    n, shared = s.workers, max(1.0, s.workers / c.cores)
    # ms per byte: on the network, and of the processors that read, add and write it.
    per_byte = 8e-6 / (s.gbit * c.reached) + 1e-6 * c.megabyte[method] * shared
    hops = (n - 1) if method == "local top-k" else 2 * (n - 1)
    values, offsets = traffic(method, s)
    exchange = s.buckets * shared * (c.negotiation + hops * c.hop) + values * per_byte
    broadcast = 0.0
    if method.startswith("ScaleCom"):
        hops = math.ceil(math.log2(n))
        broadcast = s.buckets * shared * (c.negotiation + hops * c.hop) + offsets * per_byte
    processor = _processor(method, s, c) * shared
    if method in LOCAL_METHODS:
        # A round's exchange begins when its last backward is over.
        return s.compute + (processor + exchange + broadcast) / s.local_steps
    total = exchange + broadcast
    if method == "ScaleCom look-ahead":
        # The next step's offsets may travel until its buckets are ready. So they matter only if the
        # network is busy all the time.
        tail, hidden = exchange / s.buckets, s.compute * (1 - (1 - BACKWARD) / s.buckets)
    else:
        tail, hidden = total / s.buckets, s.compute * BACKWARD * (1 - 1 / s.buckets)
    return s.compute + processor + max(tail, total - hidden)


def _processor(method: str, s: Setting, c: Constants) -> float:
    """ms per step (with local steps: per round), besides bytes, on a processor of its own."""
    measured = c.step[method]
    fixed = 0.0 if method in WHOLE_METHODS else min(FIXED, measured)
    return fixed + (measured - fixed) * s.numel / MEASURED_NUMEL


def on_devices(c: Constants) -> Constants:
    """The same constants, but sums cost no processor time, as with NCCL."""
    # If everything is sent whole, sums are all that a step costs.
    whole = {method: c.step["dense"] for method in WHOLE_METHODS if method in c.step}
    return dataclasses.replace(c, step=c.step | whole, megabyte=dict.fromkeys(c.megabyte, 0.0))


def where_the_gain_ends(method: str, s: Setting, c: Constants, least: float = 1.1) -> float:
    """The Gbit/s above which `method` is less than `least` times as fast as dense training.

    It is right to one part in sixty, and infinity if the method gains even at 4000 Gbit/s.
    """
    gbit = 0.01
    while gbit <= 4000:
        there = dataclasses.replace(s, gbit=gbit)
        if predict("dense", there, c) / predict(method, there, c) < least:
            return gbit
        gbit *= 1.016
    return math.inf
