"""Small models of Keras for the parallel tests."""

import numpy as np
import tensorflow as tf

import scalecom_hvd.tensorflow as hvd

FEATURES = 60
WIDTH = 3000


def scalecom(**settings) -> hvd.ScaleCom:
    """A ScaleCom that compresses all but the biases of these models."""
    return hvd.ScaleCom(**({"rate": 20, "min_numel": 100} | settings))


def same_on_all_ranks(variables, process_set=hvd.global_process_set) -> bool:
    flat = tf.concat([tf.reshape(tf.cast(v, tf.float64), [-1]) for v in variables], 0)
    everyone = hvd.allgather(flat[None], name="same_on_all_ranks", process_set=process_set)
    return bool(tf.reduce_all(tf.equal(everyone, everyone[:1])))


def net(seed=7, prefix="") -> tf.keras.Sequential:
    """Layers first, second and head. The weights are the same wherever this is called."""
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(64, "tanh", name=f"{prefix}first", input_shape=(FEATURES,)),
            tf.keras.layers.Dense(64, "tanh", name=f"{prefix}second"),
            tf.keras.layers.Dense(5, name=f"{prefix}head"),
        ]
    )


def examples(rank, count=48, seed=0) -> tuple[np.ndarray, np.ndarray]:
    """The examples that worker `rank` trains on."""
    teacher = np.random.default_rng(1).standard_normal((FEATURES, 5)) / 8
    x = np.random.default_rng([seed, rank]).standard_normal((count, FEATURES))
    return x.astype(np.float32), (x @ teacher).astype(np.float32)


def linear(names=("first", "second")) -> tf.keras.Model:
    """A model whose gradient does not depend on its weights, which start at zero.

    With `output` as loss, the gradient is the mean of the inputs.
    """
    inputs = tf.keras.Input((WIDTH,))
    parts = [
        tf.keras.layers.Dense(1, name=name, kernel_initializer="zeros")(inputs) for name in names
    ]
    return tf.keras.Model(inputs, tf.keras.layers.Add()(parts) if len(parts) > 1 else parts[0])


def output(y_true, y_pred):
    return y_pred


def inputs(rank, count=24) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng([2, rank]).standard_normal((count, WIDTH)) * np.random.default_rng(
        3
    ).uniform(0.1, 3, WIDTH)
    return x.astype(np.float32), np.zeros((count, 1), np.float32)


def total_residue(compression, name, process_set=hvd.global_process_set) -> np.ndarray:
    """A variable's residues, summed over all ranks. They are zero if it is sent whole."""
    residue = compression.state_dict()["residues"].get(name)
    if residue is None:
        return 0.0
    waits = tf.constant(residue / compression.config.beta)
    options = {"op": hvd.Sum, "name": f"left.{name}", "process_set": process_set}
    return hvd.allreduce(waits, **options).numpy()
