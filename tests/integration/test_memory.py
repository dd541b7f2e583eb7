"""Peak memory beyond that of stock Horovod is the residue and buffers of k elements.

Steps that are sent uncompressed also need a copy of the gradients.
"""

import json
import re
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker_memory.py")
MODEL_BYTES = 32_000_000 * 4


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_peak_memory_is_that_of_stock_horovod_the_residue_and_a_copy_of_what_is_sent_whole(
    launched,
):
    def peak(settings):
        # Fusion is off, because its buffer is as large as the fused tensors. malloc must return
        # freed blocks to the system, or peaks vary at random.
        output = launched(
            "mpirun",
            2,
            [WORKER, settings],
            HOROVOD_FUSION_THRESHOLD="0",
            MALLOC_MMAP_THRESHOLD_="1000000",
        )
        return int(re.search(r"PEAK (\d+)", output).group(1))

    dense = peak("dense")
    assert dense > 1.9 * MODEL_BYTES, "parameters and gradients"
    for settings, models in (
        ({}, 1),
        ({"lookahead": True, "leader": "staggered"}, 2),  # the first step is uncompressed
        ({"warmup_steps": 2}, 2),
    ):
        beyond = (peak(json.dumps(settings)) - dense) / MODEL_BYTES
        assert models - 0.1 < beyond < models + 0.4, f"{settings}: {beyond:.2f} times the model"
