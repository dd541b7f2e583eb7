"""What a step costs on 2 to 4096 workers and networks of 1 to 400 Gbit/s.

This fits the constants of the model in scalecom_hvd/scaling.py to what `make bench` measured, and
prints a report.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from scalecom_hvd.scaling import (
    LOCAL_METHODS,
    Constants,
    Setting,
    on_devices,
    predict,
    where_the_gain_ends,
)

# Methods that average gradients. In this model, a cyclic leader costs what staggered ones do.
METHODS = ["dense", "fp16", "local top-k", "ScaleCom staggered", "ScaleCom look-ahead"]


def fit(measured: list[dict[str, Any]], cores: int) -> Constants:
    """The constants that bring the predictions nearest to the measured steps.

    Distances are those of logarithms, so that 10 % is 10 % everywhere.
    """
    there = {method_of(r) for r in measured}
    methods = [method for method in (*METHODS, *LOCAL_METHODS) if method in there]
    families = list(dict.fromkeys(map(family_of, methods)))

    def constants(x: np.ndarray) -> Constants:
        step, megabyte = np.split(x[3:], [len(methods)])
        of_family = dict(zip(families, megabyte, strict=True))
        return Constants(
            x[0],
            x[1],
            x[2],
            dict(zip(methods, step, strict=True)),
            {method: of_family[family_of(method)] for method in methods},
            cores,
        )

    def errors(x: np.ndarray) -> list[float]:
        return [
            math.log(predict(method_of(r), setting_of(r), constants(x)) / r["step_ms"])
            for r in measured
        ]

    # hosts.py's shaping passes 94 to 96 % of the nominal speed, and a message takes 0.05 ms and
    # more from socket to socket.
    start = [0.95, 1.0, 0.1] + [10.0] * len(methods) + [1.0] * len(families)
    count = len(methods) + len(families)
    bounds = ([0.9, 0.0, 0.05] + [0.0] * count, [1.0, 20.0, 20.0] + [2000.0] * count)
    return constants(least_squares(errors, start, bounds=bounds, loss="soft_l1", f_scale=0.1).x)


def family_of(method: str) -> str:
    """Methods of one family handle a megabyte alike. Too few measured steps tell them apart."""
    return "ScaleCom" if method.startswith("ScaleCom") else method


def method_of(result: dict[str, Any]) -> str | None:
    """The model's name of a method of `make bench`; None: the model does not know the method."""
    name, _, steps = result["method"].partition(", H = ")
    if steps:
        return {"local SGD": "local SGD", "ScaleCom": "ScaleCom local"}.get(name)
    return name if name in METHODS else None


def setting_of(result: dict[str, Any]) -> Setting:
    # "Unshaped" is a bridge in this machine's memory. A speed far above that of any shaped network
    # stands for it.
    gbit = (result["mbit"] or 40_000) / 1000
    local_steps = result["method"].partition(", H = ")[2]
    # docs/bench_local_steps.csv was measured so.
    given = {"rate": 16.0, "bits": 3} if local_steps else {}
    return Setting(
        result["hosts"], gbit, result["compute_ms"], local_steps=int(local_steps or 1), **given
    )


def read(path: Path) -> tuple[list[dict[str, Any]], int | None]:
    """The measured steps that the model knows, and on how many cores; None for a table.

    path: results.json, or a table in CSV with the columns method, hosts, mbit, step_ms and
        exposed_ms. If a table has no rows of staggered leaders, those of the cyclic leader stand
        for them.
    """
    if path.suffix == ".json":
        found = json.loads(path.read_text())
        results = [r for r in found["results"] if r["case"] == "transformer"]
        return [r for r in results if method_of(r)], found["machine"]["cores"]
    rows = list(csv.DictReader(path.read_text().splitlines()))
    alike = {}
    if not any(row["method"] == "ScaleCom staggered" for row in rows):
        alike = {"ScaleCom cyclic": "ScaleCom staggered"}
    results = [
        {
            "method": alike.get(row["method"], row["method"]),
            "hosts": int(row["hosts"]),
            "mbit": float(row["mbit"] or 0),
            "step_ms": float(row["step_ms"]),
            "compute_ms": float(row["step_ms"]) - float(row["exposed_ms"]),
        }
        for row in rows
    ]
    return [r for r in results if method_of(r)], None


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
        expected = predict(method_of(r), setting_of(r), c)
        where = (
            f"{r['method']}, {r['hosts']} hosts, "
            f"{format(r['mbit'], 'g') + ' Mbit/s' if r['mbit'] else 'unshaped'}"
        )
        lines.append(
            f"{where:48s} {r['step_ms']:8.0f} {expected:8.0f} "
            f"{100 * (expected / r['step_ms'] - 1):+6.0f}%"
        )
    c = dataclasses.replace(c, cores=math.inf)
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
            where_the_gain_ends("ScaleCom look-ahead", Setting(8, 1, compute), constants)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    wrote = "what make bench wrote: results.json, or tables in CSV"
    default = [Path("bench/results.json")]
    parser.add_argument("--results", type=Path, nargs="+", default=default, help=wrote)
    parser.add_argument("--cores", type=int, help="that all workers shared, where no file says it")
    arguments = parser.parse_args()
    measured: list[dict[str, Any]] = []
    cores = arguments.cores
    try:
        for path in arguments.results:
            results, shared = read(path)
            measured += results
            cores = cores or shared
    except FileNotFoundError as error:
        absent = f"scaling_model.py: {error.filename} is not there"
        sys.exit(f"{absent}: run make bench first, which measures the constants")
    if cores is None:
        parser.error("tables do not say how many cores the workers shared: say --cores")
    c = fit(measured, cores)
    print(f"{c}\n")
    print(report(measured, c))


if __name__ == "__main__":
    main()
