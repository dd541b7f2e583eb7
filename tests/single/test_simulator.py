"""Simulated workers are compared with the oracle.

When one fails, all of them raise the error, and none waits forever.
"""

import contextlib
import copy
import time

import numpy as np
import pytest
import simulated
import torch
from parallel.made_up import ODD_SHAPES, SHAPES
from rungs import Restless
from simulated import as_tensors, assert_same, made_up, residues_of, step_as

from scalecom_hvd.exchange import ScaleCom
from scalecom_hvd.exchange.methods import LocalTopK, RandomK
from scalecom_hvd.exchange.optimizer_gradients import StartsAlike
from scalecom_hvd.exchange.simulator import Network, SimulatedCollectives, SimulatedWork, Simulation
from scalecom_hvd.rate_controller import RateController
from scalecom_hvd.reference import ScaleComReference
from scalecom_hvd.stages import LADDER, START, WHOLE

pytestmark = pytest.mark.usefixtures("one_thread_per_rank")


def simulate(n, shapes=SHAPES, **fields):
    return simulated.simulate(n, shapes, **({"rate": 20, "beta": 0.3, "min_numel": 2} | fields))


def trained(steps, n=2, **fields):
    """Return simulated ranks that have taken these steps."""
    simulation = simulate(n, **fields)
    for step in range(steps):
        simulation.step(as_tensors(made_up(n, step)))
    return simulation


def load(second, first):
    """Load what each rank of the first run saves, where the second run has this rank too."""
    for mine, theirs in zip(second.compressors, first.compressors, strict=False):
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))


def rates_of(simulation, first, end):
    """Train on, and return the rate of each step."""
    rates = []
    for step in range(first, end):
        simulation.step(as_tensors(made_up(2, step)))
        rates.append(round(simulation.compressors[0].stats()["rate"]))
    return rates


def hold_against_reference(n, steps=8, shapes=ODD_SHAPES, tolerance=1e-6, **fields):
    simulation = simulate(n, shapes, **fields)
    reference = ScaleComReference(n, shapes, simulation.compressors[0].config)
    for step in range(steps):
        everyone = made_up(n, step, shapes)
        if step == 3:
            everyone[-1]["n6401"][17] = np.nan
        step_as(reference, simulation, everyone, tolerance, rolled_back=1e-5)
    assert reference.step_number == steps - 1


MODES = [
    {},
    {"lookahead": True},
    {"leader": "staggered", "bucket_bytes": 5000},
    {"leader": "staggered", "bucket_bytes": 5000, "lookahead": True},
    {"selection": "exact", "rate": 30},
    {"bits": 32},
    {"bits": 3, "rate": 16},
    {"bits": 2, "rate": 7.5, "lookahead": True, "warmup_steps": 2, "beta": 1.0},
    {"rate": {0: 1, 3: 4, 6: 16}, "bits": 3},
    {"rate": {0: 10, 5: 100}, "rates": {"n64*": 7, "matrix": 1000}, "lookahead": True},
    {"rate": 1, "bits": 4, "leader": "staggered", "bucket_bytes": 5000},
    {"rate": {0: 4, 3: 1}, "bits": 32},
    {"warmup_steps": 5, "beta": 1.0, "dense": ["matrix"]},
    {"warmup_steps": 5, "lookahead": True, "rates": {"n64*": 10, "matrix": 1000}},
]


@pytest.mark.parametrize("fields", [{}, {"beta": 1.0, "rates": {"n64*": 7}}], ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_nothing_is_lost_when_the_rung_changes(n, fields, monkeypatch):
    class Checking(Restless):
        def note(self, seconds, exposed):
            assert 0 <= exposed <= seconds
            assert simulation.compressors[0].residues.step > reference.step_number, "it is skipped"
            return super().note(seconds, exposed)

    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", Checking)
    simulation = simulate(n, ODD_SHAPES, **fields, rate="auto")
    reference = ScaleComReference(n, ODD_SHAPES, simulation.compressors[0].config)
    rungs = []
    for step in range(24):
        everyone = made_up(n, step, ODD_SHAPES)
        if step in (3, 7):  # it tells of another rung, or would be measured
            everyone[-1]["n6401"][17] = np.nan
        step_as(reference, simulation, everyone, 1e-6, rolled_back=1e-5)
        assert len({c.residues.rung for c in simulation.compressors}) == 1
        rungs.append(simulation.compressors[0].residues.rung)
        if "beta" in fields and rungs[-2:] == [WHOLE] * 2:
            waits = [own.abs().max() for each in residues_of(simulation) for own in each.values()]
            assert max(waits) < 1e-5
        reference.take_rung(rungs[-1])
        assert simulation.compressors[0].stats()["stage"] == str(LADDER[rungs[-1]])
    assert len(set(rungs)) > 6
    assert WHOLE in rungs
    # Ranks take a rung at the end of a step. It is first measured in the step after that one.
    assert all(b in (a, c) for a, b, c in zip(rungs, rungs[1:], rungs[2:], strict=False))


@pytest.mark.parametrize(
    ("n", "mode"),
    [(n, mode) for n in (1, 2, 4) for mode in MODES]
    + [pytest.param(3, mode, marks=pytest.mark.long) for mode in MODES]
    + [(16, MODES[i]) for i in (0, 1, 3, 6)]
    + [pytest.param(64, MODES[2], marks=pytest.mark.long)],
    ids=str,
)
def test_simulated_workers_are_those_of_the_reference(n, mode):
    # The more workers there are, the larger are the sums and their rounding.
    more = {"steps": 5, "tolerance": 1e-5} if n > 4 else {}
    hold_against_reference(n, **more, **mode)


@pytest.mark.parametrize("before", ["auto", 8, {0: 1, 3: 8}], ids=str)
@pytest.mark.parametrize("after", ["auto", 2, {0: 4, 6: 16}], ids=str)
def test_a_resumed_run_has_the_rung_of_the_saved_one_or_its_own_rate(before, after, monkeypatch):
    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", Restless)
    first, second = trained(5, rate=before), simulate(2, rate=after)
    since = first.compressors[0].residues.rung, first.compressors[0].residues.rung_since
    load(second, first)
    assert_same(residues_of(second), residues_of(first))
    reference = ScaleComReference(2, SHAPES, second.compressors[0].config)
    reference.step_number, resumed = 5, second.compressors[0].residues
    reference.residues = [
        {name: residue.view(SHAPES[name]).numpy() for name, residue in own.items()}
        for own in residues_of(second)
    ]
    if after == "auto":
        reference.rung, reference._rung_since = since if before == "auto" else (START, 5)
        assert (resumed.rung, resumed.rung_since) == (reference.rung, reference._rung_since)
    for step in range(5, 9):
        step_as(reference, second, made_up(2, step), 1e-6)
        if after == "auto":
            reference.take_rung(resumed.rung)


def test_a_rate_follows_what_steps_expose(monkeypatch):
    """What a rank waits for at a step's end, and how long it took since the last one."""
    noted, began, wait = [], [], SimulatedWork.wait

    class Notes(RateController):
        def __init__(self, *start):
            super().__init__(*start)
            began.append(start)

        def note(self, *seconds):
            noted.append(seconds)

    def slow(work):
        time.sleep(0.02)
        return wait(work)

    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", Notes)
    monkeypatch.setattr(SimulatedWork, "wait", slow)
    simulation = simulate(2, rate="auto")
    for step in range(4):
        time.sleep(0.03)
        simulation.step(as_tensors(made_up(2, step)))
    assert len(noted) == 2  # the first ranks agree in, and the second is the first to be measured
    assert all(0.02 <= exposed <= seconds - 0.03 for seconds, exposed in noted)
    resumed = simulate(2, rate="auto")
    load(resumed, simulation)
    resumed.step(as_tensors(made_up(2, 4)))
    assert began == [(2, START, True), (2, START, False)]  # whether the run is new


def test_a_newcomer_takes_the_rung_of_the_others(monkeypatch):
    """Its controller, which decides for all, does not take the run for a new one."""
    begun = []

    def controller(*start):
        begun.append(start)
        return Restless(*start)

    monkeypatch.setattr("scalecom_hvd.exchange.pace.RateController", controller)
    first, second = trained(4, rate="auto"), simulate(2, rate="auto")
    second.compressors[1].load_state_dict(first.compressors[1].state_dict())
    second.step(as_tensors(made_up(2, 4)))
    (rung,) = {c.residues.rung for c in (*second.compressors, *first.compressors)}
    assert begun == [(2, START, True), (2, rung, False)]


@pytest.mark.parametrize("elastic", [False, True])
def test_only_ranks_of_an_elastic_run_may_bring_one_ranks_residues(elastic, monkeypatch, caplog):
    """They change their positions, but keep their states."""
    monkeypatch.setattr(SimulatedCollectives, "elastic", elastic)
    first, second = trained(1), simulate(2)
    for compressor in second.compressors:
        compressor.load_state_dict(copy.deepcopy(first.compressors[0].state_dict()))
    said = "rank 1 of 2 loads the residues that rank 0 of 2 saved"
    assert (said in caplog.text) == (not elastic)
    refusal = pytest.raises(RuntimeError, match="ranks 0 and 1 have both loaded the residues of")
    with contextlib.nullcontext() if elastic else refusal:
        second.step(as_tensors(made_up(2, 1)))


def test_a_run_may_resume_on_more_ranks_and_with_other_buckets(caplog):
    first, second = trained(1), simulate(3, bucket_bytes=5000)
    load(second, first)
    second.step(as_tensors(made_up(3, 1)))
    assert "resuming on 3 ranks, after training on 2 ranks" in caplog.text
    assert [own.stats()["step"] for own in second.compressors] == [2] * 3
    assert len(second.exchanges[0].buckets) > len(first.exchanges[0].buckets)


@pytest.mark.parametrize(
    "fields",
    [{"lookahead": True, "bits": 3}, {"rate": "auto"}, {"compression": LocalTopK}],
    ids=str,
)
def test_a_state_that_was_loaded_is_saved_again_as_it_was(fields):
    first, second = trained(3, **fields), simulate(2, **fields)
    load(second, first)
    for mine, theirs in zip(second.compressors, first.compressors, strict=True):
        found, state = mine.state_dict(), theirs.state_dict()
        assert found.keys() == state.keys()
        for of_tensors in ("residues", "offsets", "method_state"):
            assert_same(found.pop(of_tensors, {}), state.pop(of_tensors, {}))
        assert found == state


@pytest.mark.parametrize("saved_at", [1, 3, 5])
def test_a_run_that_turns_out_longer_goes_on(saved_at):
    """The state's step may be in the warm-up of one run, and after that of the other.

    look-ahead's choice then belongs to other lanes.
    """
    few_bits = {"bits": 3, "lookahead": True}
    of_short, of_long = (
        {"total_steps": 10 * steps, "rate": {0: 4, steps: 16}, **few_bits} for steps in (3, 5)
    )
    short, long = trained(saved_at, **of_short), simulate(2, **of_long)
    load(long, short)
    assert_same(residues_of(long), residues_of(short))
    # Two steps are uncompressed: the first one, and the one after the warm-up, before which nothing
    # was chosen.
    expected = [1] + [4] * 4 + [1] + [16] * 2
    assert rates_of(long, saved_at, 8) == [1, *expected[saved_at + 1 :]]


@pytest.mark.parametrize(("saved", "now"), [(32, 4), (4, 8), (8, 32)])
def test_a_run_that_resumes_with_other_bits_forgets_the_choice(saved, now):
    settings = {"rate": 10, "lookahead": True}
    first, second = trained(3, bits=saved, **settings), simulate(2, bits=now, **settings)
    load(second, first)
    assert rates_of(second, 3, 5) == [1, 10]


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_sums(kernel, monkeypatch):
    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    averages = simulate(4).step(as_tensors(made_up(4, 0)))[0]
    sums = simulate(4, sums=True).step(as_tensors(made_up(4, 0)))[0]
    for name in SHAPES:
        torch.testing.assert_close(sums[name], 4 * averages[name])


@pytest.mark.parametrize("fields", [{}, {"lookahead": True}, {"compression": RandomK}], ids=str)
@pytest.mark.parametrize(
    "change", [slice(0, 2), slice(0, 1)], ids=["smaller", "one row or element"]
)
@pytest.mark.parametrize("name", ["second", "bias"])
@pytest.mark.parametrize("whole", [False, True])
def test_parameters_that_became_others_are_refused(name, change, whole, fields):
    """Their gradients are smaller than residues and buffers.

    Kernels follow addresses, and would not notice.
    """
    simulation = trained(3, min_numel=100, warmup_steps=9 * whole, **fields)
    grads = as_tensors(made_up(2, 3))
    for parameters, own in zip(simulation.parameters, grads, strict=True):
        own[name] = own[name][change]
        parameters[name].data = torch.zeros_like(own[name])
    before = residues_of(simulation)
    message = f"gradient of {name} has .* but its parameter had .*DistributedOptimizer after the"
    with pytest.raises(RuntimeError, match=message):
        simulation.step(grads)
    torch.testing.assert_close(residues_of(simulation), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"lookahead": True}, {"compression": RandomK}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_parameters_of_another_dtype_than_when_they_were_wrapped(dtype, fields):
    """After model.double() or model.half(), residues and buckets stay as they were."""
    same, changed = (simulate(2, min_numel=100, **fields) for _ in range(2))
    for step in range(6):
        if step == 3:
            for parameters in changed.parameters:
                for parameter in parameters.values():
                    parameter.data = parameter.data.to(dtype)
        grads, others = as_tensors(made_up(2, step)), []
        now = dtype if step >= 3 else torch.float32
        for own in grads:
            own |= {name: grad.to(dtype).float() for name, grad in own.items()}
            others.append({name: grad.to(now, copy=True) for name, grad in own.items()})
        theirs = same.step(grads)[0]
        theirs = {name: average.to(now) for name, average in theirs.items()}
        torch.testing.assert_close(changed.step(others)[0], theirs)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("where", ["broadcast", "all_reduce", "scatter"])
def test_an_error_on_one_rank_ends_the_step_on_all(where, lookahead, monkeypatch):
    """If it comes before the sums are made, the step is rolled back. Training goes on."""
    simulation = trained(3, 4, lookahead=lookahead)
    before = residues_of(simulation)

    def fail(*_):
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        bucket, collectives = simulation.exchanges[2].buckets[0], simulation.collectives[2]
        kernel, _ = bucket.kernels[0]
        patch.setattr(kernel if where == "scatter" else collectives, where, fail)
        with pytest.raises(OSError, match="no route to host"):
            simulation.step(as_tensors(made_up(4, 3)))
    if where == "all_reduce":
        torch.testing.assert_close(residues_of(simulation), before, rtol=1e-5, atol=1e-5)
    for step in range(4, 7):
        outputs = simulation.step(as_tensors(made_up(4, step)))
        assert_same(outputs, outputs[:1] * 4)
        assert all(output.isfinite().all() for output in outputs[0].values())


def on_two_ranks(*functions):
    network = Network(2)
    ranks = [SimulatedCollectives(network, rank) for rank in range(2)]
    try:
        return network.run([lambda f=f, c=c: f(c) for f, c in zip(functions, ranks, strict=True)])
    finally:
        network.close()


def test_parameters_are_compared_until_ranks_agree_and_after_a_restart():
    face = StartsAlike({"weight": torch.ones(3)})
    told = face.tell()
    face.aborted(restarted=False)
    assert face.tell() == told
    face.hear([told, told], ())
    face.aborted(restarted=False)
    assert face.tell() == {"parameters": None}
    face.aborted(restarted=True)
    assert face.tell() == told


def test_buckets_are_in_the_order_in_which_they_are_complete():
    """Weights have integers, biases have not, so they share no bucket. The last layer is first."""
    shapes = {"weight1": (50, 50), "bias1": (50,), "weight2": (50, 50), "bias2": (50,)}
    simulation = simulate(2, shapes, bucket_bytes=10_000, min_numel=100)
    simulation.step(as_tensors(made_up(2, 0, shapes)))
    buckets = [bucket.names for bucket in simulation.exchanges[1].buckets]
    assert buckets == [["weight2"], ["bias2", "bias1"], ["weight1"]]


def test_a_user_is_told_of_steps_that_do_not_count(caplog):
    caplog.set_level("INFO", "scalecom_hvd")
    simulation = simulate(2, {"weight": (64,)})
    for step in range(43):
        everyone = as_tensors(made_up(2, step, {"weight": (64,)}))
        everyone[1]["weight"][5] = 0 if step == 19 else np.inf
        simulation.step(everyone)
        assert caplog.text.count("20 times in a row") == 2 * (step >= 39)  # once by each rank
    said = "step 1 is skipped: a gradient was not finite on some rank (39 skipped so far)"
    assert said in caplog.messages


def test_a_user_is_told_of_outliers(caplog):
    caplog.set_level("INFO", "scalecom_hvd")
    simulation = simulate(1, {"weight": (64,)})
    for factor in [1.0] * 10 + [1000.0]:
        simulation.step([{"weight": torch.full((64,), factor)}])
    (said,) = caplog.messages
    assert said == (
        "step 10: a gradient of weight has the norm 8e+03, the longest recent one 8, so its "
        "residue is multiplied by 0.00390625"
    )


@pytest.mark.parametrize("numel", [3000, 2**19])
def test_waiting_ranks_leave_the_cores_to_large_kernels(numel):
    shapes = {"weight": (numel,)}
    simulation = simulate(1, shapes)
    simulation.step(as_tensors(made_up(1, 0, shapes)))
    assert simulation.collectives[0].spins == (numel == 3000)


def test_a_thread_submits_the_last_part_just_before_a_rank_would_wait():
    network = Network(2)
    left, right = (SimulatedCollectives(network, position) for position in range(2))

    @contextlib.contextmanager
    def late():
        """The network's lock, once. The other rank's thread has it just before."""
        network._lock = lock
        right.all_reduce(torch.ones(1), "last")
        with lock:
            yield

    def waits():
        work = left.all_reduce(torch.zeros(1), "last")
        network._lock = late()
        return work.wait().item()

    lock = network._lock
    assert network.run([waits, lambda: None]) == [0.5, None]


def test_a_name_in_flight_cannot_be_used_again_but_a_name_that_has_met_can():
    def twice(collectives):
        for work in [collectives.all_reduce(torch.ones(1), "same") for _ in range(2)]:
            work.wait()

    def one_after_the_other(collectives):
        total = torch.full((1,), float(collectives.position))
        for _ in range(3):
            collectives.all_reduce(total, "same").wait()
            total += collectives.position
        return total.item()

    with pytest.raises(ValueError, match="Duplicate tensor name"):
        on_two_ranks(twice, twice)
    assert on_two_ranks(one_after_the_other, one_after_the_other) == [1.5, 2.5]


class Watched:
    """A collective's work. `names` loses its name when somebody waits for it."""

    def __init__(self, work, name, names):
        self.work, self.name, self.names, self.done = work, name, names, work.done

    def wait(self):
        self.names.discard(self.name)
        return self.work.wait()


@pytest.mark.parametrize(("rate", "skipped"), [(20, 2), ({0: 20, 3: 40, 5: 10}, 1)], ids=str)
def test_each_broadcast_is_waited_for_before_its_name_is_used_again(rate, skipped, monkeypatch):
    """Simulated broadcasts are over soon. Others may still travel when a step is rolled back.

    If the rate changes, a choice that was made ahead is for the old lanes.
    """
    broadcast, names = SimulatedCollectives.broadcast, set()

    def watched(self, buffer, root, name):
        whose = self.position, name
        assert whose not in names
        names.add(whose)
        return Watched(broadcast(self, buffer, root, name), whose, names)

    monkeypatch.setattr(SimulatedCollectives, "broadcast", watched)
    simulation = simulate(2, rate=rate, lookahead=True)
    for step in range(6):
        everyone = as_tensors(made_up(2, step))
        if step in (2, 4)[:skipped]:
            everyone[1]["first"].view(-1)[0] = np.nan
        simulation.step(everyone)
    assert simulation.compressors[0].residues.skipped_steps == skipped


def test_work_gives_its_result_as_often_as_it_is_asked():
    """It also says when there is no need to wait."""

    def brings(collectives):
        own = torch.full((2,), 1.0 + collectives.position)
        works = [
            collectives.gather(own, "gather"),
            collectives.all_reduce(own.clone(), "average"),
            collectives.broadcast(own.clone(), 1, "broadcast"),
        ]
        alone = [work.done() for work in works]
        results = [[work.wait().tolist() for work in works] for _ in range(2)]
        assert all(work.done() for work in works)
        assert own.tolist() == [1.0 + collectives.position] * 2
        return alone, results

    want = [[1, 1, 2, 2], [1.5, 1.5], [2, 2]]
    first, second = on_two_ranks(brings, brings)
    assert first == ([False] * 3, [want] * 2)
    assert second == ([True] * 3, [want] * 2)


def test_what_a_user_gets_who_sets_nothing():
    """All layers are sent in few bits, from the first step on."""
    shapes = {"body.weight": (100, 100), "head.weight": (100, 50)}
    simulation = simulated.simulate(2, shapes)
    sent = []
    for step in range(2):
        averages = simulation.step(as_tensors(made_up(2, step, shapes)))
        sent.append({name: int(average.count_nonzero()) for name, average in averages[0].items()})
    for step in sent:  # one index in 8, without those where the integers are or sum to zero
        assert 625 < step["body.weight"] <= 1250
        assert 313 < step["head.weight"] <= 625
    # There are 1875 fields of 5 bits, six in a word of 4 bytes. They hold sums from -14 to 14.
    assert simulation.compressors[0].stats()["bytes_values"] == 4 * 313


@pytest.mark.parametrize("fields", [{"bits": 32}, {"bits": 4}, {"compression": LocalTopK}], ids=str)
def test_an_average_that_overflows_half_precision_does_not_count(fields):
    """What waited fits into the residue, but not into p.grad, which carries the loss scale."""
    settings = {"rate": 4, "min_numel": 0, "loss_scale": lambda: 1024.0} | fields
    zeros = torch.zeros(64, dtype=torch.float16)
    simulation = Simulation(2, lambda _: {"w": torch.nn.Parameter(zeros)}, **settings)
    for skipped in (0, 1, 2):  # the second step would send 2 * 40 * 1024
        averages = simulation.step([{"w": torch.full_like(zeros, 40.0 * 1024)}] * 2)
        assert simulation.compressors[0].residues.skipped_steps == skipped
        found = averages[1]["w"]
        assert bool(found.isnan().all() if skipped else found.isfinite().all())


@pytest.mark.parametrize(
    ("kernel", "compression"), [("native", ScaleCom), ("torch", ScaleCom), ("native", LocalTopK)]
)
def test_norms_are_those_of_unscaled_gradients(kernel, compression, monkeypatch):
    """A loss scale that grows makes no outliers. The squares of the last gradients overflow."""

    def stats_with(scales):
        simulation = simulate(2, compression=compression, loss_scale=lambda: scale)
        for step, scale in enumerate(scales):
            simulation.step(as_tensors(made_up(2, step), scale))
        stats = simulation.compressors[0].stats()
        return [stats[what] for what in ("step", "outliers", "residue_norm", "residue_ratio")]

    monkeypatch.setenv("SCALECOM_KERNEL", kernel)
    scaled = stats_with([4.0] * 12 + [2.0**12, 2.0**70])
    assert scaled == pytest.approx(stats_with([1.0] * 14))
    assert scaled[:2] == [14, 0]
