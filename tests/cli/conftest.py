"""Fixtures for tests of commands: the folder of a small model with a tokenizer."""

import pytest
from bridges import hf_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("source"))
