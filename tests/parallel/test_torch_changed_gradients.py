"""Scripts that change p.grad between backward() and step() without synchronize().

Horovod's guide asks for synchronize() there, but scripts without it train in stock Horovod. So
every step is right, or all ranks refuse it and say what to call. No step may give a wrong number.
"""

import functools
import itertools
import time

import numpy as np
import pytest
import torch
from devices import DEVICE
from faces import horovods_alone, hvd, in_every_library
from made_up import gradients
from models import parameters as zeros
from models import same_on_all_ranks, wrap

EVERYTHING = 1.0000001  # a rate at which k = N
SMALL = {"weight": (40, 100), "bias": (50,)}
LARGE = {"weight": (700, 1000), "bias": (50,)}  # large enough for kernels on a thread
SIZES = pytest.mark.parametrize(
    "shapes", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)], ids=["small", "large"]
)


def make(library, shapes, rate=EVERYTHING, **settings):
    """Return parameters of zeros, plain SGD with learning rate 1, and the compressor."""
    model = zeros(shapes)
    every = {"rate": rate, "dense": ["bias"], "warmup_steps": 0, "min_numel": 2, "bits": 32}
    return model, *wrap(library, model, **(every | settings))


def steps_of(model, optimizer, steps):
    """For each step give its number, the gradients of all ranks, and this rank's loss."""
    shapes = {name: tuple(p.shape) for name, p in model.items()}
    for step in range(steps):
        optimizer.zero_grad()
        everyone = [gradients(shapes, rank, step) for rank in range(hvd.size())]
        yield step, everyone, loss_of(model, everyone[hvd.rank()])


def loss_of(model, grads):
    """A loss with a backward that gives every parameter the gradient in `grads`."""
    return sum((p * torch.as_tensor(grads[name])).sum() for name, p in model.items())


def changed(change, grads):
    """What a script's change makes of these gradients."""
    own = zeros({name: grad.shape for name, grad in grads.items()})
    for name, parameter in own.items():
        parameter.grad = torch.as_tensor(np.array(grads[name], np.float32))
    change(list(own.values()))
    return {name: parameter.grad.numpy().astype(np.float64) for name, parameter in own.items()}


def mean(everyone):
    return {name: sum(own[name] for own in everyone) / len(everyone) for name in everyone[0]}


def right_updates(change, everyone, ranks):
    """What stock Horovod may give if some ranks change their gradients.

    If all do, each rank's gradients are changed, or their average, depending on which comes first.
    """
    found = [changed(change, own) if rank in ranks else own for rank, own in enumerate(everyone)]
    every_rank = len(ranks) == len(everyone)
    return [mean(found), *([changed(change, mean(everyone))] if every_rank else [])]


def close(one, other):
    return all(
        np.allclose(one[name], other[name], rtol=1e-3, atol=1e-4 * np.abs(other[name]).max())
        for name in other
    )


def norm(grads):
    return float(np.sqrt(sum(np.square(grad, dtype=np.float64).sum() for grad in grads.values())))


def refuses(step):
    """Take a step. Return whether all ranks refused it, with an error that says what to call."""
    error = ""
    try:
        step()
    except RuntimeError as refusal:
        error = str(refusal)
    errors = hvd.allgather_object(error, name="errors")
    if not any(errors):
        return False
    assert all("optimizer.synchronize()" in each for each in errors), errors
    return True


def mean_residues(compressor, shapes):
    """{name: the average of the residues over ranks}"""
    found = {}
    for name, shape in shapes.items():
        tensor = compressor.residues.tensors.get(name)
        waits = torch.zeros(shape) if tensor is None else tensor.residue / tensor.beta
        found[name] = hvd.allreduce(waits.double().view(shape), name=f"waits.{name}").numpy()
    return found


def largest_residue(compressor):
    return max(float(t.residue.abs().max()) for t in compressor.residues.tensors.values())


def holds_no_more_than(compressor, grads):
    """Whether the residue holds at most this rank's gradient.

    A refused step may leave the gradient there, to be sent later.
    """
    return largest_residue(compressor) <= max(np.abs(g).max() for g in grads.values()) + 1e-4


def trains_as_stock_or_refuses(
    library, script, change, shapes=SMALL, spoil=None, ranks=None, **settings
):
    """Take steps in which everything is chosen.

    Each step gives what stock Horovod may give, and leaves no residue, or all ranks refuse it.

    script(model, optimizer, loss): one step of the script under test.
    change(parameters): what the script does to their gradients, for the reference.
    spoil(step, gradients of all ranks): changes these before backward.
    ranks: those that change their gradients. Default: all.
    """
    model, optimizer, compressor = make(library, shapes, **settings)
    for step, everyone, mine in steps_of(model, optimizer, 4):
        if spoil is not None:
            spoil(step, everyone)
            mine = loss_of(model, everyone[hvd.rank()])
        was = {name: p.detach().numpy().astype(np.float64) for name, p in model.items()}
        if refuses(lambda: script(model, optimizer, mine)):  # noqa: B023
            finite = {name: np.nan_to_num(grad) for name, grad in everyone[hvd.rank()].items()}
            assert holds_no_more_than(compressor, finite)
            for name, parameter in model.items():
                np.testing.assert_array_equal(parameter.detach().double().numpy(), was[name])
            return
        update = {name: was[name] - p.detach().double().numpy() for name, p in model.items()}
        right = right_updates(change, everyone, range(hvd.size()) if ranks is None else ranks)
        assert any(close(update, one) for one in right), (
            f"step {step}: the update's norm is {norm(update):.4g}, and should be "
            f"{' or '.join(f'{norm(one):.4g}' for one in right)}"
        )
        left = largest_residue(compressor)
        assert left < 1e-4, f"step {step}: everything was chosen, but {left:.3g} is left"
        assert same_on_all_ranks(model.values())


def of_gradients(function):
    """Make a change of all parameters' gradients from a change of one."""

    def change(parameters):
        for parameter in parameters:
            function(parameter.grad)

    return change


def mask(grad):
    rows = torch.arange(grad.shape[0])
    grad.mul_((rows % 3 != 0).view(-1, *[1] * (grad.dim() - 1)))


def through_data(parameters):
    """Change gradients without moving a version counter."""
    for parameter in parameters:
        parameter.grad.data.mul_(0.25)


def with_another_tensor(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad * 0.25


def pause(step):
    """Wait in every second step: kernels on a thread end then, and may still run in other steps."""
    time.sleep(0.05 * (step % 2))


CHANGES = {
    "clip_grad_norm_": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.01),
    "clip_grad_value_": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01),
    "mul_": of_gradients(lambda grad: grad.mul_(0.25)),
    "zero_": of_gradients(lambda grad: grad.zero_()),
    "mask": of_gradients(mask),
    "through .data": through_data,
    "another tensor": with_another_tensor,
}


def changing(change, ranks=None):
    """A script that changes gradients after backward, and then takes its step."""

    steps = itertools.count()

    def script(model, optimizer, loss):
        loss.backward()
        pause(next(steps))
        if ranks is None or hvd.rank() in ranks:
            change(list(model.values()))
        optimizer.step()

    return script


def synchronizing(change):
    """The same script as Horovod's guide writes it."""

    def script(model, optimizer, loss):
        loss.backward()
        optimizer.synchronize()
        change(list(model.values()))
        with optimizer.skip_synchronize():
            optimizer.step()

    return script


def mostly_long(names, short):
    """A test's parameters, with all but those in `short` marked long."""
    return [n if n in short else pytest.param(n, marks=pytest.mark.long) for n in names]


@in_every_library
@pytest.mark.parametrize("name", mostly_long(CHANGES, ("clip_grad_norm_", "through .data")))
def test_gradients_changed_after_backward(name, library):
    trains_as_stock_or_refuses(library, changing(CHANGES[name]), CHANGES[name])


OTHER_MODES = [{"lookahead": True}, {"leader": "staggered", "bucket_bytes": 10_000}]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        # The model is so large that kernels run on a thread, which may see half of the change.
        ("clip_grad_norm_", {"shapes": LARGE}),
        pytest.param("mul_", {"shapes": LARGE}, marks=pytest.mark.long),
        *(pytest.param("mul_", mode, marks=pytest.mark.long) for mode in OTHER_MODES),
        *(pytest.param("through .data", mode, marks=pytest.mark.long) for mode in OTHER_MODES),
    ],
    ids=str,
)
def test_gradients_changed_after_backward_in_other_modes(name, settings):
    trains_as_stock_or_refuses(hvd, changing(CHANGES[name]), CHANGES[name], **settings)


@in_every_library
@SIZES
def test_one_rank_only_changes_its_gradients(shapes, library):
    """The other ranks cannot notice it by themselves."""
    change, last = CHANGES["mul_"], [hvd.size() - 1]
    trains_as_stock_or_refuses(library, changing(change, last), change, shapes, ranks=last)


@pytest.mark.on_cpus  # see test_nothing_is_lost_where_gradients_are_changed
@in_every_library
def test_a_refused_step_keeps_gradients_as_they_came(library):
    """Even gradients that were changed without any trace are kept as they came."""
    shapes = SMALL | {"unseen": (40, 100)}
    model, optimizer, compressor = make(library, shapes)
    for step, everyone, _ in steps_of(model, optimizer, 2):
        mine = everyone[hvd.rank()]
        mine["unseen"].reshape(-1)[::1000] = 0.0  # only these elements are compared
        loss_of(model, mine).backward()
        if step == 1:
            through_data(model.values())
        refused = refuses(optimizer.step)
    assert refused
    for name, tensor in compressor.residues.tensors.items():
        left = tensor.residue / tensor.beta
        whole = torch.as_tensor(mine[name]).view(-1)
        near = 1e-4 * whole.abs().max()
        assert min(left.abs().max(), (left - whole).abs().max()) < near, name


@pytest.mark.parametrize("name", mostly_long(CHANGES, ["through .data"]))
def test_gradients_changed_in_steps_that_are_sent_whole(name):
    """One rank changes them in the second step. In the first nothing is under way yet."""
    model, optimizer, _ = make(hvd, SMALL, warmup_steps=10)
    for step, _, loss in steps_of(model, optimizer, 2):
        loss.backward()
        pause(1)
        if step == 1 and hvd.rank() == hvd.size() - 1:
            CHANGES[name](list(model.values()))
        refused = refuses(optimizer.step)
        assert refused == (step == 1)


@in_every_library
def test_gradients_that_are_not_finite_are_replaced_after_backward(library):
    def spoil(step, everyone):
        if step >= 2:
            everyone[-1]["weight"].reshape(-1)[7] = np.nan

    change = of_gradients(lambda grad: grad.nan_to_num_())
    trains_as_stock_or_refuses(library, changing(change), change, spoil=spoil)


@in_every_library
@SIZES
@pytest.mark.parametrize("clips", [False, True], ids=["", "clips"])
def test_pytorchs_own_loop_of_mixed_precision(clips, shapes, library):
    """This is the loop of PyTorch's page on amp, which has no synchronize()."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**16)
    steps = itertools.count()

    def script(model, optimizer, loss):
        scaler.scale(loss).backward()
        pause(next(steps))
        if clips:
            scaler.unscale_(optimizer)
            CHANGES["clip_grad_norm_"](list(model.values()))
        scaler.step(optimizer)
        scaler.update()

    change = CHANGES["clip_grad_norm_"] if clips else lambda parameters: None
    trains_as_stock_or_refuses(library, script, change, shapes, loss_scale=scaler)


def in_mixed_precision(scaler, model, optimizer, loss):
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


# On other devices the exchange's stream may read gradients before the change, or after it.
@pytest.mark.on_cpus
@in_every_library
@pytest.mark.parametrize("what", ["a quarter", "a quarter, after synchronize()", "amp"])
def test_nothing_is_lost_where_gradients_are_changed(what, library):
    """What was sent, plus what waits, is what came in, in the units in which it came."""
    if what == "amp":
        scaler, factor = torch.amp.GradScaler(DEVICE, init_scale=2.0**16), 1.0
        script, settings = functools.partial(in_mixed_precision, scaler), {"loss_scale": scaler}
    else:
        kind = synchronizing if "synchronize" in what else changing
        script, factor, settings = kind(CHANGES["mul_"]), 0.25, {}
    model, optimizer, compressor = make(library, SMALL, rate=20, **settings)
    came_in = {name: np.zeros(shape) for name, shape in SMALL.items()}
    kept = [np.zeros(SMALL["weight"])]
    for _, everyone, mine in steps_of(model, optimizer, 5):
        if refuses(lambda: script(model, optimizer, mine)):  # noqa: B023
            # A refused step leaves a rank's gradients unchanged in its residues if its bucket had
            # moved. Hooks begin buckets once ranks have agreed.
            if compressor.stats()["step"] > 0:
                own = [gradient["weight"] / hvd.size() for gradient in everyone]
                kept = [sum(some, kept[0]) for some in itertools.product(*([0, g] for g in own))]
            break
        came_in = {name: came_in[name] + own for name, own in mean(everyone).items()}
    waits = mean_residues(compressor, SMALL)
    used = {name: -parameter.detach().double().numpy() for name, parameter in model.items()}
    # The change applies to what is sent, or to what was sent.
    exchanged = {name: used[name] + waits[name] for name in SMALL}
    applied = {name: used[name] / factor + waits[name] for name in SMALL}
    wanted = {name: factor * own for name, own in came_in.items()}
    is_right = any(close(exchanged, wanted | {"weight": wanted["weight"] + k}) for k in kept)
    assert is_right or (close(applied, came_in) and len(kept) == 1)


@in_every_library
def test_gradients_that_share_a_storage(library):
    """They share their version too. To accumulate into one does not change the others."""
    model, optimizer, compressor = make(library, SMALL)
    sizes = [parameter.numel() for parameter in model.values()]
    right = {name: np.zeros(shape) for name, shape in SMALL.items()}
    for _, everyone, loss in steps_of(model, optimizer, 4):
        parts = torch.zeros(sum(sizes)).split(sizes)
        for parameter, part in zip(model.values(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        loss.backward()
        optimizer.step()
        right = {name: right[name] - grad for name, grad in mean(everyone).items()}
    assert close({name: p.detach().numpy() for name, p in model.items()}, right)


@horovods_alone
@pytest.mark.parametrize(
    ("step_of_change", "changes"),
    [(0, ["table"]), (2, ["table"]), (0, ["weight", "table"]), (2, ["weight", "table"])]
    + [(2, ["weight"])],
    ids=str,
)
def test_sparse_gradients_changed_after_backward(step_of_change, changes):
    """They travel from their hooks on, even in the first step. Training goes on.

    Where the table does not change, the first rank has no gradient of it in that step.
    """
    model, optimizer, _ = make(hvd, {"table": (300, 20), "weight": (40, 100)}, dense=[])
    rows, last = torch.tensor([3, 50 + hvd.rank(), 7]), hvd.size() - 1
    wanted = torch.zeros(300)
    for step in range(5):
        optimizer.zero_grad()
        found = torch.nn.functional.embedding(rows, model["table"], sparse=True)
        changes_now = step == step_of_change
        is_used = hvd.rank() > 0 or not changes_now or "table" in changes
        (model["weight"].sum() + (found.sum() if is_used else 0)).backward()
        pause(step)
        changed_now = changes_now and hvd.rank() == last
        for name in changes if changed_now else []:
            model[name].grad.mul_(0.25)
        if refuses(optimizer.step):
            assert step == step_of_change
            continue
        assert step != step_of_change, "the change was lost"
        wanted[3] -= 1
    assert float(model["table"][3, 0]) == float(wanted[3])
    assert same_on_all_ranks(model.values())
