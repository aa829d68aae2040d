"""Fixtures for every test: a fixed seed, one thread, no network, real tokenizers if available."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import socket
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    connect = socket.socket.connect

    def refuse(self, address):
        # Local connections: the driver of the browser that opens pictures, and worker processes.
        if isinstance(address, str) or address[0] in ("127.0.0.1", "::1", "localhost"):
            return connect(self, address)
        raise AssertionError(f"a test tried to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="session")
def working_cache():
    """Skip tests of what a cache saves if TransformerLens ignores that of this transformers."""
    from bridges import boot

    from attn_only_lens.engine.cached_generation import _cache_works

    if not _cache_works(boot("gpt2").original_model):
        pytest.skip("TransformerLens ignores the cache of this transformers")


@pytest.fixture(scope="session")
def shared_models_dir():
    """Return the folder of real models and tokenizers, which are not part of the project."""
    default = Path(__file__).parents[2] / "shared" / "models"
    folder = Path(os.environ.get("ATTN_ONLY_LENS_MODELS", default))
    if not folder.is_dir():
        pytest.skip("no real models: set ATTN_ONLY_LENS_MODELS to a folder that holds them")
    return folder
