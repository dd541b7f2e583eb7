"""Peak memory beyond that of stock Horovod: the residue, buffers of k elements, and a copy.

In the first steps, the copy is one of the residue, in case the script throws averages away. Steps
that are sent uncompressed copy the gradients instead.
"""

import json
import re
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker_memory.py")
MODEL_BYTES = 32_000_000 * 4


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_peak_memory_is_that_of_stock_horovod_the_residue_and_one_copy(launched):
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
    # With look-ahead, the first step is uncompressed.
    for settings in ({}, {"lookahead": True, "leader": "staggered"}, {"warmup_steps": 2}):
        beyond = (peak(json.dumps(settings)) - dense) / MODEL_BYTES
        assert 1.9 < beyond < 2.4, f"{settings}: {beyond:.2f} times the model"
