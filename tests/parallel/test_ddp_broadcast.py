"""broadcast_parameters sets exactly the elements of parameters that are views."""

import pytest
import torch
from faces import hvd
from torch import nn

from scalecom_hvd.ddp import broadcast_parameters

# Views of a (40, 6) block inside a larger buffer. A write beyond the view shows, and does no harm.
VIEWS = {
    "every second column": lambda block: block[:, ::2],
    "some columns": lambda block: block[:, 1:3],
    "transposed": lambda block: block.t(),
    "every third row, transposed": lambda block: block[::3].t(),
    "expanded": lambda block: block[:, :1].expand(40, 6),
    "expanded in rows": lambda block: block[:1].expand(40, 6),
    "channels last": lambda block: block.view(5, 2, 4, 6).permute(0, 3, 1, 2),
}


def numbers_of(rank):
    return torch.arange(1000.0) + 10_000 * (rank + 1)


def block_of(buffer):
    return buffer[300:540].view(40, 6)


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("given", ["list", "module"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_set_and_its_neighbours_are_not(view, given, root):
    buffer = numbers_of(hvd.rank())
    parameter = nn.Parameter(view(block_of(buffer)))
    module = nn.Module()
    module.weight = parameter

    expected = numbers_of(hvd.rank())
    strides = zip(parameter.shape, parameter.stride(), strict=True)
    own = tuple(slice(0, 1) if stride == 0 else slice(None) for _, stride in strides)
    view(block_of(expected))[own].copy_(view(block_of(numbers_of(root)))[own])

    broadcast_parameters([parameter] if given == "list" else module, root)
    wrong = (buffer != expected).nonzero().flatten().tolist()
    everyone = hvd.allgather_object((len(wrong), wrong[:1], wrong[-1:]))
    assert not any(count for count, _, _ in everyone), (
        f"(how many elements are wrong, the first, the last), rank by rank: {everyone}"
    )


def test_buffers_that_are_not_saved_are_sent_too():
    module = nn.Module()
    module.register_buffer("other", torch.full((3,), float(hvd.rank())), persistent=False)
    broadcast_parameters(module, 1)
    assert torch.equal(module.other, torch.ones(3))


@pytest.mark.parametrize("root", [0, 1])
def test_ranks_lay_the_same_parameter_out_differently(root):
    numbers = numbers_of(hvd.rank())[:240].view(40, 6)
    in_columns = hvd.rank() % 2 == 1
    parameter = nn.Parameter(numbers.t().contiguous().t() if in_columns else numbers.clone())
    broadcast_parameters([parameter], root)
    is_right = torch.equal(parameter, numbers_of(root)[:240].view(40, 6))
    right = hvd.allgather_object(is_right)
    assert all(right), f"which ranks have the root's numbers: {right}"
