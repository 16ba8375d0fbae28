"""Without g++ nothing here can run."""

import pytest

from .runner import COMPILER


@pytest.fixture(autouse=True)
def compiler():
    if COMPILER is None:
        pytest.skip("there is no g++, which compiles the kernels for the CPU")
