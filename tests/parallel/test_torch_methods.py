"""The methods besides ScaleCom, and two that a user wrote, compared with their oracles.

Every method, also ScaleCom, takes the tests of what all methods share. A method that reports
wrongly what it sends loses gradients, or spoils a step.
"""

import models
import numpy as np
import pytest
import rules
import torch
from faces import horovods_alone, hvd, stock
from made_up import SHAPES, came_in, gradients
from momentum import Momentum
from oracles import methods as oracle

SETTINGS = {"rate": 20, "min_numel": 100, "dense": [], "warmup_steps": 0}
DTYPES = {"double": torch.float64, "half": torch.float16}
# Sizes around a group of lanes; every dtype; "one" and "scalar" compressed.
ODD_SHAPES = {
    "scalar": (),
    "one": (1,),
    "n63": (63,),
    "double": (1500,),
    "n65": (65,),
    "n6400": (6400,),
    "half": (700,),
    "n6401": (6401,),
    "whole": (30,),
    "matrix": (37, 211),
}
ODD = {"rate": 100, "min_numel": 0, "dense": ["whole"], "bucket_bytes": 40_000}


class MeansByLeader(hvd.Method):
    """A method as a user writes it: one rank chooses for all, and values are rounded."""

    uses = ("leader", "selection")

    def step(self, bucket, collectives, state):
        chosen = bucket.choose() if collectives.leads() else bucket.new_offsets()
        offsets = yield from collectives.broadcast(chosen, collectives.leader())
        places, counts = bucket.places_at(offsets), bucket.counts
        values, means = bucket.sendable(places), hvd.BinMeans()
        payload = means.pack(values, counts)
        bucket.send(places, means.unpack(payload, values, counts))
        for theirs in (yield from collectives.gather(payload, "means")):
            bucket.receive(places, means.unpack(theirs, values, counts) * collectives.share)


KINDS = hvd.RandomK, hvd.LocalTopK, MeansByLeader
RULES = {MeansByLeader: oracle.sending(oracle.leaders, rules.rounding(hvd.BinMeans()))}
METHODS = [(method, {}) for method in KINDS]
QUANTISED = [
    (hvd.LocalTopK, {"quantiser": rules.Sign(block=10)}),
    (hvd.LocalTopK, {"quantiser": rules.Sign()}),
    (hvd.LocalTopK, {"quantiser": hvd.BinMeans()}),
    (hvd.LocalTopK, {"quantiser": hvd.BinMeans(block=100), "selection": "exact"}),
]
SOME_QUANTISED = [QUANTISED[0]]
EXACT = [(method, {"selection": "exact"}) for method in KINDS]
SCALECOM = [(hvd.ScaleCom, {}), (hvd.ScaleCom, {"lookahead": True})]


def described(value):
    return value.__name__ if isinstance(value, type) else str(value)


def with_each(*methods):
    return pytest.mark.parametrize(("method", "fields"), methods, ids=described)


every_method = with_each(*METHODS, *SOME_QUANTISED)


def rule_of(compressor):
    """The oracle's function for a method."""
    return RULES.get(type(compressor)) or rules.sending(compressor)


def parameters_of(shapes):
    return {
        name: torch.nn.Parameter(torch.zeros(shape, dtype=DTYPES.get(name, torch.float32)))
        for name, shape in shapes.items()
    }


def make(model, method, fields, lr=1.0, momentum=0.0, op=hvd.Average, **more):
    settings = SETTINGS | fields | more
    return models.wrap(hvd, model, lr, momentum, options={"op": op}, method=method, **settings)


def residues_of(compressor):
    return {name: tensor.residue.clone() for name, tensor in compressor.residues.tensors.items()}


def as_it_is(grads, rank, step):
    return grads


def hold_to_the_oracle(
    method, fields, steps, change=as_it_is, op=hvd.Average, scale=lambda step: 1, **more
):
    """Feed the same gradients to ranks and to the oracle.

    Every residue must be the same to the bit, and every average except for rounding.

    change: returns a rank's gradients of a step, given the made-up ones. Those that are left out do
        not arrive on that rank.
    scale: returns the loss scale of a step.
    """
    n, rank = hvd.size(), hvd.rank()
    model = parameters_of(ODD_SHAPES)
    zeros = {name: p.detach().numpy().copy() for name, p in model.items()}
    optimizer, compressor = make(
        model, method, ODD | fields, lr=0.1, op=op, loss_scale=lambda: scale(step), **more
    )
    reference = oracle.MethodReference(n, ODD_SHAPES, compressor.config, rule_of(compressor))
    for step in range(steps):
        made = [change(gradients(ODD_SHAPES, r, step), r, step) for r in range(n)]
        everyone = [
            {name: np.asarray(own.get(name, zero), zero.dtype) for name, zero in zeros.items()}
            for own in made
        ]
        mine = {name: grad * scale(step) for name, grad in everyone[rank].items()}
        optimizer.zero_grad()
        models.feed(model, mine, skip=model.keys() - made[rank].keys())
        optimizer.synchronize()
        if step == 0:
            reference.buckets = compressor.residues.buckets
        averages = reference.step(everyone)
        for name, parameter in model.items():
            parameter.grad /= scale(step)
            got, want = parameter.grad.double().numpy(), averages[name].astype(np.float64)
            near = {"half": 2e-3, "double": 1e-12}.get(name, 2e-6)
            where = f"{name} at step {step}"
            np.testing.assert_allclose(
                got, want * (n if op == hvd.Sum else 1), near, near, err_msg=where
            )
        for name, residue in residues_of(compressor).items():
            want = reference.residues[rank].get(name, zeros[name]).reshape(-1)
            # Means and norms of float64 are not made wider, so the order of summands may show in
            # them.
            near = 1e-12 if name == "double" else 0
            where = f"{name} at step {step}"
            np.testing.assert_allclose(residue.numpy(), want, near, near, err_msg=where)
        assert compressor.stats()["step"] == reference.step_number
        if not np.isnan(averages["n63"]).any():
            with optimizer.skip_synchronize():
                optimizer.step()
    assert models.same_on_all_ranks(model.values())
    return compressor


@with_each(*METHODS, *EXACT, *QUANTISED)
def test_parity(method, fields):
    compressor = hold_to_the_oracle(method, fields, steps=7, beta=0.3)
    assert len(compressor.residues.buckets) >= 3
    assert compressor.residues.tensors.keys() == ODD_SHAPES.keys() - {"whole"}


def leave_out(grads, rank, step):
    names = list(ODD_SHAPES)
    left_out = names[(rank + step) % len(names)], names[(3 * rank + 1) % len(names)]
    return {name: grad for name, grad in grads.items() if step == 0 or name not in left_out}


PROGRAMS = {
    "sums": {"steps": 3, "op": hvd.Sum, "beta": 0.5},
    "a gradient is missing on some ranks, and counts as zero": {
        "steps": 6,
        "change": leave_out,
        "beta": 0.5,
    },
    "the loss scale changes": {"steps": 5, "scale": lambda step: 2.0 ** (step * 3 % 8)},
    "a warm-up, and rates": {
        "steps": 6,
        "warmup_steps": 2,
        "min_numel": 60,
        "rates": {"n6*": 7, "matrix": 2.5},
    },
}


@pytest.mark.parametrize("program", PROGRAMS)
@every_method
def test_parity_of(program, method, fields):
    hold_to_the_oracle(method, fields, **PROGRAMS[program])


@every_method
def test_a_gradient_that_is_not_finite_on_one_rank(method, fields):
    """The step never happened.

    What is sent whole needs only a finite sum. What a residue takes up must be small enough.
    """
    bad = {
        0: ("n6401", np.nan),
        2: ("matrix", np.inf),
        3: ("half", -np.inf),
        4: ("n65", 1e38),
        6: ("double", np.nan),
        7: ("whole", np.inf),
    }

    def change(grads, rank, step):
        if step in bad and rank == step % hvd.size():
            name, value = bad[step]
            grads[name].reshape(-1)[11] = value
        if step == 8:  # it is finite, but its sum is not
            grads["whole"][5] = 3e38
        return grads

    compressor = hold_to_the_oracle(method, fields, 11, change, beta=0.5)
    assert (compressor.stats()["step"], compressor.stats()["skipped_steps"]) == (4, 7)


@with_each(*METHODS, *SOME_QUANTISED, *SCALECOM, (Momentum, {"mu": 0.0}))
def test_nothing_is_lost(method, fields):
    """Now and then a rank has no gradient of a parameter, which is later frozen, and unfrozen."""

    def skips(rank, step):
        return ["second"] if (rank + step) % 5 == 4 or 10 <= step < 13 else []

    model = models.parameters(SHAPES)
    optimizer, compressor = make(model, method, fields, bucket_bytes=10_000)
    models.take_steps(optimizer, model, range(10), skips=skips)
    model["second"].requires_grad_(False)
    before, value = residues_of(compressor), model["second"].detach().clone()
    models.take_steps(optimizer, model, range(10, 13), skips=skips)
    after = residues_of(compressor)
    assert torch.equal(after["second"], before["second"])
    assert after["second"].any()
    assert not torch.equal(after["first"], before["first"])
    assert torch.equal(model["second"], value)
    model["second"].requires_grad_(True)
    models.take_steps(optimizer, model, range(13, 20), skips=skips)
    assert models.same_on_all_ranks(model.values())
    total = came_in(range(hvd.size()), range(20), skips=skips)
    models.assert_nothing_is_lost(model, compressor, total, hvd.size())


@pytest.mark.parametrize("where", ["new_optimizer", "mid_run"])
@with_each(*METHODS, *SOME_QUANTISED, (Momentum, {}))
def test_resuming_is_bit_identical(method, fields, where):
    settings = {"beta": 0.5, "bucket_bytes": 10_000, "momentum": 0.9, "lr": 0.1, "warmup_steps": 2}

    def run():
        model = models.parameters(SHAPES)
        return model, *make(model, method, fields, **settings)

    models.resume(run, where, 4, 7)


# For 6 401 and 1 500 elements in one bucket. The rate is 300, so offsets have two bytes, and k is
# 22 + 5. {method: (offsets, values, gathered, collectives)}
BYTES = {
    "RandomK": (hvd.RandomK, {}, 0, 4 * 27, 0, 2),
    "LocalTopK": (hvd.LocalTopK, {}, 0, 0, 4 * 27 + 2 * 27, 2),
    "LocalTopK exact": (hvd.LocalTopK, {"selection": "exact"}, 0, 0, 4 * 27 + 4 * 27, 2),
    "LocalTopK sign": (hvd.LocalTopK, {"quantiser": rules.Sign()}, 0, 0, 2 * 4 + 4 + 2 * 27, 2),
    "LocalTopK means": (hvd.LocalTopK, {"quantiser": hvd.BinMeans()}, 0, 0, 2 * 16 + 7 + 2 * 27, 2),
    "a leader's, means": (MeansByLeader, {}, 2 * 27, 0, 2 * 16 + 7, 3),
    "ScaleCom": (hvd.ScaleCom, {"bits": 32}, 2 * 27, 4 * 27, 0, 2),
}


@pytest.mark.parametrize("which", BYTES)
def test_bytes(which):
    method, fields, offsets, values, gathered, collectives = BYTES[which]
    shapes = {"long": (6401,), "short": (1500,), "whole": (10,)}
    model = models.parameters(shapes)
    optimizer, compressor = make(model, method, fields, rate=300)
    models.take_steps(optimizer, model, range(2))
    stats, n = compressor.stats(), hvd.size()
    dense = 4 * (10 + 1)  # one element counts ranks with bad gradients
    assert [stats[f"bytes_{what}"] for what in ("offsets", "values", "gathered", "dense")] == [
        offsets,
        values,
        gathered,
        dense,
    ]
    assert (
        stats["bytes_traffic"]
        == round((n - 1) / n * (offsets + 2 * (values + dense))) + (n - 1) * gathered
    )
    assert stats["collectives"] == collectives
    assert stats["rate"] == pytest.approx(7911 / 37)
    assert stats.get("leader") == (1 % n if "leader" in method.uses else None)
    assert stats["residue_norm"] > 0
    own = fields.get("quantiser")
    assert stats.get("quantiser") == (own and repr(own))


@horovods_alone
@every_method
def test_horovods_own_optimizer_is_refused(method, fields):
    for compression in (method, method(**fields)):
        model = models.parameters(SHAPES)
        optimizer = stock.DistributedOptimizer(
            torch.optim.SGD(model.values(), lr=0.1), model.items(), compression=compression
        )
        with pytest.raises(
            TypeError,
            match=r"only in this package's DistributedOptimizer: import scalecom_hvd.torch as hvd",
        ):
            models.feed(model, gradients(SHAPES, hvd.rank(), 0))
        del optimizer
