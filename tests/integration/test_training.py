"""The training scripts as a user runs them: both launchers, resuming, one process, wrong input."""

import sys

import pytest
import torch
from conftest import ROOT

SCRIPTS = ROOT / "scripts"
SHORT = ["--batch-size", "8", "--no-progress", "--evaluate-every", "20"]


@pytest.mark.parametrize(
    ("launcher", "script", "options"),
    [
        ("mpirun", "train_image.py", ["--lookahead", "--leader", "staggered"]),
        ("horovodrun --gloo", "train_char_lm.py", ["--beta", "0.3"]),
    ],
)
def test_stopped_and_resumed_is_as_never_stopped(launched, tmp_path, launcher, script, options):
    options = [SCRIPTS / script, *SHORT, "--rate", "20", *options, "--steps", "20", "--checkpoint-every", "8"]
    launched(launcher, 2, [*options, "--checkpoint-dir", tmp_path / "straight"], limit=200)
    launched(launcher, 2, [*options, "--checkpoint-dir", tmp_path / "stopped", "--stop-at", "9"], limit=200)
    launched(launcher, 2, [*options, "--checkpoint-dir", tmp_path / "stopped", "--resume"], limit=200)
    files = sorted(path.relative_to(tmp_path / "straight") for path in (tmp_path / "straight").rglob("*.pt"))
    assert len(files) >= 3  # the model's, and each rank's residues
    compared = 0
    for name in files:
        pair = [torch.load(tmp_path / run / name, weights_only=True) for run in ("straight", "stopped") if (tmp_path / run / name).exists()]
        if len(pair) == 2:
            assert same(*pair), name
            compared += 1
    assert compared >= 3


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_one_process_without_a_launcher(run):
    output = run([sys.executable, SCRIPTS / "train_image.py", *SHORT, "--steps", "3", "--model", "mobilenetv2", "--norm", "group"])
    assert '"step": 3' in output
    output = run([sys.executable, SCRIPTS / "train_char_lm.py", *SHORT, "--steps", "3", "--model", "transformer"], limit=200)
    assert '"bits_per_character"' in output


def test_other_compressions(launched):
    for compression in ("none", "fp16"):
        output = launched("mpirun", 2, [SCRIPTS / "train_image.py", *SHORT, "--steps", "3", "--compression", compression])
        assert '"step": 3' in output


def test_wrong_input(launched, tmp_path):
    for options, message in (
        (["--dataset", "cifar10"], "needs --data-dir: the folder 'cifar-10-batches-py' with the files data_batch_1"),
        (["--dataset", "cifar10", "--data-dir", tmp_path], "missing data_batch_1"),
        (["--rate", "0.5"], "rate is N/k"),
    ):
        output = launched("mpirun", 2, [SCRIPTS / "train_image.py", *SHORT, "--steps", "3", *options], fails=True)
        assert message in output
        assert "Traceback" not in output
