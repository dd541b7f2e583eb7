"""Controllers of rate="auto" that measure nothing."""

from scalecom_hvd.rate_controller import RateController
from scalecom_hvd.stages import LADDER, WHOLE

# Settings of a program whose rung changes.
AUTO = {"rate": "auto", "lookahead": False, "warmup_steps": 0}


class Restless(RateController):
    """Takes another rung whenever it is told of a step: one after the other, all of them."""

    def note(self, seconds, exposed):
        self.rung = (self.rung + 7) % len(LADDER)
        return self.rung


class SendsWhole(RateController):
    """Takes the rung on which all is sent whole, and stays there."""

    def note(self, seconds, exposed):
        self.rung = WHOLE
        return self.rung
