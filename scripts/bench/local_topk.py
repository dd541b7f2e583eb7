"""The baseline of `make bench`: local top-k with error feedback and an all-gather.

It is Deep Gradient Compression (Lin et al., 2018, arXiv 1712.01887). Every worker sends its own
largest elements, found by a threshold that is estimated on a sample. What it does not send, it
keeps and adds to the next gradient. The indices differ between workers, so values and indices are
gathered, and the traffic grows with the number of workers. The code is as fast as it can be in
PyTorch: buffers are kept, and indices are 32 bits wide.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as horovod
import torch

SAMPLED = 0.01  # of a tensor's elements, for the threshold (the paper's 0.1 % to 1 %)


class LocalTopK:
    """Averages the gradients of `parameters` over the ranks.

    Every rank sends one element in `rate`. Call `reduce` after backward.
    """

    def __init__(
        self, parameters: list[torch.nn.Parameter], rate: int, min_numel: int = 2048
    ) -> None:
        self._rate = rate
        self._small = [p for p in parameters if p.numel() < min_numel]
        self._residues = {p: torch.zeros(p.numel()) for p in parameters if p.numel() >= min_numel}
        self._magnitudes = torch.empty(max(residue.numel() for residue in self._residues.values()))
        self._names = {p: i for i, p in enumerate(parameters)}
        self._handles: dict[torch.nn.Parameter, tuple[Any, Any]] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(self._send) for p in self._residues]
        self._dense = torch.zeros(sum(p.numel() for p in self._small))

    def _send(self, parameter: torch.nn.Parameter) -> None:
        residue = self._residues[parameter].add_(parameter.grad.view(-1))
        indices = self._largest(residue)
        values = residue[indices]
        residue[indices] = 0
        name = self._names[parameter]
        self._handles[parameter] = (
            horovod.allgather_async(indices.int(), name=f"local_topk.indices.{name}"),
            horovod.allgather_async(values, name=f"local_topk.values.{name}"),
        )

    def _largest(self, residue: torch.Tensor) -> torch.Tensor:
        """Indices of about N / rate elements: those above a threshold.

        In a sample, the same share of elements is above that threshold.
        """
        magnitudes = torch.abs(residue, out=self._magnitudes[: residue.numel()])
        stride = max(1, min(int(1 / SAMPLED), residue.numel() // (4 * self._rate)))
        start = int(torch.randint(stride, ()))
        sample = magnitudes[start::stride]
        threshold = sample.topk(max(1, sample.numel() // self._rate), sorted=False).values.min()
        return (magnitudes >= threshold).nonzero().view(-1)

    def reduce(self) -> None:
        """Every p.grad <- the sum of what the ranks sent, divided by their number."""
        if self._small:
            parts = self._dense.split([p.numel() for p in self._small])
            torch._foreach_copy_(list(parts), [p.grad.view(-1) for p in self._small])
            dense = horovod.allreduce_async_(self._dense, name="local_topk.dense")
        for parameter, (indices, values) in self._handles.items():
            everyones = horovod.synchronize(indices), horovod.synchronize(values)
            parameter.grad.view(-1).zero_().index_add_(0, *everyones, alpha=1 / horovod.size())
        self._handles.clear()
        if self._small:
            horovod.synchronize(dense)
            torch._foreach_copy_([p.grad.view(-1) for p in self._small], list(parts))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
