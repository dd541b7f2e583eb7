"""Settings of all tests.

They leave the optimizer's momentum as it is unless they give nu, or take this variable away.
"""

import os

os.environ.setdefault("SCALECOM_NU", "1")
