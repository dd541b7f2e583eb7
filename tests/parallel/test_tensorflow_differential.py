"""Random programs, run with stock Horovod and with ScaleCom on the same numbers.

With rate 1, variables must end as they do with stock Horovod, and the collectives of the program
itself must give the same. At rate 10 nothing may be lost: the sum of the averages, plus the
residues, is what came in. Some programs have a gradient that comes only on one rank. They hang in
stock Horovod, so only ScaleCom's sums are checked. See programs.py.
"""

import horovod.tensorflow as stock
import horovod.tensorflow.keras as stock_keras
import numpy as np
import pytest
import tensorflow as tf
from programs import limited, run_random_programs
from tensorflow_models import same_on_all_ranks

import scalecom_hvd.tensorflow as hvd
import scalecom_hvd.tensorflow.keras as keras

SHAPES = {"a": (300,), "b": (20, 15), "c": (7,), "d": (150,)}
TABLE = (30, 10)
MODES = (
    {},
    {"leader": "staggered", "bucket_bytes": 700},
    {"warmup_steps": 1},
    {"bits": 3, "warmup_steps": 2},
    {"bits": 2},
)
RATE_OF_LEARNING = 0.1
LossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer


def on_some_rank(fact):
    fact = tf.constant(float(fact))
    return float(stock.allreduce(fact, op=stock.Sum, name="fuzz.on_some_rank")) > 0


def total(array):
    return stock.allreduce(tf.constant(array, tf.float64), op=stock.Sum, name="fuzz.total").numpy()


class Arm:
    """One way to run a program: stock Horovod (rate None), or ScaleCom at a rate."""

    def __init__(self, rate, mode):
        self.rate, self.mode = rate, mode
        self.library, self.keras = (stock, stock_keras) if rate is None else (hvd, keras)
        self.compressions = []
        shapes = SHAPES | {"table": TABLE}
        self.variables = {n: tf.Variable(tf.zeros(shape), name=n) for n, shape in shapes.items()}
        self.seen = []
        self.sent = {name: np.zeros(v.shape) for name, v in self.variables.items()}
        self.came = {name: np.zeros(v.shape) for name, v in self.variables.items()}

    def compression(self, **settings):
        if self.rate is None:
            return stock.Compression.none
        settings |= {} if self.rate == 1 else self.mode
        self.compressions.append(hvd.ScaleCom(rate=self.rate, min_numel=100, **settings))
        return self.compressions[-1]

    def residue(self, name):
        """What waits on this rank, over all series of gradients."""
        found = np.zeros(self.variables[name].shape)
        for compression in self.compressions:
            for key, residue in compression.state_dict()["residues"].items():
                if key.partition("#")[0] == name:
                    found += residue / compression.config.beta
        return found

    def check_sums(self, names, divisor=None):
        for name in names:
            found = self.sent[name] * (divisor or hvd.size()) + total(self.residue(name))
            where, came = f"{name} at rate {self.rate}", total(self.came[name])
            near = 1e-3 + 1e-6 * np.abs(came).max()  # integers are rounded beside the largest ones
            np.testing.assert_allclose(found, came, 1e-3, near, err_msg=where)


def draw_outlier(choose):
    """The rank whose gradients are much too long in a step, or None.

    Nothing is cut off residues, because a tensor's first ten gradients are never outliers.
    """
    return choose((None, None, *range(hvd.size())))


def numbers(seed, step, outlier=None):
    """This rank's part of the gradients at a step, and the table's rows that the step looks up.

    outlier: the rank whose gradients are 1000 to 1000000 times as long.
    """
    made = np.random.default_rng([seed, step, hvd.rank()])
    factor = 10.0 ** (3 + seed % 4) if outlier == hvd.rank() else 1.0

    def normal(shape):
        return (made.standard_normal(shape) * factor).astype(np.float32)

    grads = {name: normal(shape) for name, shape in SHAPES.items()}
    rows = made.integers(0, TABLE[0], 4)
    return grads, rows, normal((4, TABLE[1]))


def own_collective(library, kind, x):
    """Run a collective of the user's own. Horovod numbers or names collectives without a name."""
    if kind == "allreduce":
        return library.allreduce(x)
    if kind == "named allreduce":
        return library.allreduce(x, name="mine", op=library.Sum)
    return library.allgather(x) if kind == "allgather" else library.broadcast(x, 1)


OWN = ("allreduce", "named allreduce", "allgather", "broadcast")


class Tapes:
    """Tapes in the user's own loop."""

    def draw(self, choose):
        traced = choose((True, False))
        uneven = not traced and choose((True, False))
        styles = ("one", "one", "persistent", "disjoint", "two tapes", "nested", "tensor")
        style, op = "one" if uneven else choose(styles), choose(("Average", "Average", "Sum"))
        grouped = style in ("one", "persistent", "nested")
        program = {
            "traced": traced,
            "uneven": uneven,
            "style": style,
            "op": op,
            "predivide": choose((1.0, 2.0)) if op == "Average" else 1.0,
            "groups": choose((None, None, 2, "lists")) if grouped else None,
            "local": choose((None, None, "register", "partial")),
            "sparse": None if uneven else choose((None, "slices", "dense")),
            "mode": choose(MODES),
        }
        # Stock Horovod cannot have groups without a gradient.
        whole = bool(program["groups"]) or uneven
        pairs = [(rank, name) for rank in range(hvd.size()) for name in SHAPES]
        since = {pair: choose((0, 1, 2, 3, 9)) for pair in pairs}
        masks = [tuple(name for name in SHAPES if choose((True, True, False))) for _ in range(2)]
        steps = program["steps"] = []
        for number in range(5):
            late = {pair for pair in pairs if number < since[pair]} | {choose(pairs)}
            raises = None if traced else choose((None, None, None, 0, 1))
            forward = choose((True, False, False))
            steps.append(
                {
                    "mask": tuple(SHAPES) if whole or choose((True, False)) else choose(masks),
                    "all sources": whole or choose((True, True, False)),
                    "without": sorted(late) if uneven else [],
                    "own": choose((None, *OWN)),
                    # It must run on all ranks.
                    "forward": forward and not uneven and raises is None,
                    "raises": raises,
                    "outlier": draw_outlier(choose),
                }
            )
        if traced:  # every kind of step is traced, so there are few
            program["steps"] = [choose(steps[:2]) for _ in range(5)]
        return program

    def run(self, program, arm, seed):
        p, variables, functions = program, arm.variables, {}
        compression = arm.compression()
        layer = tf.keras.layers.Layer()
        layer.c = variables["c"]
        groups = p["groups"]
        if groups == "lists":
            groups = [[variables["a"], variables["c"]], [variables["b"]]]
        times = {"persistent": 3, "two tapes": 2}.get(p["style"], 1)
        options = {"compression": compression, "op": getattr(stock, p["op"])}
        options |= {"sparse_as_dense": p["sparse"] == "dense", "scale_local_gradients": False}
        if p["sparse"] != "slices":  # stock Horovod can do neither of these with slices
            options |= {"gradient_predivide_factor": p["predivide"], "groups": groups}

        def distributed(tape):
            if p["local"] == "partial":
                partial = arm.library.PartialDistributedGradientTape
                return partial(tape, local_layers=layer, **options)
            tape = arm.library.DistributedGradientTape(tape, **options)
            if p["local"] == "register":
                tape.register_local_source(variables["c"])
            return tape

        def loss_of(names, grads):
            parts = []
            for name in names:
                w = variables[name]
                if p["style"] == "nested":
                    with tf.GradientTape() as inner:
                        half = tf.reduce_sum(w * w) / 2
                    w2 = tf.square(inner.gradient(half, w))
                else:
                    w2 = w * w
                parts.append(tf.reduce_sum(w * grads[name]) + 0.05 * tf.reduce_sum(w2))
            return tf.add_n(parts) if parts else tf.constant(0.0)

        def body(grads, rows, asked, x, names, step):
            seen = []
            asks_for = SHAPES if step["all sources"] else step["mask"]
            sources = [variables[name] for name in asks_for]
            with tf.GradientTape(persistent=True) as tape, tf.GradientTape() as second:
                if step["raises"] == hvd.rank():
                    raise ArithmeticError
                tape.watch(x)
                loss = loss_of(names, grads)
                if step["forward"] and "a" in names:
                    name = "forward" if step["own"] else None
                    mine = stock.allreduce(tf.reduce_sum(variables["a"]), name=name)
                    loss += 0.01 * mine
                    seen.append(mine)
                if p["sparse"]:
                    loss += tf.reduce_sum(tf.gather(variables["table"], rows) * asked)
                twice = 2 * loss
                loss_x = loss + tf.reduce_sum(x * x)
                first, rest = loss_of(names[:1], grads), loss_of(names[1:], grads)
            if step["raises"] is not None:
                return None, seen
            if step["own"]:
                seen.append(own_collective(stock, step["own"], x))
            if p["sparse"]:
                sources = [*sources, variables["table"]]
            style, wrapped = p["style"], distributed(tape)
            results = [(wrapped, loss, sources)]
            splits = names and sources[0] is variables[names[0]]
            if style == "tensor":
                results = [(wrapped, loss_x, [*sources, x])]
            elif style == "disjoint" and splits and not p["sparse"] and not step["forward"]:
                results = [(wrapped, first, sources[:1]), (wrapped, rest, sources[1:])]
            elif style == "persistent":
                results.append((wrapped, twice, sources))
            if style == "two tapes":
                results.append((distributed(second), loss, sources))
            averages = {}
            for tape_, loss_, sources_ in results:
                for source, average in zip(sources_, tape_.gradient(loss_, sources_), strict=True):
                    if source is x:
                        seen.append(average)
                    elif average is not None:
                        average = tf.convert_to_tensor(average)
                        averages[source.ref()] = averages.get(source.ref(), 0.0) + average
            for source in sources:
                if source.ref() in averages:
                    source.assign_sub(RATE_OF_LEARNING * averages[source.ref()])
            return {ref.deref().name[:-2]: average for ref, average in averages.items()}, seen

        def of_kind(names, step):
            return lambda grads, rows, asked, x: body(grads, rows, asked, x, names, step)

        for number, step in enumerate(p["steps"]):
            grads, rows, asked = numbers(seed, number, step["outlier"])
            x = tf.constant(grads["c"])
            parts = [(hvd.rank(), name) for name in step["mask"]]
            names = tuple(pair[1] for pair in parts if pair not in step["without"])
            before = {name: v.numpy() for name, v in variables.items()}
            raised, averages, seen = False, None, []
            run = of_kind(names, step)
            if p["traced"]:
                key = names, step["all sources"], step["own"], step["forward"]
                run = functions.setdefault(key, tf.function(run, autograph=False))
            tensors = {name: tf.constant(grad) for name, grad in grads.items()}
            try:
                averages, seen = run(tensors, tf.constant(rows), tf.constant(asked), x)
            except ArithmeticError:
                raised = True
            if step["raises"] is not None:
                assert raised == (step["raises"] == hvd.rank())
                assert on_some_rank(raised)
                continue
            arm.seen += [value.numpy() for value in seen]
            for name, average in averages.items():
                arm.sent[name] += average.numpy()
            for name in names:
                more = 0.01 if name == "a" and step["forward"] else 0
                arm.came[name] += times * (grads[name] + 0.1 * before[name] + more)
            if p["sparse"]:
                np.add.at(arm.came["table"], rows, times * asked)
        shared = [name for name in variables if not (name == "c" and p["local"])]
        arm.check_sums(shared, 1 if p["op"] == "Sum" else None)
        assert same_on_all_ranks([variables[name] for name in shared])


class Optimizers:
    """Keras optimizers in the user's own loop.

    Several take turns, with clipping, aggregation, and a moving loss scale with overflows.
    """

    def draw(self, choose):
        scaled = choose((True, False, False))
        passes = 1 if scaled else choose((1, 1, 2))
        clip = choose((None, None, "clipnorm", "global_clipnorm", "clipvalue"))
        return {
            "traced": choose((True, False)),
            "make": choose(("SGD", "SGD", "momentum", "Adam", "legacy SGD", "legacy Adam")),
            "clip": {clip: 0.7} if clip else {},
            "passes": passes,
            "average": choose((True, False)),
            "scaled": scaled,
            "mode": choose(MODES),
            "turns": [choose((0, 1)) for _ in range(4)],
            "outliers": [draw_outlier(choose) for _ in range(4)],
            "bad": [choose((None, None, 0, 1)) if scaled else None for _ in range(4)],
            "own": choose((None, *OWN)),
        }

    def run(self, p, arm, seed):
        kinds = tf.keras.optimizers.legacy if "legacy" in p["make"] else tf.keras.optimizers
        parts = [["a", "c"], ["b", "d"]]

        def make():
            inner, made = kinds.SGD(0.1, 0.9 * (p["make"] == "momentum"), **p["clip"]), []
            if "Adam" in p["make"]:
                inner = kinds.Adam(0.1, **p["clip"])
            scaled = p["scaled"] and arm.rate
            settings = {"loss_scale": lambda: made[0].loss_scale} if scaled else {}
            optimizer = arm.keras.DistributedOptimizer(
                inner,
                compression=arm.compression(**settings),
                backward_passes_per_step=p["passes"],
                average_aggregated_gradients=p["average"],
            )
            if p["scaled"]:
                optimizer = LossScaleOptimizer(
                    optimizer, initial_scale=2.0**10, dynamic_growth_steps=2
                )
            made.append(optimizer)
            return optimizer

        optimizers = [make() for _ in parts]
        variables = [[arm.variables[name] for name in names] for names in parts]

        def body(turn, grads, x):
            optimizer, names = optimizers[turn], parts[turn]
            with tf.GradientTape() as tape:
                loss = 0.0
                for name in names:
                    w = arm.variables[name]
                    loss += tf.reduce_sum(w * grads[name]) + 0.05 * tf.reduce_sum(w**2)
            seen = own_collective(stock, p["own"], x) if p["own"] else x
            # apply_gradients, called by itself, averages nothing in Horovod
            optimizer.minimize(loss, variables[turn], tape=tape)
            return seen

        steps = [body, body]
        if p["traced"]:
            steps = [tf.function(body, autograph=False) for _ in parts]
            for optimizer, mine in zip(optimizers, variables, strict=True):
                if hasattr(optimizer, "build"):
                    optimizer.build(mine)
        number = 0
        for turn, bad, outlier in zip(p["turns"], p["bad"], p["outliers"], strict=True):
            for _ in range(p["passes"]):
                grads, _, _ = numbers(seed, number, outlier)
                number += 1
                for name in parts[turn] if bad is None else ():
                    arm.came[name] += grads[name] + 0.1 * arm.variables[name].numpy()
                if bad == hvd.rank():
                    grads[parts[turn][0]][2] = np.inf
                tensors = {name: tf.constant(grad) for name, grad in grads.items()}
                seen = steps[turn](turn, tensors, tf.constant(grads["c"]))
                if p["own"] and bad is None:
                    arm.seen.append(seen.numpy())
        arm.seen += [np.array(optimizer.loss_scale) for optimizer in optimizers if p["scaled"]]
        assert same_on_all_ranks(list(arm.variables.values()))
        if p["make"] in ("SGD", "legacy SGD") and not p["clip"]:
            arm.sent = {name: -v.numpy() / 0.1 for name, v in arm.variables.items()}
            arm.check_sums(SHAPES, hvd.size() * (p["passes"] if p["average"] else 1))


def check(drawn):
    kind = drawn.choose((Tapes, Tapes, Tapes, Optimizers, Optimizers))()
    drawn.note(type(kind).__name__)
    program = drawn.note(kind.draw(drawn.choose))
    rates = (1, 10) if program.get("uneven") else (None, 1, 10)
    arms = [Arm(rate, program["mode"]) for rate in rates]
    for arm in arms:
        kind.run(program, arm, drawn.seed)
    if arms[0].rate is None:
        found = [[v.numpy() for v in arm.variables.values()] + arm.seen for arm in arms[:2]]
        for number, (theirs, ours) in enumerate(zip(*found, strict=True)):
            np.testing.assert_allclose(ours, theirs, 1e-3, 1e-4, err_msg=f"value {number}")


@pytest.mark.long
@limited
def test_random_programs():
    run_random_programs(check, on_some_rank, most=4)
