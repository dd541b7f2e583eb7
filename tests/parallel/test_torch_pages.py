"""The examples for PyTorch on Horovod in README.md and docs/ train exactly as printed."""

import os
import sys

import pages
import pytest
import torch
from models import same_on_all_ranks
from test_torch_nodes import remove_process_sets

import scalecom_hvd.torch as hvd


def scope_of(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 120), torch.nn.ReLU(), torch.nn.Linear(120, 30), torch.nn.Linear(30, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.randn(8, 20) + hvd.rank()

    def loss_of(model):
        return torch.nn.functional.cross_entropy(model(inputs), torch.arange(8) % 4)

    def train_one_step():
        optimizer = scope["optimizer"]
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    if kind == "torch, training":
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=hvd.ScaleCom
        )
    names = {"torch": torch, "model": model, "optimizer": optimizer}
    if kind != "stock":
        names["hvd"] = hvd
    scope = names | {"loss_of": loss_of, "train_one_step": train_one_step, "os": os}
    return scope


@pytest.mark.parametrize(
    "example", pages.examples("torch", "torch, training", "stock"), ids=lambda e: e.name
)
def test_examples(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = scope_of(example.kind)
    given = scope["optimizer"]
    example.run(scope)
    if scope["optimizer"] is given and example.kind != "torch, training":
        return  # the example makes no optimizer
    for _ in range(4):
        scope["train_one_step"]()
    if hasattr(scope["optimizer"], "synchronize_parameters"):
        scope["optimizer"].synchronize_parameters()
    assert same_on_all_ranks(scope["model"].parameters())


@pytest.mark.parametrize("example", pages.examples("torch nodes"), ids=lambda e: e.name)
def test_examples_of_nodes(example):
    scope = scope_of(example.kind)
    example.shorter("nodes=True", "nodes=2").run(scope)
    for _ in range(4):
        scope["train_one_step"]()
    assert same_on_all_ranks(scope["model"].parameters())
    scope.clear()
    remove_process_sets()


@pytest.mark.parametrize("method", ["dense", "scalecom"])
@pytest.mark.parametrize("example", pages.examples("torch script"), ids=lambda e: e.name)
def test_scripts(example, method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", method])
    scope = {}
    example.shorter("600", "60").run(scope)
    assert same_on_all_ranks(scope["model"].parameters())
    assert (f"{method}: loss" in capsys.readouterr().out) == (hvd.rank() == 0)
