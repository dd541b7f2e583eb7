"""Local steps on real ranks.

They are compared with the oracle of Qsparse-local-SGD where ranks synchronise, and with an ordinary
optimizer in between. Saved and elastic states are in test_torch_local_states.py.
"""

import itertools

import models
import numpy as np
import pytest
import rules
import torch
from devices import DEVICE
from faces import horovods_alone, hvd
from local_models import (
    COMPRESSIONS,
    EVALUATES,
    LR,
    MOMENTUM,
    SHAPES,
    SOME,
    Plain,
    begin,
    copy_into,
    equal,
    from_zero,
    make,
    method,
    usable,
    values_of,
)
from made_up import came_in, gradients
from oracles import methods as oracle
from oracles.local_steps import LocalStepsReference, nesterov

from scalecom_hvd.schedule import Schedule

some_compressions = pytest.mark.parametrize("compression", SOME)


def momentum_sgd():
    """PyTorch's SGD with momentum, separately for every worker."""
    buffers = {}

    def update(worker, values, grads):
        for name, grad in grads.items():
            key = (worker, name)
            buffers[key] = grad if key not in buffers else MOMENTUM * buffers[key] + grad
        return {
            name: value - value.dtype.type(LR) * buffers[worker, name].astype(value.dtype)
            for name, value in values.items()
        }

    return update


def hold_to_the_oracle(compression, local_steps=4, steps=24, outers=None, **more):
    """Compare parameters and residues after each step. outers: the oracle's outer optimizer."""
    n, rank = hvd.size(), hvd.rank()
    model = begin()
    optimizer, compressor = make(model, compression, local_steps, MOMENTUM, **more)
    exchange = oracle.MethodReference(
        n,
        SHAPES,
        compressor.config,
        rules.sending(compressor),
        decay=getattr(compressor, "decay", 1.0),
        by_contributors=getattr(compressor, "average", "all") == "contributors",
    )
    start = {name: value.numpy() for name, value in values_of(model).items()}
    reference = LocalStepsReference(
        exchange,
        start,
        Schedule(local_steps, more.get("fragments", 1)),
        momentum_sgd(),
        outers,
        more.get("overlap", 0),
        optimizer._local._fragments,
        more.get("clip_changes"),
    )
    for step in range(steps):
        everyone = [
            {name: g.astype(start[name].dtype) for name, g in gradients(SHAPES, r, step).items()}
            for r in range(n)
        ]
        models.take_steps(optimizer, model, [step], grads=lambda *_: everyone[rank])  # noqa: B023
        if compressor.residues.buckets is not None:
            exchange.buckets = compressor.residues.buckets
        reference.step(everyone)
        where = f"after step {step + 1}"
        for name, want in reference.workers[rank].items():
            got = model[name].detach().numpy()
            np.testing.assert_allclose(got, want, 1e-5, 1e-5, err_msg=f"{name} {where}")
        if reference.travelling is not None:
            continue  # residues have moved in place, and may still be taken back
        for name, tensor in compressor.residues.tensors.items():
            want = exchange.residues[rank].get(name, np.zeros(SHAPES[name])).reshape(-1)
            got = tensor.residue.numpy()
            np.testing.assert_allclose(got, want, 1e-4, 1e-4, err_msg=f"{name} {where}")
    assert compressor.stats()["step"] == exchange.step_number
    optimizer.synchronize_parameters()
    assert models.same_on_all_ranks(model.values())


# The oracle's buckets are known only after the first exchange. So that exchange has one bucket of
# each kind.
ONE_BUCKET = {"bucket_bytes": 10**8, "dense": ["double"]}


def outer_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.75, nesterov=True)


CHANGING = {0: 1, 5: 3, 15: 7}
ROUNDS = {
    "H changes": {"local_steps": CHANGING},
    "outer": {"outer": outer_sgd},
    "overlap": {"outer": outer_sgd, "overlap": 1, "steps": 27},
    "longer overlap": {"outer": outer_sgd, "overlap": 3, "steps": 27},
    "fragments": {"outer": outer_sgd, "local_steps": 6, "overlap": 2, "fragments": 2},
    "fragments, H changes": {"outer": outer_sgd, "local_steps": CHANGING, "fragments": 2},
    "clipped": {"local_steps": 6, "clip_changes": 1},
    "clipped fragments": {"local_steps": 6, "clip_changes": 1, "overlap": 2, "fragments": 2},
}
LONG_ROUNDS = {
    "three fragments": {"outer": outer_sgd, "local_steps": 5, "fragments": 3},
    "fragments of a step": {"outer": outer_sgd, "local_steps": 2, "fragments": 3},
    "clipped shorter": {"local_steps": 6, "clip_changes": 0.9},
    "shorter fragments": {"local_steps": 6, "clip_changes": 0.9, "overlap": 2, "fragments": 2},
}


@pytest.mark.parametrize(
    ("compression", "local_steps"),
    [*((compression, 4) for compression in COMPRESSIONS), (SOME[0], 1), (SOME[1], 1)],
)
def test_parity(compression, local_steps):
    scales = itertools.cycle([2.0**10, 2.0**-3, 1.0])  # changes carry no loss scale
    made = method(compression, **ONE_BUCKET, loss_scale=lambda: next(scales))
    hold_to_the_oracle(made, local_steps, local_steps * 6)


# Every day, each kind of round runs with one compression.
ALL_ROUNDS = [
    pytest.param(compression, kind, marks=() if is_short else pytest.mark.long)
    for number, kind in enumerate(ROUNDS | LONG_ROUNDS)
    for i, compression in enumerate(SOME)
    for is_short in [kind in ROUNDS and i == number % len(SOME)]
]


@pytest.mark.parametrize(("compression", "kind"), ALL_ROUNDS)
def test_parity_of_every_kind_of_round(compression, kind):
    more = (ROUNDS | LONG_ROUNDS)[kind]
    outers = nesterov(0.5, 0.75) if "outer" in more else None
    hold_to_the_oracle(method(compression, **ONE_BUCKET), **more, outers=outers)


def test_recipes():
    hold_to_the_oracle(hvd.Compression.none)  # plain local SGD
    hold_to_the_oracle(**hvd.diloco(4), steps=24, outers=nesterov(0.7, 0.9))
    assert (hvd.diloco()["local_steps"], hvd.sparseloco()["local_steps"]) == (500, 30)
    made = hvd.sparseloco(4, rate=20)["compression"]
    assert (made.decay, made.average, made.config.rate) == (0.95, "contributors", 20)
    assert (type(made.quantiser), made.config.beta) == (hvd.BinMeans, 1.0)
    config = made.config.replace(**ONE_BUCKET)
    hold_to_the_oracle(
        hvd.LocalTopK(
            config=config, decay=made.decay, average=made.average, quantiser=made.quantiser
        )
    )


def exact(shapes, rank, step):
    """Gradients of few bits: sums, averages over 2 and 4 ranks, and steps of 0.5 are exact."""
    return {name: np.round(grad * 8) / 64 for name, grad in gradients(shapes, rank, step).items()}


@pytest.mark.parametrize(
    "compression", ["ScaleCom", "LocalTopK", "RandomK", "ScaleCom, exact, beta"]
)
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_one_local_step_with_sgd_is_the_ordinary_path(compression, op):
    """Where arithmetic is exact, they are equal to the bit."""
    ordinary, local = begin(scale=0), begin(scale=0)
    for model, local_steps in ((ordinary, None), (local, 1)):
        compressor = method(compression, beta=1.0)
        optimizer, _ = make(model, compressor, local_steps, op=getattr(hvd, op))
        models.take_steps(optimizer, model, range(10), grads=exact)
    assert equal(ordinary, local)
    assert local["first"].any()


# What scripts do, compared with an ordinary optimizer. Each function takes one step.

# {step: (rank, its bad gradient)}. Ranks synchronise after every third step.
BAD = {2: (0, np.nan), 4: (1, np.inf), 5: (0, 2.0**101), 9: (1, np.nan)}


def gradients_of(step):
    grads = gradients(SHAPES, hvd.rank(), step)
    rank, value = BAD.get(step, (None, None))
    if rank == hvd.rank():
        grads["first"][3, 4] = value
    return grads


def scaled(model, optimizer, scaler, step):
    optimizer.zero_grad()
    scaler.scale(torch.zeros(()))  # as for a loss; here the gradients are given
    scale = scaler.get_scale()
    models.feed(model, {n: grad * grad.dtype.type(scale) for n, grad in gradients_of(step).items()})
    if step % 2:  # as scripts that clip do
        optimizer.synchronize()
        scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


def downhill(model, optimizer, scaler, step, bad=1):
    """Evaluate the loss as often as the optimizer asks. bad: the evaluation that may go wrong."""
    goal = {n: torch.as_tensor(g).clamp(-1, 1) for n, g in gradients(SHAPES, 7, hvd.rank()).items()}
    losses = []

    def closure():
        optimizer.zero_grad()
        apart = {name: (model[name] - goal[name].to(model[name].dtype)) for name in SHAPES}
        loss = sum((d.square() * (1 + goal[n].abs())).sum().float() for n, d in apart.items())
        loss.backward()
        losses.append(loss.detach())
        if len(losses) == bad and BAD.get(step, (None,))[0] == hvd.rank():
            model["third"].grad[5] = np.nan
        return losses[-1]

    return optimizer.step(closure)


def momentum(params):
    return torch.optim.SGD(params, lr=LR, momentum=0.9)


SCRIPTS = {"scaled": (scaled, momentum)}
SCRIPTS |= {kind: (downhill, kind_of) for kind, kind_of in EVALUATES.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_between_synchronisations_ranks_step_like_an_ordinary_optimizer(script):
    """A step with a bad gradient changes nothing. Optimizers' states are never averaged.

    Hooks and schedules are the script's. test_torch_local_differential.py draws other scripts.
    """
    step_of, kind = SCRIPTS[script]
    model, alone, seen = begin(), begin(), ([], [])
    optimizer, compressor = make(model, local_steps=3, sgd=kind(model.values()))
    plain = Plain(kind(alone.values()))
    runs = []
    for values, one, found in ((model, optimizer, seen[0]), (alone, plain, seen[1])):
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=4)
        scheduler = torch.optim.lr_scheduler.StepLR(getattr(one, "optimizer", one), 5, gamma=0.5)
        # Hooks are called once, and see gradients that are not scaled.
        one.register_step_pre_hook(
            lambda *_, values=values, found=found: found.append(str(values["first"].grad))
        )
        runs.append((values, one, scaler, scheduler))
    skipped = 0
    for step in range(12):
        losses = []
        for values, one, scaler, scheduler in runs:
            values["bias"].requires_grad_(step < 7)
            losses.append(step_of(values, one, scaler, step))
            scheduler.step()
        assert losses[0] == losses[1]
        skipped += not usable(alone.values())
        if step % 3 == 2:
            assert models.same_on_all_ranks(model.values())
            copy_into(alone, model)
        assert equal(model, alone), f"step {step}"
        states = [one.state_dict()["state"] for one in (optimizer, plain)]
        torch.testing.assert_close(*states, rtol=0, atol=0)
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 12 - skipped
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    stats = compressor.stats()
    assert (stats["step"], stats["skipped_steps"], stats["local_steps"]) == (4, 0, [[0, 3]])
    assert (stats["local_steps_taken"], stats["local_steps_skipped"]) == (12, skipped)
    assert (skipped > 0) == (hvd.rank() < 2)


@pytest.mark.parametrize("kind", EVALUATES)
def test_a_bad_gradient_in_a_later_evaluation_lasts_until_the_next_synchronisation(kind):
    model = begin()
    optimizer, compressor = make(model, local_steps=2, sgd=EVALUATES[kind](model.values()))
    finite = []
    for step in (4, 3, 6, 7):  # it is bad in the first
        downhill(model, optimizer, None, step, bad=2)
        finite.append(all(bool(parameter.isfinite().all()) for parameter in model.values()))
    # A line search takes back what led there.
    assert finite == [hvd.rank() != 1 or "searching" in kind, True, True, True]
    assert models.same_on_all_ranks(model.values())
    assert compressor.stats()["local_steps_taken"] == 4


def adam(params):
    return torch.optim.Adam(params, lr=LR)


def adagrad(params):
    return torch.optim.Adagrad(params, lr=LR)


def rprop(params):
    """Its step sizes must not become zero."""
    return torch.optim.Rprop(params, lr=LR)


GATHERS = {"LBFGS": EVALUATES["LBFGS"], "momentum": momentum, "Adam": adam}
GATHERS |= {"Adagrad": adagrad, "Rprop": rprop}


@pytest.mark.parametrize("kind", GATHERS)
def test_a_rank_that_goes_back_forgets_what_its_optimizer_gathered(kind):
    model = begin()
    sgd = GATHERS[kind](model.values())
    optimizer, _ = make(model, hvd.Compression.none, 2, sgd=sgd)
    for step in (10, 11, 12, 13):
        loss = downhill(model, optimizer, None, step)
        if step == 12 and hvd.rank() == 1:
            model["third"].detach()[7] = np.inf
            for state in optimizer.state.values():
                names = ("exp_avg", "momentum_buffer", "sum", "prev")
                gathered = next((state[name] for name in names if name in state), None)
                (state["old_stps"][0] if gathered is None else gathered).fill_(np.nan)
    for step in (14, 15):
        before = values_of(model)
        assert downhill(model, optimizer, None, step).isfinite()
        assert not torch.equal(model["third"], before["third"])
        # Its first step has this length.
        if kind in ("Adam", "Adagrad", "Rprop") and (step, hvd.rank()) == (14, 1):
            moved = (model["third"] - before["third"]).abs()
            torch.testing.assert_close(moved, torch.full_like(moved, LR))
    assert loss.isfinite() == (hvd.rank() != 1)
    assert models.same_on_all_ranks(model.values())


# Parameters and ranks of every kind.


def test_channels_last():
    torch.manual_seed(2)
    model = {"kernel": torch.nn.Parameter(torch.randn(64, 8, 3, 3))}
    given = torch.randn(64, 8, 3, 3)
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        own = {name: p.detach().clone(memory_format=layout) for name, p in model.items()}
        own = {name: torch.nn.Parameter(value) for name, value in own.items()}
        optimizer, _ = make(own, hvd.ScaleCom(rate=4, min_numel=1), 2)
        for step in range(4):
            (own["kernel"] * given * (step + hvd.rank())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(own["kernel"].detach())
    assert torch.equal(*ends)


def test_half_precision_loses_nothing_of_the_average():
    """Common parameters are float32, so what is too small for half precision adds up there."""
    model = {"weight": torch.nn.Parameter(torch.ones(4000, dtype=torch.float16))}
    sgd = torch.optim.SGD(model.values(), lr=1.0)
    optimizer, compressor = make(model, hvd.ScaleCom(dense=["*"], warmup_steps=0), 1, sgd=sgd)

    def small(shapes, rank, step):
        # As its share of the average, one rank's change is at most half of what half precision
        # resolves just below 1.
        return {"weight": np.full(4000, 2.0**-11 if rank == 0 and step % 2 == 0 else 0.0)}

    models.take_steps(optimizer, model, range(16), grads=small)
    expected = torch.full((4000,), 1 - 8 * 2.0**-11 / hvd.size(), dtype=torch.float16)
    torch.testing.assert_close(model["weight"].detach(), expected, rtol=0, atol=2.0**-11)
    assert abs(model["weight"][0].item() - 1) > 2.0**-11
    assert compressor.stats()["step"] == 16


@some_compressions
def test_frozen_parameters(compression):
    """What a parameter changed before is sent. Then its residue waits until it is thawed."""
    model, optimizer, compressor = from_zero(compression, 2)

    def skips(rank, step):
        return ["second"] if 3 <= step < 8 else []

    models.take_steps(optimizer, model, range(3))
    model["second"].requires_grad_(False)
    models.take_steps(optimizer, model, [3], skips)
    residue = compressor.residues.tensors["second"].residue
    before = values_of({"residue": residue, "value": model["second"]})
    models.take_steps(optimizer, model, range(4, 8), skips)
    assert equal({"residue": residue, "value": model["second"]}, before)
    model["second"].requires_grad_(True)
    models.take_steps(optimizer, model, range(8, 12))
    assert not torch.equal(model["second"], before["value"])
    came = came_in(range(hvd.size()), range(12), SHAPES, skips)
    models.assert_nothing_is_lost(model, compressor, came, divisor=hvd.size())


def test_sparse_gradients_stay_local():
    embedding = torch.nn.Embedding(200, 30, sparse=True)
    hvd.broadcast_parameters(embedding.state_dict(), 0)
    optimizer, _ = make(dict(embedding.named_parameters()), local_steps=2)
    for step in range(4):
        optimizer.zero_grad()
        embedding(torch.arange(10) * (hvd.rank() + step)).square().sum().backward()
        assert embedding.weight.grad.is_sparse
        optimizer.step()
    assert models.same_on_all_ranks(embedding.parameters())


@horovods_alone
@pytest.mark.parametrize(
    "members", [[0], pytest.param([0, 1], marks=pytest.mark.skipif("hvd.size() < 3"))]
)
def test_a_process_set(members):
    """Ranks outside it take their steps by themselves, and leave out those with bad gradients."""
    some = hvd.add_process_set(members)
    try:
        model = begin()
        optimizer, compressor = make(model, local_steps=2, process_set=some)
        for step in (0, 1, 2, 3):
            grads = gradients(SHAPES, hvd.rank(), step)
            if step == 1:
                grads["first"][3, 4] = np.nan
            optimizer.zero_grad()
            models.feed(model, grads)
            optimizer.step()
        optimizer.synchronize_parameters()
        stats = compressor.stats()
        assert (stats["local_steps_taken"], stats["local_steps_skipped"]) == (4, 1)
        if some.included():
            assert models.same_on_all_ranks(model.values(), process_set=some)
        assert not models.same_on_all_ranks(model.values())
    finally:
        hvd.remove_process_set(some)


MORE = {"plain": {}, "overlap": {"overlap": 1}}
MORE["all"] = {"overlap": 1, "clip_changes": 2, "outer": outer_sgd}


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("compression", ["ScaleCom", "LocalTopK, means"])
def test_synchronize_parameters_ends_a_round_where_a_script_evaluates(compression, more):
    """The first synchronisation under inference mode makes tensors that later ones write to."""
    model = begin()
    optimizer, compressor = make(model, compression, **MORE[more])
    # Also after steps 4 and 8, as usual. Some averages of step 8 travel then.
    for steps, done in ((range(2), 1), (range(2, 8), 3), (range(8, 11), 4)):
        models.take_steps(optimizer, model, steps)
        assert not models.same_on_all_ranks(model.values()) or steps.stop == 8
        with torch.inference_mode():
            compressor.state_dict()
            for _ in range(2):  # the second has nothing to do
                optimizer.synchronize_parameters()
        assert models.same_on_all_ranks(model.values())
        assert compressor.stats()["step"] == done


def test_a_model_loaded_between_rounds_is_where_the_next_begins():
    model, fresh = begin(), begin()
    optimizer, _ = make(model, method("ScaleCom", dense=["*"]), 2)
    models.take_steps(optimizer, model, range(2))
    copy_into(model, fresh)
    models.take_steps(optimizer, model, range(2))
    models.take_steps(make(fresh, method("ScaleCom", dense=["*"]), 2)[0], fresh, range(2))
    assert equal(model, fresh)


# Refusals.


@pytest.mark.parametrize("local_steps", [None, 2])
def test_what_averages_is_not_wrapped_again(local_steps):
    model = begin()
    optimizer, _ = make(model, local_steps=local_steps)
    for again in (None, 4):
        with pytest.raises(
            TypeError, match="already averages gradients: wrap the optimizer that it was made from"
        ):
            make(model, local_steps=again, sgd=optimizer)


@horovods_alone
def test_what_cannot_work_is_refused():
    for kind, message, settings in (
        (
            ValueError,
            r"not through FP16Compressor. To send fewer bits, give hvd.ScaleCom\(bits=8\)",
            {"compression": hvd.Compression.fp16},
        ),
        (ValueError, "ScaleCom averages values, but Adasum does not", {"op": hvd.Adasum}),
        (TypeError, "local_steps must be a number of steps", {"local_steps": [2] * hvd.size()}),
    ):
        with pytest.raises(kind, match=message):
            make(begin(), **settings)


def other_start(model, optimizer):
    model["first"].detach().add_(hvd.rank())


def late_parameter(model, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


DIFFER = "settings differ.*local_steps is"


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        (
            [{"local_steps": 4}, {"local_steps": 5}],
            None,
            rf"{DIFFER} \[\[0, 4\]\] on rank 0 and \[\[0, 5\]\] on rank 1",
        ),
        (
            [{"local_steps": None}, {"local_steps": 4}],
            None,
            rf"{DIFFER} missing on rank 0 and \[\[0, 4\]\] on rank 1",
        ),
        ([{}, {"overlap": 1}], None, "settings differ.*overlap is 0 on rank 0 and 1 on rank 1"),
        ([{}, {"fragments": 2}], None, "settings differ.*fragments is 1 on rank 0 and 2 on rank 1"),
        ([{}, {"clip_changes": 2}], None, "settings differ.*clip_changes is None on rank 0 and 2"),
        ([{"outer": outer_sgd}, {"outer": momentum}], None, r"settings differ.*outer is SGD\("),
        ([{}, {}], other_start, "different parameters.*Call broadcast_parameters on all ranks bef"),
        ([{}, {}], late_parameter, "after DistributedOptimizer was made.*Make a new Distributed"),
    ],
)
def test_the_first_step_is_refused_on_all_ranks(settings, change, message):
    model = begin()
    optimizer, _ = make(model, **settings[hvd.rank() == 1])
    if change is not None:
        change(model, optimizer)
    with pytest.raises(RuntimeError, match=message):
        models.take_steps(optimizer, model, [0])
