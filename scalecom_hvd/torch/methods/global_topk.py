"""The true top-k of the averaged accumulator: what every other choice is measured by. It saves no traffic."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from scalecom_hvd.torch.accumulators import Accumulators, Channel
from scalecom_hvd.torch.kernels import largest
from scalecom_hvd.torch.methods.base import Method
from scalecom_hvd.torch.transport import Wait


class GlobalTopK(Method):
    """In every tensor the k places where the average over ranks of m + g is largest in magnitude. An oracle for studies, not for use.

    All accumulators are averaged whole to find them: dense traffic, 2(n-1)/n of 4N bytes. `rate` says how much of the average is then used.
    fields: of ScaleComConfig; leader, lookahead, wire_dtype and selection (always exact) mean nothing here.
    """

    unused = (*Method.unused, "selection")
    sends_all = True

    def exchange(self, bucket: Accumulators, channel: Channel) -> Generator[Wait, Any, None]:
        average = yield from channel.average(bucket.flat.clone(), "accumulators")
        parts = average.split(bucket.sizes)
        places = bucket.places([largest(part, k) for part, k in zip(parts, bucket.counts, strict=True)])
        bucket.send(places, bucket.flat[places])
        bucket.receive(places, average[places])
