"""For all tests: what is sent whole they say themselves.

The library's defaults, a dense warm-up and a dense output layer, would leave little to see of
compression in a few steps of a small model; tests of the defaults take these variables away.
"""

import os

os.environ.setdefault("SCALECOM_DENSE", "[]")
os.environ.setdefault("SCALECOM_WARMUP_STEPS", "0")
