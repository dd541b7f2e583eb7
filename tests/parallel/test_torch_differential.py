"""Random programs of calls, as scripts make them, compared with stock Horovod.

Every script (optimizer_scripts.py) runs several times on the same made-up gradients:

- in stock Horovod;
- with everything chosen (k = N, through lanes and residues). After every call parameters must then
  be those of stock Horovod;
- at rate 10. Nothing may be lost then.

The last two run both in this package's optimizer and in Horovod's own. In this package's optimizer,
some programs take another method than ScaleCom. After every synchronize():

    mean of gradients as they were + mean of residues before
        = gradients as they are + mean of residues after

If every gradient of all ranks was exchanged already, residues and step stay as they were.

Stock Horovod reads p.grad while it averages. If a script changes p.grad meanwhile, stock Horovod is
given what the change makes of each rank's gradients. This package may refuse such a step on all
ranks. The script then goes on, but is no longer compared with stock Horovod, because residues may
hold what was refused.
"""

import contextlib
import copy
import logging
import os
import time
import traceback
import warnings

import horovod.torch as stock
import pytest
import torch
from made_up import EVERYTHING, SOME
from models import halve_gradient, on_some_rank, run_collective, same_on_all_ranks
from optimizer_scripts import CHANGES, SHAPES, Failed, FailingBackward, Script, count_alike
from programs import for_method, limited, run_random_programs
from rungs import Restless
from test_torch_changed_gradients import changed, refuses

import scalecom_hvd.torch as hvd


class Trained:
    """One model of a script on this rank.

    library: the optimizer's library.
    sent: EVERYTHING or SOME, or None for stock Horovod.
    said: returns the warnings that ScaleCom has logged since.
    """

    def __init__(self, script, number, library, sent, said):
        self.script, self.library, self.sent, self.said = script, library, sent, said
        self.scale_now, self.threw_away, self.given = 1.0, False, []
        self.comparable = True  # with dense training
        # Whether some rank has a gradient that was not exchanged yet. None if that depends on the
        # gradients that scripts set.
        self.new = False
        # mine: the gradients. kept: the residues before they came.
        # Residues after the last exchange, and before the first whose averages wait for a step.
        self.mine, self.kept, self.earlier = {}, {}, {}
        self.thrown, self.back, self.waiting, self.used = 0, set(), set(), set()
        method = script.method if library is hvd else "ScaleCom"
        generator = torch.Generator().manual_seed(script.seed)
        self.parameters = {
            name: torch.nn.Parameter(torch.randn(shape, generator=generator))
            for name, shape in SHAPES.items()
        }
        named = {f"{name}.{number}": p for name, p in self.parameters.items()}
        self.compressor, more = stock.Compression.none, {}
        if sent is not None:
            fields = script.fields | {"rate": sent["rate"], "min_numel": 2}
            fields["dense"] = [f"{name}.{number}" for name in script.fields["dense"]]
            if method == "ScaleCom":
                fields |= sent | (script.narrow if sent != EVERYTHING else {})
            if library is stock:
                fields["named_parameters"] = named.items()
                # Horovod's own optimizer takes no schedule and no few bits.
                fields |= {"rate": sent["rate"], "bits": 32}
            kind = getattr(hvd, method)
            self.compressor = kind(loss_scale=lambda: self.scale_now, **for_method(kind, fields))
        if script.groups is not None and library is hvd:
            groups = script.groups
            if not isinstance(groups, int):
                groups = [[self.parameters[name] for name in part] for part in groups]
            more["groups"] = groups
        self.optimizer = library.DistributedOptimizer(
            torch.optim.SGD(named.values(), lr=0.01, momentum=script.momentum),
            named.items(),
            compression=self.compressor,
            backward_passes_per_step=script.passes,
            sparse_as_dense=script.sparse == "as dense",
            **script.options,
            **more,
        )
        self.optimizer.register_step_post_hook(self.note_used)

    def note_used(self, *_):
        names = [name for name, p in self.parameters.items() if p.grad is not None]
        self.used |= {(name, self.steps()) for name in names}

    @property
    def own(self):
        """Whether this package's optimizer averages."""
        return self.library is hvd and self.sent is not None

    def values(self):
        return [p.detach().clone() for p in self.parameters.values()]

    def gradients(self, seed, rank=None):
        """The gradients, which depend on the parameters' values."""
        rank = hvd.rank() if rank is None else rank
        generator = torch.Generator().manual_seed(seed * 64 + rank)
        grads = {
            name: (torch.randn(shape, generator=generator) + 0.1 * self.parameters[name].detach())
            * self.scale_now
            for name, shape in SHAPES.items()
        }
        grads["rows"][torch.rand(40, generator=generator) < 0.8] = 0.0
        return grads

    def add(self, name, grad, factor=1.0):
        """Note what backward gives, times a hook's factor."""
        before = self.mine.get(name)
        self.mine[name] = (grad if before is None else before + grad) * factor

    def backward(
        self,
        seed,
        missing=None,
        fails=None,
        collective=None,
        one_by_one=False,
        penalty=False,
        halve=(),
        outlier=None,
    ):
        """Run backward.

        penalty: gradients come from other gradients, as gradient penalties do.
        halve: the ranks on which a late hook halves what was accumulated.
        outlier: the rank whose gradients are 1000 to 1000000 times as long.
        """
        rank, parameters, grads = hvd.rank(), self.parameters, self.gradients(seed)
        if rank == outlier:
            grads = {name: grad * 10 ** (3 + seed % 4) for name, grad in grads.items()}
        missing = missing or [[]] * hvd.size()
        names = [n for n in SHAPES if parameters[n].requires_grad and n not in missing[rank]]
        terms = []
        for i, name in enumerate(names):
            if fails is not None and fails == (rank, i):
                failing = FailingBackward.apply(torch.zeros(1, requires_grad=True))
                terms.append((None, failing.sum()))
            parameter, grad = parameters[name], grads[name]
            if penalty and name != "rows":
                energy = parameter.square().sum() / 2
                (parameter,) = torch.autograd.grad(energy, parameter, create_graph=True)
            term = self.term(name, parameter, grad)
            if name == "weight" and collective is not None:
                called = None if self.script.seed % 2 else "features"
                term = run_collective(self.library, collective, term, called)
            if name == "weight":
                term = term * torch.ones(term.shape)  # Horovod takes only contiguous gradients
            terms.append((name, term.sum()))
        self.new = self.new or any(len(names) < len(SHAPES) for names in missing)
        order = terms[::-1]  # the order in which autograd gets to them
        halved = names if rank in halve else []
        hooks = [parameters[n].register_post_accumulate_grad_hook(halve_gradient) for n in halved]
        with contextlib.suppress(Failed):
            if one_by_one:
                for _, term in order:
                    term.backward()
            elif order:
                sum(term for _, term in terms).backward()
        for hook in hooks:
            hook.remove()
        for name, _ in order:
            if name is None:
                break
            grad = grads[name]
            if name == "weight" and collective == "broadcast" and rank != 0:
                grad = torch.zeros_like(grad)
            self.add(name, grad, 0.5 if name in halved else 1.0)

    def term(self, name, parameter, grad):
        """A term of a loss that gives this parameter this gradient."""
        if name != "rows" or self.script.sparse == "no":
            return parameter * grad
        own = grad.any(1).nonzero().view(-1)
        return torch.nn.functional.embedding(own, parameter, sparse=True) * grad[own]

    def own_collective(self, kind, nameless, end):
        """What it gives must be what stock Horovod's gives."""
        name = None if nameless else f"own.{kind}"
        x = torch.arange(2.0 * hvd.size()).view(-1, 2) + 10 * hvd.rank()
        self.given.append(run_collective(self.library, kind, x, name, end))

    # What is true after every synchronize().

    def residues(self):
        """The residues, in the gradients' units."""
        tensors = {} if self.sent is None else self.compressor.residues.tensors
        return {
            name.partition(".")[0]: (tensor.residue / tensor.beta).view(tensor.shape)
            for name, tensor in tensors.items()
        }

    def steps(self):
        return None if self.sent is None else self.compressor.residues.step

    def begun_with(self, residues):
        """The residues that an exchange began with, if some averages were thrown away before."""
        before, self.thrown = self.thrown, self.times_thrown_away()
        # After a step that was given up, more names may go back, for the same averages.
        known = set() if self.thrown > before else self.back
        self.back = set(self.compressor.residues.given_back) if self.own else set()
        back = [name.partition(".")[0] for name in self.back - known]
        self.waiting.difference_update(back)
        zeros = {name: torch.zeros(SHAPES[name]) for name in back}  # at the start
        return residues | {name: self.earlier.get(name, zeros[name]) for name in back}

    def times_thrown_away(self):
        return self.compressor.stats()["averages_thrown_away"] if self.own else 0

    def before(self):
        """What `check` must know.

        Missing gradients are zeros. Backward may have moved the residues already.
        """
        mine = {name: self.mine.get(name) for name in SHAPES}
        grads = {n: torch.zeros(SHAPES[n]) if g is None else g for n, g in mine.items()}
        return grads, self.kept, self.steps(), self.new

    def check(self, grads, residues, steps, new, void=False):
        """Check what is true after synchronize(). void: whether the step was skipped."""
        residues = self.begun_with(residues)
        if self.steps() != steps:
            waiting = {name for name in self.waiting if (name, steps) not in self.used}
            self.earlier |= {n: own for n, own in residues.items() if n not in waiting}
            self.waiting = set(SHAPES)
        now = {name: dense(parameter.grad) for name, parameter in self.parameters.items()}
        self.mine, self.new = {name: grad.clone() for name, grad in now.items()}, False
        after = self.kept = self.residues()
        if self.sent is not None and (void or new is False):
            assert self.steps() == steps, "a step was counted"
            for name, residue in after.items():
                before = residues.get(name, torch.zeros_like(residue))
                # A residue that was moved and taken back is the same except for rounding. That
                # happens in a skipped step, and in Horovod's own optimizer after loading.
                moved = void or self.library is stock
                size = float(before.abs().max() + grads[name].nan_to_num(0, 0, 0).abs().max())
                assert (residue - before).abs().max() <= 1e-5 * size * moved, (
                    f"the residue of {name} changed"
                )
        if void:
            # In this package's optimizer every gradient shows a skipped step. In Horovod's own,
            # only the gradient that was not finite does.
            told = now if self.own else {"wide": now["wide"]}
            assert not any(grad.isfinite().all() for grad in told.values())
            return
        factor = hvd.size() if "op" in self.script.options else 1
        zero = {name: torch.zeros_like(grad) for name, grad in now.items()}
        came, waited, waits = (
            torch.cat([part.get(name, zero[name]).double().view(-1) for name in now])
            for part in (grads, residues, after)
        )
        moved = came.abs() + self.scale_now * (waited.abs() + waits.abs())
        came = came + self.scale_now * (waited - waits)
        came, moved = hvd.allreduce(torch.stack([came, moved]), name="differential.came") * factor
        lengths = [grad.numel() for grad in now.values()]
        of_all = zip(now.items(), came.split(lengths), moved.split(lengths), strict=True)
        for (name, grad), sent, moved_of in of_all:
            off = float((sent - grad.view(-1)).abs().max())
            # A step that was taken back leaves the rounding of its gradients.
            assert off <= 1e-5 * (float(moved_of.max()) + self.scale_now), (
                f"{name}: what left residues and gradients, and what came, differ by {off:g}"
            )

    def remember(self):
        grads = {name: p.grad for name, p in self.parameters.items()}
        self.mine = {n: None if grad is None else dense(grad).clone() for n, grad in grads.items()}

    # The calls of a script.

    def synchronize(self):
        before = self.before()
        self.optimizer.synchronize()
        self.check(*before)

    def step(self, skipping=False):
        if skipping:
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
            return
        before = self.before()
        self.optimizer.step()
        self.check(*before)

    def closure(self, kind, seed):
        before = self.before()

        def evaluate():
            self.check(*before)
            if kind != "nothing":
                self.zero("grads")
                self.backward(seed)
                self.new = True
                self.synchronize()
            if kind == "clipped":
                self.clip()
            return torch.tensor(5.0)

        assert float(self.optimizer.step(evaluate)) == 5.0
        self.remember()

    def dense_ones(self):
        """The parameters whose gradients are not sparse."""
        parameters = self.parameters.values()
        return [p for p in parameters if p.grad is not None and not p.grad.is_sparse]

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.dense_ones(), 0.5)

    def zero(self, how):
        if how == "grads":
            self.optimizer.zero_grad()
        dense_ones = set(self.dense_ones())
        for i, parameter in enumerate(self.parameters.values()):
            if parameter in dense_ones and how == "in place":
                parameter.grad.zero_()
            elif parameter in dense_ones and how == "some ranks" and (i + hvd.rank()) % 2:
                parameter.grad = None
        self.remember()

    def by_hand(self, names, seed, everywhere_the_same):
        grads = self.gradients(seed, 0 if everywhere_the_same else None)
        for name in names:
            self.parameters[name].grad = grads[name].clone()
        self.new = self.new or None
        self.remember()

    def change(self, how, seed):
        generator = torch.Generator().manual_seed(seed * 64 + hvd.rank())
        if how == "clip":
            self.clip()
        for parameter in self.dense_ones():
            if how == "in place":
                parameter.grad.mul_(0.5)
            elif how == "anew":
                parameter.grad = parameter.grad * 0.5
                self.new = self.new or None
            elif how == "noise":
                parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        self.remember()

    def scale(self, scale):
        self.scale_now = scale

    def overflow(self, rank, value, seed):
        grads = self.gradients(seed)
        if hvd.rank() == rank:
            grads["wide"][1, 7] = float(value)
        trained = {n: p for n, p in self.parameters.items() if p.requires_grad and n != "rows"}
        sum((p * grads[name]).sum() for name, p in trained.items()).backward()
        for name in trained:
            self.add(name, grads[name])
        self.new = True
        before = self.before()
        self.optimizer.synchronize()
        self.check(*before, void="wide" in trained)
        found = not all(dense(p.grad).isfinite().all() for p in self.parameters.values())
        assert found == ("wide" in trained)
        self.zero("grads")

    def freeze(self, names):
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name not in names)

    def load(self, what):
        if what == "optimizer":
            reload(self.optimizer)
        elif self.sent is not None and not (self.library is stock and "op" in self.script.options):
            # In Horovod's own optimizer a compressor does not know of Sum. In a synchronize() with
            # nothing new, right after loading, it averages where another sum would multiply.
            reload(self.compressor)
            self.waiting.clear()

    def load_in_step(self):
        handles = [handle for handle, _ in self.optimizer._handles.values()]
        while not all(callable(handle) or stock.poll(handle) for handle in handles):
            time.sleep(0.001)  # or stock Horovod meets its own names
        reload(self.optimizer)
        self.zero("grads")
        # Horovod's own optimizer tells a compressor nothing. So the compressor takes the step back
        # only when it is asked for the next one.
        self.new = None if self.library is stock else False
        self.kept = self.begun_with(self.kept)
        for name, residue in self.residues().items() if self.own else ():
            before = self.kept.get(name, torch.zeros_like(residue))
            near = 1e-4 * (1 + before.abs().max())
            assert (residue - before).abs().max() <= near, f"the residue of {name}"
            before.copy_(residue)

    def load_where_some_have_gradients(self, seed, have):
        """Horovod's own optimizer runs no backward here: it would meet its own names, and hang."""
        missing = [[] if has else list(SHAPES) for has in have]
        for number in range(self.script.passes if self.own else 0):
            self.backward(seed + number, missing)
        self.load_in_step()

    def one_rank_loads(self, rank):
        state = copy.deepcopy(self.optimizer.state_dict())
        if self.script.momentum:  # or there is no state, and nothing is broadcast
            state["param_groups"][0]["lr"] *= 0.9
            for own in state["state"].values():
                own["momentum_buffer"] *= 0.5
        if hvd.rank() == rank:
            self.optimizer.load_state_dict(state)
        self.library.broadcast_optimizer_state(self.optimizer, rank)
        self.new = self.new or None  # it makes zero gradients where there are none
        self.remember()

    def thrown_away(self, seed, sharp, how):
        parameters, here = self.parameters.values(), self.values()
        self.backward(seed)
        self.synchronize()
        if self.sent is not None:
            stats = self.compressor.stats()
            self.threw_away |= bool(stats["bytes_values"] or stats.get("bytes_gathered"))
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=0.01 * sharp)
        self.zero(how)
        self.backward(seed + 1)
        with torch.no_grad():
            for parameter, original in zip(parameters, here, strict=True):
                parameter.copy_(original)
        self.step()

    def change_on_the_way(self, how, ranks, names, seeds, waits, cleans):
        """The step must give what it would with gradients that had come as changed.

        Or all ranks refuse it, and go on.
        """
        rank, is_sparse = hvd.rank(), self.script.sparse != "no"
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        names = [name for name in names if name in trained and rank in ranks]
        passes = [self.gradients(seed) for seed in seeds]
        if how == "nan_to_num_" and "wide" in names and rank == ranks[-1]:
            passes[-1]["wide"][1, 7] = float("nan")
        before = {name: sum(grads[name] for grads in passes) for name in trained}
        grads = dict(before)
        if names:
            found = changed(CHANGES[how], {name: before[name] for name in names})
            grads |= {name: torch.as_tensor(grad).float() for name, grad in found.items()}
        # Horovod's own optimizer tells a compressor nothing of sparse gradients.
        if self.sent is None or (self.library is stock and self.script.sparse == "yes"):
            for name, parameter in trained.items():
                parts = name == "rows" and is_sparse
                parameter.grad = grads[name].to_sparse(1) if parts else grads[name].clone()
        else:
            for own in passes:
                sum(self.term(name, p, own[name]).sum() for name, p in trained.items()).backward()
            time.sleep(0.01 * waits)
            if names:
                CHANGES[how]([trained[name] for name in names])
        self.mine, self.new, here = grads, True, self.values()
        arguments = self.before()
        if self.sent is None:
            self.optimizer.step()
        elif refuses(self.optimizer.step):
            assert all(map(torch.equal, self.parameters.values(), here))
            assert self.steps() == arguments[2], "a refused step was counted"
            self.check_refused(before)
            self.go_on(cleans)
            return
        self.check(*arguments)

    def check_refused(self, grads):
        """Check that a refused step left residues as they were, or added gradients as they came."""
        self.kept = self.begun_with(self.kept)
        for name, residue in self.residues().items():
            left = residue - self.kept.get(name, torch.zeros_like(residue))
            whole = grads.get(name, torch.zeros_like(residue)).nan_to_num(0, 0, 0) / self.scale_now
            near = 1e-4 * (1 + float(residue.abs().max()))
            assert min(left.abs().max(), (left - whole).abs().max()) <= near, (
                f"the residue of {name} after a refused step"
            )

    def go_on(self, cleans):
        """Go on as a script that caught the error does."""
        self.comparable, self.kept = False, self.residues()
        # The next average need not contain what was refused.
        self.new = None
        if self.library is stock:  # only a load gives up a step there
            reload(self.optimizer)
            cleans = "grads"  # some are averages already
        self.zero(cleans)

    def newcomer(self, asks, leaves):
        """All ranks refuse it. When it is removed or frozen, they go on as usual."""
        parameter = torch.nn.Parameter(torch.ones(3))
        self.optimizer.add_param_group({"params": [parameter]})
        if self.own:  # in stock Horovod each rank trains it
            with pytest.raises(RuntimeError, match="Make a new DistributedOptimizer"):
                getattr(self.optimizer, asks)()
        parameter.requires_grad_(False)
        if leaves:
            del self.optimizer.param_groups[-1]


def reload(one):
    one.load_state_dict(copy.deepcopy(one.state_dict()))


def assert_close(ours, theirs, where):
    torch.testing.assert_close(
        ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text: f"{where}: {text}"
    )


def dense(grad):
    grad = grad.detach()
    # Horovod joins the ranks' rows at every synchronize(), so thousands of entries may stand for
    # one element.
    return grad.double().to_dense().to(grad.dtype) if grad.is_sparse else grad


def run(script, library, sent, said):
    """Run a script.

    Return for each call its name, all parameters after it, what the script's own collectives have
    given so far, and whether all these must be stock Horovod's.
    """
    trained = [Trained(script, one.number, library, sent, said) for one in script.models]
    seen = []
    for number, (name, model, arguments) in enumerate(script.calls):
        try:
            getattr(trained[model], name)(**arguments)
        except Exception as error:
            raise AssertionError(f"call {number}, {name} of {model}: {arguments}") from error
        lost = sum(one.threw_away for one in trained)
        noticed = sum("no optimizer step" in message for message in said())
        noticed += sum(one.times_thrown_away() for one in trained)
        assert noticed >= lost, "averages were lost, and no warning says so"
        values, given = [one.values() for one in trained], [list(one.given) for one in trained]
        seen.append((name, values, given, all(one.comparable for one in trained)))
    return seen


def check(program, own, caplog):
    """Run the program in every way, and raise if one goes wrong.

    own: this rank's own process set.
    """
    script, expected = Script(program), None
    ways = [(library, sent) for sent in (EVERYTHING, SOME) for library in (hvd, stock)]
    for library, sent in ((stock, None), *ways):
        kind = f"{library.__name__}, {sent}"
        count_alike(own)
        caplog.clear()
        try:
            seen = run(script, library, sent, lambda: [r.getMessage() for r in caplog.records])
        except Exception:  # the other ranks may wait for this one
            error = f"rank {hvd.rank()}, seed {program.seed}: {kind}:\n{traceback.format_exc()}"
            os.write(2, error.encode())
            raise
        expected = expected or seen
        for (name, theirs, told, _), (_, ours, given, same) in zip(expected, seen, strict=True):
            if same:
                assert_close(given, told, f"{kind}, after {name}")
            if same and sent == EVERYTHING:
                assert_close(ours, theirs, f"{kind}, after {name}")
        # If a script changed gradients differently on every rank and skipped synchronize(), ranks
        # differ in stock Horovod too. They also differ in the last bits if a gradient is sparse on
        # one rank and dense on another, because torch adds these differently.
        last = [[v for model in one[-1][1] for v in model] for one in (expected, seen)]
        if script.sparse != "as dense" and same_on_all_ranks(last[0]):
            assert same_on_all_ranks(last[1]), kind


@limited
def test_random_programs(caplog, monkeypatch):
    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", Restless)
    # torch imports much of itself when it makes its first optimizer. Warnings need an optimizer
    # that steps.
    torch.optim.SGD([torch.zeros(1)]).step()
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    warnings.filterwarnings("ignore", message="optimizer.step")
    # Every rank has a set of its own, because other tests make sets of some of the same ranks.
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    run_random_programs(
        lambda program: check(program, sets[hvd.rank()], caplog), on_some_rank, most=25
    )
    for one in sets:  # not after a failure, which ends one rank before the others
        hvd.remove_process_set(one)
