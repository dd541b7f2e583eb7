"""Random programs of calls, as scripts make them, compared with stock Horovod.

Every program runs several times on the same made-up gradients:

- in stock Horovod;
- with everything chosen (k = N, through lanes and residues). After every call parameters must then
  be those of stock Horovod;
- at rate 10. Nothing may be lost then.

The last two run both in this package's optimizer and in Horovod's own. In this package's optimizer,
some programs take another method than ScaleCom. After every synchronize():

    mean of gradients as they were + mean of residues before
        = gradients as they are + mean of residues after

If every gradient of all ranks was exchanged already, residues and step stay as they were.

A program draws only calls that stock Horovod survives. Stock Horovod waits for ever if ranks differ
in nameless calls, or if one rank gives up a step that others have begun. It also reads p.grad while
it averages. If a script changes p.grad meanwhile, stock Horovod is given what the change makes of
each rank's gradients. This package may refuse such a step on all ranks. The script then goes on,
but is no longer compared with stock Horovod, because residues may hold what was refused.

By default every run takes the same programs: as many as fit into some seconds, but at most
PROGRAMS. FUZZ_SECONDS says how long to make new programs, and FUZZ_SEED is the first seed. A
program that fails, or waits for ever, is printed with its seed.
"""

import contextlib
import copy
import logging
import os
import random
import time
import traceback
import warnings

import horovod.torch as stock
import pytest
import torch
from made_up import EVERYTHING, SOME
from models import same_on_all_ranks
from test_torch_changed_gradients import CHANGES, refuses

import scalecom_hvd.torch as hvd

SECONDS = float(os.environ.get("FUZZ_SECONDS", 10))
PROGRAMS = None if "FUZZ_SECONDS" in os.environ else 25
FIRST_SEED = int(os.environ.get("FUZZ_SEED", 0))
SHAPES = {"weight": (37, 11), "bias": (11,), "scale": (), "wide": (3, 230), "rows": (40, 6)}
COLLECTIVES = (
    "allreduce",
    "grouped_allreduce",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "none",
)


OTHER_METHODS = ("ECQSGD", "GTopK", "GlobalTopK", "LocalTopK", "RandomK")
# What a script does to p.grad between backward() and step().
CHANGES = {name: change for name, change in CHANGES.items() if name != "mask"} | {
    "nan_to_num_": lambda parameters: [p.grad.nan_to_num_() for p in parameters]
}

# The changes that torch also makes to sparse gradients, with a new version.
OF_SPARSE = ("mul_", "zero_", "another tensor")
THROWN = "averages_thrown_away"


class Failed(Exception):
    """A rank's forward or backward raises it if a program says so."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Failed


# Programs.


class Program:
    """What all ranks draw alike: settings, and calls [(name of a method of Run, its arguments)]."""

    def __init__(self, seed):
        self.seed = seed
        self.dice = dice = random.Random(seed)
        self.ranks = stock.size()
        self.passes = dice.choice((1, 1, 1, 2, 3))
        self.models = dice.choice((1, 1, 2))
        # With one sparse embedding that is made dense, Horovod's own optimizer can tell it from the
        # other tensors. It cannot with more.
        self.sparse = dice.choice(("no", "no", "yes", "as dense"))
        self.options = dice.choice(({}, {}, {"op": stock.Sum}, {"gradient_predivide_factor": 2.0}))
        self.groups = dice.choice((None, None, 2, [["wide", "bias"], ["weight"]]))
        self.fields = dice.choice(
            (
                {},
                {},
                {"lookahead": True},
                {"leader": "staggered", "bucket_bytes": 1000},
                {"bucket_bytes": 1},
            )
        )
        self.fields = self.fields | {
            "warmup_steps": dice.choice((0, 0, 2)),
            "dense": dice.choice(((), ("bias",))),
        }
        # Horovod's own optimizer takes only ScaleCom.
        self.method = dice.choice(("ScaleCom",) * len(OTHER_METHODS) + OTHER_METHODS)
        # torch's SGD cannot add a dense gradient to momentum that was sparse.
        self.momentum = dice.choice((0.0, 0.9)) if self.sparse == "no" else 0.0
        # Integers are rounded, so no other setting gives the same results.
        integers = {"bits": dice.choice((2, 3, 5)), "warmup_rate": dice.choice((1, 2, 4))}
        self.narrow = dice.choice(({"bits": 32}, {}, integers))
        self.frozen = [set() for _ in range(self.models)]
        # backward passes, and whether ranks' hooks fired alike
        self.pending = [[0, True] for _ in range(self.models)]
        # whether all ranks have had gradients: they have then compared their parameters
        self.met = [False] * self.models
        self.calls = []
        kinds = [getattr(self, name) for name in dir(self) if name.startswith("draw_")]
        if dice.random() < 0.1:
            self.change_on_the_way(0)
        length = dice.randrange(6, 22)
        # At most one change, and only in some programs: what follows it is checked less strictly.
        changes_at = dice.choice((None, dice.randrange(length)))
        for number in range(length):
            dice.choice(kinds)(dice.randrange(self.models))
            if number == changes_at:
                self.change_on_the_way(dice.randrange(self.models))
        for model in range(self.models):
            self.synchronize(model)
        self.call("step", 0, False)
        self.change_on_the_way(dice.randrange(self.models))

    def __str__(self):
        settings = {
            name: value
            for name, value in vars(self).items()
            if name not in ("dice", "calls", "pending", "frozen", "met")
        }
        return "\n".join(map(str, [settings, *self.calls]))

    def call(self, name, model, *arguments):
        self.calls.append((name, model, *arguments))

    def synchronize(self, model):
        self.call("synchronize", model)
        self.pending[model] = [0, True]

    def settle(self, model):
        """Let nothing be under way, because stock Horovod would refuse zero_grad()."""
        if self.pending[model][0]:
            self.synchronize(model)

    def draw_gradients(self, model):
        """Run backward on all ranks.

        On some ranks it may be for only some parameters, or one rank may raise an exception.
        """
        if self.pending[model][0] >= self.passes:
            self.synchronize(model)
        dice = self.dice
        if self.sparse != "no" and not self.pending[model][0]:
            # torch cannot add a sparse gradient to what stock Horovod left
            self.call("zero", model, "grads")
        how = dice.choice(("all", "all", "all", "missing", "fails"))
        missing = [[] for _ in range(self.ranks)]
        names = [
            name
            for name in SHAPES
            if name not in self.frozen[model] and (name != "rows" or self.sparse != "yes")
        ]
        if how == "missing":
            missing = [[name for name in names if dice.random() < 0.4] for _ in range(self.ranks)]
            if dice.random() < 0.3:
                missing[dice.randrange(self.ranks)] = names
        # An embedding's sparse gradient must come on all ranks, or stock Horovod waits for ever.
        fails = (
            (dice.randrange(self.ranks), dice.randrange(len(SHAPES)))
            if how == "fails" and self.sparse != "yes"
            else None
        )
        alike = not any(missing) and fails is None
        self.met[model] |= alike
        collective = (
            dice.choice(COLLECTIVES)
            if alike and all(same for _, same in self.pending) and dice.random() < 0.4
            else "none"
        )
        self.call(
            "backward",
            model,
            dice.randrange(10**6),
            missing,
            fails,
            collective,
            dice.random() < 0.3,
            dice.random() < 0.2,
            dice.choice(([], [], [], list(range(self.ranks)), [self.ranks - 1])),
        )
        self.pending[model] = [self.pending[model][0] + 1, self.pending[model][1] and alike]

    draw_gradients_too = draw_gradients_again = draw_gradients

    def draw_usual_step(self, model):
        self.draw_gradients(model)
        if self.dice.random() < 0.5:
            self.synchronize(model)
        self.draw_step(model)
        if self.dice.random() < 0.7:
            self.call("zero", model, self.dice.choice(("grads", "grads", "in place", "some ranks")))

    draw_usual_steps = draw_usual_step

    def draw_synchronize(self, model):
        for _ in range(self.dice.choice((1, 1, 2, 3))):
            self.synchronize(model)

    def draw_step(self, model):
        skipping = self.dice.random() < 0.4
        if skipping and self.met[model]:
            self.settle(model)
        elif skipping:  # if ranks step by themselves before they meet, they refuse when they meet
            self.synchronize(model)
        self.call("step", model, skipping)
        self.pending[model] = [0, True]

    def draw_closure(self, model):
        """The closure synchronises what it computes, as Horovod's must, or computes nothing."""
        self.call(
            "closure",
            model,
            self.dice.choice(("nothing", "gradients", "gradients", "clipped")),
            self.dice.randrange(10**6),
        )
        self.pending[model] = [0, True]

    def draw_zero(self, model):
        self.settle(model)
        self.call("zero", model, self.dice.choice(("grads", "in place", "some ranks")))

    def draw_by_hand(self, model):
        self.settle(model)
        names = [name for name in SHAPES if name != "rows" and self.dice.random() < 0.7]
        self.call("by_hand", model, names, self.dice.randrange(10**6), self.dice.random() < 0.3)

    def draw_change(self, model):
        self.settle(model)
        self.call(
            "change",
            model,
            self.dice.choice(("in place", "anew", "clip", "clip", "noise")),
            self.dice.randrange(10**6),
        )

    def draw_scale(self, model):
        self.settle(model)
        self.call("scale", model, self.dice.choice((1.0, 0.25, 2.0**7)))

    def draw_overflow(self, model):
        """After an overflow, do as a GradScaler does: drop gradients, and take no step."""
        self.settle(model)
        self.call("zero", model, "grads")
        self.call(
            "overflow",
            model,
            self.dice.randrange(self.ranks),
            self.dice.choice(("inf", "nan")),
            self.dice.randrange(10**6),
        )

    def draw_freeze(self, model):
        self.settle(model)
        name = self.dice.choice(("weight", "wide"))
        self.frozen[model] ^= {name}
        self.call("freeze", model, sorted(self.frozen[model]))

    def draw_load(self, model):
        self.settle(model)
        self.call("load", model, self.dice.choice(("optimizer", "compressor")))

    def draw_load_in_step(self, model):
        """Give a step up.

        This is not done with sparse gradients: stock Horovod does not tell whether they are still
        under way.
        """
        if self.sparse != "yes":
            self.settle(model)
            self.call("zero", model, "grads")
            for _ in range(self.passes):
                self.call(
                    "backward",
                    model,
                    self.dice.randrange(10**6),
                    [[]] * self.ranks,
                    None,
                    "none",
                    self.dice.random() < 0.5,
                )
            self.call("load_in_step", model)

    def draw_load_where_some_have_gradients(self, model):
        """Load while only some ranks have gradients, because the others had an empty batch.

        This is not done with sparse gradients, for the reason that draw_load_in_step gives.
        """
        if self.sparse == "yes":
            return
        self.settle(model)
        self.call("zero", model, "grads")
        have = [self.dice.random() < 0.5 for _ in range(self.ranks)]
        self.call("load_where_some_have_gradients", model, self.dice.randrange(10**6), have)

    def draw_one_rank_loads(self, model):
        """One rank loads a state, such as the best checkpoint, and broadcasts it.

        All ranks must have a state first.
        """
        self.synchronize(model)
        self.call("step", model, True)
        self.call("one_rank_loads", model, self.dice.randrange(self.ranks))

    def draw_thrown_away(self, model):
        """Compute an average that no step uses, as FGSM and GANs do.

        Sharpness-aware steps do so too: the average leads to where they take their gradient.
        """
        self.settle(model)
        # torch cannot add a sparse gradient to what stock Horovod left
        how = "grads" if self.sparse != "no" else self.dice.choice(("grads", "in place"))
        self.call("zero", model, how)
        seed, sharp = self.dice.randrange(10**6), self.dice.random() < 0.5
        self.call("thrown_away", model, seed, sharp, how)

    def change_on_the_way(self, model):
        """A script changes p.grad between backward() and step(), on all ranks or on one."""
        dice = self.dice
        how, names = dice.choice(list(CHANGES)), [list(SHAPES), list(SHAPES), ["weight"], ["wide"]]
        cleans = ("grads", "grads", "in place", "nothing")
        if self.sparse != "no":  # torch cannot add a sparse gradient to another
            how, names, cleans = dice.choice(OF_SPARSE), [*names, ["rows"]], ["grads"]
        # This change is not seen if most elements are zero.
        if how == "through .data" and self.frozen[model]:
            how = "mul_"
        self.settle(model)
        self.call("zero", model, "grads")
        self.call(
            "change_on_the_way",
            model,
            how,
            dice.choice((list(range(self.ranks)), [dice.randrange(self.ranks)])),
            dice.choice(names),
            [dice.randrange(10**6) for _ in range(self.passes)],
            dice.random() < 0.3,
            dice.choice(cleans),
        )
        self.pending[model] = [0, True]

    def draw_newcomer(self, model):
        """Add or thaw a parameter when the optimizer exists already."""
        asks, leaves = self.dice.choice(("synchronize", "step")), self.dice.random() < 0.5
        self.call("newcomer", model, asks, leaves)

    def draw_own_collective(self, model):
        """Run a collective between any two calls.

        It may be nameless only if all ranks have submitted the same: stock Horovod counts its own
        collectives with it.
        """
        alike = all(same for _, same in self.pending)
        self.call(
            "own_collective",
            model,
            self.dice.choice(COLLECTIVES[:-1]),
            alike and self.dice.random() < 0.7,
        )


# Runs.


class Run:
    """A program on this rank.

    where: the optimizer's library.
    sent: EVERYTHING or SOME, or None for stock Horovod.
    said: returns the warnings that ScaleCom has logged since.
    """

    def __init__(self, program, where, sent, said):
        self.program, self.library, self.sent, self.said = program, where, sent, said
        self.method = program.method if where is hvd else "ScaleCom"
        # Scripts with Horovod's own optimizer know only horovod.torch.
        self.collectives = where
        self.scale_now = [1.0] * program.models
        # Whether some rank has a gradient that was not exchanged yet. None if that depends on the
        # gradients that scripts set.
        self.new = [False] * program.models
        # The models that had averages thrown away.
        self.threw_away = set()
        self.models, self.compressors, self.optimizers, self.mine = [], [], [], []
        # Residues after the last exchange, and before it; how often averages were thrown away.
        self.kept = [{} for _ in range(program.models)]
        self.earlier = [{} for _ in range(program.models)]
        self.thrown = [0] * program.models
        self.comparable = self.method != "ECQSGD"  # ECQSGD rounds
        for model in range(program.models):
            self.make(model)

    def make(self, model):
        program = self.program
        generator = torch.Generator().manual_seed(program.seed)
        parameters = {
            f"{name}.{model}": torch.nn.Parameter(torch.randn(shape, generator=generator))
            for name, shape in SHAPES.items()
        }
        compression, more = stock.Compression.none, {}
        if self.sent is not None:
            method = getattr(hvd, self.method)
            fields = program.fields | {
                "dense": [f"{name}.{model}" for name in program.fields["dense"]],
                "rate": self.sent["rate"],
                "min_numel": 2,
            }
            if self.method == "ScaleCom":
                fields |= self.sent
            if self.sent != EVERYTHING and self.method == "ScaleCom":
                fields |= program.narrow
            if self.library is stock:
                fields["named_parameters"] = parameters.items()
                fields.pop("warmup_rate", None)  # Horovod's own optimizer refuses it
            unused = {*hvd.ScaleCom.uses} - {*method.uses}
            compression = method(
                loss_scale=lambda: self.scale_now[model],
                **{name: value for name, value in fields.items() if name not in unused},
            )
        if program.groups is not None and self.library is hvd:
            groups = program.groups
            more["groups"] = (
                groups
                if isinstance(groups, int)
                else [[parameters[f"{name}.{model}"] for name in part] for part in groups]
            )
        optimizer = torch.optim.SGD(parameters.values(), lr=0.01, momentum=program.momentum)
        self.optimizers.append(
            self.library.DistributedOptimizer(
                optimizer,
                parameters.items(),
                compression=compression,
                backward_passes_per_step=program.passes,
                sparse_as_dense=program.sparse == "as dense",
                **program.options,
                **more,
            )
        )
        self.models.append(
            {name.partition(".")[0]: parameter for name, parameter in parameters.items()}
        )
        self.compressors.append(compression)
        self.mine.append({})

    def all(self):
        """Yield what every call of the program leaves behind.

        That is the call's name, a copy of all parameters, and whether these must be stock
        Horovod's.
        """
        for number, (name, model, *arguments) in enumerate(self.program.calls):
            try:
                getattr(self, name)(model, *arguments)
            except Exception as error:
                raise AssertionError(f"call {number}, {name}{(model, *arguments)}") from error
            yield (
                name,
                [p.detach().clone() for parameters in self.models for p in parameters.values()],
                self.comparable,
            )

    def gradients(self, model, seed, rank):
        """The gradients, which depend on the parameters' values."""
        generator, parameters = torch.Generator().manual_seed(seed * 64 + rank), self.models[model]
        grads = {
            name: (torch.randn(shape, generator=generator) + 0.1 * parameters[name].detach())
            * self.scale_now[model]
            for name, shape in SHAPES.items()
        }
        grads["rows"][torch.rand(40, generator=generator) < 0.8] = 0.0
        return grads

    def add(self, model, name, grad, factor=1.0):
        """Note what backward gives, times a hook's factor."""
        mine = self.mine[model]
        mine[name] = (grad if mine.get(name) is None else mine[name] + grad) * factor

    def backward(
        self, model, seed, missing, fails, collective, one_by_one, penalty=False, halve=()
    ):
        """Run backward.

        penalty: gradients come from other gradients, as gradient penalties do.
        halve: the ranks on which a late hook halves what was accumulated.
        """
        rank, parameters = hvd.rank(), self.models[model]
        grads = self.gradients(model, seed, rank)
        names = [
            name for name in SHAPES if parameters[name].requires_grad and name not in missing[rank]
        ]
        terms, raises = [], fails is not None and fails[0] == rank
        for i, name in enumerate(names):
            if raises and i == fails[1]:
                terms.append(
                    (None, FailingBackward.apply(torch.zeros(1, requires_grad=True)).sum())
                )
            parameter, grad = parameters[name], grads[name]
            if penalty and name != "rows":
                energy = parameter.square().sum() / 2
                (parameter,) = torch.autograd.grad(energy, parameter, create_graph=True)
            term = self.term(name, parameter, grad)
            if name == "weight":
                term = self.differentiable(term, collective)
                term = term * torch.ones(term.shape)  # Horovod takes only contiguous gradients
            terms.append((name, term.sum()))
        self.new[model] = self.new[model] or any(len(names) < len(SHAPES) for names in missing)
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
            if name == "weight" and collective == "broadcast":
                grad = grad if rank == 0 else torch.zeros_like(grad)
            self.add(model, name, grad, 0.5 if name in halved else 1.0)

    def term(self, name, parameter, grad):
        """A term of a loss that gives this parameter this gradient."""
        if name != "rows" or self.program.sparse == "no":
            return parameter * grad
        own = grad.any(1).nonzero().view(-1)
        return torch.nn.functional.embedding(own, parameter, sparse=True) * grad[own]

    def differentiable(self, x, kind):
        """Run a collective in the middle of a model, without changing the gradient.

        Only a broadcast changes it: it leaves the gradient on rank 0.
        """
        library, n, name = (
            self.collectives,
            hvd.size(),
            None if self.program.seed % 2 else "features",
        )
        if kind == "allreduce":
            return library.allreduce(x, name=name)
        if kind == "grouped_allreduce":
            return torch.cat(library.grouped_allreduce([x[:5], x[5:]], name=name))
        if kind == "allgather":
            return library.allgather(x, name=name)
        if kind == "grouped_allgather":
            return torch.cat(library.grouped_allgather([x[:5], x[5:]], name=name))
        if kind == "broadcast":
            return library.broadcast(x, 0, name=name)
        if kind == "alltoall":
            return library.alltoall(
                x, torch.tensor([len(x) - n + 1] + [1] * (n - 1), dtype=torch.int32), name=name
            )[0]
        if kind == "reducescatter":
            return library.reducescatter(x, name=name)
        return x

    def before(self, model):
        """This rank's gradients, and its residues before backward.

        Missing gradients are zeros. Backward may have moved the residues already.
        """
        mine = {name: self.mine[model].get(name) for name in SHAPES}
        grads = {
            name: torch.zeros(SHAPES[name]) if grad is None else grad for name, grad in mine.items()
        }
        return grads, self.kept[model]

    def residues(self, model):
        """The residues, in the gradients' units."""
        tensors = {} if self.sent is None else self.compressors[model].residues.tensors
        return {
            name.partition(".")[0]: (tensor.residue / tensor.beta).view(tensor.shape)
            for name, tensor in tensors.items()
        }

    def steps(self, model):
        return None if self.sent is None else self.compressors[model].residues.step

    def synchronize(self, model):
        before, steps, new = self.before(model), self.steps(model), self.new[model]
        self.optimizers[model].synchronize()
        self.after(model, before, steps, new)

    def after(self, model, before, steps, new, void=False):
        """Check what is true after every synchronize()."""
        grads, residues = before
        thrown = 0 if self.sent is None else self.compressors[model].stats().get(THROWN, 0)
        if thrown > self.thrown[model]:  # residues became what they were before those averages
            residues = self.earlier[model]
        self.thrown[model] = thrown
        if self.steps(model) != steps:
            self.earlier[model] = residues
        now = {name: dense(parameter.grad) for name, parameter in self.models[model].items()}
        self.mine[model], self.new[model] = (
            {name: grad.clone() for name, grad in now.items()},
            False,
        )
        after = self.kept[model] = self.residues(model)
        if self.sent is not None and (void or new is False):
            assert self.steps(model) == steps, "a step was counted"
            for name, residue in (
                residues or {name: torch.zeros_like(residue) for name, residue in after.items()}
            ).items():
                # A residue that was moved and taken back is the same except for rounding. That
                # happens in a skipped step, and in Horovod's own optimizer after loading.
                moved = void or self.library is stock
                size = float(residue.abs().max() + grads[name].nan_to_num(0, 0, 0).abs().max())
                assert (after[name] - residue).abs().max() <= 1e-5 * size * moved, (
                    f"the residue of {name} changed"
                )
        if void:
            # In this package's optimizer every gradient shows a skipped step. In Horovod's own,
            # only the gradient that was not finite does.
            told = now if self.library is hvd and self.sent is not None else {"wide": now["wide"]}
            assert not any(grad.isfinite().all() for grad in told.values())
            return
        n, scale = hvd.size(), self.scale_now[model]
        factor = n if "op" in self.program.options else 1
        names = list(now)
        zero = {name: torch.zeros_like(grad) for name, grad in now.items()}
        parts = [
            torch.cat([part.get(name, zero[name]).double().view(-1) for name in names])
            for part in (grads, residues, after)
        ]
        came = parts[0] + scale * (parts[1] - parts[2])
        moved = parts[0].abs() + scale * (parts[1].abs() + parts[2].abs())
        came, moved = hvd.allreduce(torch.stack([came, moved]), name="differential.came")
        lengths = [now[name].numel() for name in names]
        of_all = (whole.split(lengths) for whole in (came * factor, moved * factor))
        for name, sent, moved_of in zip(names, *of_all, strict=True):
            off = float((sent - now[name].view(-1)).abs().max())
            # A step that was taken back leaves the rounding of its gradients.
            assert off <= 1e-5 * (float(moved_of.max()) + scale), (
                f"{name}: what left residues and gradients, and what came, differ by {off:g}"
            )

    def step(self, model, skipping):
        optimizer = self.optimizers[model]
        if skipping:
            with optimizer.skip_synchronize():
                optimizer.step()
            return
        before, steps, new = self.before(model), self.steps(model), self.new[model]
        optimizer.step()
        self.after(model, before, steps, new)

    def closure(self, model, kind, seed):
        optimizer, parameters = self.optimizers[model], self.models[model]
        before, steps, new = self.before(model), self.steps(model), self.new[model]

        def evaluate():
            self.after(model, before, steps, new)
            if kind != "nothing":
                self.zero(model, "grads")
                self.backward(model, seed, [[]] * hvd.size(), None, "none", False)
                self.new[model] = True
                self.synchronize(model)
            if kind == "clipped":
                self.clip(parameters)
            return torch.tensor(5.0)

        assert float(optimizer.step(evaluate)) == 5.0
        self.remember(model)

    @staticmethod
    def clip(parameters):
        torch.nn.utils.clip_grad_norm_(
            [p for p in parameters.values() if p.grad is not None and not p.grad.is_sparse], 0.5
        )

    def remember(self, model):
        self.mine[model] = {
            name: None if p.grad is None else dense(p.grad).clone()
            for name, p in self.models[model].items()
        }

    def zero(self, model, how):
        if how == "grads":
            self.optimizers[model].zero_grad()
        for i, parameter in enumerate(self.models[model].values()):
            if parameter.grad is None or parameter.grad.is_sparse:
                continue
            if how == "in place":
                parameter.grad.zero_()
            elif how == "some ranks" and (i + hvd.rank()) % 2:
                parameter.grad = None
        self.remember(model)

    def by_hand(self, model, names, seed, everywhere_the_same):
        grads = self.gradients(model, seed, 0 if everywhere_the_same else hvd.rank())
        for name in names:
            self.models[model][name].grad = grads[name].clone()
        self.new[model] = self.new[model] or None
        self.remember(model)

    def change(self, model, how, seed):
        generator = torch.Generator().manual_seed(seed * 64 + hvd.rank())
        parameters = {
            name: p
            for name, p in self.models[model].items()
            if p.grad is not None and not p.grad.is_sparse
        }
        if how == "clip":
            self.clip(parameters)
        for parameter in parameters.values():
            if how == "in place":
                parameter.grad.mul_(0.5)
            elif how == "anew":
                parameter.grad = parameter.grad * 0.5
                self.new[model] = self.new[model] or None
            elif how == "noise":
                parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        self.remember(model)

    def scale(self, model, scale):
        self.scale_now[model] = scale

    def overflow(self, model, rank, value, seed):
        grads = self.gradients(model, seed, hvd.rank())
        if hvd.rank() == rank:
            grads["wide"][1, 7] = float(value)
        wanted = {
            name: p for name, p in self.models[model].items() if p.requires_grad and name != "rows"
        }
        if self.program.sparse == "yes":
            self.models[model]["rows"].grad = None
            return
        sum((p * grads[name]).sum() for name, p in wanted.items()).backward()
        for name in wanted:
            self.add(model, name, grads[name])
        before, steps = self.before(model), self.steps(model)
        self.optimizers[model].synchronize()
        if "wide" in wanted:
            self.after(model, before, steps, True, void=True)
        else:
            self.after(model, before, steps, True)
        found = not all(dense(p.grad).isfinite().all() for p in self.models[model].values())
        assert found == ("wide" in wanted)
        self.zero(model, "grads")

    def freeze(self, model, names):
        for name, parameter in self.models[model].items():
            parameter.requires_grad_(name not in names)

    def load(self, model, what):
        if what == "optimizer":
            optimizer = self.optimizers[model]
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif self.sent is not None and not (self.library is stock and "op" in self.program.options):
            # In Horovod's own optimizer a compressor does not know of Sum. In a synchronize() with
            # nothing new, right after loading, it averages where another sum would multiply.
            compressor = self.compressors[model]
            compressor.load_state_dict(copy.deepcopy(compressor.state_dict()))

    def load_in_step(self, model):
        optimizer = self.optimizers[model]
        while not all(
            callable(handle) or stock.poll(handle) for handle, _ in optimizer._handles.values()
        ):
            time.sleep(0.001)  # or stock Horovod meets its own names
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.zero(model, "grads")
        # Horovod's own optimizer tells a compressor nothing. So the compressor takes the step back
        # only when it is asked for the next one.
        self.new[model] = None if self.library is stock else False
        if self.library is hvd and self.sent is not None:
            for name, residue in self.residues(model).items():
                before = self.kept[model].get(name, torch.zeros_like(residue))
                assert (residue - before).abs().max() <= 1e-4 * (1 + before.abs().max()), (
                    f"the residue of {name}"
                )
                before.copy_(residue)

    def load_where_some_have_gradients(self, model, seed, have):
        """Horovod's own optimizer runs no backward here: it would meet its own names, and hang."""
        if self.library is hvd and self.sent is not None:
            missing = [[] if has else list(SHAPES) for has in have]
            for number in range(self.program.passes):
                self.backward(model, seed + number, missing, None, "none", False)
        self.load_in_step(model)

    def one_rank_loads(self, model, rank):
        optimizer = self.optimizers[model]
        state = copy.deepcopy(optimizer.state_dict())
        if self.program.momentum:  # or there is no state, and nothing is broadcast
            state["param_groups"][0]["lr"] *= 0.9
            for own in state["state"].values():
                own["momentum_buffer"] *= 0.5
        if hvd.rank() == rank:
            optimizer.load_state_dict(state)
        self.library.broadcast_optimizer_state(optimizer, rank)
        self.new[model] = self.new[model] or None  # it makes zero gradients where there are none
        self.remember(model)

    def thrown_away(self, model, seed, sharp, how):
        parameters = self.models[model].values()
        here = [parameter.detach().clone() for parameter in parameters]
        self.backward(model, seed, [[]] * hvd.size(), None, "none", False)
        self.synchronize(model)
        if self.sent is not None:
            stats = self.compressors[model].stats()
            if stats["bytes_values"] or stats.get("bytes_gathered"):
                self.threw_away.add(model)
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(parameter.grad, alpha=0.01 * sharp)
        self.zero(model, how)
        self.backward(model, seed + 1, [[]] * hvd.size(), None, "none", False)
        with torch.no_grad():
            for parameter, original in zip(parameters, here, strict=True):
                parameter.copy_(original)
        self.step(model, False)
        told = sum("no optimizer step" in message for message in self.said()) + sum(self.thrown)
        assert told >= len(self.threw_away), "averages were lost, and no warning says so"

    def change_on_the_way(self, model, how, ranks, names, seeds, waits, cleans):
        """The step must give what it would with gradients that had come as changed.

        Or all ranks refuse it, and go on.
        """
        rank, optimizer = hvd.rank(), self.optimizers[model]
        trained = {name: p for name, p in self.models[model].items() if p.requires_grad}
        names = [name for name in names if name in trained and rank in ranks]
        passes = [self.gradients(model, seed, rank) for seed in seeds]
        if how == "nan_to_num_" and "wide" in names and rank == ranks[-1]:
            passes[-1]["wide"][1, 7] = float("nan")
        before = {name: sum(grads[name] for grads in passes) for name in trained}
        grads = dict(before)
        if names:
            grads |= changed(CHANGES[how], {name: before[name] for name in names})
        # Horovod's own optimizer tells a compressor nothing of sparse gradients.
        by_hand = self.sent is None or (self.library is stock and self.program.sparse == "yes")
        if by_hand:
            for name, parameter in trained.items():
                is_sparse = name == "rows" and self.program.sparse != "no"
                parameter.grad = grads[name].to_sparse(1) if is_sparse else grads[name].clone()
        else:
            for own in passes:
                sum(self.term(name, p, own[name]).sum() for name, p in trained.items()).backward()
            time.sleep(0.01 * waits)
            if names:
                CHANGES[how]([trained[name] for name in names])
        self.mine[model], self.new[model] = grads, True
        arguments = self.before(model), self.steps(model), True
        here = [parameter.detach().clone() for parameter in self.models[model].values()]
        if self.sent is None:
            optimizer.step()
        elif refuses(optimizer.step):
            assert all(map(torch.equal, self.models[model].values(), here))
            assert self.steps(model) == arguments[1], "a refused step was counted"
            self.check_refused(model, before)
            self.go_on(model, cleans)
            return
        self.after(model, *arguments)

    def go_on(self, model, cleans):
        """Go on as a script that caught the error does."""
        self.comparable, self.kept[model] = False, self.residues(model)
        # The next average need not contain what was refused.
        self.new[model] = None
        if self.library is stock:  # only a load gives up a step there
            optimizer = self.optimizers[model]
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            cleans = "grads"  # some are averages already
        self.zero(model, cleans)

    def check_refused(self, model, grads):
        """Check that a refused step left residues as they were, or added gradients as they came."""
        for name, residue in self.residues(model).items():
            left = residue - self.kept[model].get(name, torch.zeros_like(residue))
            whole = grads.get(name, torch.zeros_like(residue)).nan_to_num(0, 0, 0)
            whole = whole / self.scale_now[model]
            near = 1e-4 * (1 + float(residue.abs().max()))
            assert min(left.abs().max(), (left - whole).abs().max()) <= near, (
                f"the residue of {name} after a refused step"
            )

    def newcomer(self, model, asks, leaves):
        """All ranks refuse it. When it is removed or frozen, they go on as usual."""
        optimizer, parameter = self.optimizers[model], torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [parameter]})
        if self.library is hvd and self.sent is not None:  # in stock Horovod each rank trains it
            with pytest.raises(RuntimeError, match="Make a new DistributedOptimizer"):
                getattr(optimizer, asks)()
        parameter.requires_grad_(False)
        if leaves:
            del optimizer.param_groups[-1]

    def own_collective(self, model, kind, nameless):
        name = None if nameless else f"own.{kind}"
        library, n, x = self.collectives, hvd.size(), torch.full((hvd.size(), 2), float(hvd.rank()))
        if kind == "allreduce":
            assert float(library.allreduce(x, name=name)[0, 0]) == (n - 1) / 2
        elif kind == "grouped_allreduce":
            assert (
                float(library.grouped_allreduce([x, x], op=stock.Sum, name=name)[1][0, 0])
                == n * (n - 1) / 2
            )
        elif kind == "allgather":
            assert library.allgather(x, name=name)[:, 0].tolist() == [
                r for r in range(n) for _ in range(n)
            ]
        elif kind == "grouped_allgather":
            assert library.synchronize(library.grouped_allgather_async([x], name=name))[
                0
            ].shape == (n * n, 2)
        elif kind == "broadcast":
            assert (
                float(library.synchronize(library.broadcast_async(x, n - 1, name=name))[0, 0])
                == n - 1
            )
        elif kind == "alltoall":
            assert library.alltoall(x, name=name)[:, 0].tolist() == list(range(n))
        else:
            assert float(library.reducescatter(x, name=name)[0, 0]) == (n - 1) / 2


def count_alike(own):
    """Let all ranks have submitted as many collectives as the rank with the most.

    If a state is loaded in the middle of a step, a rank may have submitted more of that step than
    another. Horovod names a nameless collective by its number in the process, so those of
    horovod.torch itself would never meet again. A script takes them from scalecom_hvd.torch, or
    trains only with horovod.torch. Here both take turns in one process.
    """

    def submit():
        handle = stock.allreduce_async(torch.zeros(1), name="differential.own", process_set=own)
        stock.synchronize(handle)
        return handle  # the number of collectives

    numbers = stock.allgather(torch.tensor([submit()]), name="differential.numbers")
    for _ in range(int(numbers.max() - numbers[stock.rank()])):
        submit()


def halve_gradient(parameter):
    parameter.grad.mul_(0.5)


def changed(change, grads):
    """{name: what a script's change makes of this gradient}"""
    own = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}
    for name, parameter in own.items():
        parameter.grad = grads[name].clone()
    change(list(own.values()))
    return {name: parameter.grad for name, parameter in own.items()}


def dense(grad):
    grad = grad.detach()
    # Horovod joins the ranks' rows at every synchronize(), so thousands of entries may stand for
    # one element.
    return grad.double().to_dense().to(grad.dtype) if grad.is_sparse else grad


def check(program, own, caplog):
    """Run the program in every way, and raise if one goes wrong.

    own: this rank's own process set.
    """
    expected = None
    for where, sent in (
        (stock, None),
        (hvd, EVERYTHING),
        (stock, EVERYTHING),
        (hvd, SOME),
        (stock, SOME),
    ):
        # All ranks stop or none does, so that no rank waits for one that has stopped.
        kind = f"{where.__name__}, {sent}"
        seen, error = [], None
        count_alike(own)
        caplog.clear()
        try:
            run = Run(program, where, sent, lambda: [r.getMessage() for r in caplog.records])
            seen = list(run.all())
        except Exception:
            error = f"{kind}:\n{traceback.format_exc()}"
            os.write(2, f"rank {hvd.rank()}, seed {program.seed}: {error}".encode())
            raise
        if sent is None:
            expected = seen
        elif sent == EVERYTHING:
            for (name, theirs, _), (_, ours, comparable) in zip(expected, seen, strict=True):
                if not comparable:
                    break
                for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
                    torch.testing.assert_close(
                        b,
                        a,
                        rtol=1e-4,
                        atol=1e-5,
                        msg=lambda text: f"{kind}, after {name}, {i}: {text}",  # noqa: B023
                    )
        # If a script changed gradients differently on every rank and skipped synchronize(), ranks
        # differ in stock Horovod too. They also differ in the last bits if a gradient is sparse on
        # one rank and dense on another, because torch adds these differently.
        if program.sparse != "as dense" and same_on_all_ranks(expected[-1][1]):
            assert same_on_all_ranks(seen[-1][1]), kind


@pytest.mark.timeout(SECONDS + 100, method="thread")
def test_random_programs(caplog):
    # torch imports much of itself when it makes its first optimizer. Warnings need an optimizer
    # that steps.
    torch.optim.SGD([torch.zeros(1)]).step()
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    # Every rank has a set of its own, because other tests make sets of some of the same ranks.
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    begun, seed = time.monotonic(), FIRST_SEED
    warnings.filterwarnings("ignore", message="optimizer.step")
    while seed - FIRST_SEED != PROGRAMS:
        late = hvd.allreduce(
            torch.tensor(float(time.monotonic() - begun > SECONDS)), name="differential.late"
        )
        if late:
            break
        program = Program(seed)
        print(f"FUZZ_SEED={seed} on {hvd.size()} ranks\n{program}\n", flush=True)
        try:
            check(program, sets[hvd.rank()], caplog)
        except Exception as error:
            raise AssertionError(
                f"FUZZ_SEED={seed} on {hvd.size()} ranks fails in\n{program}"
            ) from error
        seed += 1
    for one in sets:  # not after a failure, which ends one rank before the others
        hvd.remove_process_set(one)
    print(f"programs {FIRST_SEED} to {seed - 1}")
