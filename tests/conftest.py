"""Settings of all tests.

They leave the optimizer's momentum as it is unless they give nu, or take this variable away.
"""

import os

import pytest

os.environ.setdefault("SCALECOM_NU", "1")


@pytest.fixture
def nu_is_open(monkeypatch):
    """Mix the optimizer's momentum, as by default, unless a test asks for something else."""
    monkeypatch.delenv("SCALECOM_NU")
