"""Train a ResNet on handwritten digits with Keras and Horovod, dense or with ScaleCom.

    horovodrun -np 2 python scripts/examples/train_keras.py --compression scalecom
    mpirun -np 4 python scripts/examples/train_keras.py --loop custom --norm group --steps 1000
    python scripts/examples/train_keras.py --steps 200      (one process, to try things out)

It trains by Keras's model.fit, or by a gradient tape. Compared with a script without Horovod, the
lines that differ call `hvd` or `keras_hvd`. Compared with a script with Horovod, only
`compression=` differs.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from typing import Any

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
    return Training(args).run()


class Training:
    """A model, its data, its optimizer and its checkpoints."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.digits, self.held_out = digits.load()
        keras.utils.set_random_seed(training.seed_from(args.seed) % 2**32)
        self.model = build_model(args.norm)
        variables = self.model.trainable_variables
        self.compression = training.compression_from(args, hvd)
        if isinstance(self.compression, hvd.ScaleCom):
            shapes = {v.name.partition(":")[0]: tuple(v.shape) for v in variables}
            try:
                self.compression.config.rates_for(shapes)  # finds globs that match no variable
            except ValueError as error:
                raise training.WrongInput(str(error)) from error
        # Keras clips averaged gradients. It decays weights separately from the gradient, so
        # momentum does not amplify the decay as it does in PyTorch.
        clip_norm = None if args.clip_norm == math.inf else args.clip_norm
        shared = {"weight_decay": args.weight_decay, "global_clipnorm": clip_norm}
        if args.optimizer == "adamw":
            self.optimizer = keras.optimizers.AdamW(**shared)
        else:
            self.optimizer = keras.optimizers.SGD(momentum=args.momentum, **shared)
        if args.loop == "fit":
            self.optimizer = keras_hvd.DistributedOptimizer(
                self.optimizer, compression=self.compression
            )
        self.optimizer.build(variables)
        self.everything = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)
        self.residues = None
        if isinstance(self.compression, hvd.ScaleCom):
            self.residues = tf.train.Checkpoint(scalecom=self.compression)
        self.predict = tf.function(lambda x: tf.argmax(self.model(x, training=False), 1))
        self.first_step = self.begin()
        title = f"digits Keras {args.loop} {args.compression}"
        self.log = training.RunLog(
            args, title, self.first_step, hvd, mean_over_ranks, self.compression
        )

    def run(self) -> dict[str, Any]:
        """Take all steps; returns the summary."""
        if self.first_step < self.log.last_step:
            next(self.batches())  # refuses batches that are too large while all ranks still listen
            self.fit() if self.args.loop == "fit" else self.custom_loop()
        parameters = sum(v.shape.num_elements() for v in self.model.trainable_variables)
        sent = training.traffic_per_step(self.args, parameters, self.compression, hvd.size())
        return self.log.end(parameters=parameters, bytes_per_step=sent)

    def fit(self) -> None:
        """Train with model.fit, for which all steps are one epoch. The optimizer compresses."""
        self.model.compile(self.optimizer, CROSS_ENTROPY)
        self.model.fit(
            self.batches(),
            steps_per_epoch=self.log.last_step - self.first_step,
            callbacks=[keras_hvd.callbacks.BroadcastGlobalVariablesCallback(0), EachStep(self)],
            verbose=0,
        )

    def custom_loop(self) -> None:
        """Train with a gradient tape, which compresses; the optimizer is Keras's own."""

        @tf.function
        def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = CROSS_ENTROPY(labels, self.model(images, training=True))
            tape = hvd.DistributedGradientTape(tape, compression=self.compression)
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.model.trainable_variables, strict=True)
            )
            return loss

        hvd.broadcast_variables(self.model.variables, root_rank=0)
        hvd.broadcast_variables(self.optimizer.variables, root_rank=0)
        for step, (images, labels) in zip(self.log.steps(), self.batches(), strict=True):
            self.before(step)
            self.after(step, train_step(tf.constant(images), tf.constant(labels)))

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        examples = len(self.digits.images)
        for step in range(self.first_step, self.log.last_step):
            epoch, mine = training.deal(self.args, examples, step, hvd)
            chosen = generator(self.args.seed, epoch).permutation(examples)[mine]
            random = generator(self.args.seed, step, hvd.rank())
            images = digits.shift_at_random(self.digits.images[chosen], random)
            yield images[..., None], self.digits.labels[chosen]

    def before(self, step: int) -> None:
        self.lr = training.learning_rate(self.args, step, hvd.size())
        self.optimizer.learning_rate = self.lr

    def after(self, step: int, loss: Any) -> None:
        self.log.step_done(step, loss, self.lr, self.evaluate, self.save)

    def evaluate(self) -> dict[str, float]:
        """{"accuracy", "acc9"} on the test images, plain and over their nine one-pixel shifts.

        Each rank does its share.
        """
        # Each rank gathers batch normalisation's running statistics on its own. All ranks evaluate
        # with rank 0's.
        if self.model.non_trainable_variables:
            hvd.broadcast_variables(self.model.non_trainable_variables, root_rank=0)
        mine = range(hvd.rank(), len(self.held_out.images), hvd.size())
        images, labels = (part[list(mine)] for part in self.held_out)

        def correct(dx: int, dy: int) -> int:
            moved = digits.shift(images, dx, dy)[..., None]
            return int(np.sum(self.predict(tf.constant(moved)) == labels))

        shifted = sum(correct(dx, dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1))
        return {
            "accuracy": ratio_over_ranks(correct(0, 0), len(mine), "accuracy"),
            "acc9": ratio_over_ranks(shifted, 9 * len(mine), "acc9"),
        }

    def save(self, step: int) -> None:
        """Save the state after `step` steps.

        Rank 0 saves the model and the optimizer, and every rank saves its own residues.
        """
        folder = self.args.checkpoint_dir
        folder.mkdir(parents=True, exist_ok=True)
        mine = {training.residues_name(step, hvd.rank()): self.residues}
        if hvd.rank() == 0:
            mine[training.model_name(step)] = self.everything
        for name, checkpoint in mine.items():
            if checkpoint is not None:
                checkpoint.write(str(folder / name))
                training.keep(folder / f"{name}.index", *folder.glob(f"{name}.data-*"), folder)
        hvd.allreduce(tf.zeros(1), name="checkpoint.written")  # waits for all ranks
        training.commit_checkpoint(folder, step, hvd)

    def begin(self) -> int:
        """Load the newest checkpoint, if --resume asks for it; returns its step, or 0.

        Every rank reads rank 0's model and its own residues. If something does not fit, all ranks
        raise WrongInput.
        """
        step = training.latest_checkpoint(self.args, hvd)
        if not step:
            return 0
        folder, complaint = self.args.checkpoint_dir, None
        try:
            saved = self.everything.read(str(folder / training.model_name(step)))
            saved.assert_existing_objects_matched()
            if self.residues is not None:
                self.residues.read(str(folder / training.residues_name(step, hvd.rank())))
        except AssertionError:
            complaint = (
                "it is of another model, so resume with the options that it was trained with"
            )
        except (tf.errors.NotFoundError, ValueError) as error:
            complaint = f"{error}"
        complaints = [text for text in hvd.allgather_object(complaint, name="complaints") if text]
        if complaints:
            raise training.WrongInput(f"cannot go on from step {step} in {folder}: {complaints[0]}")
        return step


class EachStep(keras.callbacks.Callback):
    """What happens before and after each step of model.fit."""

    def __init__(self, run: Training) -> None:
        super().__init__()
        self._run, self._numbers = run, run.log.steps()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = next(self._numbers)
        self._run.before(self._step)
        # Without this, Keras would give the mean loss since the epoch's beginning.
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any]) -> None:
        self._run.after(self._step, logs["loss"])


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
