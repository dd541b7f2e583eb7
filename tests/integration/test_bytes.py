"""stats() counts as many bytes as Horovod's own timeline, and k agrees with the rate."""

import json
import math
import re
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker_bytes.py")
SIZES = {"uint8": 1, "int16": 2, "float16": 2, "int32": 4, "float32": 4, "float64": 8}
STEPS = 6
MANY_BUCKETS = {"rate": 300, "lookahead": True, "leader": "staggered", "bucket_bytes": 1_000_000}


def bytes_in_timeline(path) -> dict[str, list[int]]:
    """Return {name of a collective: bytes of each of its runs} from a HOROVOD_TIMELINE.

    The timeline's last line may be cut off. Horovod puts the operation before the names of
    PyTorch's collectives.
    """
    names, found = {}, {}
    for line in re.findall(r"\{(?:[^{}]|\{[^{}]*\})*\}", path.read_text()):
        event = json.loads(line)
        arguments = event.get("args", {})
        if event.get("name") == "process_name" and "name" in arguments:
            names[event["pid"]] = arguments["name"]
        elif "shape" in arguments:
            size = SIZES.get(arguments["dtype"], 0) * math.prod(json.loads(arguments["shape"]))
            name = re.sub(r"^(allgather|allreduce|broadcast)\.", "", names[event["pid"]])
            found.setdefault(name, []).append(size)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "launcher", "settings"),
    [
        pytest.param("torch", "horovodrun --gloo", {"rate": 100}, marks=pytest.mark.nightly),
        pytest.param("torch", "horovodrun", MANY_BUCKETS, marks=pytest.mark.nightly),
        pytest.param(
            "torch", "mpirun", {"rate": 100, "warmup_steps": STEPS}, marks=pytest.mark.nightly
        ),
        ("torch", "horovodrun --gloo", {"rate": 16, "bits": 3}),
        pytest.param("tensorflow", "mpirun", MANY_BUCKETS, marks=pytest.mark.nightly),
        pytest.param(
            *("tensorflow", "horovodrun --gloo", {"rate": 50, "dense": ["dense_2/*"]}),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_stats_count_what_the_timeline_counts(launched, tmp_path, framework, launcher, settings):
    timeline = tmp_path / "timeline.json"
    output = launched(
        launcher,
        2,
        [WORKER, framework, json.dumps(settings), STEPS],
        HOROVOD_TIMELINE=str(timeline),
    )
    stats = json.loads(re.search(r"STATS (\{.*\})", output).group(1))
    counted = bytes_in_timeline(timeline)
    names = r"scalecom\.((offsets|values)\.\d+|whole\.\d+(\..+|_\d+of\d+)?|agreement.*)"
    assert all(re.fullmatch(names, name) for name in counted), counted.keys()

    def runs(kind):
        found = [sizes for name, sizes in counted.items() if name.startswith(f"scalecom.{kind}.")]
        assert all(len(set(sizes)) == 1 for sizes in found), (
            "a changed shape would be negotiated anew at every step"
        )
        return [sizes[0] for sizes in found]

    warm_up = "warmup_steps" in settings
    offsets, averaged = runs("offsets"), runs("whole" if warm_up else "values")
    assert stats["collectives"] == len(offsets) + len(averaged)
    assert stats["bytes_offsets"] == pytest.approx(sum(offsets), rel=0.05)
    assert stats["bytes_values"] + stats["bytes_dense"] == pytest.approx(sum(averaged), rel=0.05)
    assert (stats["bytes_offsets"] == 0) == warm_up
    for name, (k, numel) in stats["k"].items():
        assert k == math.ceil(numel / settings["rate"]), name
