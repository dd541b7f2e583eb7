"""Random programs of local steps on real ranks, compared with plain PyTorch.

What a script does here on real ranks, every rank also does in plain PyTorch for all n workers. A
worker is a model, an ordinary optimizer and perhaps a GradScaler. At the schedule's steps the
workers' parameters are averaged.

With everything chosen, parameters must be equal after every line of the program. At rate 10 they
must be equal between synchronisations. At synchronisations nothing may be lost: what left the
ranks' residues and changes, averaged, is what the common parameters moved by.

See programs.py.
"""

import contextlib
import copy
import gc
import math

import torch
from local_models import Plain, Twice, copy_into, lbfgs, values_of
from models import on_some_rank, through_a_file
from programs import limited, run_random_programs

import scalecom_hvd.torch as hvd

LINES = 16
RULES = (
    *("step",) * 10,
    *("end_the_round", "freeze", "collective", "save", "resume", "resume", "go_back"),
    *("commit", "restore", "meet"),
)
ORDERS = (
    "model make state broadcast",
    "model make broadcast state",
    "model state make broadcast",
    "state model make broadcast",
    "make state model broadcast",
    "make state model broadcast state broadcast",
    "own make state",
    "make state own",
)
TOLERANCES = {
    torch.float64: {"rtol": 1e-7, "atol": 1e-7},
    torch.float32: {"rtol": 1e-3, "atol": 1e-4},
}


class Net(torch.nn.Module):
    """Three layers. Only some batches use one of them."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.detour, self.last = (
            torch.nn.Linear(*sizes, dtype=dtype) for sizes in ((6, 8), (8, 8), (8, 5))
        )
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.4, generator=generator)

    def hidden(self, inputs, detour):
        hidden = torch.tanh(self.first(inputs))
        return hidden + torch.tanh(self.detour(hidden)) if detour else hidden


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.03, eps=1e-3),
    "LBFGS": lbfgs(0.3, max_iter=3),
    "LBFGS, searching": lbfgs(0.3, max_iter=3, line_search_fn="strong_wolfe"),
    "twice": lambda params: Twice(params, lr=0.05),
}
OUTERS = {
    "Nesterov": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.75, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.03, eps=1e-3),
}


class Worker:
    """One rank's model, optimizer and scaler. The rank is real or simulated."""

    def __init__(self, rank, net, optimizer, scaler):
        self.rank, self.net, self.optimizer, self.scaler = rank, net, optimizer, scaler

    def parameters(self):
        return dict(self.net.named_parameters())

    def values(self):
        return values_of(self.parameters())

    def loss(self, hidden, plan, number):
        random = self.random(plan, number + 100)
        target = torch.randn(4, 5, dtype=hidden.dtype, generator=random).clamp(-1, 1)
        loss = torch.nn.functional.mse_loss(torch.tanh(self.net.last(hidden)), target)
        return self.scaler.scale(loss) if self.scaler is not None and not plan["closure"] else loss

    def random(self, plan, number):
        return torch.Generator().manual_seed((plan["seed"] * 1000 + number) * 10 + self.rank)

    def hidden(self, plan, number):
        if plan["raises"] == self.rank and number == 0:
            raise ZeroDivisionError("in forward")
        dtype = self.net.last.weight.dtype
        inputs = torch.randn(4, 6, dtype=dtype, generator=self.random(plan, number))
        return self.net.hidden(inputs, plan["detours"][self.rank])

    def spoil(self, plan):
        grad = self.net.last.bias.grad
        if plan["bad"][0] == self.rank and grad is not None:
            grad[2] = plan["bad"][1]

    def take(self, plan):
        """Do what comes after backward, including the step."""
        optimizer, parameters = self.optimizer, list(self.net.parameters())
        if plan["hand"] == self.rank != plan["raises"]:
            parameters[0].grad = torch.full_like(parameters[0], 0.25)
        factor = plan["factor"] * (1000 if plan["outlier"] == self.rank else 1)
        for p in parameters:
            if factor != 1 and p.grad is not None:
                p.grad.mul_(factor)
        self.spoil(plan)
        for _ in range(plan["synchronize"]):
            optimizer.synchronize()
        # A scaler refuses to step without gradients.
        scaler = self.scaler if any(p.grad is not None for p in parameters) else None
        if plan["clip"]:
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, plan["clip"])
        with optimizer.skip_synchronize() if plan["skip"] else contextlib.nullcontext():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()

    def take_by_closure(self, plan):
        evaluations = []

        def closure():
            evaluations.append(1)
            self.net.zero_grad(plan["zero"] != "zeros")
            loss = self.loss(self.hidden(plan, 1), plan, 1)
            if loss.requires_grad:
                loss.backward()
            for _ in range(plan["synchronize"]):
                self.optimizer.synchronize()
            if plan["clip"]:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), plan["clip"])
            if len(evaluations) == 1:
                self.spoil(plan)
            return loss.detach()

        if plan["raises"] == self.rank:
            self.optimizer.zero_grad()  # nothing to evaluate: a closure that computes no gradient
            self.optimizer.step(lambda: torch.zeros(()))
        else:
            self.optimizer.step(closure)


def train(workers, plan, share):
    """Run the lines of a training script for these workers. Return whether they took a step.

    share: returns for each worker what all of them share in the middle.
    """
    stays = plan["raises"] is not None and plan["nobody steps"]
    if plan["closure"]:
        for worker in [] if stays else workers:
            worker.take_by_closure(plan)
        return not stays
    for worker in workers:
        if plan["zero"] != "left":
            worker.net.zero_grad(plan["zero"] == "none")
    for number in range(plan["passes"]):
        hidden = {}
        for worker in workers:
            try:
                hidden[worker] = worker.hidden(plan, number)
            except ZeroDivisionError:
                worker.optimizer.zero_grad()
        if plan["shared"] and plan["raises"] is None:
            middle = share([one.mean(0) for one in hidden.values()], plan, number)
            for (worker, one), common in zip(list(hidden.items()), middle, strict=True):
                hidden[worker] = one + common
        loss = sum(worker.loss(one, plan, number) for worker, one in hidden.items())
        if hidden and loss.requires_grad:
            loss.backward()
    for worker in [] if stays else workers:
        worker.take(plan)
    return not stays


def shared_by_horovod(hidden, plan, number):
    name = None if plan["shared"] == "nameless" else f"fuzz.middle.{number}"
    return [hvd.allreduce(hidden[0], name=name)]


def shared_by_all(hidden, plan, number):
    return [sum(hidden) / len(hidden)] * len(hidden)


class Simulated:
    """All workers in plain PyTorch.

    x: the common parameters.
    start: the parameters with which each worker began its round.
    fragments: the parameters' names in each fragment, as the real optimizer tells them.
    """

    def __init__(self, setting):
        self.setting, self.workers = setting, []
        for rank in range(hvd.size()):
            net = Net(setting["dtype"])
            optimizer = Plain(OPTIMIZERS[setting["optimizer"]](net.parameters()))
            self.workers.append(Worker(rank, net, optimizer, make_scaler(setting)))
        self.x = self.workers[0].values()
        self.outer = None
        if setting["outer"] is not None:
            self.common = {name: torch.nn.Parameter(x.clone()) for name, x in self.x.items()}
            self.outer = OUTERS[setting["outer"]](self.common.values())
        self.start = dict(self.x)
        self.fragments = [list(self.x)]
        self.taken = self.last = 0
        # departed: (since, the average, the workers' parameters) of what travels. brought: what
        # this rank brought to it in the real run (its change, its residues before).
        self.departed = self.brought = None

    def due(self):
        """The names of what is synchronised after the step that was just taken."""
        steps = self.setting["local_steps"]
        changes = steps if isinstance(steps, dict) else {0: steps}
        steps = changes[max(first for first in changes if first <= self.last)]
        done, count = self.taken - self.last, len(self.fragments)
        names = []
        for number, fragment in enumerate(self.fragments):
            if math.ceil(steps * (number + 1) / count) == done:
                names += fragment
        if done == steps:
            self.last = self.taken
        return names

    def depart(self, names):
        values, n = [worker.values() for worker in self.workers], len(self.workers)
        average = {name: sum(self.start[name] - one[name] for one in values) / n for name in names}
        self.departed = self.taken, average, values

    def has_arrived(self):
        return self.departed and self.taken >= self.departed[0] + self.setting["overlap"]

    def take_average(self, average, changed):
        """Apply the average of what was sent to x.

        changed: the names of what really changed. A mere rounding here is no change.
        """
        if self.outer is None:
            self.x = self.x | {name: self.x[name] - one for name, one in average.items()}
            return
        copy_into(self.common, self.x)
        for name, common in self.common.items():
            common.grad = average[name].clone() if name in changed else None
        self.outer.step()
        self.x = values_of(self.common)

    def arrive(self):
        (_, average, sent_from), self.departed = self.departed, None
        for worker, then in zip(self.workers, sent_from, strict=True):
            own = worker.values()
            moved = {name: self.x[name] + own[name] - then[name] for name in average}
            copy_into(worker.parameters(), own | moved)
        self.start = self.start | {name: self.x[name] for name in average}

    def save(self):
        kept = [
            (one.optimizer.state_dict(), one.scaler and one.scaler.state_dict(), one.values())
            for one in self.workers
        ]
        steps = self.taken, self.last, self.departed, self.brought
        outer = self.outer and self.outer.state_dict()
        return copy.deepcopy([kept, self.x, self.start, steps, outer])

    def load(self, saved):
        kept, self.x, self.start, steps, outer = copy.deepcopy(saved)
        self.taken, self.last, self.departed, self.brought = steps
        if outer is not None:
            self.outer.load_state_dict(outer)
        for worker, (state, scaler, values) in zip(self.workers, kept, strict=True):
            worker.optimizer.load_state_dict(state)
            if scaler is not None:
                worker.scaler.load_state_dict(scaler)
            copy_into(worker.parameters(), values)


def make_scaler(setting):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return scaler if setting["scaler"] else None


class Training:
    """A model's training in a program: this rank's real one, and the simulated one of all ranks."""

    def __init__(self, program):
        self.program, self.choose = program, program.choose
        self.setting = program.note(draw_setting(program.choose))
        self.simulated = Simulated(self.setting)
        self.frozen, self.saved, self.seen = set(), None, []
        self.scaler = make_scaler(self.setting)
        self.make(Net(self.setting["dtype"]), self.compressor())
        self.commit()

    def compressor(self):
        kind, fields = self.setting["compression"]
        if kind is None:
            return hvd.Compression.none
        return getattr(hvd, kind)(**({"min_numel": 2, "dense": [], "warmup_steps": 0} | fields))

    def make(self, net, compressor):
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[self.setting["optimizer"]](net.parameters()),
            net.named_parameters(),
            compression=compressor,
            outer=OUTERS.get(self.setting["outer"]),
            backward_passes_per_step=self.setting["passes"],
            **{name: self.setting[name] for name in ("local_steps", "overlap", "fragments")},
        )
        self.worker = Worker(hvd.rank(), net, optimizer, self.scaler)
        self.watch(optimizer._local)
        self.elastic = hvd.elastic.TorchState(net, optimizer)

    def watch(self, local):
        """Record what every synchronisation begins and ends with."""
        depart, arrive = local._depart, local._arrive
        self.simulated.fragments = local._fragments
        own = self.worker.parameters()

        def see_what_departs(fragments):
            names = [name for fragment in fragments for name in local._fragments[fragment]]
            starts = {name: local.common[name].detach().to(own[name].dtype) for name in names}
            changes = {name: (x - own[name].detach()).double() for name, x in starts.items()}
            self.simulated.brought = changes, self.residues()
            depart(fragments)

        def see_what_arrives(everywhere=True):
            before, travelled = values_of(local.common), local._journey is not None
            happened = arrive(everywhere)
            if travelled:
                changes, residues = self.simulated.brought
                left = self.residues()
                sent = {n: c + residues.get(n, 0) - left.get(n, 0) for n, c in changes.items()}
                # What a residue's rounding leaves in these differences was not sent.
                for name, one in sent.items():
                    near = TOLERANCES[self.setting["dtype"]]["atol"] / 1000
                    one[one.abs() <= near * (1 + abs(left.get(name, 0)))] = 0
                self.seen.append((happened, before, values_of(local.common), sent))
            return happened

        local._depart, local._arrive = see_what_departs, see_what_arrives

    def residues(self):
        tensors = self.worker.optimizer.compression.residues.tensors
        return {n: one.residue.view(one.shape).double().clone() for n, one in tensors.items()}

    def line(self, rule):
        """One of RULES, the name of a method."""
        self.program.note(rule)
        getattr(self, rule)()
        self.compare()

    def step(self):
        plan = draw_plan(self.choose, self.setting)
        if "first" in self.frozen:
            # in backward only ranks with a detour would get to it, which hangs with any library
            plan["shared"] = None
        self.program.note({n: value for n, value in plan.items() if value not in (None, False, 0)})
        stepped = train([self.worker], plan, shared_by_horovod)
        assert train(self.simulated.workers, plan, shared_by_all) == stepped
        if stepped:
            self.simulated.taken += 1
            if self.simulated.has_arrived():
                self.synchronised()
            names = self.simulated.due()
            if names:
                self.simulated.depart(names)
                if not self.setting["overlap"]:
                    self.synchronised()

    def end_the_round(self):
        self.worker.optimizer.synchronize_parameters()
        if self.simulated.departed:
            self.synchronised()
        if self.seen:
            self.simulated.depart(list(self.simulated.x))
            self.synchronised()

    def synchronised(self):
        happened, before, now, sent = self.seen.pop(0)
        assert happened
        average = {
            name: hvd.allreduce(one, name=f"fuzz.sent.{name}").to(now[name].dtype)
            for name, one in sent.items()
        }
        changed = {name for name, one in average.items() if one.any()}
        if self.setting["whole"]:
            _, average, _ = self.simulated.departed
        else:  # the simulation has no such average
            self.simulated.x = before
        self.simulated.take_average(average, changed)
        for name, x in self.simulated.x.items():
            torch.testing.assert_close(now[name], x, **TOLERANCES[self.setting["dtype"]])
        if not self.setting["whole"]:
            self.simulated.x = now
        self.simulated.arrive()

    def compare(self):
        """Check that all ranks' parameters are those of the simulated workers.

        The workers go on from the ranks' parameters, so that rounding errors do not add up.
        """
        assert not self.seen, "synchronised where nobody should"
        mine = torch.cat([value.reshape(-1) for value in self.worker.values().values()])
        everyone = hvd.allgather(mine[None], name="fuzz.parameters")
        for actual, worker in zip(everyone, self.simulated.workers, strict=True):
            expected = torch.cat([value.reshape(-1) for value in worker.values().values()])
            assert expected.isfinite().all()
            near = TOLERANCES[self.setting["dtype"]]
            torch.testing.assert_close(
                actual, expected, **near, msg=lambda m, worker=worker: f"rank {worker.rank}: {m}"
            )
            torch.nn.utils.vector_to_parameters(actual.clone(), worker.net.parameters())
        stats = self.worker.optimizer.compression.stats()
        assert stats["local_steps_taken"] == self.simulated.taken

    def freeze(self):
        self.frozen ^= {self.choose(("first", "detour", "last"))}
        self.program.note(set(self.frozen))
        self.tell_who_is_frozen()

    def tell_who_is_frozen(self):
        for worker in [self.worker, *self.simulated.workers]:
            for name, p in worker.parameters().items():
                p.requires_grad_(name.split(".")[0] not in self.frozen)

    def collective(self):
        name = self.program.note(self.choose((None, "fuzz.mine")))
        total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum, name=name)
        assert total == hvd.size() * (hvd.size() + 1) / 2
        gathered = hvd.allgather(torch.zeros(1 + hvd.rank()), name=name and name + ".gather")
        assert len(gathered) == total

    # Checkpoints and elastic states.

    def checkpoint(self):
        optimizer = self.worker.optimizer
        states = [optimizer.compression, optimizer, self.worker.net, self.scaler]
        return through_a_file([one and one.state_dict() for one in states])

    def save(self):
        self.saved = self.checkpoint(), self.simulated.save()

    def resume(self):
        """Start a new process: it loads rank 0's model, and then perhaps this rank's own."""
        state, momenta, own, _ = self.checkpoint()
        rank_0s = hvd.broadcast_object(own, root_rank=0, name="fuzz.model")
        order = self.program.note(self.choose(ORDERS)).split()
        net, compressor = Net(self.setting["dtype"]), self.compressor()
        if compressor is hvd.Compression.none:  # it has no state before the optimizer is made
            order = ["make", *(what for what in order if what != "make")]
        for what in order:
            if what == "make":
                self.make(net, compressor)
                compressor = self.worker.optimizer.compression
                self.worker.optimizer.load_state_dict(momenta)
            elif what == "state":
                compressor.load_state_dict(copy.deepcopy(state))
            elif what == "broadcast":
                hvd.broadcast_parameters(net.state_dict(), root_rank=0)
            else:
                net.load_state_dict(own if what == "own" else rank_0s)
        for worker in self.simulated.workers:
            worker.optimizer.zero_grad()
        self.tell_who_is_frozen()
        self.commit()

    def go_back(self):
        """Go back to what was saved, in the same process."""
        if self.saved is None:
            return
        (state, momenta, own, scaler), simulated = copy.deepcopy(self.saved)
        optimizer = self.worker.optimizer
        loads = [(self.worker.net, own), (optimizer, momenta), (optimizer.compression, state)]
        for one, its in self.choose((loads, loads[::-1])):
            one.load_state_dict(its)
        if scaler is not None:
            self.scaler.load_state_dict(scaler)
        self.simulated.load(simulated)

    def commit(self):
        self.elastic.save()
        self.committed = self.scaler and self.scaler.state_dict(), self.simulated.save()

    def restore(self):
        """A worker was lost: all ranks go back, and meet."""
        self.elastic.restore()
        self.simulated.load(self.committed[1])
        if self.scaler is not None:
            self.scaler.load_state_dict(self.committed[0])
        self.meet()

    def meet(self):
        self.elastic.sync()


def draw_setting(choose):
    whole = choose((True, True, False))
    optimizer = choose(("SGD", "SGD", "Adam", *OPTIMIZERS))
    several = optimizer in ("LBFGS", "LBFGS, searching", "twice")
    fields = {"rate": 1 if whole else 10, "bucket_bytes": choose((25 * 2**20, 300)), "beta": 1.0}
    some = ("ScaleCom", "ScaleCom", "LocalTopK", "RandomK")
    kind = choose((None, "ScaleCom", "LocalTopK") if whole else some)
    if kind == "ScaleCom":
        fields |= {
            "selection": choose(("lanes", "exact")),
            "leader": choose(("cyclic", "staggered")),
            "lookahead": choose((False, True)),
        }
        if not whole:  # plain PyTorch does not give rounded numbers
            few_bits = {"bits": 3, "rate": choose((10, 1, {0: 1, 5: 10})), "selection": "lanes"}
            fields |= choose(({}, {}, few_bits))
    local_steps = choose((1, 2, 3, 4, 6, {0: 1, 3: 4}, {0: 4, 6: 2, 9: 3}))
    least = min(local_steps.values()) if isinstance(local_steps, dict) else local_steps
    fragments = choose((1, 1, 2, 3))
    wide = torch.float64
    return {
        "whole": whole,
        "compression": (kind, fields),
        "local_steps": local_steps,
        "overlap": choose((0, *range(max(least // fragments, 1)))),
        "fragments": fragments,
        "outer": choose((None, None, *OUTERS)),
        "optimizer": optimizer,
        "several": several,
        "dtype": choose((wide, wide, wide if several else torch.float32)),
        "scaler": not several and choose((False, False, True)),
        "passes": choose((1, 1, 2)),
    }


def draw_plan(choose, setting):
    ranks = range(hvd.size())
    closure = setting["several"] or choose((False, False, True))
    return {
        "seed": choose(range(10**6)),
        "closure": closure,
        "passes": choose((1, 1, 2, 3)),
        "zero": choose(("none", "none", "zeros", "left")),
        "detours": [choose((True, True, False)) for _ in ranks],
        "bad": choose(((None, 0),) * 3 + ((choose(ranks), choose((float("inf"), float("nan")))),)),
        "hand": choose((None, None, None, choose(ranks))),
        "factor": choose((1, 1, 0.5)),
        # A rank whose gradients are 1000 times as long. Nothing is cut off residues of changes.
        "outlier": choose((None,) * 4 + (choose(ranks),)),
        "synchronize": choose((0, 0, 1, 2)),
        "skip": choose((False, True)),
        "clip": choose((None, None, 0.1)),
        "shared": choose((None, None, "nameless", "named")) if not closure else None,
        "raises": choose((None,) * 6 + (choose(ranks),)),
        "nobody steps": choose((False, True)),
    }


def check(program):
    choose = program.choose
    trainings = [Training(program) for _ in range(choose((1, 1, 2)))]
    for _ in range(LINES):
        training = choose(trainings)
        program.note(f"{trainings.index(training)}:")
        training.line(choose(RULES))


@limited
def test_random_programs():
    for make in OPTIMIZERS.values():
        # torch imports much of itself when it makes its first optimizer
        make([torch.zeros(1)]).zero_grad()
    gc.collect()
    gc.freeze()  # broadcasts look for deleted optimizers, and need not look here
    run_random_programs(check, on_some_rank, most=25)
