"""Run on every rank by test_frameworks_agree.py: gives the made-up gradients to one framework.

Arguments: "torch" or "tensorflow", and a directory. The program saves every mode's averages (of
rank 0) and digests of the residues at every step in this directory.
"""

import json
import sys
from pathlib import Path

import numpy as np
from frameworks_cases import MODES, SHAPES, STEPS, digest, gradients


def in_torch(settings, groups):
    """Return step(grads) -> averages, and residues(), for PyTorch; all by name."""
    import torch

    import scalecom_hvd.torch as hvd

    torch.set_num_threads(1)
    model = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.values(), lr=0.1),
        named_parameters=model.items(),
        compression=hvd.ScaleCom(outliers=None, **settings),
        groups=[[model[name] for name in group] for group in groups],
    )

    def step(grads):
        optimizer.zero_grad()
        sum(
            (parameter * torch.from_numpy(grads[name])).sum() for name, parameter in model.items()
        ).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        return {name: parameter.grad.numpy().copy() for name, parameter in model.items()}

    return step, lambda: {
        name: m.numpy() for name, m in optimizer.compression.state_dict()["residues"].items()
    }


def in_tensorflow(settings, groups):
    import tensorflow as tf

    import scalecom_hvd.tensorflow as hvd

    model = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()}
    compressor = hvd.ScaleCom(**settings)
    groups = [[model[name] for name in group] for group in groups]

    @tf.function
    def run(grads):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(model[name] * grad) for name, grad in grads.items()])
        tape = hvd.DistributedGradientTape(tape, compression=compressor, groups=groups)
        return dict(zip(model, tape.gradient(loss, list(model.values())), strict=True))

    def step(grads):
        return {
            name: average.numpy()
            for name, average in run(
                {name: tf.constant(grad) for name, grad in grads.items()}
            ).items()
        }

    return step, lambda: compressor.state_dict()["residues"]


def main() -> None:
    framework, directory = sys.argv[1], Path(sys.argv[2])
    if framework == "torch":
        import horovod.torch as horovod
    else:
        import horovod.tensorflow as horovod
    horovod.init()
    rank = horovod.rank()
    for mode, (settings, groups) in MODES.items():
        step, residues = (in_torch if framework == "torch" else in_tensorflow)(settings, groups)
        averages = {name: [] for name in SHAPES}
        digests = []
        for number in range(STEPS):
            for name, average in step(gradients(SHAPES, rank, number)).items():
                averages[name].append(average)
            digests.append({name: digest(residue) for name, residue in residues().items()})
        if rank == 0:
            np.savez(
                directory / f"{framework}-{mode}.npz",
                **{name: np.stack(every) for name, every in averages.items()},
            )
        (directory / f"{framework}-{mode}-{rank}.json").write_text(json.dumps(digests))


if __name__ == "__main__":
    main()
