"""A model for tests of patching that leave it as it is."""

import bridges
import pytest


@pytest.fixture(scope="session")
def model():
    return bridges.exposed_copy(bridges.boot("gpt2"))
