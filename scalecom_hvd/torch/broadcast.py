"""horovod.torch.broadcast_parameters, which also works for models with local steps."""

from __future__ import annotations

from typing import Any

from horovod.torch import functions

from scalecom_hvd.exchange.faces import common_parameters


def broadcast_parameters(params: dict[str, Any] | list[Any], root_rank: int) -> None:
    """horovod.torch.broadcast_parameters, which also works for models with local steps.

    If a rank's loaded state is from the middle of a round of local steps, the root sends the common
    parameters. Ranks without a state begin from these. Ranks with a state get their own parameters
    back afterwards.

    Args:
        params: a state_dict, or a list of (name, tensor) or of tensors.
        root_rank: the rank whose parameters are sent.
    """
    with common_parameters(params):
        functions.broadcast_parameters(params, root_rank)
