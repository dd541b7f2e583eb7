"""The training scripts as a user runs them: all launchers, resuming, one process, wrong input."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import launch
import psutil
import pytest
import torch
import training
import training_torch
from conftest import ROOT

SCRIPTS = ROOT / "scripts" / "examples"
SHORT = "--batch-size 8 --no-progress --evaluate-every 20"


def program(script, options, *more):
    """The words of a short training."""
    return [SCRIPTS / script, *f"{SHORT} {options}".split(), *more]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launcher", "script", "options"),
    [
        ("mpirun", "train_image.py", "--lookahead --leader staggered"),
        ("horovodrun --gloo", "train_char_lm.py", "--beta 0.3 --optimizer adamw"),
        ("torchrun", "train_image.py", "--clip-norm 1 --lookahead"),
    ],
)
def test_stopped_and_resumed_is_as_never_stopped(launched, tmp_path, launcher, script, options):
    for folder, more in (
        ("straight", ()),
        ("stopped", ("--stop-at", "9")),
        ("stopped", ("--resume",)),
    ):
        words = program(script, f"--rate 20 {options} --steps 20 --checkpoint-every 8")
        launched(launcher, 2, [*words, "--checkpoint-dir", tmp_path / folder, *more], limit=200)
    straight = tmp_path / "straight"
    files = sorted(path.relative_to(straight) for path in straight.rglob("*.pt"))
    assert len(files) >= 3  # the model's, and each rank's residues
    compared = 0
    for name in files:
        pair = [
            torch.load(tmp_path / run / name, weights_only=True)
            for run in ("straight", "stopped")
            if (tmp_path / run / name).exists()
        ]
        if len(pair) == 2:
            assert same(*pair), name
            compared += 1
    assert compared >= 3


@pytest.mark.nightly
def test_killed_at_any_moment_it_goes_on_from_a_whole_checkpoint(launched, tmp_path):
    """There is a checkpoint after every step, so some kills hit while one is being written."""
    folder, ranks, steps = tmp_path / "killed", 2, 60
    options = f"--rate 20 --lookahead --steps {steps} --checkpoint-every 1 --resume"
    words = program("train_image.py", options, "--checkpoint-dir", folder)
    command = launch.command("mpirun", ranks, [str(part) for part in words])
    moments = random.Random(time.time_ns())
    reached = 0
    for _ in range(3):
        killed_after = moments.uniform(0, 0.1)
        kill_after_step(reached + 4, killed_after, folder, command)
        reached, whole = newest(folder)
        assert whole.keys() == {"", *(f".residues-{rank}" for rank in range(ranks))}, (
            f"killed {killed_after} s after a step"
        )
        assert [whole[f".residues-{rank}"]["step"] for rank in range(ranks)] == [reached] * ranks
    assert f'"step": {steps},' in launched("mpirun", ranks, words)
    reached, whole = newest(folder)
    assert reached == steps
    assert len(list(folder.iterdir())) == len(whole) + 1, (
        "something is left of what was not completed"
    )


def test_a_file_counts_only_when_it_is_on_the_disk(tmp_path, monkeypatch):
    """If it did not hold, a crash of the machine would show it, but killing a process would not."""
    done = []
    for name in ("fsync", "replace"):
        called = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, called=called: done.append(name) or called(*args)
        )
    file = tmp_path / "step.pt"
    training_torch.write(file, {"step": 1})
    assert done == ["fsync", "replace", "fsync"]  # for file, name, folder

    def write_half(opened):
        opened.write(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        training.write_whole(file, write_half)
    assert torch.load(file, weights_only=True) == {"step": 1}


def kill_after_step(step, seconds, folder, command):
    """Start a training, and kill all its processes `seconds` after the checkpoint of `step`."""
    with (folder.parent / "output.txt").open("w+") as output:
        process = started(command, output)
        try:
            wait_for_step(process, folder, step)
            time.sleep(seconds)
            assert process.poll() is None, "it ended before it was killed"
        finally:
            kill_family(process)


def started(command, output):
    return subprocess.Popen(
        command,
        env=launch.environment(),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for_step(process, folder, step):
    """Wait until there is a checkpoint of this step or of a later one."""
    deadline = time.monotonic() + 150
    while (
        not (folder / "latest.json").exists()
        or json.loads((folder / "latest.json").read_text())["step"] < step
    ):
        if time.monotonic() > deadline or process.poll() is not None:
            pytest.fail(
                f"no checkpoint of step {step}: {(folder.parent / 'output.txt').read_text()}"
            )
        time.sleep(0.002)


def kill_family(process):
    """Kill a process and all its descendants."""
    if process.poll() is None:
        family = [*psutil.Process(process.pid).children(recursive=True), process]
        for member in family:
            member.kill()
        psutil.wait_procs(family[:-1])
        process.wait()


def newest(folder) -> tuple[int, dict]:
    """Return the step of the newest checkpoint, and its files by the ends of their names."""
    step = json.loads((folder / "latest.json").read_text())["step"]
    prefix = f"step-{step:06d}"
    return step, {
        path.stem.removeprefix(prefix): torch.load(path, weights_only=True)
        for path in folder.glob(f"{prefix}*.pt")
    }


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.nightly
def test_one_process_without_a_launcher(run):
    for script, options, tells in (
        ("train_image.py", "--model mobilenetv2 --norm group", '"step": 3'),
        ("train_char_lm.py", "--model transformer", '"bits_per_character"'),
    ):
        words = program(script, f"--steps 3 {options}")
        assert tells in run([sys.executable, *words], limit=200)


@pytest.mark.nightly
def test_other_compressions(launched):
    for compression in ("none", "fp16"):
        words = program("train_image.py", f"--steps 3 --compression {compression}")
        assert '"step": 3' in launched("mpirun", 2, words)


def test_wrong_input(launched):
    words = program("train_image.py", "--steps 3 --dense hed*")
    output = launched("mpirun", 2, words, fails=True)
    assert "dense names 'hed*', which matches no parameter" in output
    assert "Traceback" not in output


def test_a_script_may_end_right_after_a_step(launched):
    """The hook's thread may be the last that holds process groups, while Python ends."""
    for _ in range(2):
        launched("torchrun", 2, [Path(__file__).with_name("worker_exit.py")])
