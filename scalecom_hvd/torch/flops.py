"""The paper's guide to per-layer rates: layers that compute much per gradient are compressed less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

# FLOPs per gradient element at a mini-batch of 32 per worker, and the rate from there on (Chen et al., section 4).
GUIDE = ((196, 25.0), (128, 50.0), (0, 400.0))
GUIDE_BATCH = 32


def rates_from_flops(model: torch.nn.Module, example_inputs: Any, batch_size: int) -> dict[str, float]:
    """A rate for every parameter of the model, to be passed as ScaleCom(rates=...): 25, 50 or 400, and 1 for the first layer.

    example_inputs: one batch as the model takes it: a tensor, a tuple of positional or a dict of keyword arguments. It is run
    once, forward only, without gradients.  batch_size: how many samples it holds; FLOPs are scaled from it to the guide's 32.
    A layer is a module with parameters of its own; its FLOPs are those of its forward pass, counted by torch.utils.flop_counter.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is the number of samples in example_inputs, at least 1, not {batch_size}")
    layers = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}
    if not layers:
        raise ValueError("the model has no parameters")
    flops = dict.fromkeys(layers, 0)
    order: list[str] = []
    with FlopCounterMode(display=False) as counter:
        handles = []
        for name, module in layers.items():
            started: list[int] = []

            def before(_module, _args, started=started):
                started.append(counter.get_total_flops())

            def after(_module, _args, _output, name=name, started=started):
                flops[name] += counter.get_total_flops() - started.pop()
                order.append(name)

            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                _call(model, example_inputs)
        finally:
            model.train(training)
            for handle in handles:
                handle.remove()

    first = next((name for name in order if flops[name] > 0), None)
    rates = {}
    for name, module in layers.items():
        parameters = dict(module.named_parameters(recurse=False, prefix=name))
        per_gradient = flops[name] * GUIDE_BATCH / batch_size / sum(p.numel() for p in parameters.values())
        rate = 1.0 if name == first else next(rate for least, rate in GUIDE if per_gradient >= least)
        rates.update(dict.fromkeys(parameters, rate))
    return rates


def _call(model: torch.nn.Module, example_inputs: Any) -> Any:
    if isinstance(example_inputs, Mapping):
        return model(**example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return model(*example_inputs)
    return model(example_inputs)
