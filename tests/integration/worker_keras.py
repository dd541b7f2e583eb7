"""Run on every rank by test_keras_training.py: calls train_keras.py from Python.

It also runs short trainings on digits, intact or with one part broken, as worker_accuracy.py does.
Prints one line of JSON for each part.
"""

import json
import sys
from pathlib import Path
from unittest import mock

from tensorflow import keras

import scalecom_hvd.tensorflow as hvd
from scalecom_hvd.tensorflow.bucket import Bucket

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "examples"))
import train_keras
import training

RESUMED = ["--loop", "custom", "--steps", "12", "--rate", "20", "--beta", "0.3"]
SCHEDULE = "--steps 400 --lr 0.004 --lr-schedule constant --weight-decay 0"
BOUND = [*SCHEDULE.split(), "--rate", "50", "--bits", "32"]
DENSE = ["--compression", "none"]


def plain_network(norm: str) -> keras.Model:
    """The network of worker_accuracy.py. It has no normalisation, because that hides errors."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="first"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu", name="second"),
            layers.Flatten(),
            layers.Dense(128, activation="relu", name="hidden"),
            layers.Dense(10, name="head"),
        ]
    )


def train(*options: str) -> dict:
    given = [*options, "--no-progress", "--evaluate-every", "1000"]
    return train_keras.train(train_keras.argument_parser().parse_args(given))


def acc9(*options: str) -> tuple[float, bool]:
    """Return the accuracy in percent, and whether all ranks ended with the same weights."""
    models, build = [], train_keras.build_model

    def kept(norm):
        models.append(build(norm))
        return models[0]

    with mock.patch.object(train_keras, "build_model", kept):
        result = train(*options)
    weights = b"".join(variable.numpy().tobytes() for variable in models[0].variables)
    return 100 * result["acc9"], len(set(hvd.allgather_object(weights))) == 1


def commit_nothing(bucket, result) -> list:
    """Take the place of Bucket.commit. Residues stay zero, because they are never assigned."""
    return []


def refusal(*options: str) -> list[str | None]:
    """Return each rank's error message on wrong input, or None."""
    message = None
    try:
        train(*options)
    except training.WrongInput as error:
        message = str(error)
    return hvd.allgather_object(message)


def main() -> None:
    train_keras.start()
    resnet, train_keras.build_model = train_keras.build_model, plain_network
    reached = {
        "dense": acc9(*BOUND, *DENSE),
        "fit": acc9(*BOUND),
        "custom": acc9(*BOUND, "--loop", "custom", "--leader", "staggered"),
    }
    with mock.patch.object(Bucket, "commit", commit_nothing):
        reached["residues thrown away"] = acc9(*BOUND)
    show("REACHED", reached)

    straight, stopped = (
        ["--checkpoint-dir", f"{sys.argv[1]}/{name}"] for name in ("straight", "stopped")
    )
    train(*RESUMED, *straight)
    train(*RESUMED, *stopped, "--stop-at", "5")
    train(*RESUMED, *stopped, "--resume")

    spoilt = ["--checkpoint-dir", f"{sys.argv[1]}/spoilt", "--steps", "20"]
    train(*spoilt, "--rate", "20", "--stop-at", "1")
    if hvd.rank() == 1:
        for file in Path(sys.argv[1], "spoilt").glob("*.residues-1.*"):
            file.unlink()
    asked = {
        "rate": ["--rate", "0.5"],
        "dense": ["--dense", "hed*"],
        "batch": ["--batch-size", "1000"],
        "other settings": [*spoilt, "--resume", "--rate", "7"],
        "no residues": [*spoilt, "--resume", "--rate", "20"],
    }
    refused = {name: refusal(*options) for name, options in asked.items()}
    train_keras.build_model = resnet
    show("REFUSED", refused | {"another model": refusal(*spoilt, "--resume", "--rate", "20")})
    hvd.shutdown()


def show(title: str, value) -> None:
    if hvd.rank() == 0:
        print(title, json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
