"""The true top-k of the averaged accumulator: what every other choice is measured by."""

from __future__ import annotations

from scalecom_hvd.exchange.kernels.base import largest
from scalecom_hvd.exchange.methods.base import BucketCollectives, BucketStep, Method, State, Step


class GlobalTopK(Method):
    """Chooses in every tensor the k elements where the average of m + g is largest in magnitude.

    The average is over ranks. This is an oracle for studies, not for use. To find the elements, all
    accumulators are averaged whole, which is dense traffic: 2(n-1)/n of 4N bytes. `rate` says how
    much of the average is then used.
    The choice is always exact. For the arguments, see `Method`.
    """

    uses = ()
    sends_all = True

    def step(self, bucket: BucketStep, collectives: BucketCollectives, state: State) -> Step[None]:
        """Average all accumulators, and choose from the average."""
        average = yield from collectives.average(bucket.accumulators.clone(), "accumulators")
        parts = average.split(bucket.sizes)
        chosen = [largest(part, k) for part, k in zip(parts, bucket.counts, strict=True)]
        places = bucket.places(chosen)
        values = bucket.sendable(places)
        bucket.send(places, values)
        averages = yield from collectives.average(values.clone(), "values")
        bucket.receive(places, averages)
