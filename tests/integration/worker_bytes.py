"""Run on every rank by test_bytes.py: trains for some steps and prints what stats() says was sent."""

import json
import sys

import torch

import scalecom_hvd.torch as hvd


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 500), torch.nn.Linear(500, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression=hvd.ScaleCom(**json.loads(sys.argv[1]))
    )
    torch.manual_seed(hvd.rank())
    for _ in range(int(sys.argv[2])):
        optimizer.zero_grad()
        model(torch.randn(4, 1000)).square().mean().backward()
        optimizer.step()
    if hvd.rank() == 0:
        tensors = optimizer.compression.residues.tensors
        k = {name: [t.geometry.k, t.residue.numel()] for name, t in tensors.items()}
        print("STATS " + json.dumps(optimizer.compression.stats() | {"k": k}), flush=True)


if __name__ == "__main__":
    main()
