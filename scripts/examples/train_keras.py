"""Train a ResNet on handwritten digits with Keras and Horovod, dense or with ScaleCom.

    horovodrun -np 2 python scripts/examples/train_keras.py --compression scalecom
    mpirun -np 4 python scripts/examples/train_keras.py --loop custom --norm group --steps 1000
    python scripts/examples/train_keras.py --steps 200      (one process, to try things out)

An example to copy: `train` sets up, then `fit` trains with Keras's model.fit, or `custom_loop` with
a gradient tape. Compared with a script without Horovod, the lines that differ call `hvd` or
`keras_hvd`. Compared with a script with Horovod, only `compression=` in `train` or `custom_loop`
differs.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import digits
import numpy as np
import tensorflow as tf
import training
from tensorflow import keras

import scalecom_hvd.tensorflow as hvd
import scalecom_hvd.tensorflow.keras as keras_hvd

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train as the options say; returns the run's summary."""
    train_digits, test_digits = digits.load()
    examples = len(train_digits.images)

    keras.utils.set_random_seed(training.seed_from(args.seed) % 2**32)
    model = build_model(args.norm)
    variables = model.trainable_variables
    shapes = {variable.name.partition(":")[0]: tuple(variable.shape) for variable in variables}
    compression = training.compression_from(args, shapes, hvd)
    # Keras clips averaged gradients. It decays weights separately from the gradient, so momentum
    # does not amplify the decay as it does in PyTorch.
    clip_norm = None if args.clip_norm == math.inf else args.clip_norm
    shared = {"weight_decay": args.weight_decay, "global_clipnorm": clip_norm}
    if args.optimizer == "adamw":
        optimizer = keras.optimizers.AdamW(**shared)
    else:
        optimizer = keras.optimizers.SGD(momentum=args.momentum, **shared)
    if args.loop == "fit":
        optimizer = keras_hvd.DistributedOptimizer(optimizer, compression=compression)
    optimizer.build(variables)

    first_step = begin(args, model, optimizer, compression)
    title = f"digits Keras {args.loop} {args.compression}"
    log = training.RunLog(args, title, first_step, hvd, mean_over_ranks, compression)
    predict = tf.function(lambda images: tf.argmax(model(images, training=False), 1))

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in range(first_step, log.last_step):
            epoch, mine = training.deal(args, examples, step, hvd)
            chosen = generator(args.seed, epoch).permutation(examples)[mine]
            random = generator(args.seed, step, hvd.rank())
            images = digits.shift_at_random(train_digits.images[chosen], random)
            yield images[..., None], train_digits.labels[chosen]

    def before_step(step: int) -> None:
        optimizer.learning_rate = training.learning_rate(args, step, hvd.size())

    def after_step(step: int, loss: Any) -> None:
        lr = training.learning_rate(args, step, hvd.size())
        log.step_done(step, loss, lr, test, save)

    def test() -> dict[str, float]:
        return evaluate(model, predict, test_digits)

    def save(step: int) -> None:
        save_checkpoint(args.checkpoint_dir, step, model, optimizer, compression)

    if first_step < log.last_step:
        next(batches())  # refuses batches that are too large while all ranks still listen
        loop = fit if args.loop == "fit" else custom_loop
        count = log.last_step - first_step
        loop(model, optimizer, compression, Steps(count, log, batches, before_step, after_step))

    parameters = sum(variable.shape.num_elements() for variable in variables)
    sent = training.traffic_per_step(args, parameters, compression, hvd.size())
    return log.end(parameters=parameters, bytes_per_step=sent)


class Steps(NamedTuple):
    """All steps: their batches, and what to do before each, and after it with its loss."""

    count: int
    log: training.RunLog
    batches: Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
    before: Callable[[int], None]
    after: Callable[[int, Any], None]


# --------------------------------------------------------------------------------------------------
# two loops


def fit(model: keras.Model, optimizer: Any, compression: Any, steps: Steps) -> None:
    """Train with model.fit, for which all steps are one epoch.

    `optimizer` is a DistributedOptimizer, which compresses.
    """
    model.compile(optimizer, CROSS_ENTROPY)
    model.fit(
        steps.batches(),
        steps_per_epoch=steps.count,
        callbacks=[keras_hvd.callbacks.BroadcastGlobalVariablesCallback(0), EachStep(steps)],
        verbose=0,
    )


class EachStep(keras.callbacks.Callback):
    """Sets the learning rate before each step of model.fit.

    After the step it shows progress, evaluates and saves.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps, self._numbers = steps, steps.log.steps()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = next(self._numbers)
        self._steps.before(self._step)
        # Without this, Keras would give the mean loss since the epoch's beginning.
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        self._steps.after(self._step, logs["loss"])


def custom_loop(model: keras.Model, optimizer: Any, compression: Any, steps: Steps) -> None:
    """Train with a gradient tape, which compresses; `optimizer` is Keras's own.

    The step is one function, so that TensorFlow traces it once.
    """

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = CROSS_ENTROPY(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    for step, (images, labels) in zip(steps.log.steps(), steps.batches(), strict=True):
        steps.before(step)
        loss = train_step(tf.constant(images), tf.constant(labels))
        steps.after(step, loss)


# -------------------------------------------------------------------------------------------------
# Horovod and TensorFlow


def start() -> None:
    """Start Horovod, and make every run compute the same.

    The ranks of this machine share its cores and GPUs fairly.
    """
    hvd.init()
    cores = max(1, (os.cpu_count() or 1) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    tf.config.experimental.enable_op_determinism()


def generator(*numbers: int) -> np.random.Generator:
    """A random generator that depends only on these numbers, such as (seed, step, rank)."""
    return np.random.default_rng(training.seed_from(*numbers))


def mean_over_ranks(loss: Any) -> float:
    return float(hvd.allreduce(tf.constant(loss, tf.float32), name="loss"))


def ratio_over_ranks(numerator: float, denominator: float, name: str) -> float:
    """Sum both over all ranks and divide. This is a metric's mean if each rank knows a part."""
    sums = hvd.allreduce(tf.constant([numerator, denominator], tf.float64), op=hvd.Sum, name=name)
    return float(sums[0] / sums[1])


def evaluate(model: keras.Model, predict: Callable, data: digits.Digits) -> dict[str, float]:
    """{"accuracy", "acc9"} on the test images, plain and over their nine one-pixel shifts.

    Each rank does its share.
    """
    # Each rank gathers batch normalisation's running statistics on its own. All ranks evaluate with
    # rank 0's.
    if model.non_trainable_variables:
        hvd.broadcast_variables(model.non_trainable_variables, root_rank=0)
    mine = training.my_share(len(data.images), hvd)

    def correct(dx: int, dy: int) -> int:
        images = digits.shift(data.images[mine], dx, dy)[..., None]
        return int(np.sum(predict(tf.constant(images)) == data.labels[mine]))

    shifted = sum(correct(dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1))
    return {
        "accuracy": ratio_over_ranks(correct(0, 0), len(mine), "accuracy"),
        "acc9": ratio_over_ranks(shifted, 9 * len(mine), "acc9"),
    }


# --------------------------------------------------------------------------------------------------
# checkpoints


def save_checkpoint(
    folder: Path, step: int, model: keras.Model, optimizer: Any, compression: Any
) -> None:
    """Save the state after `step` steps.

    Rank 0 saves the model and the optimizer, and every rank saves its own residues.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(compression, hvd.ScaleCom):
        name = training.residues_name(step, hvd.rank())
        _write(tf.train.Checkpoint(scalecom=compression), folder, name)
    if hvd.rank() == 0:
        everything = tf.train.Checkpoint(model=model, optimizer=optimizer)
        _write(everything, folder, training.model_name(step))
    hvd.allreduce(tf.zeros(1), name="checkpoint.written")  # waits for all ranks
    training.commit_checkpoint(folder, step, hvd)


def _write(checkpoint: tf.train.Checkpoint, folder: Path, name: str) -> None:
    """Write a checkpoint's files, and wait until they are on the disk.

    They count once the checkpoint is committed.
    """
    checkpoint.write(str(folder / name))
    training.keep([folder / f"{name}.index", *folder.glob(f"{name}.data-*")])
    training.keep_names(folder)


def begin(args: argparse.Namespace, model: keras.Model, optimizer: Any, compression: Any) -> int:
    """Load the newest checkpoint, if --resume asks for it, and return its step; 0: there is none.

    Every rank reads rank 0's model and its own residues. If there are more ranks than before, the
    new ones start with residues of zero. If something does not fit, all ranks raise WrongInput.
    """
    step, ranks = training.latest_checkpoint(args, hvd)
    if not step:
        return 0
    folder, complaint = args.checkpoint_dir, None
    try:
        everything = tf.train.Checkpoint(model=model, optimizer=optimizer)
        saved = everything.read(str(folder / training.model_name(step)))
        saved.assert_existing_objects_matched()
        if isinstance(compression, hvd.ScaleCom) and hvd.rank() < ranks:
            own = str(folder / training.residues_name(step, hvd.rank()))
            tf.train.Checkpoint(scalecom=compression).read(own)
    except AssertionError:
        complaint = "it is of another model, so resume with the options that it was trained with"
    except (tf.errors.NotFoundError, ValueError) as error:
        complaint = f"{error}"
    complaints = [text for text in hvd.allgather_object(complaint, name="complaints") if text]
    if complaints:
        raise training.WrongInput(f"cannot go on from step {step} in {folder}: {complaints[0]}")
    return step


# --------------------------------------------------------------------------------------------------
# model


def build_model(norm: str, width: int = 24) -> keras.Model:
    """A stem and three residual blocks, 174 000 parameters. norm: "batch" or "group".

    Each block but the first halves height and width.
    """
    images = keras.Input((8, 8, 1))
    x = keras.activations.relu(convolution(images, width, norm, "stem"))
    for number, stride in ((1, 1), (2, 2), (3, 2)):
        x = residual_block(x, width * 2 ** (number - 1), stride, norm, f"block{number}")
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, keras.layers.Dense(10, name="head")(x))


def residual_block(x: Any, outputs: int, stride: int, norm: str, name: str) -> Any:
    """Two 3 x 3 convolutions with a shortcut (He et al., 2016)."""
    shortcut = x
    if stride != 1 or x.shape[-1] != outputs:
        shortcut = convolution(x, outputs, norm, f"{name}_shortcut", size=1, stride=stride)
    y = keras.activations.relu(convolution(x, outputs, norm, f"{name}_first", stride=stride))
    return keras.activations.relu(convolution(y, outputs, norm, f"{name}_second") + shortcut)


def convolution(x: Any, outputs: int, norm: str, name: str, size: int = 3, stride: int = 1) -> Any:
    """A convolution without bias, and its normalisation."""
    x = keras.layers.Conv2D(outputs, size, stride, padding="same", use_bias=False, name=name)(x)
    if norm == "batch":
        return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(x)
    return keras.layers.GroupNormalization(8, epsilon=1e-5, name=f"{name}_norm")(x)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train an image classifier with Keras and Horovod, dense or with ScaleCom."
    )
    loops = "model.fit, or a gradient tape"
    parser.add_argument("--loop", choices=("fit", "custom"), default="fit", help=loops)
    parser.add_argument("--norm", choices=("batch", "group"), default="batch", help="of a layer")
    training.add_training_options(parser, lr=0.025, steps=600, batch_size=32, weight_decay=1e-4)
    return parser


if __name__ == "__main__":
    training.main(argument_parser(), train, start, hvd)
