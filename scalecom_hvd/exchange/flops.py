"""The paper's guide to per-layer rates: layers that compute much per gradient are compressed less.

Users call it once, before training.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

# (FLOPs, rate): layers with at least so many FLOPs per gradient element, at a mini-batch of 32 per
# worker, get this rate (Chen et al., NeurIPS 2020, arXiv 2104.11125, section 4).
GUIDE = ((196, 25.0), (128, 50.0), (0, 400.0))
GUIDE_BATCH = 32


def rates_from_flops(
    model: torch.nn.Module, example_inputs: object, batch_size: int
) -> dict[str, float]:
    """A rate for every trained parameter of the model. Pass the rates as ScaleCom(rates=...).

    A layer is a module that has parameters of its own. Its FLOPs are those of its forward pass.
    torch.utils.flop_counter counts them, on the CPU or wherever the model is. If a module is never
    called itself, it counts as part of the module around it. An example is the output projection of
    nn.MultiheadAttention.

    Args:
        model: the model. It is run once, forward only, without gradients.
        example_inputs: one batch as the model takes it: a tensor, a tuple of positional arguments,
            or a dict of keyword arguments.
        batch_size: how many samples the batch holds. FLOPs are scaled from it to the guide's 32.

    Returns:
        {parameter's name: rate}. Rates are 25, 50 or 400, and 1 for the first layer.

    Raises:
        ValueError: the batch has no samples, or the model has no parameters that are trained.

    Example:
        >>> rates = hvd.rates_from_flops(model, images, batch_size=len(images))
        >>> compression = hvd.ScaleCom(rates=rates, bits=32)
    """
    if batch_size < 1:
        raise ValueError(
            f"batch_size must be at least 1, not {batch_size}. It is the number of samples in "
            "example_inputs"
        )
    layers = {
        name: module
        for name, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    }
    if not layers:
        raise ValueError("the model has no trainable parameters")
    flops = _count(model, layers, example_inputs)

    # Tied parameters belong to the layer that comes first, as in model.named_parameters().
    owners: dict[str, str] = {}
    sizes = Counter[str]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layer = name.rpartition(".")[0]
            while layer not in flops and layer:
                layer = layer.rpartition(".")[0]
            owners[name] = layer
            sizes[layer] += parameter.numel()

    def rate_of(layer: str) -> float:
        per_gradient = flops.get(layer, 0) * GUIDE_BATCH / batch_size / sizes[layer]
        return next(rate for least, rate in GUIDE if per_gradient >= least)

    first = next((layer for layer, count in flops.items() if count > 0), None)
    return {name: 1.0 if layer == first else rate_of(layer) for name, layer in owners.items()}


def _count(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module], example_inputs: object
) -> dict[str, int]:
    """{layer: FLOPs of its forward passes} in the order of first calls, if it was called."""
    flops: dict[str, int] = {}
    handles: list[torch.utils.hooks.RemovableHandle] = []
    training = {module: module.training for module in model.modules()}
    with FlopCounterMode(display=False) as counter, _countable():

        def count(sign: int, name: str, *_: object) -> None:
            flops[name] = flops.get(name, 0) + sign * counter.get_total_flops()

        for name, module in layers.items():
            handles.append(module.register_forward_pre_hook(partial(count, -1, name)))
            handles.append(module.register_forward_hook(partial(count, 1, name)))
        model.eval()
        try:
            with torch.no_grad():
                if isinstance(example_inputs, Mapping):
                    model(**example_inputs)
                elif isinstance(example_inputs, (tuple, list)):
                    model(*example_inputs)
                else:
                    model(example_inputs)
        finally:
            for module, was_training in training.items():
                module.training = was_training
            for handle in handles:
                handle.remove()
    return flops


@contextlib.contextmanager
def _countable() -> Iterator[None]:
    """Turn off the CPU's fused LSTM and attention, for which the counter counts no FLOPs."""
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # flags() warns about settings that it only restores
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
