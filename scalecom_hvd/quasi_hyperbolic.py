"""kappa: how much of an optimizer's step goes along the gradient instead of the momentum.

Both frameworks' momentum.py mix momenta by it (QHM and QHAdam, with nu = 1 - kappa). Imports no
framework.
"""

from __future__ import annotations

# Found by trying (docs/results.md): SGD, AdamW and Lion share one number.
LARGEST = 0.5
# At lower rates less waits, and kappa falls.
FULL_RATE = 8.0
POWER = 0.6
UNKNOWN = (
    "%s keeps its momentum as it is, because ScaleCom does not know how this optimizer uses it. "
    "Training may lose accuracy: try beta=0.2. (nu=1 keeps every optimizer's momentum, and logs "
    "nothing)"
)


def kappa_of(rate: float, nu: float | None) -> float:
    """kappa, for a tensor of which one element in `rate` is sent.

    Args:
        rate: gradients are up to so many steps late.
        nu: the user's choice of 1 - kappa. None: by the rate. The wait is a part of the momentum,
            so kappa falls with the rate.
    """
    if nu is not None:
        return 1 - nu
    return LARGEST * min(1.0, (rate / FULL_RATE) ** POWER)
