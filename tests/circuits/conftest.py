"""Fixtures of several files: Small English, pairs of prompts, and their circuit with resamples.

Files about other models have a fixture `model` of their own.
"""

import pytest

from attn_only_lens import circuits, expose_neuron_heads, load, tasks
from attn_only_lens import patching as p


@pytest.fixture(scope="session")
def model():
    return expose_neuron_heads(load("small-english"), copy=True).model


@pytest.fixture(scope="session")
def task(model):
    return tasks.agreement(model.tokenizer, 6, structure="relative")


@pytest.fixture(scope="session")
def circuit(model, task):
    search = circuits.Search(resamples=4)
    return circuits.discover(model, task, sites=p.Sites(positions="roles"), search=search)
