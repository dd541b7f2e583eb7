"""Random programs of calls under DistributedDataParallel, with the hook and without it.

With everything chosen parameters are those of plain DDP; at a rate of 10 they are equal on all
ranks. FUZZ_SEED chooses the first program, FUZZ_SECONDS how long programs are drawn. One that fails
is written down: it is drawn again by its seed.
"""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from models import same_on_all_ranks
from test_ddp_hook import EVERYTHING, Net, batch, hooked
from torch import nn

PROGRAMS = 12


def draw(seed):
    """A program, the same on every rank."""
    dice = random.Random(seed)
    steps = [
        {
            "micro": dice.choice([0, 0, 1, 2]),
            "backwards": dice.choice([1, 1, 1, 2]),
            "head": dice.choice(["both", "both", 0, "by rank"]),
            "twice": dice.random() < 0.3,
            "checkpointed": dice.random() < 0.3,
            "clip": dice.choice([None, None, 0.1]),
            "overflow": dice.choice([None] * 5 + [0, 1]),
            "to_none": dice.random() < 0.5,
            "evaluates": dice.random() < 0.2,
            "saves": dice.random() < 0.2,
            "late": dice.choice([None, None, 0, 1]),
        }
        for _ in range(dice.randint(3, 6))
    ]
    # What DDP refuses in some of its ways is not drawn.
    unused = any(step["head"] != "both" for step in steps)
    alike = all(step == steps[0] | {"late": step["late"]} for step in steps)
    if unused:
        for step in steps:
            step |= {"checkpointed": False, "twice": False}
    return {
        "steps": steps,
        "momentum": dice.choice([0.0, 0.9]),
        "of_ddp": {
            "find_unused_parameters": unused,
            "gradient_as_bucket_view": dice.random() < 0.5,
            "static_graph": alike and not unused,
            "bucket_cap_mb": dice.choice([0.003, 0.01, 25]),
        },
        "settings": {
            "lookahead": dice.random() < 0.5,
            "leader": dice.choice(["cyclic", "staggered"]),
            "bucket_bytes": dice.choice([3000, 8000, 10**7]),
            "warmup_steps": dice.choice([0, 0, 2]),
        },
    }


def run(program, rate):
    rank = dist.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    settings = program["settings"] | {"loss_scale": scaler}
    model, state = hooked(rate, Net(), settings=settings, **program["of_ddp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=program["momentum"])
    for number, step in enumerate(program["steps"]):
        head = (number + rank) % 2 if step["head"] == "by rank" else step["head"]
        how = {"head": head, "twice": step["twice"], "checkpointed": step["checkpointed"]}

        def loss(micro, how=how, number=number):
            return scaler.scale(model(batch(number, micro), **how))

        optimizer.zero_grad(set_to_none=step["to_none"])
        with model.no_sync():
            for micro in range(step["micro"]):
                loss(micro).backward()
        for micro in range(step["backwards"]):
            if step["late"] == rank:
                time.sleep(0.005)
            factor = float("inf") if step["overflow"] == rank else 1.0
            (loss(5 + micro) * factor).backward()
        scaler.unscale_(optimizer)
        if step["clip"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), step["clip"])
        scaler.step(optimizer)
        scaler.update()
        if step["evaluates"]:
            with torch.no_grad():
                model.eval()(batch(number, 9))
                model.train()
        if step["saves"] and state is not None:
            state.load_state_dict(state.state_dict())
    return list(model.parameters())


def hold(program):
    plain, everything, few = (run(program, rate) for rate in (None, EVERYTHING, 10))
    for one, other in zip(plain, everything, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)
    assert same_on_all_ranks(few)
    assert all(p.isfinite().all() for p in few)


@pytest.mark.timeout(900)
def test_random_programs():
    seed, seconds = (
        int(os.environ.get("FUZZ_SEED", "0")),
        float(os.environ.get("FUZZ_SECONDS", "0")),
    )
    begun, number = time.monotonic(), 0
    while True:
        enough = torch.tensor(float(number >= PROGRAMS and time.monotonic() > begun + seconds))
        dist.broadcast(enough, 0)  # rank 0's clock decides
        if enough:
            return
        program = draw(seed + number)
        try:
            hold(program)
        except BaseException as error:
            raise AssertionError(f"FUZZ_SEED={seed + number} fails: {program}") from error
        number += 1
