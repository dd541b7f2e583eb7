"""Scripts that train models with a DistributedOptimizer, drawn at random from a program.

A script has only calls that stock Horovod survives. Stock Horovod waits for ever if ranks differ in
nameless calls, or if one rank gives up a step that others have begun.
"""

import horovod.torch as stock
import torch
from models import COLLECTIVES
from programs import METHODS
from rungs import AUTO
from test_torch_changed_gradients import CHANGES

SHAPES = {"weight": (37, 11), "bias": (11,), "scale": (), "wide": (3, 230), "rows": (40, 6)}
# Twice the same tensor would double the gradient.
COLLECTIVES = [kind for kind in COLLECTIVES if kind != "grouped_reducescatter"]
# What a script does to p.grad between backward() and step().
CHANGES = {name: change for name, change in CHANGES.items() if name != "mask"} | {
    "nan_to_num_": lambda parameters: [p.grad.nan_to_num_() for p in parameters]
}
# The changes that torch also makes to sparse gradients, with a new version.
OF_SPARSE = ("mul_", "zero_", "another tensor")


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


class Failed(Exception):
    """A rank's forward or backward raises it if a program says so."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Failed


class Drawn:
    """What a program has drawn for one of its models so far.

    passes: backward passes since the last exchange. alike: whether ranks' hooks fired alike in
    them. met: whether all ranks have had gradients: they have then compared their parameters.
    """

    def __init__(self, number):
        self.number, self.frozen, self.met = number, set(), False
        self.exchanged()

    def exchanged(self):
        self.passes, self.alike = 0, True


class Script:
    """Settings, and calls: (name of a method of Trained, number of a model, arguments)."""

    def __init__(self, program):
        self.program, self.choose, self.happens = program, program.choose, program.happens
        choose, self.ranks, self.seed = program.choose, range(stock.size()), program.seed
        self.passes = choose((1, 1, 1, 2, 3))
        # With one sparse embedding that is made dense, Horovod's own optimizer can tell it from the
        # other tensors. It cannot with more.
        self.sparse = choose(("no", "no", "yes", "as dense"))
        self.options = choose(({}, {}, {"op": stock.Sum}, {"gradient_predivide_factor": 2.0}))
        self.groups = choose((None, None, 2, [["wide", "bias"], ["weight"]]))
        buckets = {"leader": "staggered", "bucket_bytes": 1000}, {"bucket_bytes": 1}
        self.fields = choose(({}, {}, {"lookahead": True}, *buckets))
        self.fields |= {"warmup_steps": choose((0, 0, 2)), "dense": choose(((), ("bias",)))}
        # Where a gradient may be an outlier, nothing must be cut off its residue.
        self.fields["outliers"] = choose((4.0, None))
        self.method = choose(METHODS)  # Horovod's own optimizer takes only ScaleCom
        # torch's SGD cannot add a dense gradient to momentum that was sparse.
        self.momentum = choose((0.0, 0.9)) if self.sparse == "no" else 0.0
        # Integers are rounded, so no other setting gives the same results.
        rate = choose((10, 1, {0: 1, 2: 10}, {0: 2, 1: 4, 3: 10}))
        integers = {"bits": choose((2, 3, 5)), "rate": rate}
        self.narrow = choose(({"bits": 32}, {}, integers, AUTO))
        self.models = [Drawn(number) for number in range(choose((1, 1, 2)))]
        hidden = ("program", "choose", "happens", "ranks", "models")
        program.note({name: value for name, value in vars(self).items() if name not in hidden})
        self.calls = []
        self.draw()

    def draw(self):
        kinds = [getattr(self, name) for name in dir(self) if name.startswith("draw_")]
        kinds += [self.draw_gradients] * 2 + [self.draw_usual_step]
        if self.happens(0.1):
            self.change_on_the_way(self.models[0])
        length = self.choose(range(6, 22))
        # At most one change, and only in some programs: what follows it is checked less strictly.
        changes_at = self.choose((None, self.choose(range(length))))
        for number in range(length):
            self.choose(kinds)(self.choose(self.models))
            if number == changes_at:
                self.change_on_the_way(self.choose(self.models))
        for model in self.models:
            self.synchronize(model)
        self.call("step", self.models[0])
        self.change_on_the_way(self.choose(self.models))

    def call(self, name, model, **arguments):
        self.calls.append(self.program.note((name, model.number, arguments)))

    def synchronize(self, model):
        self.call("synchronize", model)
        model.exchanged()

    def settle(self, model):
        """Let nothing be under way, because stock Horovod would refuse zero_grad()."""
        if model.passes:
            self.synchronize(model)

    def begin_anew(self, model, how="grads"):
        self.settle(model)
        self.call("zero", model, how=how)

    def number(self):
        return self.program.number()

    def draw_gradients(self, model):
        """Run backward on all ranks.

        On some ranks it may be for only some parameters, or one rank may raise an exception.
        """
        if model.passes >= self.passes:
            self.synchronize(model)
        choose, is_sparse = self.choose, self.sparse == "yes"
        if self.sparse != "no" and not model.passes:
            # torch cannot add a sparse gradient to what stock Horovod left
            self.call("zero", model, how="grads")
        how = choose(("all", "all", "all", "missing", "fails"))
        missing, fails = [[] for _ in self.ranks], None
        # An embedding's sparse gradient must come on all ranks, or stock Horovod waits for ever.
        names = [n for n in SHAPES if n not in model.frozen and not (is_sparse and n == "rows")]
        if how == "missing":
            missing = [[name for name in names if self.happens(0.4)] for _ in self.ranks]
            if self.happens(0.3):
                missing[choose(self.ranks)] = names
        if how == "fails" and not is_sparse:
            fails = choose(self.ranks), choose(range(len(SHAPES)))
        alike = not any(missing) and fails is None
        model.met |= alike
        within = alike and all(one.alike for one in self.models) and self.happens(0.4)
        self.call(
            "backward",
            model,
            seed=self.number(),
            missing=missing,
            fails=fails,
            collective=choose((*COLLECTIVES, None)) if within else None,
            one_by_one=self.happens(0.3),
            penalty=self.happens(0.2),
            halve=choose(([], [], [], list(self.ranks), [self.ranks[-1]])),
            outlier=choose((None, None, *self.ranks)) if self.fields["outliers"] is None else None,
        )
        model.passes, model.alike = model.passes + 1, model.alike and alike

    def draw_usual_step(self, model):
        self.draw_gradients(model)
        if self.happens(0.5):
            self.synchronize(model)
        self.draw_step(model)
        if self.happens(0.7):
            how = self.choose(("grads", "grads", "in place", "some ranks"))
            self.call("zero", model, how=how)

    def draw_synchronize(self, model):
        for _ in range(self.choose((1, 1, 2, 3))):
            self.synchronize(model)

    def draw_step(self, model):
        skipping = self.happens(0.4)
        if skipping and model.met:
            self.settle(model)
        elif skipping:  # if ranks step by themselves before they meet, they refuse when they meet
            self.synchronize(model)
        self.call("step", model, skipping=skipping)
        model.exchanged()

    def draw_closure(self, model):
        """The closure synchronises what it computes, as Horovod's must, or computes nothing."""
        kind = self.choose(("nothing", "gradients", "gradients", "clipped"))
        self.call("closure", model, kind=kind, seed=self.number())
        model.exchanged()

    def draw_zero(self, model):
        self.begin_anew(model, self.choose(("grads", "in place", "some ranks")))

    def draw_by_hand(self, model):
        self.settle(model)
        names = [name for name in SHAPES if name != "rows" and self.happens(0.7)]
        alike = self.happens(0.3)
        self.call("by_hand", model, names=names, seed=self.number(), everywhere_the_same=alike)

    def draw_change(self, model):
        self.settle(model)
        how = self.choose(("in place", "anew", "clip", "clip", "noise"))
        self.call("change", model, how=how, seed=self.number())

    def draw_scale(self, model):
        self.settle(model)
        self.call("scale", model, scale=self.choose((1.0, 0.25, 2.0**7)))

    def draw_overflow(self, model):
        """After an overflow, do as a GradScaler does: drop gradients, and take no step."""
        self.begin_anew(model)
        rank, value = self.choose(self.ranks), self.choose(("inf", "nan"))
        if self.sparse != "yes":
            self.call("overflow", model, rank=rank, value=value, seed=self.number())

    def draw_freeze(self, model):
        self.settle(model)
        model.frozen ^= {self.choose(("weight", "wide"))}
        self.call("freeze", model, names=sorted(model.frozen))

    def draw_load(self, model):
        self.settle(model)
        self.call("load", model, what=self.choose(("optimizer", "compressor")))

    # If gradients are sparse, no step is given up: stock Horovod does not tell whether they are
    # still under way.

    def draw_load_in_step(self, model):
        if self.sparse != "yes":
            self.begin_anew(model)
            for _ in range(self.passes):
                seed, one_by_one = self.number(), self.happens(0.5)
                self.call("backward", model, seed=seed, one_by_one=one_by_one)
            self.call("load_in_step", model)

    def draw_load_where_some_have_gradients(self, model):
        """Load while only some ranks have gradients, because the others had an empty batch."""
        if self.sparse != "yes":
            self.begin_anew(model)
            have = [self.happens(0.5) for _ in self.ranks]
            self.call("load_where_some_have_gradients", model, seed=self.number(), have=have)

    def draw_one_rank_loads(self, model):
        """One rank loads a state, such as the best checkpoint, and broadcasts it.

        All ranks must have a state first.
        """
        self.synchronize(model)
        self.call("step", model, skipping=True)
        self.call("one_rank_loads", model, rank=self.choose(self.ranks))

    def draw_thrown_away(self, model):
        """Compute an average that no step uses, as FGSM and GANs do.

        Sharpness-aware steps do so too: the average leads to where they take their gradient.
        """
        # torch cannot add a sparse gradient to what stock Horovod left
        how = "grads" if self.sparse != "no" else self.choose(("grads", "in place"))
        self.begin_anew(model, how)
        self.call("thrown_away", model, seed=self.number(), sharp=self.happens(0.5), how=how)

    def draw_newcomer(self, model):
        """Add or thaw a parameter when the optimizer exists already."""
        asks = self.choose(("synchronize", "step"))
        self.call("newcomer", model, asks=asks, leaves=self.happens(0.5))

    def draw_own_collective(self, model):
        """Run a collective between any two calls.

        It may be nameless only if all ranks have submitted the same: stock Horovod counts its own
        collectives with it.
        """
        nameless = all(one.alike for one in self.models) and self.happens(0.7)
        kind, end = self.choose(COLLECTIVES), self.choose(("", "_async"))
        self.call("own_collective", model, kind=kind, nameless=nameless, end=end)

    def change_on_the_way(self, model):
        """A script changes p.grad between backward() and step(), on all ranks or on one."""
        choose, names = self.choose, [list(SHAPES), list(SHAPES), ["weight"], ["wide"]]
        how, cleans = choose(list(CHANGES)), ("grads", "grads", "in place", "nothing")
        if self.sparse != "no":  # torch cannot add a sparse gradient to another
            how, names, cleans = choose(OF_SPARSE), [*names, ["rows"]], ["grads"]
        if how == "through .data" and model.frozen:  # not seen if most elements are zero
            how = "mul_"
        self.begin_anew(model)
        self.call(
            "change_on_the_way",
            model,
            how=how,
            ranks=choose((list(self.ranks), [choose(self.ranks)])),
            names=choose(names),
            seeds=[self.number() for _ in range(self.passes)],
            waits=self.happens(0.3),
            cleans=choose(cleans),
        )
        model.exchanged()
