"""How long a step takes on 2 to 4096 workers, for networks of 1 to 400 Gbit/s: a model whose
constants `make bench` measured.

The model (all of it is `predict`). Gradients become ready evenly over backward, two thirds of the
compute; a bucket's collectives follow each other and the last bucket's cannot hide. A collective
costs a negotiation and its hops, 2(n-1) of them for a ring's all-reduce, log2 n for a broadcast,
and its bytes at the network's speed:

    dense       2(n-1)/n * 4N bytes a worker        fp16  half of that
    local top-k (n-1) * 8k bytes: the union of n choices, values and indices
    ScaleCom    2(n-1)/n * 4k + k bytes: constant in n; look-ahead hides the k bytes of offsets
                behind the next forward and backward

Five kinds of constants are fitted to the measured steps: the share of the nominal speed that is
reached, one negotiation, one hop, and per method the processor's time a step and a megabyte. All
but the first grow where workers share processors, as those of `make bench` do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy.optimize import least_squares

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend is chosen first

METHODS = ["dense", "fp16", "local top-k", "ScaleCom staggered", "ScaleCom look-ahead"]
BACKWARD = 2 / 3
BUCKETS = 4


@dataclass(frozen=True)
class Constants:
    """What is fitted. Times in ms."""

    reached: float  # of the nominal speed
    negotiation: float
    hop: float
    step: dict[str, float]  # the processor's, per method
    megabyte: dict[str, float]
    cores: float = math.inf  # that all workers share. Infinite: every worker has its own


@dataclass(frozen=True)
class Setting:
    """Where a step is predicted. compute in ms, a model of `numel` parameters."""

    workers: int
    gbit: float
    compute: float
    numel: int = 24_800_000
    rate: float = 100


def traffic(method: str, s: Setting) -> tuple[float, float]:
    """Bytes that a worker sends in a step: (what is averaged or gathered, offsets)."""
    k, ring = s.numel / s.rate, 2 * (s.workers - 1) / s.workers
    if method in ("dense", "fp16"):
        return ring * s.numel * (4 if method == "dense" else 2), 0
    if method == "local top-k":
        return (s.workers - 1) * k * 8, 0
    return ring * k * 4, k * (s.workers - 1) / s.workers


def broadcast_of_offsets(method: str, s: Setting, c: Constants) -> float:
    """The time in ms that a step's broadcasts take if nothing hides them."""
    shared = max(1.0, s.workers / c.cores)
    per_byte = 8e-6 / (s.gbit * c.reached) + 1e-6 * c.megabyte[method] * shared
    return (
        BUCKETS * shared * (c.negotiation + math.ceil(math.log2(s.workers)) * c.hop)
        + traffic(method, s)[1] * per_byte
    )


def predict(method: str, s: Setting, c: Constants) -> float:
    """A step's time in ms."""
    values, _ = traffic(method, s)
    n, shared = s.workers, max(1.0, s.workers / c.cores)
    per_byte = 8e-6 / (s.gbit * c.reached) + 1e-6 * c.megabyte[method] * shared
    negotiation, hop = c.negotiation * shared, c.hop * shared
    hops = (n - 1) if method == "local top-k" else 2 * (n - 1)
    exchange = BUCKETS * (negotiation + hops * hop) + values * per_byte
    broadcast = broadcast_of_offsets(method, s, c) if method.startswith("ScaleCom") else 0.0
    if method == "ScaleCom look-ahead":
        # The next step's offsets travel until its buckets are ready, so they take part only where
        # the network is busy all the time.
        tail, total, hidden = (
            exchange / BUCKETS,
            exchange + broadcast,
            s.compute * (1 - (1 - BACKWARD) / BUCKETS),
        )
    else:
        total = exchange + broadcast
        tail, hidden = total / BUCKETS, s.compute * BACKWARD * (1 - 1 / BUCKETS)
    return s.compute + c.step[method] * shared + max(tail, total - hidden)


def fit(measured: list[dict[str, Any]], cores: int) -> Constants:
    """The constants that bring the predictions nearest to the measured steps, in logarithms: 10 %
    is 10 % everywhere.
    """
    methods = [method for method in METHODS if any(r["method"] == method for r in measured)]

    def constants(x: np.ndarray) -> Constants:
        step, megabyte = np.split(x[3:], 2)
        return Constants(
            x[0],
            x[1],
            x[2],
            dict(zip(methods, step, strict=True)),
            dict(zip(methods, megabyte, strict=True)),
            cores,
        )

    def errors(x: np.ndarray) -> list[float]:
        return [
            math.log(predict(r["method"], setting_of(r), constants(x)) / r["step_ms"])
            for r in measured
        ]

    # hosts.py's shaping passes 94 to 96 % of the nominal speed, and a message takes 0.05 ms and
    # more from socket to socket.
    start = [0.95, 1.0, 0.1] + [10.0] * len(methods) + [1.0] * len(methods)
    bounds = (
        [0.9, 0.0, 0.05] + [0.0] * 2 * len(methods),
        [1.0, 20.0, 20.0] + [2000.0] * 2 * len(methods),
    )
    return constants(least_squares(errors, start, bounds=bounds, loss="soft_l1", f_scale=0.1).x)


def setting_of(result: dict[str, Any]) -> Setting:
    # "Unshaped" is a bridge in this machine's memory; a figure far above what any shaped network
    # gives stands for it.
    return Setting(result["hosts"], (result["mbit"] or 40_000) / 1000, result["compute_ms"])


def own_cores(c: Constants) -> Constants:
    """The same, where every worker has processors of its own."""
    return dataclasses.replace(c, cores=math.inf)


def on_devices(c: Constants) -> Constants:
    """The same, where sums cost no processor time, as with NCCL."""
    return dataclasses.replace(c, megabyte=dict.fromkeys(c.megabyte, 0.0))


def where_the_gain_ends(
    method: str, c: Constants, workers: int, compute: float, least: float = 1.1
) -> float:
    """The Gbit/s above which `method` makes a dense step less than `least` times as fast."""
    for gbit in np.geomspace(0.01, 4000, 800):
        s = Setting(workers, float(gbit), compute)
        if predict("dense", s, c) / predict(method, s, c) < least:
            return float(gbit)
    return math.inf


def report(measured: list[dict[str, Any]], c: Constants) -> str:
    per_method = ", ".join(
        f"{method} {time:.1f} + {c.megabyte[method]:.2f} a MB" for method, time in c.step.items()
    )
    lines = [
        f"fitted: {100 * c.reached:.0f} % of the nominal speed, {c.negotiation:.2f} ms a "
        f"negotiation, {c.hop:.3f} ms a hop; processor ms a step: {per_method}",
        "",
        f"{'measured':48s} {'step ms':>8s} {'model':>8s} {'off by':>7s}",
    ]
    for r in measured:
        expected = predict(r["method"], setting_of(r), c)
        where = (
            f"{r['method']}, {r['hosts']} hosts, "
            f"{str(r['mbit']) + ' Mbit/s' if r['mbit'] else 'unshaped'}"
        )
        lines.append(
            f"{where:48s} {r['step_ms']:8.0f} {expected:8.0f} "
            f"{100 * (expected / r['step_ms'] - 1):+6.0f}%"
        )
    c = own_cores(c)
    lines += [
        "",
        "predicted speed-up over dense (24.8 M parameters, 150 ms of compute, every worker on "
        "processors of its own):",
    ]
    speeds = (1, 10, 25, 100, 400)
    for method in [m for m in METHODS[1:] if m in c.step]:
        lines.append(f"  {method:22s}" + "".join(f"{f'{gbit} Gbit/s':>12s}" for gbit in speeds))
        for n in (2, 8, 64, 512, 4096):
            settings = [Setting(n, gbit, 150) for gbit in speeds]
            lines.append(
                f"  {n:14d} workers"
                + "".join(
                    f"{predict('dense', s, c) / predict(method, s, c):11.1f}x" for s in settings
                )
            )
    lines += [
        "",
        "where the gain ends: above this speed a step is less than 1.1 times as fast as a dense "
        "one (8 workers), Gbit/s:",
    ]
    for compute in (50, 150, 500):
        ends = [
            where_the_gain_ends("ScaleCom look-ahead", constants, 8, compute)
            for constants in (c, on_devices(c))
        ]
        as_said = [f"{end:.1f}" if end < math.inf else "nowhere" for end in ends]
        lines.append(
            f"  {compute:3d} ms of compute: {as_said[0]} with sums on processors (Gloo), "
            f"{as_said[1]} with sums on devices (NCCL)"
        )
    if "ScaleCom staggered" in c.step:
        lines += [
            "",
            "what the broadcast of offsets costs (10 Gbit/s, 150 ms of compute): cyclic or "
            "staggered step less look-ahead step, ms",
        ]
        for n in (2, 8, 64, 512, 4096):
            s = Setting(n, 10, 150)
            lines.append(
                f"  {n:5d} workers: "
                f"{predict('ScaleCom staggered', s, c) - predict('ScaleCom look-ahead', s, c):7.1f}"
            )
    return "\n".join(lines)


def plot(measured: list[dict[str, Any]], c: Constants, path: Path) -> None:
    """Step time against workers, with the measured points (this machine's cores shared), and
    predictions per speed.
    """
    figure, axes = plt.subplots(1, 4, figsize=(18, 4.2), layout="constrained")
    colours = {method: f"C{i}" for i, method in enumerate(METHODS)}
    for method in c.step:
        points = [r for r in measured if r["method"] == method and r["mbit"] == 1000]
        axes[0].plot(
            [r["hosts"] for r in points], [r["step_ms"] for r in points], "o", color=colours[method]
        )
        n = [2, 4, 8]
        compute = {r["hosts"]: r["compute_ms"] for r in points}
        axes[0].plot(
            n,
            [predict(method, Setting(i, 1, compute.get(i, 150)), c) for i in n],
            "-",
            color=colours[method],
            label=method,
        )
    axes[0].set_title("measured (points) and model, 1 Gbit/s, 2 cores for all", fontsize=10)
    workers = [2**i for i in range(1, 13)]
    for axis, gbit in zip(axes[1:], (1, 10, 100), strict=True):
        for method in c.step:
            axis.plot(
                workers,
                [predict(method, Setting(n, gbit, 150), own_cores(c)) for n in workers],
                color=colours[method],
                label=method,
            )
        axis.set_title(f"model, {gbit} Gbit/s, 150 ms of compute", fontsize=10)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("workers")
    axes[0].set_ylabel("ms a step")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=Path("bench/results.json"), help="what make bench wrote"
    )
    parser.add_argument("--output", type=Path, default=Path("bench/scaling.png"))
    arguments = parser.parse_args()
    try:
        found = json.loads(arguments.results.read_text())
    except FileNotFoundError:
        print(
            f"scaling_model.py: {arguments.results} is not there: run make bench first, which "
            "measures the constants",
            file=sys.stderr,
        )
        return 1
    measured = [
        r for r in found["results"] if r["case"] == "transformer" and r["method"] in METHODS
    ]
    c = fit(measured, found["machine"]["cores"])
    print(report(measured, c))
    plot(measured, c, arguments.output)
    print(f"\nwritten: {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
