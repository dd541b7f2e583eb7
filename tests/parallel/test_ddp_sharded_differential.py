"""Random programs of calls with FSDP2, both plain and compressed between nodes.

If everything is chosen, the parameters are those of plain FSDP2 on the same mesh. At a rate of 6
they are equal on all ranks, and nothing is lost: what came into averages and did not come out is in
the residues. See programs.py.
"""

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from devices import DEVICE
from models import on_some_rank, same_on_all_ranks, through_a_file
from programs import Program, limited, run_random_programs
from rungs import AUTO, Restless
from test_ddp_sharded import NAMES, Net, loss, make_mesh, shard, whole
from torch import nn

from scalecom_hvd import ddp


class Interrupted(Exception):
    pass


def draw(program):
    choose, happens, ranks = program.choose, program.happens, range(dist.get_world_size())
    steps = [
        {
            "micro": choose([1, 1, 1, 2, 3]),
            "way": choose(["no sync", "all reduce", "sums of shards", "passes"]),
            "twice": happens(0.25),
            "extra": happens(0.75),
            "checkpointed": happens(0.25),
            "clip": choose([None, None, 0.05]),
            "overflow": choose([None] * 5 + [*ranks]),
            "factors": [1.0 for _ in ranks],
            "to_none": happens(0.6),
            "evaluates": choose([None] * 4 + ["before", "between", "after"]),
            "forward": choose([None] * 5 + ["alone", "that fails"]),
            "saves": happens(0.2),
            "looks": happens(0.2),
        }
        for _ in range(choose([3, 4, 5, 6, 7]))
    ]
    double, outliers = happens(0.8), choose([4.0, None])
    if double and outliers is None:  # nothing is cut off residues, but averages are clipped
        for step in steps:
            step |= {"clip": 0.05, "factors": [choose([1.0] * 5 + [1e3, 1e6]) for _ in ranks]}
    return {
        "steps": steps,
        "frozen": choose([None, None, "body", "first"]),
        "momentum": choose([0.0, 0.9]),
        "dimensions": choose([NAMES, NAMES, "shard"]),
        "reshard": choose([True, False, None]),
        "double": double,
        "method": choose(["ScaleCom", "ScaleCom", "ScaleCom", "LocalTopK", "RandomK"]),
        "settings": {"outliers": outliers, "bucket_bytes": choose([1000, 4000, 10**7])},
        "of_scalecom": {
            "lookahead": happens(0.5),
            "leader": choose(["cyclic", "staggered"]),
            "warmup_steps": choose([0, 0, 2]),
            "nu": choose([None, 1, 1]),
            **choose([{}, {"bits": 3}, AUTO]),
        },
    }


class Run:
    """A program on this rank. If rate is None, it runs with plain FSDP2."""

    def __init__(self, program, rate):
        self.program, self.rate = program, rate
        self.model = Net().double() if program["double"] else Net()
        if program["frozen"]:
            getattr(self.model, program["frozen"]).requires_grad_(False)
        mesh = make_mesh()[NAMES if rate is None else program["dimensions"]]
        shard(self.model, mesh, reshard_after_forward=program["reshard"])
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**6, growth_interval=3)
        self.came, self.seen, self.left = {}, {}, {}
        # These are the shards, which the model does not show between forward and backward.
        self.trained = trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        # The garbage collector does not see what hooks hold.
        itself = weakref.ref(self)
        for name, p in trained.items():
            # FSDP2 calls hooks in the order in which they were registered.
            p.register_post_accumulate_grad_hook(lambda p, name=name: itself().comes(name, p.grad))
            self.left[name] = torch.zeros_like(p.to_local(), dtype=torch.float64)
        optimizer = torch.optim.SGD(trained.values(), lr=0.05, momentum=program["momentum"])
        if rate is not None:
            settings = {"rate": rate, "min_numel": 20, "loss_scale": self.scaler}
            settings |= program["settings"]
            if program["method"] == "ScaleCom":
                own = program["of_scalecom"]
                if rate == 1:
                    own = {k: v for k, v in own.items() if k not in ("bits", "rate")}
                settings |= own
            method = getattr(ddp, program["method"])(**settings)
            optimizer = ddp.DistributedOptimizer(
                optimizer, trained.items(), compression=method, mesh=make_mesh()
            )
        self.optimizer = optimizer

    def go(self):
        for number, step in enumerate(self.program["steps"]):
            self.step(100 * number, step)
            yield

    def step(self, number, step):
        model, optimizer = self.model, self.optimizer
        optimizer.zero_grad(set_to_none=step["to_none"])
        how = {key: step[key] for key in ("twice", "extra", "checkpointed")}
        if step["evaluates"] == "before":
            self.evaluate()
        if step["forward"] == "alone":
            with torch.no_grad():
                loss(model, dist.get_rank(), number + 50)
        elif step["forward"] == "that fails":
            self.fail(number)
        by_passes = step["way"] == "passes"
        if by_passes and self.rate is not None:
            optimizer.set_backward_passes_per_step(step["micro"])
        for micro in range(step["micro"]):
            is_last = micro + 1 == step["micro"]
            # Plain FSDP2 would give the result of "passes" in either way.
            model.set_requires_gradient_sync(step["way"] != "no sync" or is_last)
            model.set_requires_all_reduce(step["way"] != "all reduce" or is_last)
            value = loss(model, dist.get_rank(), number + micro, **how)
            if step["evaluates"] == "between" and step["way"] != "no sync":
                self.evaluate()
            if is_last and step["overflow"] == dist.get_rank():
                value = value * float("inf")
            value = value * step["factors"][dist.get_rank()]
            self.came.clear()
            before = self.grads()
            self.scaler.scale(value).backward()
            if self.rate is not None and (is_last or not by_passes):
                self.note(before)
        if by_passes and self.rate is not None:
            optimizer.set_backward_passes_per_step(1)
        if step["looks"]:
            optimizer.synchronize() if self.rate is not None else None
        self.scaler.unscale_(optimizer)
        if step["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), step["clip"])
        self.scaler.step(optimizer)
        self.scaler.update()
        if step["evaluates"] == "after":
            self.evaluate()
        if step["saves"]:
            self.save_and_load()

    def fail(self, number):
        """Run a forward that raises an error on every rank, in the outermost module."""

        def interrupt(*_):
            raise Interrupted

        hook = self.model.extra.register_forward_hook(interrupt)
        with pytest.raises(Interrupted):
            loss(self.model, dist.get_rank(), number + 60)
        hook.remove()
        # FSDP2 takes the next forward for one inside the forward that failed.
        for module in (self.model, self.model.body, self.model.extra):
            module.reshard()

    def grads(self):
        named = self.trained.items()
        return {n: p.grad.to_local().clone() for n, p in named if p.grad is not None}

    def comes(self, name, grad):
        """Note a gradient, or a part: FSDP2 adds a second part to the first, unless taken."""
        own = grad.to_local().clone()
        if name in self.came and self.seen[name] is not grad:
            own += self.came[name]
        self.came[name], self.seen[name] = own, grad

    def note(self, before):
        """Note what came into this backward's averages and did not come out."""
        grads = self.grads()
        if any(not grad.isfinite().all() for grad in grads.values()):
            assert all(grad.isnan().all() for grad in grads.values())
            return
        scale = self.scaler.get_scale()
        for name, out in grads.items():
            came = self.came.get(name, before.get(name))
            self.left[name] += (came.double() - out.double()) / scale

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            found = self.model(torch.ones(3, 12, dtype=next(self.model.parameters()).dtype))
        self.model.train()
        assert same_on_all_ranks([found])

    def save_and_load(self):
        state = [copy.deepcopy(self.model.state_dict()), self.optimizer.state_dict()]
        model, optimizer = through_a_file(state, weights_only=False)
        with torch.no_grad():
            for p in self.model.parameters():
                p.to_local().zero_()
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if self.rate is not None:
            compression = self.optimizer.compression
            saved = through_a_file(compression.state_dict())
            for tensor in compression.residues.tensors.values():
                tensor.residue.fill_(7)
            compression.load_state_dict(saved)

    def check_nothing_is_lost(self):
        tensors = self.optimizer.compression.residues.tensors
        for name, total in self.left.items():
            if name in tensors:
                waits = (tensors[name].residue / tensors[name].beta).view(total.shape)
                total = total - waits.double()
            total = total.clone()
            dist.all_reduce(total, group=make_mesh().get_group("replicate"))
            if total.numel():
                assert total.abs().max() < 2e-5, name


def check(program):
    torch.manual_seed(1)
    plain, chosen = Run(program, None), Run(program, 1)
    for _ in zip(plain.go(), chosen.go(), strict=True):
        expected = whole(plain.model)
        for name, p in whole(chosen.model).items():
            rtol = 1e-9 if program["double"] else 1e-3
            assert torch.allclose(p, expected[name], rtol=rtol, atol=rtol / 100), name
    compressed = Run(program, 6)
    for _ in compressed.go():
        assert same_on_all_ranks(whole(compressed.model).values())
    compressed.check_nothing_is_lost()


@limited
def test_random_programs(monkeypatch):
    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", Restless)
    run_random_programs(lambda program: check(program.note(draw(program))), on_some_rank, most=8)


def test_a_gradient_that_is_reduced_in_two_parts_is_not_lost():
    """A module that is called twice, after a pass without synchronisation, has such a gradient."""
    program = draw(Program(0))
    one = {**program["steps"][0], "micro": 1, "way": "no sync", "twice": False, "overflow": None}
    one |= {"evaluates": None, "forward": None, "saves": False, "extra": True}
    twice = one | {"micro": 2, "twice": True}
    program |= {"steps": [one, twice, twice], "frozen": None, "method": "ScaleCom"}
    check(program | {"of_scalecom": {"lookahead": True}})
