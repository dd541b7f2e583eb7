"""Random programs of calls under DDP, with and without the hook, and with this package's optimizer.

All of them train the same model. If everything is chosen, the parameters are those of plain DDP. At
a rate of 10 they are equal on all ranks. In both cases nothing is lost: what came into averages and
did not come out is in the residues. With the optimizer, gradients are changed at the end between
backward() and step(). All ranks refuse that, and go on. See programs.py.
"""

import contextlib
import functools
import logging
import time

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from made_up import EVERYTHING, SOME
from models import halve_gradient, on_some_rank, same_on_all_ranks
from programs import METHODS, for_method, limited, run_random_programs
from rungs import AUTO, Restless
from test_ddp_hook import ALL, InDtype, Net, batch, hooked, taken_by
from test_torch_changed_gradients import CHANGES, refuses
from torch import nn

from scalecom_hvd import ddp


def draw(program):
    choose, happens, ranks = program.choose, program.happens, range(dist.get_world_size())
    steps = [
        {
            "micro": choose([0, 0, 1, 2]),
            "backwards": choose([1, 1, 1, 2]),
            "head": choose(["both", "both", 0, "by rank"]),
            "twice": happens(0.3),
            "checkpointed": happens(0.3),
            "clip": choose([None, None, 0.1]),
            "overflow": choose([None] * 5 + [0, 1]),
            "to_none": happens(0.5),
            "evaluates": happens(0.2),
            "saves": happens(0.2),
            "late": choose([None, None, 0, 1]),
            "attack": happens(0.15),
            "sharp": choose([None, None, None, None, "averaged", "alone"]),
            "newcomer": happens(0.15),
            "penalty": happens(0.2),
            "halve": choose([[], [], [], list(ranks), [ranks[-1]]]),
        }
        for _ in range(choose([3, 4, 5, 6]))
    ]
    if happens(0.5):
        steps = [steps[0] | {"late": step["late"]} for step in steps]
    # No program is drawn that DDP refuses in some of its modes.
    unused = any(step["head"] != "both" for step in steps)
    alike = all(step == steps[0] | {"late": step["late"]} for step in steps)
    static = alike and not unused
    for step in steps:
        if static:  # It must not begin under no_sync(). Gradients of gradients set ranks apart.
            step |= {"micro": 0, "sharp": step["sharp"] and "averaged", "penalty": False}
        if unused:
            step |= {"checkpointed": False, "twice": False}
        if step["checkpointed"]:
            step["penalty"] = False
        if step["halve"]:  # if ranks differ, it matters whether they averaged before
            step["backwards"] = 1
    outliers = choose([4.0, None])
    if outliers is None:  # nothing is cut off residues, but averages are clipped
        steps = [step | {"clip": 0.1, "outlier": choose([None, None, *ranks])} for step in steps]
    method = choose(METHODS)
    settings = {
        "outliers": outliers,
        "lookahead": happens(0.5),
        "leader": choose(["cyclic", "staggered"]),
        "bucket_bytes": choose([3000, 8000, 10**7]),
        "warmup_steps": choose([0, 0, 2]),
    }
    changes = [name for name in CHANGES if name != "mask"]
    return {
        "steps": steps,
        "momentum": choose([0.0, 0.9]),
        "two_dtypes": happens(0.5),
        "of_ddp": {
            "find_unused_parameters": unused,
            "gradient_as_bucket_view": happens(0.5),
            "static_graph": static,
            "bucket_cap_mb": choose([0.003, 0.01, 25]),
        },
        "method": method,
        "settings": for_method(getattr(ddp, method), settings),
        # Only for ScaleCom at rate 10: nothing else gives what rounded integers give.
        "integers": choose(
            [{"bits": 32}, {"bits": 4, "rate": choose([10, 1, {0: 1, 2: 4}])}, AUTO]
        ),
        "change": (choose(changes), choose([list(ranks), [choose(ranks)]])),
    }


class Run:
    """A program on this rank.

    sent: EVERYTHING or SOME, or None for plain DDP.
    by_optimizer: whether this package's optimizer trains a model that is not wrapped.
    said: returns the warnings that ScaleCom has logged since.
    """

    def __init__(self, program, sent, by_optimizer, said):
        self.program, self.by_optimizer, self.said = program, by_optimizer, said
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, growth_interval=2)
        method = getattr(ddp, program["method"])
        settings = program["settings"] | {"loss_scale": self.scaler}
        if sent == SOME and method is ddp.ScaleCom:
            settings |= program["integers"]
        net = Net()
        if program["two_dtypes"]:
            net.body[2] = InDtype(net.body[2], torch.float64)
        sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=program["momentum"])
        if by_optimizer:
            self.state = self.compression = method(**(ALL | taken_by(method, sent) | settings))
            self.model = net
            self.optimizer = ddp.DistributedOptimizer(sgd, net.named_parameters(), self.state)
        else:
            self.model, self.state = hooked(sent, net, method, settings, **program["of_ddp"])
            self.optimizer = sgd
            if self.state is not None:
                self.compression = self.state.compression
                self.state.reduce = functools.partial(self.reduce, self.state.reduce)
        self.parameters = list(net.parameters())
        self.names = [name for name, _ in net.named_parameters()]
        self.threw_away = False
        # For one backward: parameters, what came into their averages, and what came out.
        self.averaged = []
        # For all backwards, unscaled: what came in and did not come out, and how much was moved.
        self.left = {p: torch.zeros_like(p, dtype=torch.float64) for p in self.parameters}
        self.before = self.left
        self.thrown = 0
        self.moved = 1e-3

    def all(self):
        """Run all steps, and return the parameters after the last one."""
        for number, step in enumerate(self.program["steps"]):
            self.step(number, step)
        # Until some step has been taken, nobody can tell what uses averages.
        if self.threw_away and any(step["overflow"] is None for step in self.program["steps"]):
            assert self.thrown or any("no optimizer step" in message for message in self.said())
        self.check_conserved()
        return [parameter.detach().clone() for parameter in self.parameters]

    def step(self, number, step):
        rank = dist.get_rank()
        halves = self.parameters if rank in step["halve"] else []
        hooks = [p.register_post_accumulate_grad_hook(halve_gradient) for p in halves]
        self.optimizer.zero_grad(set_to_none=step["to_none"])
        if step["attack"]:
            self.average_and_throw_away(number, step)
        here = [parameter.detach().clone() for parameter in self.parameters]
        if step["sharp"]:
            self.go_where_it_is_steep(number, step)
        self.let_add_up(step["micro"] + step["backwards"])
        with self.no_sync():
            for micro in range(step["micro"]):
                self.loss(number, micro, step).backward()
        for micro in range(step["backwards"]):
            if step["late"] == rank:
                time.sleep(0.005)
            factor = float("inf") if step["overflow"] == rank else 1.0
            factor *= 1e4 if step.get("outlier") == rank else 1.0
            (self.loss(number, 5 + micro, step) * factor).backward()
            self.note_averages()
        with torch.no_grad():
            for parameter, original in zip(self.parameters, here, strict=True):
                parameter.copy_(original)
        if step["newcomer"]:
            self.add_a_parameter()
        self.synchronize()
        self.scaler.unscale_(self.optimizer)
        if step["clip"] is not None:
            nn.utils.clip_grad_norm_(self.parameters, step["clip"])
        with self.optimizer.skip_synchronize() if self.by_optimizer else contextlib.nullcontext():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        for hook in hooks:
            hook.remove()
        if step["evaluates"]:
            with torch.no_grad():
                self.model.eval()(batch(number, 9))
                self.model.train()
        if step["saves"] and self.state is not None:
            self.state.load_state_dict(self.state.state_dict())

    def loss(self, number, micro, step):
        head = (number + dist.get_rank()) % 2 if step["head"] == "by rank" else step["head"]
        x = batch(number, micro).requires_grad_(step["penalty"])
        loss = self.model(x, head=head, twice=step["twice"], checkpointed=step["checkpointed"])
        if step["penalty"]:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + 0.1 * (slope.norm(dim=1) - 1).square().mean()
        return self.scaler.scale(loss)

    def no_sync(self):
        return contextlib.nullcontext() if self.by_optimizer else self.model.no_sync()

    def let_add_up(self, passes):
        if self.by_optimizer:
            self.optimizer.set_backward_passes_per_step(passes)

    def synchronize(self):
        if self.by_optimizer:
            came = [gradient_of(p) for p in self.parameters]
            self.optimizer.synchronize()
            self.averaged = [(p, own, p.grad) for p, own in zip(self.parameters, came, strict=True)]
            self.note_averages()

    def reduce(self, reduce, bucket):
        """The hook. It averages gradients in place."""
        came = [gradient.clone() for gradient in bucket.gradients()]
        future = reduce(bucket)
        self.averaged += zip(bucket.parameters(), came, bucket.gradients(), strict=True)
        return future

    def note_averages(self):
        """Count what came in and went out, unless the step is skipped."""
        averaged, self.averaged = self.averaged, []
        if averaged and self.state is not None:
            thrown = self.compression.stats()["averages_thrown_away"]
            if thrown > self.thrown:  # residues became what they were before those averages
                self.left = self.before
            self.before = {parameter: left.clone() for parameter, left in self.left.items()}
            self.thrown = thrown
        scale = self.scaler.get_scale()
        # A skipped step is taken back, except for the rounding of its gradients.
        for _, came, _ in averaged:
            self.moved += float(came.nan_to_num(0, 0, 0).abs().max() / scale)
        if all(went.isfinite().all() for _, _, went in averaged):
            for parameter, came, went in averaged:
                # DDP drops the average of a parameter that no rank has used.
                if parameter.grad is None or not torch.equal(parameter.grad, went):
                    went = torch.zeros_like(went)
                self.left[parameter] += (came.double() - went) / scale
                self.moved += float(went.abs().max() / scale)

    def residues(self):
        """Each parameter's residue, in the gradients' units."""
        tensors = self.compression.residues.tensors
        return {
            p: (tensors[name].residue / tensors[name].beta).double().view(p.shape)
            if name in tensors
            else torch.zeros_like(p, dtype=torch.float64)
            for name, p in zip(self.names, self.parameters, strict=True)
        }

    def check_conserved(self):
        """Check that nothing is missing in all. What went out is the same on all ranks."""
        if self.state is None:
            return
        lost = torch.cat([(self.left[p] - r).view(-1) for p, r in self.residues().items()])
        moved = torch.tensor(self.moved, dtype=torch.float64)
        dist.all_reduce(lost)
        dist.all_reduce(moved)
        worst = float(lost.abs().max())
        assert worst <= 1e-6 * moved, f"{worst:g} of {float(moved):g} are neither sent nor waiting"

    def add_a_parameter(self):
        """Add a parameter to an optimizer made without it. All ranks refuse until it is frozen."""
        parameter = nn.Parameter(torch.ones(3))
        self.optimizer.add_param_group({"params": [parameter]})
        if self.by_optimizer:
            with pytest.raises(RuntimeError, match="Make a new DistributedOptimizer"):
                self.optimizer.step()
        parameter.requires_grad_(False)

    def average_and_throw_away(self, number, step):
        """Do as the fast gradient sign method, which wants only the inputs' gradients."""
        self.average(number, 8, step)
        self.optimizer.zero_grad(set_to_none=step["to_none"])

    def average(self, number, micro, step):
        before = 0 if self.state is None else self.compression.residues.step
        self.let_add_up(1)
        self.loss(number, micro, step).backward()
        self.note_averages()
        self.synchronize()
        if self.state is not None:
            stats = self.compression.stats()
            has_sent = stats["bytes_values"] or stats["bytes_gathered"]
            self.threw_away |= stats["step"] > before and bool(has_sent)

    def go_where_it_is_steep(self, number, step):
        """Take a sharpness-aware step along the average, or along each rank's own gradient."""
        if step["sharp"] == "averaged":
            self.average(number, 7, step)
            slopes = [parameter.grad for parameter in self.parameters]
        elif self.by_optimizer:
            loss = self.loss(number, 7, step)
            slopes = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            factor = 0.5 if dist.get_rank() in step["halve"] else 1.0
            slopes = [None if slope is None else slope * factor for slope in slopes]
        else:
            with self.no_sync():
                self.loss(number, 7, step).backward()
            slopes = [parameter.grad for parameter in self.parameters]
        with torch.no_grad():
            for parameter, slope in zip(self.parameters, slopes, strict=True):
                if slope is not None:
                    parameter.add_(slope, alpha=0.01 / self.scaler.get_scale())
        self.optimizer.zero_grad(set_to_none=step["to_none"])

    def change_on_the_way(self):
        """Change gradients on some ranks between backward() and step().

        All ranks refuse that, because they have agreed to. Then they go on.
        """
        how, ranks = self.program["change"]
        before = self.residues()
        here = [parameter.detach().clone() for parameter in self.parameters]
        self.let_add_up(1)
        self.optimizer.zero_grad()
        self.model(batch(99), head="both").backward()
        came = {p: gradient_of(p).double() for p in self.parameters}
        if dist.get_rank() in ranks:
            CHANGES[how](self.parameters)
        assert refuses(self.optimizer.step), f"{how} on ranks {ranks}"
        assert all(map(torch.equal, self.parameters, here))
        for parameter, residue in self.residues().items():
            kept, whole = residue - before[parameter], came[parameter] / self.scaler.get_scale()
            near = 1e-5 * (1 + residue.abs().max())
            assert min(kept.abs().max(), (kept - whole).abs().max()) <= near
            self.left[parameter] += kept
        for number, step in enumerate(self.program["steps"][:2], 100):
            self.step(number, step)
        self.check_conserved()
        assert same_on_all_ranks(self.parameters)


def gradient_of(parameter):
    """A copy of the parameter's gradient, or zeros if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def hold(program, caplog):
    program = program.note(draw(program))

    def run(sent, by_optimizer=False):
        caplog.clear()
        one = Run(program, sent, by_optimizer, lambda: [r.getMessage() for r in caplog.records])
        parameters = one.all()
        # An optimizer that has just loaded a state exchanges the gradients that it finds.
        if by_optimizer and not program["steps"][-1]["saves"]:
            one.change_on_the_way()
        elif sent is not None and not by_optimizer:
            del one.state.reduce  # DDP's C++ holds the state, and no collector frees such a cycle
        return parameters

    plain, everything, few = (run(sent) for sent in (None, EVERYTHING, SOME))
    compare(everything, plain, few)
    everything, few = (run(sent, by_optimizer=True) for sent in (EVERYTHING, SOME))
    # If DDP has no gradient, the optimizer has zeros, so its momentum goes on.
    unused = program["of_ddp"]["find_unused_parameters"]
    compare(everything, everything if unused and program["momentum"] else plain, few)


def compare(everything, plain, few):
    torch.testing.assert_close(everything, plain, rtol=1e-3, atol=1e-5)
    assert same_on_all_ranks(few)
    assert all(p.isfinite().all() for p in few)


@limited
def test_random_programs(caplog, monkeypatch):
    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", Restless)
    caplog.set_level(logging.WARNING, "scalecom_hvd")
    torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()  # warnings need an optimizer that steps
    run_random_programs(lambda program: hold(program, caplog), on_some_rank, most=12)
