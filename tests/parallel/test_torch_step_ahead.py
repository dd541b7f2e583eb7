"""Gradients computed a step ahead: what they are, and that no one else sees parameters ahead."""

import copy
import functools
import gc
import io
import pickle
import sys

import pytest
import torch
from faces import horovods_alone, hvd, in_every_library, stock
from models import same_on_all_ranks
from oracles import step_ahead as oracle
from step_ahead import (
    OPTIMIZERS,
    SETTINGS,
    are_equal,
    assert_close,
    config,
    copies,
    loss,
    make_model,
    unlike_loss,
)

from scalecom_hvd.exchange import Simulation


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Each test compiles anew. Else tests share graphs, and there may be too many of them."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def make(library=hvd, optimizer="adamw", model=None, **settings):
    """A model, its optimizer and the method."""
    model = make_model() if model is None else model
    named = {"named_parameters": model.named_parameters()} if library is stock else {}
    method = hvd.ScaleCom(**named, **{**SETTINGS, **settings})
    wrapped = library.DistributedOptimizer(
        OPTIMIZERS[optimizer](model.parameters()), model.named_parameters(), compression=method
    )
    return model, wrapped, method


def take(model, optimizer, step, loss=loss):
    optimizer.zero_grad()
    loss(model, hvd.rank(), step).backward()
    optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("settings", [{}, {"lookahead": True}, {"bits": 3}, {"step_ahead": 0.4}])
def test_they_are_the_oracles(optimizer, settings, caplog):
    model, wrapped, _ = make(optimizer=optimizer, **settings)
    other = make_model()
    stepped = OPTIMIZERS[optimizer](other.parameters())
    factor = settings.get("step_ahead", 1.0)
    for step in range(8):
        take(model, wrapped, step)
        assert same_on_all_ranks(model.parameters())
    oracle.train(other, stepped, config(**settings), hvd.size(), 8, loss, factor)
    assert_close(model, other)
    assert "computed a step ahead" not in caplog.text


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bits", [32, 3])
def test_ranks_that_want_opposites(optimizer, bits):
    model, wrapped, method = make(optimizer=optimizer, bits=bits)
    other = make_model()
    for step in range(8):
        take(model, wrapped, step, unlike_loss)
    stepped = OPTIMIZERS[optimizer](other.parameters())
    workers = hvd.size()
    expected = oracle.train(other, stepped, config(bits=bits), workers, 8, unlike_loss).alignments
    assert_close(model, other)
    own = method.residues.alignment.cosine
    assert own == pytest.approx(expected[hvd.rank()], abs=1e-9)
    assert workers != 2 or own < 0.5  # if ranks agreed, theirs would be near 1


@in_every_library
def test_a_model_that_nobody_calls_is_said(library, caplog):
    model, optimizer, _ = make(library, "sgd")
    for step in range(6):
        take(lambda x: torch.tanh(x @ model[0].weight.T) @ model[2].weight.T, optimizer, step)
    told = [record for record in caplog.records if "not computed a step ahead" in record.msg]
    assert len(told) == 1
    assert told[0].getMessage().startswith("step 3: ")


@horovods_alone
@pytest.mark.parametrize("bits", [32, 3])
def test_horovods_own_optimizer(bits):
    model, wrapped, _ = make(stock, "momentum", bits=bits)
    other = make_model()
    stepped = OPTIMIZERS["momentum"](other.parameters())
    for step in range(8):
        take(model, wrapped, step)
        assert same_on_all_ranks(model.parameters())
    oracle.train(other, stepped, config(lookahead=True, bits=bits), hvd.size(), 8, loss)
    assert_close(model, other)


def test_a_run_that_goes_on_with_an_optimizer_that_is_new():
    """For parameters that the optimizer has not stepped yet, no direction is known."""
    model, wrapped, method = make(optimizer="adamw")
    for step in range(3):
        take(model, wrapped, step)
    saved = method.state_dict()
    model, wrapped, method = make(optimizer="adamw")
    method.load_state_dict(saved)
    for step in range(2):
        take(model, wrapped, step)
    assert same_on_all_ranks(model.parameters())


def someone_looks(model, optimizer, method):
    """{who: what they see}, for all who may look between a forward and the step."""

    def evaluates():
        model.eval()
        model(torch.zeros(1, 12, dtype=torch.float64))
        model.train()

    def without_gradients():
        with torch.no_grad():
            model(torch.zeros(1, 12, dtype=torch.float64))

    def sees_in_forward(run):
        seen = {}
        hook = model[0].register_forward_pre_hook(lambda *_: seen.update(copies(model)))
        run()
        hook.remove()
        return seen

    yield "evaluation", lambda: sees_in_forward(evaluates)
    yield "no_grad", lambda: sees_in_forward(without_gradients)


@in_every_library
def test_evaluation_sees_the_common_ones_and_backward_those_ahead(library):
    model, optimizer, method = make(library)
    plain, other, _ = make(library)
    for step in range(4):
        take(model, optimizer, step)
        take(plain, other, step)
    before = copies(model)
    optimizer.zero_grad()
    value = loss(model, hvd.rank(), 4)
    assert not are_equal(model, before), "nothing has moved"
    for who, look in someone_looks(model, optimizer, method):
        assert all(torch.equal(seen, before[name]) for name, seen in look().items()), who
        assert not are_equal(model, before), who
    value.backward()
    optimizer.step()
    take(plain, other, 4)
    assert are_equal(model, copies(plain))
    assert same_on_all_ranks(model.parameters())


@in_every_library
@pytest.mark.parametrize("who", ["state_dict", "part's state_dict", "broadcast", "load"])
def test_who_saves_or_loads_has_the_common_ones(library, who):
    model, optimizer, _ = make(library)
    for step in range(4):
        take(model, optimizer, step)
    before = copies(model)
    optimizer.zero_grad()
    loss(model, hvd.rank(), 4)
    assert not are_equal(model, before)
    if who == "state_dict":
        model.state_dict()
    elif who == "part's state_dict":
        model[0].state_dict()
    elif who == "broadcast":
        hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    else:
        model.load_state_dict(make_model(seed=2).state_dict())
        before = copies(make_model(seed=2))
    assert are_equal(model, before)
    take(model, optimizer, 5)
    assert same_on_all_ranks(model.parameters())


@in_every_library
def test_a_script_that_skips_its_step(library):
    """The script synchronizes, and does not step. A GradScaler does the same."""
    model, optimizer, _ = make(library)
    for step in range(4):
        take(model, optimizer, step)
    before = copies(model)
    optimizer.zero_grad()
    loss(model, hvd.rank(), 4).backward()
    optimizer.synchronize()
    assert are_equal(model, before)
    take(model, optimizer, 5)
    assert same_on_all_ranks(model.parameters())


@in_every_library
def test_gradients_that_are_not_finite(library):
    model, optimizer, _ = make(library, "momentum")
    for step in range(4):
        take(model, optimizer, step)
    before = copies(model)
    optimizer.zero_grad()
    (loss(model, hvd.rank(), 4) * (float("nan") if hvd.rank() == 0 else 1)).backward()
    optimizer.synchronize()
    assert are_equal(model, before)
    assert all(p.grad.isnan().all() for p in model.parameters())


@in_every_library
def test_an_exception_in_a_forward_of_all_ranks(library):
    model, optimizer, _ = make(library)
    plain, other, _ = make(library)
    for step in range(4):
        take(model, optimizer, step)
        take(plain, other, step)

    def fails(*_):
        raise ValueError("as scripts do")

    hook = model[2].register_forward_hook(fails)
    with pytest.raises(ValueError, match="as scripts do"):
        loss(model, hvd.rank(), 4)
    hook.remove()
    for step in range(4, 6):
        take(model, optimizer, step)
        take(plain, other, step)
    assert are_equal(model, copies(plain))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_gradients_of_a_closure(optimizer):
    model, wrapped, _ = make(optimizer=optimizer)

    steps = iter(range(8))

    def closure():
        wrapped.zero_grad()
        value = loss(model, hvd.rank(), next(steps))
        value.backward()
        wrapped.synchronize()
        return value

    for _ in range(8):
        with wrapped.skip_synchronize():
            wrapped.step(closure)
        assert same_on_all_ranks(model.parameters())
    other = make_model()
    stepped = OPTIMIZERS[optimizer](other.parameters())
    oracle.train(other, stepped, config(), hvd.size(), 8, loss)
    assert_close(model, other)


def test_a_step_that_failed():
    """Later steps are ahead again."""
    model, optimizer, _ = make(optimizer="momentum")
    for step in range(3):
        take(model, optimizer, step)

    def fails():
        raise ValueError("as closures do")

    with pytest.raises(ValueError, match="as closures do"):
        optimizer.step(fails)
    take(model, optimizer, 3)
    before = copies(model)
    optimizer.zero_grad()
    loss(model, hvd.rank(), 4)
    assert not are_equal(model, before)


def test_several_passes_of_a_step():
    model = make_model()
    method = hvd.ScaleCom(**SETTINGS)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model.parameters()),
        model.named_parameters(),
        compression=method,
        backward_passes_per_step=2,
    )
    other = make_model()
    stepped = OPTIMIZERS["momentum"](other.parameters())
    for step in range(5):
        optimizer.zero_grad()
        for part in range(2):
            loss(model, hvd.rank(), 2 * step + part).backward()
        optimizer.step()
        assert same_on_all_ranks(model.parameters())

    def both(model, rank, step):
        return loss(model, rank, 2 * step) + loss(model, rank, 2 * step + 1)

    oracle.train(other, stepped, config(), hvd.size(), 5, both)
    assert_close(model, other)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_run_that_goes_on_is_one_that_never_stopped(optimizer):
    model, wrapped, method = make(optimizer=optimizer)
    for step in range(4):
        take(model, wrapped, step)
    saved = io.BytesIO()
    everything = model.state_dict(), wrapped.state_dict(), method.state_dict()
    torch.save(everything, saved)
    for step in range(4, 8):
        take(model, wrapped, step)
    saved.seek(0)
    again, other, resumed = make(optimizer=optimizer)
    for one, state in zip((again, other, resumed), torch.load(saved), strict=True):
        one.load_state_dict(state)
    for step in range(4, 8):
        take(again, other, step)
    assert are_equal(again, copies(model))


def test_copies_of_a_model_move_nothing():
    model, optimizer, _ = make()
    for step in range(3):
        take(model, optimizer, step)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = copies(copied)
        loss(copied, hvd.rank(), 4)
        assert are_equal(copied, before)
    assert are_equal(model, before)


def clamp(parameter):
    with torch.no_grad():
        parameter.clamp_(-0.1, 0.1)


def decay(parameter):
    parameter.data.mul_(0.9)


@pytest.mark.parametrize("another_forward", [False, True])
@pytest.mark.parametrize("write", [clamp, decay])
def test_parameters_that_are_written_to_while_ahead_are_refused(write, another_forward):
    model, optimizer, _ = make()
    for step in range(3):
        take(model, optimizer, step)
    optimizer.zero_grad()
    loss(model, hvd.rank(), 4).backward()
    write(model[0].weight)
    if another_forward:  # as between two micro-batches
        loss(model, hvd.rank(), 5)
    with pytest.raises(RuntimeError, match="after optimizer.step"):
        optimizer.step()


def test_a_model_may_limit_its_weights_in_forward():
    def limit(module, _):
        module[0].weight.data.clamp_(-0.1, 0.1)

    model, optimizer, _ = make()
    model.register_forward_pre_hook(limit)
    for step in range(4):
        take(model, optimizer, step)
    assert same_on_all_ranks(model.parameters())


def test_a_parameter_that_is_frozen_stays():
    model, optimizer, _ = make()
    for step in range(3):
        take(model, optimizer, step)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    loss(model, hvd.rank(), 4)
    assert torch.equal(model[0].weight, before)


class ScaledElsewhere(torch.optim.Adam):
    """Like Prodigy, it keeps Adam's moments, and more that its steps depend on."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["s"] = p.detach().view(-1)[::7]


# RAdam keeps Adam's state, but begins with shorter steps.
OTHERS = ScaledElsewhere, torch.optim.Adadelta, torch.optim.RAdam


@pytest.mark.parametrize("kind", OTHERS)
def test_other_optimizers_are_followed_by_their_last_step(kind, caplog, monkeypatch):
    monkeypatch.setattr(oracle, "KNOWN", ())
    model, other = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        kind(model.parameters()),
        model.named_parameters(),
        compression=hvd.ScaleCom(**SETTINGS),
    )
    for step in range(8):
        take(model, optimizer, step)
        assert same_on_all_ranks(model.parameters())
    oracle.train(other, kind(other.parameters()), config(), hvd.size(), 8, loss)
    assert_close(model, other)
    assert "computed a step ahead" not in caplog.text


def test_parameters_that_were_loaded_are_no_step_of_the_optimizer():
    model, optimizer, _ = make(optimizer="signs")
    for step in range(4):
        take(model, optimizer, step)
    far = {name: value + 100 for name, value in model.state_dict().items()}
    model.load_state_dict(far)
    loss(model, hvd.rank(), 4)
    assert are_equal(model, far)


def test_a_look_inside_an_evaluation_does_not_change_what_the_last_step_was():
    model, optimizer, method = make(optimizer="signs")
    for step in range(3):
        take(model, optimizer, step)
    before = copies(model)
    came = loss(model, hvd.rank(), 3)
    looks = model[1].register_forward_hook(lambda *_: model.state_dict() and None)
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 12, dtype=torch.float64))
    model.train()
    looks.remove()
    came.backward()
    optimizer.step()
    common, residues = copies(model), method.residues
    loss(model, hvd.rank(), 4)
    for name, p in model.named_parameters():
        if name in residues.tensors:
            waits = residues.tensors[name].residue.view(p.shape)
            given = residues.alignment.weight, 0.01, 1.0, {}, {}
            moved = oracle.ahead(waits, *given, common[name] - before[name])
            assert moved.any()
            torch.testing.assert_close(p - common[name], moved)


def test_an_optimizer_of_known_direction_may_lose_its_state():
    model, optimizer, _ = make()
    fresh = copy.deepcopy(optimizer.state_dict())
    for step in range(2):
        take(model, optimizer, step)
    optimizer.state.clear()
    for step in range(2, 4):
        take(model, optimizer, step)
    optimizer.load_state_dict(fresh)
    for step in range(4, 6):
        take(model, optimizer, step)
    assert same_on_all_ranks(model.parameters())


class EverySecond(torch.optim.Optimizer):
    """Steps another optimizer in every second call, and keeps no state of its own."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.calls = inner, 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 2 == 0:
            self.inner.step()


def test_an_optimizer_may_wrap_another():
    model, optimizer, _ = make()
    wrapper = EverySecond(optimizer)
    for step in range(6):
        wrapper.zero_grad()
        loss(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            wrapper.step()
    assert same_on_all_ranks(model.parameters())


def test_layers_of_a_frozen_model_are_ahead_once_they_are_trained():
    """As a GAN's discriminator, which is frozen while the generator gets its gradients."""
    model, optimizer, _ = make()
    for step in range(2):
        take(model, optimizer, step)
    before = copies(model)
    model.requires_grad_(False)
    loss(model, hvd.rank(), 2)
    assert are_equal(model, before)
    model.requires_grad_(True)
    value = loss(model, hvd.rank(), 2)
    assert not are_equal(model, before)
    value.backward()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def in_a_wrapper(model):
    return torch.nn.Sequential(model)


def in_a_new_wrapper_each_time(model):
    return lambda x: torch.nn.Sequential(model)(x)


def after_an_evaluation_in_a_wrapper(model):
    with torch.no_grad():
        torch.nn.Sequential(model)(torch.ones(2, 12, dtype=torch.float64))
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_to_one_graph(model):
    return torch.compile(model, backend="eager", fullgraph=True)


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_in_place_and_apart(model):
    torch.compile(model, backend="eager")
    return compiled_in_place(model)


def compiled_in_a_compiled_function(model):
    inner = torch.compile(model, backend="eager")
    return torch.compile(lambda x: inner(x), backend="eager")


def compiled_with_its_loss(model):
    return torch.compile(lambda x: model(x), backend="eager")


def compiled_in_parts(model):
    parts = torch.compile(model[0], backend="eager"), torch.compile(model[1:], backend="eager")
    return lambda x: parts[1](parts[0](x))


@pytest.mark.parametrize(
    "call",
    [
        *(in_a_wrapper, in_a_new_wrapper_each_time, after_an_evaluation_in_a_wrapper),
        *(compiled, compiled_to_one_graph, compiled_in_place_and_apart),
        pytest.param(compiled_in_place, marks=pytest.mark.long),
        pytest.param(compiled_with_its_loss, marks=pytest.mark.long),
        pytest.param(compiled_in_a_compiled_function, marks=pytest.mark.long),
    ],
)
def test_whatever_the_script_calls_is_ahead(call):
    whole, optimizer, _ = make()
    other, others, _ = make()
    called = call(other)
    for step in range(6):
        take(whole, optimizer, step)
        take(called, others, step)
        loss(called, hvd.rank(), 7)  # is not used
        with torch.no_grad():
            seen = other(torch.ones(2, 12, dtype=torch.float64))
        assert same_on_all_ranks([seen])
    other.state_dict()
    assert are_equal(other, copies(whole))


@pytest.mark.parametrize("called", ["model", "wrapper"])
def test_a_wrapper_that_is_older_than_the_optimizer(called):
    whole, optimizer, _ = make()
    model = make_model()
    wrapper = torch.nn.Sequential(model)
    _, others, _ = make(model=model)
    for step in range(4):
        take(whole, optimizer, step)
        take({"model": model, "wrapper": wrapper}[called], others, step)
    assert are_equal(model, copies(whole))


def test_a_model_that_was_compiled_before_has_no_graph_breaks():
    whole, optimizer, _ = make()
    model = make_model()
    called = torch.compile(model, backend="eager", fullgraph=True)
    _, others, _ = make(model=model)
    for step in range(4):
        take(whole, optimizer, step)
        take(called, others, step)
        with torch.no_grad():
            seen = called(torch.ones(2, 12, dtype=torch.float64))
        assert same_on_all_ranks([seen])
    assert are_equal(model, copies(whole))


def test_a_compiled_function_may_evaluate_a_model_that_another_one_trains():
    model, optimizer, _ = make()
    called = torch.compile(model, backend="eager", fullgraph=True)
    evaluate = torch.compile(lambda x: model(x), backend="eager")
    for step in range(4):
        optimizer.zero_grad()
        value = loss(called, hvd.rank(), step)
        with torch.no_grad():
            seen = evaluate(torch.ones(2, 12, dtype=torch.float64))
        assert same_on_all_ranks([seen]), step
        value.backward()
        optimizer.step()


def test_a_model_is_exported_while_it_is_trained():
    model, optimizer, _ = make()
    for step in range(3):
        take(model, optimizer, step)
        before = copies(model)
        exported = torch.export.export(model, (torch.ones(2, 12, dtype=torch.float64),))
        assert are_equal(model, before)
    assert exported.state_dict.keys() == before.keys()


def test_a_model_compiled_in_place_to_one_graph_is_told_what_to_do():
    model, _, _ = make()
    model.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch.compile\(model, fullgraph"):
        loss(model, hvd.rank(), 0)


def by_layers(model):
    return lambda x: model[1:](model[0](x))


@pytest.mark.parametrize("call", [by_layers, compiled_in_parts])
def test_if_parts_are_called_they_are_ahead_from_the_second_exchange_on(call, caplog):
    model, optimizer, _ = make()
    called = call(model)
    for step in range(3):
        take(called, optimizer, step)
    before = copies(model)
    loss(called, hvd.rank(), 3)
    assert not are_equal(model, before)
    assert "not computed a step ahead" not in caplog.text
    model.state_dict()
    assert are_equal(model, before)


def test_modules_that_belong_to_no_model():
    layers = make_model()
    encoder, decoder = layers[0], layers[2]
    _, optimizer, _ = make(model=layers)
    del layers
    gc.collect()
    whole, others, _ = make()
    for step in range(5):
        take(whole, others, step)
        take(lambda x: decoder(torch.tanh(encoder(x))), optimizer, step)
    mine = [p for part in (encoder, decoder) for p in part.parameters()]
    assert same_on_all_ranks(mine)


def test_hooks_go_with_their_optimizer():
    model, optimizer, method = make()
    took = len(model._forward_pre_hooks), len(model[0]._state_dict_pre_hooks)
    del optimizer, method
    gc.collect()
    assert not model._forward_pre_hooks
    for _ in range(3):
        method = hvd.ScaleCom(**SETTINGS)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adamw"](model.parameters()), model.named_parameters(), compression=method
        )
        assert (len(model._forward_pre_hooks), len(model[0]._state_dict_pre_hooks)) == took
        del optimizer
        gc.collect()


def test_parts_that_were_scripted():
    model = make_model()
    model[1] = torch.jit.script(model[1])
    _, optimizer, _ = make(model=model)
    for step in range(3):
        take(model, optimizer, step)
    assert same_on_all_ranks(model.parameters())


def test_a_traced_model_is_refused():
    model = torch.jit.trace(make_model(), torch.ones(2, 12, dtype=torch.float64))
    gc.collect()
    with pytest.raises(TypeError, match="step_ahead=0"):
        make(model=model)


def test_a_module_inside_another_that_is_called_alone_too():
    """The inner module's hooks move nothing back while the outer one steps aside."""
    model, optimizer, method = make()
    inputs = torch.ones(2, 12, dtype=torch.float64)
    method.compute_ahead(model[0])
    for step in range(3):
        take(model, optimizer, step)
    before = copies(model)
    value = loss(model, hvd.rank(), 3)
    ahead = copies(model)
    with torch.no_grad():
        seen = model(inputs)
    assert same_on_all_ranks([seen])
    assert are_equal(model, ahead)
    model[0].eval()  # a part that is frozen stays ahead within a training forward
    trained = model(inputs)
    assert are_equal(model, ahead)
    assert not are_equal(model, before)
    assert not same_on_all_ranks([trained.detach()])
    (value + trained.mean()).backward()
    optimizer.step()
    assert same_on_all_ranks(model.parameters())


def test_a_method_whose_parameters_another_one_moves_says_so_once(caplog):
    _, _, method = make()
    method.ahead.retire()
    for step in range(3):
        method.ahead.note_step(step)
    assert caplog.text.count("another ScaleCom moves the same") == 1


@in_every_library
def test_an_optimizer_is_made_anew_and_the_old_method_is_kept(library):
    """The old one's hooks are still on the model."""
    model, optimizer, old = make(library)
    for step in range(3):
        take(model, optimizer, step)
    loss(model, hvd.rank(), 3)  # parameters are ahead
    del optimizer
    gc.collect()  # Horovod's hooks go with it
    other = make_model()
    other.load_state_dict(model.state_dict())
    found = []
    for each in (model, other):
        named = {"named_parameters": each.named_parameters()} if library is stock else {}
        fresh = hvd.ScaleCom(**named, **SETTINGS)
        optimizer = library.DistributedOptimizer(
            OPTIMIZERS["adamw"](each.parameters()), each.named_parameters(), compression=fresh
        )
        for step in range(3, 6):
            take(each, optimizer, step)
        found.append(copies(each))
        assert same_on_all_ranks(each.parameters())
        del optimizer
        gc.collect()
    assert all(map(torch.equal, found[0].values(), found[1].values()))
    assert old.stats()["step"] == 3


def test_one_autocast_for_training_and_evaluation():
    """Autocast keeps copies of the weights, also of those ahead."""
    model, optimizer, _ = make()
    model.float()
    inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(3))
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss(lambda x: model(x.float()), hvd.rank(), step)
            with torch.no_grad():
                seen = model(inputs)
            ahead = model(inputs + hvd.rank())
        assert same_on_all_ranks([seen])
        ahead.square().mean().backward()
        optimizer.step()


def test_an_exchange_of_ones_own_must_name_the_model():
    with pytest.raises(ValueError, match=r"call its compute_ahead\(model\)"):
        Simulation(2, lambda rank: {"w": torch.nn.Parameter(torch.zeros(60, 50))}, **SETTINGS)


@pytest.mark.parametrize("ahead", [None, 0.0, 1.0])
def test_a_state_is_loaded_before_there_is_an_optimizer(ahead):
    """Then nobody knows yet whether gradients will be computed ahead."""
    settings = {**SETTINGS, "step_ahead": ahead, "beta": None}
    model, optimizer, method = make(**settings)
    for step in range(3):
        take(model, optimizer, step)
    saved = method.state_dict()
    assert saved["config"]["beta"] == (0.2 if ahead == 0 else 1)
    del optimizer
    gc.collect()  # Horovod's hooks go with it
    method = hvd.ScaleCom(**settings)
    method.load_state_dict(saved)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adamw"](model.parameters()), model.named_parameters(), compression=method
    )
    for step in range(3, 5):
        take(model, optimizer, step)
    assert same_on_all_ranks(model.parameters())
    other = hvd.ScaleCom(**{**settings, "step_ahead": None if ahead == 0 else 0})
    with pytest.raises(ValueError, match="beta"):
        other.load_state_dict(saved)
        hvd.DistributedOptimizer(
            OPTIMIZERS["adamw"](model.parameters()), model.named_parameters(), compression=other
        )


def pickled(method):
    return pickle.loads(pickle.dumps(method))


def reloaded(method):
    other = hvd.ScaleCom(**{**SETTINGS, "step_ahead": None})
    other.load_state_dict(method.state_dict())
    return other


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, reloaded])
def test_a_method_is_copied_before_it_has_an_optimizer(copied):
    method = copied(hvd.ScaleCom(**{**SETTINGS, "step_ahead": None}))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adamw"](model.parameters()), model.named_parameters(), compression=method
    )
    assert (method.config.step_ahead, method.config.beta) == (1, 1)
    take(model, optimizer, 0)


def test_a_method_that_was_refused_may_serve_local_steps():
    model = make_model()
    method = hvd.ScaleCom(**{**SETTINGS, "step_ahead": None})
    make_optimizer = functools.partial(
        hvd.DistributedOptimizer, OPTIMIZERS["sgd"](model.parameters()), compression=method
    )
    with pytest.raises(ValueError, match="named_parameters"):
        make_optimizer([("a", model[0].weight), ("a", model[0].bias)])
    optimizer = make_optimizer(model.named_parameters(), local_steps=2)
    assert (method.config.step_ahead, method.config.beta) == (0, 0.2)
    with pytest.raises(ValueError, match="already serves"):
        make_optimizer(model.named_parameters())
    assert (method.config.step_ahead, method.config.beta) == (0, 0.2)
    for step in range(4):
        take(model, optimizer, step)


def test_local_steps_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="exclude each other"):
        hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()),
            model.named_parameters(),
            compression=hvd.ScaleCom(**SETTINGS),
            local_steps=4,
        )


def test_momentum_of_sparse_gradients():
    torch.manual_seed(1)
    layers = torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 6)
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model.parameters()),
        model.named_parameters(),
        compression=hvd.ScaleCom(**SETTINGS),
    )
    words = torch.arange(4) + hvd.rank()
    for _ in range(4):
        optimizer.zero_grad()
        model(words).square().mean().backward()
        optimizer.step()
        assert same_on_all_ranks(model.parameters())
