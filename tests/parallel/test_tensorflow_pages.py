"""The examples for TensorFlow and Keras in README.md and docs/ train exactly as printed."""

import sys

import numpy as np
import pages
import pytest
import tensorflow as tf
from tensorflow_models import same_on_all_ranks

import scalecom_hvd.tensorflow
import scalecom_hvd.tensorflow.keras

FACES = {"keras": scalecom_hvd.tensorflow.keras, "tensorflow": scalecom_hvd.tensorflow}


def scope_of(kind):
    hvd = FACES[kind]
    random = np.random.default_rng(hvd.rank())
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(120, "relu", input_shape=(20,)), tf.keras.layers.Dense(4, "softmax")]
    )
    scope = {"tf": tf, "hvd": hvd, "model": model}
    scope["images"] = random.normal(size=(64, 20)).astype("float32")
    scope["labels"] = random.integers(0, 4, 64)
    scope["optimizer"] = tf.keras.optimizers.SGD(0.05)
    if kind == "tensorflow":
        losses = tf.keras.losses.sparse_categorical_crossentropy
        scope["loss_of"] = lambda labels, outputs: tf.reduce_mean(losses(labels, outputs))
        scope["compression"] = hvd.ScaleCom(rate=100)
    return scope


@pytest.mark.parametrize("example", pages.examples("keras", "tensorflow"), ids=lambda e: e.name)
def test_examples(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = scope_of(example.kind)
    given = scope["optimizer"]
    example.run(scope)
    model, images, labels = scope["model"], scope["images"], scope["labels"]
    if "step" in scope:
        for _ in range(3):
            scope["step"](images, labels)
    elif scope["optimizer"] is not given:
        model.compile(scope["optimizer"], "sparse_categorical_crossentropy")
        model.fit(images, labels, epochs=2, verbose=0)
    assert same_on_all_ranks(model.trainable_variables)


@pytest.mark.parametrize("method", [pytest.param("dense", marks=pytest.mark.long), "scalecom"])
@pytest.mark.parametrize("example", pages.examples("keras script"), ids=lambda e: e.name)
def test_scripts(example, method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_keras.py", method])
    scope = {}
    example.shorter("3200", "320").run(scope)
    assert same_on_all_ranks(scope["model"].trainable_variables)
