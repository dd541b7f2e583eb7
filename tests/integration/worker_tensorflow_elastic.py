"""Run on every rank by test_tensorflow_elastic.py: trains elastically and writes down what happens.

Arguments: "tape", "fit" or "example" (fit, in the order of Horovod's example), ScaleCom's settings
as JSON, and a directory. Host discovery prints the file `hosts` of this directory. One step is one
batch. The worker on the host 127.0.0.1 kills itself before step KILLED_AT. At step GROWN_AT rank 0
adds a slot to `hosts`, and all workers wait for the newcomer. At step LAST they end.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import scalecom_hvd.tensorflow.keras as hvd
from scalecom_hvd.config import ScaleComConfig
from scalecom_hvd.tensorflow import DistributedGradientTape

COMMIT_EVERY, KILLED_AT, GROWN_AT, LAST = 5, 12, 20, 40
FEATURES, OUTPUTS = 64, 32

kind, settings, directory = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
diary = directory / f"{os.getpid()}.jsonl"


def note(event: str, **facts) -> None:
    facts |= {"event": event, "rank": hvd.rank(), "size": hvd.size()}
    with diary.open("a") as file:
        print(json.dumps(facts), file=file)


def digest(arrays) -> str:
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()[:16]


def build() -> tf.keras.Model:
    inputs = tf.keras.Input([FEATURES])
    hidden = tf.keras.layers.Dense(128, activation="tanh", name="hidden")(inputs)
    return tf.keras.Model(inputs, tf.keras.layers.Dense(OUTPUTS, name="output")(hidden))


def batch_of(step: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a batch that differs between ranks. The labels come from one linear map."""
    truth = np.random.default_rng(0).standard_normal([FEATURES, OUTPUTS]) / FEATURES**0.5
    inputs = np.random.default_rng([hvd.rank(), step]).standard_normal([32, FEATURES])
    return tf.constant(inputs, tf.float32), tf.constant(inputs @ truth, tf.float32)


class Story:
    """What happens to this worker at which step, and what it writes down."""

    def __init__(self, model: tf.keras.Model, compressor: hvd.ScaleCom) -> None:
        self.model, self.compressor = model, compressor

    def residues(self) -> str | None:
        """Return a digest of the residues, or None if there are none yet."""
        residues = self.compressor.state_dict()["residues"]
        return digest(residues.values()) if residues else None

    def note(self, event: str, state) -> None:
        note(
            event,
            batch=state.batch,
            residues=self.residues(),
            weights=digest(self.model.get_weights()),
            step=self.compressor.state_dict()["step"],
        )

    def before(self, state) -> None:
        if state.batch == KILLED_AT and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            os.kill(os.getpid(), signal.SIGKILL)
        if state.batch == GROWN_AT and hvd.size() == 2:
            if hvd.rank() == 0:
                (directory / "hosts").write_text("localhost:3\n")
            limit = time.time() + 30
            while time.time() < limit:
                self.note("commit", state)
                state.commit()  # it raises HostsUpdatedInterrupt when hosts have changed
                time.sleep(0.1)
            raise TimeoutError("nobody came")

    def after(self, state, loss: float) -> bool:
        """Return whether a commit is due, which is noted here."""
        note("step", batch=state.batch, loss=float(loss), step=self.compressor.stats()["step"])
        state.batch += 1
        due = state.batch % COMMIT_EVERY == 0
        if due:
            self.note("commit", state)
        return due


def train_with_tape() -> Story:
    model, compressor = build(), hvd.ScaleCom(**settings)
    optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    story = Story(model, compressor)
    beta = ScaleComConfig(**settings).resolved().beta
    traces = []

    @tf.function
    def gradients_of(inputs, labels, ours):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - labels))
        if ours:
            traces.append(1)
            tape = DistributedGradientTape(tape, compression=compressor)
        grads = tape.gradient(loss, model.trainable_variables)
        if ours:
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss, grads

    @hvd.elastic.run
    def train(state) -> None:
        story.note("begin", state)
        while state.batch < LAST:
            story.before(state)
            batch = batch_of(state.batch)
            fresh = story.residues() is None
            own = gradients_of(*batch, False)[1] if fresh else None
            before = story.residues()
            try:
                loss, _ = gradients_of(*batch, True)
            except Exception:
                note("broken", before=before, residues=story.residues())
                raise
            if fresh:
                # A new worker's residue is beta times its gradient. Where it sent a value, the
                # residue is zero or, with few bits, a rounding error.
                residues = compressor.state_dict()["residues"]
                grads = {
                    v.name.partition(":")[0]: g.numpy() * np.float32(beta)
                    for v, g in zip(model.trainable_variables, own, strict=True)
                }
                kept = max(float(np.abs(m).max()) for m in residues.values())
                shares = []
                for name, m in residues.items():
                    off = np.minimum(np.abs(m), np.abs(m - grads[name]))
                    shares.append(float((off > 1e-6 * kept).mean()))
                note("first", batch=state.batch, off=max(shares), kept=kept)
            if story.after(state, loss):
                state.commit()

    train(hvd.elastic.KerasState(model, optimizer, batch=0))
    note("traces", count=len(traces))
    return story


def train_with_fit() -> Story:
    model, compressor = build(), hvd.ScaleCom(**settings)
    optimizer = hvd.DistributedOptimizer(
        tf.keras.optimizers.SGD(0.05, momentum=0.9), compression=compressor
    )
    model.compile(optimizer, "mse")
    story = Story(model, compressor)

    def data(first: int):
        return tf.data.Dataset.from_generator(
            lambda: map(batch_of, range(first, LAST)),
            output_signature=tuple(tf.TensorSpec([32, width]) for width in (FEATURES, OUTPUTS)),
        )

    def one_step():
        model.fit(data(0), steps_per_epoch=1, epochs=1, verbose=0)

    # As in Horovod's tensorflow2_keras_mnist_elastic.py, a step of the example makes the
    # optimizer's variables. Survivors take part in this step.
    if kind == "example":
        one_step()
    else:
        optimizer.build(model.trainable_variables)
    state = hvd.elastic.KerasState(model, batch=0)
    if kind == "example":
        state.register_reset_callbacks([one_step])

    class Tell(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            story.before(state)

        def on_train_batch_end(self, batch, logs=None):
            story.after(state, logs["loss"])  # CommitStateCallback commits

    @hvd.elastic.run
    def train(state) -> None:
        story.note("begin", state)
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=COMMIT_EVERY)
        model.fit(data(state.batch), epochs=1, verbose=0, callbacks=[Tell(), commit])

    train(state)
    return story


def main() -> None:
    hvd.init()
    # This holds from Horovod's next start on. The first one has a shorter limit, so that failures
    # are found soon.
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "60"
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.keras.utils.set_random_seed(hvd.rank())
    story = train_with_tape() if kind == "tape" else train_with_fit()
    note("end", weights=digest(story.model.get_weights()), residues=story.residues())


if __name__ == "__main__":
    main()
