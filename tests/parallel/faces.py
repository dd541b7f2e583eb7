"""The face under test, under Horovod's names.

`hvd` is this package's face for torch.distributed if torchrun started the ranks, and for Horovod in
all other cases. `stock` is what trains without this package there: horovod.torch, or what DDP does
without a hook.
"""

import os

import pytest

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
if UNDER_TORCHRUN:
    import ddp_face as hvd
    import ddp_stock as stock
else:
    import horovod.torch as stock

    import scalecom_hvd.torch as hvd

__all__ = ["UNDER_TORCHRUN", "horovods_alone", "hvd", "in_every_library", "stock"]

horovods_alone = pytest.mark.skipif(UNDER_TORCHRUN, reason="of Horovod's face alone")
# The libraries with a DistributedOptimizer that takes ScaleCom.
in_every_library = pytest.mark.parametrize(
    "library", [hvd, pytest.param(stock, marks=horovods_alone)], ids=["drop-in", "stock"]
)
