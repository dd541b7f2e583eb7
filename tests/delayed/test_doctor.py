"""The checks that `doctor --gpu` runs on a GPU, here on the device whose streams run late."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scalecom_hvd.doctor import gpu_steps

RANK = """
import sys

sys.path.insert(0, sys.argv.pop())
import delayed.process_group
from scalecom_hvd.doctor import torch_rank

torch_rank.main(sys.argv[1], "delayed", "cpu:gloo,delayed:delayedccl")
"""


@pytest.mark.long
def test_steps_are_those_of_the_cpu():
    assert gpu_steps.check("delayed:0") == 3 * len(gpu_steps.KINDS)


def test_a_step_that_is_not_is_found(monkeypatch):
    monkeypatch.setattr(torch, "copysign", lambda size, sign: size)
    with pytest.raises(AssertionError, match="gives different numbers than on the CPU"):
        gpu_steps.check("delayed:0")


@pytest.mark.long
def test_ranks(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", program, "hook", Path(__file__).parents[1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("scalecom_hvd self-test passed: ") == 2
