"""horovod.torch.broadcast_parameters, for models with local steps too.

Imports optimizers of exchange/ only.
"""

from __future__ import annotations

from typing import Any

from horovod.torch import functions

from scalecom_hvd.exchange.optimizers import common_parameters


def broadcast_parameters(params: dict[str, Any] | list[Any], root_rank: int) -> None:
    """horovod.torch.broadcast_parameters, for models with local steps too.

    Where a rank's loaded state is in the middle of a round of local steps, the root sends the
    common parameters to ranks without a state. Those with one have their own again afterwards.

    Args:
        params: a state_dict, or a list of (name, tensor) or of tensors.
        root_rank: whose parameters are sent.
    """
    with common_parameters(params):
        functions.broadcast_parameters(params, root_rank)
