"""How scripts/bench reads from a profile whether kernels run beside each other."""

from types import SimpleNamespace

from bench_gpu_steps import overlap_of


def event(stream, start, end, name="kernel", device="CUDA"):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        device_resource_id=stream,
        time_range=SimpleNamespace(start=start, end=end),
        is_user_annotation=name.startswith("scalecom."),
    )


def test_what_a_profile_tells_of_kernels_beside_each_other():
    events = [
        event(7, 0, 100),
        event(7, 200, 300),
        event(7, 400, 401),
        event(1, 0, 9, device="CPU"),
    ]
    events += [event(20, 50, 150), event(20, 350, 450), event(24, 0, 500)]
    assert overlap_of(events) is None
    events.append(event(20, 0, 500, "scalecom.take_and_accumulate"))
    assert overlap_of(events) == (2, 0.2, 51 / 200)
