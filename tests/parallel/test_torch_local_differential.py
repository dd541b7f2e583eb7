"""Random programs of local steps on real ranks, compared with plain PyTorch.

What a script does here on real ranks, every rank also does in plain PyTorch for all n workers. A
worker is a model, an ordinary optimizer and perhaps a GradScaler. At the schedule's steps the
workers' parameters are averaged.

With everything chosen, parameters must be equal after every line of the program. At rate 10 they
must be equal between synchronisations. At synchronisations nothing may be lost: what left the
ranks' residues and changes, averaged, is what the common parameters moved by.

Every rank makes the same programs from the same seed. By default every run makes the same programs:
as many as fit into some seconds, but at most PROGRAMS. FUZZ_SECONDS says how long to make new
programs, and FUZZ_SEED is the first seed. A program that fails is printed with its seed.
"""

import contextlib
import copy
import gc
import io
import math
import os
import random
import time

import pytest
import torch

import scalecom_hvd.torch as hvd

SECONDS = float(os.environ.get("FUZZ_SECONDS", 10))
PROGRAMS = None if "FUZZ_SECONDS" in os.environ else 25
FIRST_SEED = int(os.environ.get("FUZZ_SEED", 0))
LINES = 16
RULES = (
    *("step",) * 10,
    *(
        "end the round",
        "freeze",
        "collective",
        "save",
        "resume",
        "resume",
        "go back",
        "commit",
        "restore",
        "meet",
    ),
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


class Twice(torch.optim.Optimizer):
    """Evaluates the closure again at the point that its momentum leads to."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        trained = [p for group in self.param_groups for p in group["params"]]
        loss = torch.enable_grad()(closure)()
        for p in trained:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.5)
            if p.grad is not None:
                momentum.add_(p.grad)
            p.sub_(momentum, alpha=self.param_groups[0]["lr"])
        torch.enable_grad()(closure)()
        for p in (p for p in trained if p.grad is not None):
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.03, eps=1e-3),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.3, max_iter=3, history_size=2),
    "LBFGS, searching": lambda params: torch.optim.LBFGS(
        params, lr=0.3, max_iter=3, history_size=2, line_search_fn="strong_wolfe"
    ),
    "twice": Twice,
}


OUTERS = {
    "Nesterov": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.75, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.03, eps=1e-3),
}


class BadGradient(Exception):  # noqa: N818
    """A worker of plain PyTorch raises it."""


class Plain:
    """Makes local steps of an ordinary optimizer, without the averages.

    A step with a bad gradient is as if nobody had asked for it.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.zero_grad, self.state_dict, self.load_state_dict = (
            optimizer.zero_grad,
            optimizer.state_dict,
            optimizer.load_state_dict,
        )
        self.synchronize, self.skip_synchronize = lambda: None, contextlib.nullcontext

    def check(self):
        if not all(bool(p.grad.isfinite().all()) for p in self.parameters if p.grad is not None):
            raise BadGradient

    def step(self, closure=None):
        def checked():
            loss = closure()
            self.check()
            return loss

        with contextlib.suppress(BadGradient):
            if closure is None:
                self.check()
            self.optimizer.step(*([checked] if closure else []))


class Worker:
    """One rank's model, optimizer and scaler. The rank is real or simulated."""

    def __init__(self, rank, net, optimizer, scaler, plain):
        self.rank, self.net, self.optimizer, self.scaler, self.plain = (
            rank,
            net,
            optimizer,
            scaler,
            plain,
        )

    def loss(self, hidden, plan, number):
        target = torch.randn(
            4, 5, dtype=hidden.dtype, generator=self.random(plan, number + 100)
        ).clamp(-1, 1)
        loss = torch.nn.functional.mse_loss(torch.tanh(self.net.last(hidden)), target)
        return self.scaler.scale(loss) if self.scaler is not None and not plan["closure"] else loss

    def random(self, plan, number):
        return torch.Generator().manual_seed((plan["seed"] * 1000 + number) * 10 + self.rank)

    def hidden(self, plan, number):
        if plan["raises"] == self.rank and number == 0:
            raise ZeroDivisionError("in forward")
        inputs = torch.randn(
            4, 6, dtype=self.net.last.weight.dtype, generator=self.random(plan, number)
        )
        return self.net.hidden(inputs, plan["detours"][self.rank])

    def take(self, plan):
        """Do what comes after backward, including the step."""
        optimizer, parameters = self.optimizer, list(self.net.parameters())
        if plan["hand"] == self.rank != plan["raises"]:
            parameters[0].grad = torch.full_like(parameters[0], 0.25)
        for p in parameters:
            if plan["halved"] and p.grad is not None:
                p.grad.mul_(0.5)
        if plan["bad"][0] == self.rank and parameters[-1].grad is not None:
            parameters[-1].grad[2] = plan["bad"][1]
        for _ in range(plan["synchronize"]):
            optimizer.synchronize()
        # A scaler refuses to step without gradients.
        scaler = self.scaler if any(p.grad is not None for p in parameters) else None
        if plan["clip"]:
            if scaler is not None:
                scaler.unscale_(optimizer.optimizer if self.plain else optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, plan["clip"])
        with optimizer.skip_synchronize() if plan["skip"] else contextlib.nullcontext():
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer.optimizer if self.plain else optimizer)
                scaler.update()

    def take_by_closure(self, plan):
        evaluations = 0

        def closure():
            nonlocal evaluations
            evaluations += 1
            self.net.zero_grad(plan["zero"] != "zeros")
            loss = self.loss(self.hidden(plan, 1), plan, 1)
            if loss.requires_grad:
                loss.backward()
            for _ in range(plan["synchronize"]):
                self.optimizer.synchronize()
            if plan["clip"]:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), plan["clip"])
            if (
                plan["bad"][0] == self.rank
                and evaluations == 1
                and self.net.last.bias.grad is not None
            ):
                self.net.last.bias.grad[2] = plan["bad"][1]
            return loss.detach()

        if plan["raises"] == self.rank:
            self.optimizer.zero_grad()  # nothing to evaluate: a closure that computes no gradient
            self.optimizer.step(lambda: torch.zeros(()))
            return
        self.optimizer.step(closure)


def train(workers, plan, share):
    """Run the lines of a training script for these workers. Return whether they took a step.

    share: returns for each worker what all of them share in the middle.
    """
    if plan["closure"]:
        if plan["raises"] is not None and plan["nobody steps"]:
            return False
        for worker in workers:
            worker.take_by_closure(plan)
        return True
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
            hidden = {
                worker: one + common
                for (worker, one), common in zip(hidden.items(), middle, strict=True)
            }
        loss = sum(worker.loss(one, plan, number) for worker, one in hidden.items())
        if hidden and loss.requires_grad:
            loss.backward()
    if plan["raises"] is not None and plan["nobody steps"]:
        return False
    for worker in workers:
        worker.take(plan)
    return True


def shared_by_horovod(hidden, plan, number):
    return [
        hvd.allreduce(
            hidden[0], name=None if plan["shared"] == "nameless" else f"fuzz.middle.{number}"
        )
    ]


def shared_by_all(hidden, plan, number):
    return [sum(hidden) / len(hidden)] * len(hidden)


class Simulated:
    """All workers in plain PyTorch.

    x: the common parameters.
    start: the parameters with which each worker began its round.
    fragments: the parameters' names in each fragment, as the real optimizer tells them.
    """

    def __init__(self, setting):
        self.setting, n = setting, hvd.size()
        self.workers = []
        for rank in range(n):
            net = Net(setting["dtype"])
            self.workers.append(
                Worker(
                    rank,
                    net,
                    Plain(OPTIMIZERS[setting["optimizer"]](net.parameters())),
                    make_scaler(setting),
                    True,
                )
            )
        self.names = [name for name, _ in net.named_parameters()]
        self.x = self.values()[0]
        self.outer = None
        if setting["outer"] is not None:
            self.common = {name: torch.nn.Parameter(x.clone()) for name, x in self.x.items()}
            self.outer = OUTERS[setting["outer"]](self.common.values())
        self.start = dict(self.x)
        self.fragments = [self.names]
        self.taken = self.last = 0
        # departed: (since, the average, the workers' parameters) of what travels. brought: what
        # this rank brought to it in the real run (its change, its residues before).
        self.departed = self.brought = None

    def values(self):
        return [
            {name: p.detach().clone() for name, p in worker.net.named_parameters()}
            for worker in self.workers
        ]

    def set(self, rank, values):
        with torch.no_grad():
            for name, p in self.workers[rank].net.named_parameters():
                p.copy_(values[name])

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
        values, n = self.values(), len(self.workers)
        average = {
            name: sum(self.start[name] - worker[name] for worker in values) / n for name in names
        }
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
        with torch.no_grad():
            for name, common in self.common.items():
                common.copy_(self.x[name])
                common.grad = average[name].clone() if name in changed else None
        self.outer.step()
        self.x = {name: common.detach().clone() for name, common in self.common.items()}

    def arrive(self):
        _, average, sent_from = self.departed
        values, self.departed = self.values(), None
        for rank in range(len(values)):
            meanwhile = {name: values[rank][name] - sent_from[rank][name] for name in average}
            moved = {name: self.x[name] + change for name, change in meanwhile.items()}
            self.set(rank, values[rank] | moved)
        self.start = self.start | {name: self.x[name] for name in average}

    def save(self):
        kept = [
            (worker.optimizer.state_dict(), worker.scaler and worker.scaler.state_dict())
            for worker in self.workers
        ]
        outer = self.outer and self.outer.state_dict()
        steps = self.taken, self.last, self.departed, self.brought
        return copy.deepcopy([kept, self.values(), self.x, self.start, steps, outer])

    def load(self, saved):
        kept, values, self.x, self.start, steps, outer = copy.deepcopy(saved)
        self.taken, self.last, self.departed, self.brought = steps
        if outer is not None:
            self.outer.load_state_dict(outer)
        for worker, (state, scaler), value in zip(self.workers, kept, values, strict=True):
            worker.optimizer.load_state_dict(state)
            if scaler is not None:
                worker.scaler.load_state_dict(scaler)
            self.set(worker.rank, value)


def make_scaler(setting):
    return (
        torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        if setting["scaler"]
        else None
    )


class Training:
    """A model's training in a program: this rank's real one, and the simulated one of all ranks."""

    def __init__(self, setting, choose, log):
        self.setting, self.choose, self.log = setting, choose, log
        self.simulated = Simulated(setting)
        self.frozen, self.saved, self.committed, self.seen = set(), None, None, []
        self.scaler = make_scaler(setting)
        net = Net(setting["dtype"])
        self.make(net, self.compressor())
        self.commit()

    def compressor(self):
        kind, fields = self.setting["compression"]
        return (
            hvd.Compression.none
            if kind is None
            else getattr(hvd, kind)(**({"min_numel": 2, "dense": [], "warmup_steps": 0} | fields))
        )

    def make(self, net, compressor):
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[self.setting["optimizer"]](net.parameters()),
            net.named_parameters(),
            compression=compressor,
            local_steps=self.setting["local_steps"],
            outer=OUTERS.get(self.setting["outer"]),
            overlap=self.setting["overlap"],
            fragments=self.setting["fragments"],
            backward_passes_per_step=self.setting["passes"],
        )
        self.worker = Worker(hvd.rank(), net, optimizer, self.scaler, False)
        self.watch(optimizer._local)
        self.elastic = hvd.elastic.TorchState(net, optimizer)

    def watch(self, local):
        """Record what every synchronisation begins and ends with."""
        depart, arrive = local._depart, local._arrive
        self.simulated.fragments = local._fragments
        own = dict(self.worker.net.named_parameters())

        def see_what_departs(fragments):
            changes = {
                name: (
                    local.common[name].detach().to(own[name].dtype) - own[name].detach()
                ).double()
                for fragment in fragments
                for name in local._fragments[fragment]
            }
            self.simulated.brought = changes, self.residues()
            depart(fragments)

        def see_what_arrives(everywhere=True):
            before = {name: x.detach().clone() for name, x in local.common.items()}
            travelled = local._journey is not None
            happened = arrive(everywhere)
            if travelled:
                changes, residues = self.simulated.brought
                left = self.residues()
                now = {name: one.detach().clone() for name, one in local.common.items()}
                sent = {n: c + residues.get(n, 0) - left.get(n, 0) for n, c in changes.items()}
                self.seen.append((happened, before, now, sent))
            return happened

        local._depart, local._arrive = see_what_departs, see_what_arrives

    def residues(self):
        tensors = self.worker.optimizer.compression.residues.tensors
        return {
            name: tensor.residue.view(tensor.shape).double().clone()
            for name, tensor in tensors.items()
        }

    def line(self, rule):
        self.log.append(rule)
        {
            "step": self.step,
            "end the round": self.end_the_round,
            "freeze": self.freeze,
            "collective": self.collective,
            "save": self.save,
            "resume": self.resume,
            "go back": self.go_back,
            "commit": self.commit,
            "restore": self.restore,
            "meet": self.meet,
        }[rule]()
        self.compare()

    def step(self):
        plan = draw_plan(self.choose, self.setting)
        if "first" in self.frozen:
            # in backward only ranks with a detour would get to it, which hangs with any library
            plan["shared"] = None
        self.log.append(
            {key: value for key, value in plan.items() if value not in (None, False, 0)}
        )
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
            self.simulated.depart(self.simulated.names)
            self.synchronised()

    def synchronised(self):
        happened, before, now, sent = self.seen.pop(0)
        _, average_of_changes, _ = self.simulated.departed
        assert happened
        average = {
            name: hvd.allreduce(one, name=f"fuzz.sent.{name}").to(now[name].dtype)
            for name, one in sent.items()
        }
        changed = {name for name, one in average.items() if one.any()}
        if self.setting["whole"]:
            average = average_of_changes
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
        mine = torch.cat([p.detach().reshape(-1) for p in self.worker.net.parameters()])
        everyone = hvd.allgather(mine[None], name="fuzz.parameters")
        for rank, (actual, worker) in enumerate(zip(everyone, self.simulated.workers, strict=True)):
            expected = torch.cat([p.detach().reshape(-1) for p in worker.net.parameters()])
            assert expected.isfinite().all()
            torch.testing.assert_close(
                actual,
                expected,
                **TOLERANCES[self.setting["dtype"]],
                msg=lambda m, rank=rank: f"rank {rank}: {m}",
            )
            torch.nn.utils.vector_to_parameters(actual.clone(), worker.net.parameters())
        assert (
            self.worker.optimizer.compression.stats()["local_steps_taken"] == self.simulated.taken
        )

    def freeze(self):
        self.frozen ^= {self.choose(("first", "detour", "last"))}
        self.log.append(set(self.frozen))
        self.tell_who_is_frozen()

    def tell_who_is_frozen(self):
        for worker in [self.worker, *self.simulated.workers]:
            for name, p in worker.net.named_parameters():
                p.requires_grad_(name.split(".")[0] not in self.frozen)

    def collective(self):
        name = self.choose((None, "fuzz.mine"))
        self.log.append(name)
        total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum, name=name)
        assert total == hvd.size() * (hvd.size() + 1) / 2
        assert (
            len(hvd.allgather(torch.zeros(1 + hvd.rank()), name=name and name + ".gather")) == total
        )

    # Checkpoints and elastic states.

    def checkpoint(self):
        file = io.BytesIO()
        optimizer = self.worker.optimizer
        state = [
            optimizer.compression.state_dict(),
            optimizer.state_dict(),
            self.worker.net.state_dict(),
        ]
        torch.save([*state, self.scaler and self.scaler.state_dict()], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def save(self):
        self.saved = self.checkpoint(), self.simulated.save()

    def resume(self):
        """Start a new process: it loads rank 0's model, and then perhaps this rank's own."""
        state, momenta, own, _ = self.checkpoint()
        rank_0s = hvd.broadcast_object(own, root_rank=0, name="fuzz.model")
        order = self.choose(ORDERS).split()
        self.log.append(order)
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
        loads = [
            lambda: self.worker.net.load_state_dict(own),
            lambda: self.worker.optimizer.load_state_dict(momenta),
            lambda: self.worker.optimizer.compression.load_state_dict(state),
        ]
        for load in self.choose((loads, loads[::-1])):
            load()
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
    kind = choose(
        (None, "ScaleCom", "LocalTopK")
        if whole
        else ("ScaleCom", "ScaleCom", "LocalTopK", "RandomK")
    )
    if kind == "ScaleCom":
        fields |= {
            "selection": choose(("lanes", "exact")),
            "leader": choose(("cyclic", "staggered")),
        }
        fields |= {"lookahead": choose((False, True))}
        if not whole:  # plain PyTorch does not give rounded numbers
            fields |= choose(({}, {}, {"bits": 3, "warmup_rate": choose((1, 4))}))
    local_steps = choose((1, 2, 3, 4, 6, {0: 1, 3: 4}, {0: 4, 6: 2, 9: 3}))
    least = min(local_steps.values()) if isinstance(local_steps, dict) else local_steps
    fragments = choose((1, 1, 2, 3))
    overlap = choose((0, *range(max(least // fragments, 1))))
    return {
        "whole": whole,
        "compression": (kind, fields),
        "local_steps": local_steps,
        "overlap": overlap,
        "fragments": fragments,
        "outer": choose((None, None, *OUTERS)),
        "optimizer": optimizer,
        "several": several,
        "dtype": choose(
            (torch.float64, torch.float64, torch.float64 if several else torch.float32)
        ),
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
        "halved": choose((False, False, True)),
        "synchronize": choose((0, 0, 1, 2)),
        "skip": choose((False, True)),
        "clip": choose((None, None, 0.1)),
        "shared": choose((None, None, "nameless", "named")) if not closure else None,
        "raises": choose((None,) * 6 + (choose(ranks),)),
        "nobody steps": choose((False, True)),
    }


def run_program(seed, log):
    choose = random.Random(seed).choice
    trainings = []
    for _ in range(choose((1, 1, 2))):
        setting = draw_setting(choose)
        log.append(setting)
        trainings.append(Training(setting, choose, log))
    for _ in range(LINES):
        number = choose(range(len(trainings)))
        log.append(f"{number}:")
        trainings[number].line(choose(RULES))


def on_some_rank(fact):
    """Whether `fact` is true on some rank. All ranks ask together, so that none stops by itself."""
    return bool(hvd.allreduce(torch.tensor(float(fact)), op=hvd.Sum, name="fuzz.on_some_rank"))


@pytest.mark.timeout(SECONDS + 100)
def test_random_programs():
    for make in OPTIMIZERS.values():
        # torch imports much of itself when it makes its first optimizer
        make([torch.zeros(1)]).zero_grad()
    gc.collect()
    gc.freeze()  # broadcasts look for deleted optimizers, and need not look here
    begun, seed = time.monotonic(), FIRST_SEED
    while not on_some_rank(time.monotonic() - begun > SECONDS or seed - FIRST_SEED == PROGRAMS):
        log = []
        print(f"FUZZ_SEED={seed}")
        try:
            run_program(seed, log)
        except Exception as error:
            program = "\n".join(map(str, log))
            raise AssertionError(
                f"FUZZ_SEED={seed} on {hvd.size()} ranks fails in\n{program}"
            ) from error
        seed += 1
    print(f"programs {FIRST_SEED} to {seed - 1} in {time.monotonic() - begun:.0f} s")
