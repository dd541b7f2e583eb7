"""train_keras.py as a user runs it.

Tests cover both loops, both launchers, resuming, wrong input, and whether the model learns.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT

SCRIPT = ROOT / "scripts" / "examples" / "train_keras.py"
WORKER = Path(__file__).with_name("worker_keras.py")
# How many points of acc9 may be lost against dense, at 8 sends per element (400 steps at rate 50)
# and a small learning rate.
BOUND = 9


@pytest.mark.nightly
def test_stopped_and_resumed_is_as_never_stopped_under_either_launcher(launched, tmp_path):
    options = "--steps 20 --batch-size 8 --rate 20 --leader staggered"
    often = "--no-progress --evaluate-every 20 --checkpoint-every 8 --checkpoint-dir"
    program = [SCRIPT, *options.split(), *often.split()]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    launched("mpirun", 2, [*program, straight])
    launched("horovodrun --gloo", 2, [*program, stopped, "--stop-at", "9"])
    assert json.loads((stopped / "latest.json").read_text()) == {"step": 9, "ranks": 2}
    launched("mpirun", 2, [*program, stopped, "--resume"])
    assert_same_checkpoints(tmp_path, 20)


def assert_same_checkpoints(folder: Path, step: int) -> None:
    for name in ("", ".residues-0", ".residues-1"):
        once, twice = (
            tensors(folder / run / f"step-{step:06d}{name}") for run in ("straight", "stopped")
        )
        assert once.keys() == twice.keys()
        assert all(np.array_equal(once[key], twice[key]) for key in once), name
    assert any("residues" in key and np.any(value) for key, value in once.items())


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(checkpoint))
    # The object graph is not numeric, and may list its objects in any order.
    return {
        name: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH"
    }


@pytest.mark.nightly
def test_both_loops_learn_resume_and_refuse_and_the_bound_catches_lost_residues(launched, tmp_path):
    output = launched("mpirun", 2, [WORKER, tmp_path], limit=280)
    reached, refused = (
        json.loads(re.search(f"{title} (.*)", output).group(1)) for title in ("REACHED", "REFUSED")
    )

    dense, _ = reached.pop("dense")
    assert dense > 88, reached
    assert {name: acc9 > dense - BOUND for name, (acc9, _) in reached.items()} == {
        "fit": True,
        "custom": True,
        "residues thrown away": False,
    }, (dense, reached)
    assert all(same_weights for _, same_weights in reached.values()), reached

    assert_same_checkpoints(tmp_path, 12)
    for name, message in {
        "rate": "rate must be at least 1",
        "dense": "dense names 'hed*', which matches no parameter",
        "batch": "2 ranks times --batch-size 1000 is more than the 1437 training examples",
        "another model": "incompatible tensor with shape (3, 3, 1, 16)",
        "other settings": "rate=20.0 in the state and 7.0 now",
        "no residues": "residues-1",
    }.items():
        assert len(set(refused[name])) == 1, refused[name]
        assert message in refused[name][0]


@pytest.mark.long
def test_wrong_input_ends_all_ranks_with_a_message(launched):
    output = launched("mpirun", 2, [SCRIPT, "--no-progress", "--rate", "0.5"], fails=True)
    assert "train_keras.py: rate must be at least 1" in output
    assert "Traceback" not in output


@pytest.mark.nightly
def test_one_process_without_a_launcher(run):
    options = "--no-progress --steps 3 --norm group --loop custom"
    output = run([sys.executable, SCRIPT, *options.split()])
    assert '"step": 3' in output
    assert '"bytes_per_step": 0' in output
