"""Two hosts of two ranks, each host a node, reach the same result as two nodes on one host."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from hosts import Hosts

FSDP = ROOT / "scripts" / "examples" / "train_fsdp.py"
WORKER = Path(__file__).with_name("worker_nodes.py")
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("hosts")]


def held_out(output):
    (bits,) = re.findall(r"held out: (\S+) bits", output)
    return float(bits)


def on_hosts(launcher, program):
    with Hosts(2) as cluster:
        job = cluster.run(
            launcher,
            program,
            timeout=150,
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "e0"},
            stdout=subprocess.PIPE,
            ranks_per_host=2,
        )
    assert job.returncode == 0, job.stdout
    return job.stdout


def test_fsdp2_on_two_hosts_stopped_and_resumed(machine, launched, tmp_path):
    program = [FSDP, "--steps", "24"]
    stopped = [*program, "--ranks-per-node", "2", "--checkpoint", tmp_path / "checkpoint"]
    launched("torchrun", 4, [*stopped, "--stop-at", "11"], limit=100)
    resumed = held_out(launched("torchrun", 4, [*stopped, "--resume"], limit=100))
    assert held_out(on_hosts("torchrun", program)) == resumed
    dense = held_out(launched("torchrun", 4, [*program, "--ranks-per-node", "2", "--dense"]))
    assert dense != resumed < 6  # it is 6.6 bits at the start


@pytest.mark.parametrize(
    "launcher", ["horovodrun --gloo", pytest.param("mpirun", marks=pytest.mark.nightly)]
)
def test_horovod_on_two_hosts(machine, launched, launcher):
    def result(output):
        return json.loads(re.findall(r"RESULT (.*)", output)[0])

    weights, ranks_per_node = result(on_hosts(launcher, [WORKER, "True"]))
    assert ranks_per_node == 2
    expected, _ = result(launched("mpirun", 4, [WORKER, "2"], limit=100))
    assert weights == pytest.approx(expected, rel=1e-6)


def test_a_rank_that_fails_between_synchronisations_waits_for_nobody(launched):
    """Otherwise it would wait five minutes for the other rank, which waits for it."""
    output = launched("mpirun", 2, [WORKER, "2", "fails"], fails=True, limit=200)
    assert "ArithmeticError: in the script" in output
