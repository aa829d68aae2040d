"""Helpers for all tests, with either version of transformer-lens: sizes, tokens, distances, marks.

Sizes are distinct primes, so that no swapped axis can pass.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import typer
from typer.testing import CliRunner

from attn_only_lens.cli import app as cli
from attn_only_lens.storage.chunks import ChunkStore
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

IN_PLACE = {
    "q": "hook_neuron_query",
    "k": "hook_neuron_key",
    "v": "hook_neuron_value",
    "attn_scores": "hook_neuron_logits",
    "pattern": "hook_neuron_probs",
    "z": "hook_neuron_act",
    "result": "hook_neuron_write",
}
"""The hook points of neuron-heads in place, by part."""
BATCH, POS, D_MLP, D_VOCAB, N_LAYERS = 2, 11, 37, 41, 3

needs_hooked_transformer = pytest.mark.hooked  # the root conftest.py skips it with version 4
needs_transformer_lens_4 = pytest.mark.skipif(
    HAS_HOOKED_TRANSFORMER,
    reason="about what transformer-lens 4 has not: run with it, `make test`",
)


def run_script(main, arguments):
    """Run a script of `analyses` with these arguments, and return its result; it must succeed."""
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result


def run_cli(*arguments):
    """Run a command of attn-only-lens in this process, and return its result."""
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def mlp_hook(point, layer=1):
    """Return the name of a hook point of an exposed MLP: one of its neuron-heads, or its own."""
    return f"blocks.{layer}.mlp.{IN_PLACE.get(point, f'hook_{point}')}"


def tokens(seed=0, batch=BATCH, pos=POS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, D_VOCAB, (batch, pos), generator=generator)


def changed(clean, where, by=7):
    """Return the tokens with other ones at one or more positions of every prompt."""
    corrupted = clean.clone()
    corrupted[:, where] = (clean[:, where] + by) % D_VOCAB
    return corrupted


def relative(got, expected):
    """Return the largest difference relative to the largest expected entry."""
    return ((got - expected).abs().max() / expected.abs().max()).item()


def in_threads(run, inputs, times=17):
    """Return the results of `run` on each input, repeated in one thread per input."""
    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(lambda x: [run(x) for _ in range(times)], inputs))


def meeting(inputs):
    """Return a hook that blocks a thread until the threads of all inputs have reached it."""
    barrier = threading.Barrier(len(inputs), timeout=60)

    def wait(*args, **kwargs):
        barrier.wait()

    return wait


@contextmanager
def interrupted(n_chunks=2):
    """Expect that the job inside is interrupted, which happens when some chunks are stored."""
    put, left = ChunkStore.put, iter(range(n_chunks))

    def until_none_is_left(self, key, arrays):
        if next(left, None) is None:
            raise KeyboardInterrupt
        put(self, key, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkStore, "put", until_none_is_left)
        with pytest.raises(KeyboardInterrupt):
            yield


def of_a_library(hook):
    """Disguise a torch hook as one from transformers that only reads, which nothing refuses."""
    hook.__module__ = "transformers.utils.output_capturing"
    return hook
