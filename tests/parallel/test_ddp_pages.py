"""The examples for PyTorch under torchrun in README.md and docs/ train exactly as printed."""

import os
import sys

import pages
import pytest
import torch
import torch.distributed as dist
from models import same_on_all_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from scalecom_hvd.ddp import broadcast_parameters

NAMES = {"os": os, "torch": torch, "dist": dist, "DistributedDataParallel": DistributedDataParallel}


@pytest.mark.parametrize("example", pages.examples("ddp"), ids=lambda e: e.name)
def test_examples(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 120), torch.nn.ReLU(), torch.nn.Linear(120, 30), torch.nn.Linear(30, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scope = NAMES | {"model": model, "optimizer": optimizer}
    example.run(scope)
    trained = scope.get("wrapped", scope["model"])
    inputs = torch.randn(8, 20) + dist.get_rank()
    for _ in range(4):
        scope["optimizer"].zero_grad()
        torch.nn.functional.cross_entropy(trained(inputs), torch.arange(8) % 4).backward()
        scope["optimizer"].step()
    assert same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("example", pages.examples("ddp nodes"), ids=lambda e: e.name)
def test_examples_of_nodes(example):
    model = torch.nn.Sequential(torch.nn.Linear(20, 120), torch.nn.ReLU(), torch.nn.Linear(120, 4))
    ranks_per_node = dist.get_world_size() // 2
    scope = NAMES | {"model": model, "nodes": 2, "ranks_per_node": ranks_per_node}
    scope["optimizer"] = torch.optim.AdamW(model.parameters())
    example.run(scope)
    torch.manual_seed(dist.get_rank() // ranks_per_node)  # one batch a node, for tensor parallelism
    inputs = torch.randn(8, 20)
    for _ in range(4):
        scope["optimizer"].zero_grad()
        loss = torch.nn.functional.cross_entropy(scope["model"](inputs), torch.arange(8) % 4)
        loss.backward()
        scope["optimizer"].step()
    getattr(scope["optimizer"], "synchronize_parameters", int)()  # of local steps
    whole = [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]
    assert same_on_all_ranks(whole)


@pytest.mark.parametrize("example", pages.examples("ddp pipeline"), ids=lambda e: e.name)
def test_examples_of_pipelines(example):
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "pp")
    )
    place = mesh.get_local_rank("pp")
    torch.manual_seed(mesh.get_local_rank("replicate"))
    module = torch.nn.Sequential(
        torch.nn.Linear(20, 120), torch.nn.ReLU(), torch.nn.Linear(120, 20)
    )
    scope = NAMES | {"module": module, "mesh": mesh, "stages": 2, "device": torch.device("cpu")}
    scope |= {"microbatches": 4, "loss": lambda found, wanted: (found - wanted).square().mean() / 4}
    broadcast_parameters(module)
    example.run(scope)
    inputs, losses, seen = torch.randn(8, 20), [], []
    for _ in range(40):
        scope["optimizer"].zero_grad()
        if place == 0:
            scope["schedule"].step(inputs)
        else:
            scope["schedule"].step(target=inputs.flip(0), losses=losses)
            seen.append(sum(losses).item())
        scope["optimizer"].step()
    assert not seen or seen[-1] < 0.95 * seen[0]


@pytest.mark.parametrize("method", ["dense", "scalecom"])
@pytest.mark.parametrize("example", pages.examples("ddp script"), ids=lambda e: e.name)
def test_scripts(example, method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for done_by_the_tests in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, done_by_the_tests, lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["train_ddp.py", method])
    scope = {}
    example.shorter("600", "60").run(scope)
    assert same_on_all_ranks(scope["model"].parameters())
    assert (f"{method}: loss" in capsys.readouterr().out) == (dist.get_rank() == 0)
