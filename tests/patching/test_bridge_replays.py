"""Tests that replays of bridges try their edits and shortcuts before use.

A patch runs on its suffix of positions only where the model allows it, and edits that have no
effect are refused.
"""

from dataclasses import replace
from functools import partial

import bridges
import numpy as np
import pytest
from bridges import exposed
from common import BATCH, POS, changed, of_a_library, tokens
from patched_runs import hook_point, whole_runs
from transformer_lens.hook_points import HookPoint
from transformers.cache_utils import DynamicLayer

from attn_only_lens import Contrast, circuits
from attn_only_lens import patching as p
from attn_only_lens.engine.cached_generation import RecordedCache
from attn_only_lens.engine.replay import Variants
from attn_only_lens.engine.replay import bridge as bridge_replay
from attn_only_lens.engine.replay.bridge import BridgeReplay
from attn_only_lens.engine.replay.key_values import KeyValues, record_key_values
from attn_only_lens.errors import UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
FIRST = 4
EXACT = 1e-10
METRIC = p.logit_diff(correct=7, wrong=8)
NEURONS = ["L0N5", "L0N29", "L0N36"]
ROWS = BATCH * len(NEURONS)  # rows in a batch of variants; tests of a start have other sizes


CLEAN = tokens(1)
PAIR = Contrast(CLEAN, changed(CLEAN, slice(FIRST, None)), METRIC)
"""Prompts that differ at FIRST and at all later positions."""


def sweep(model, sites=NEURONS, part="z"):
    return p.activation_patch(model, PAIR, sites=sites, part=part).to_frame()


def worst(model, frame):
    """Return a sweep's largest error against whole runs with a hook, for one site per position."""
    felt = frame[frame.position >= FIRST].groupby("position").sample(n=1, random_state=1)
    expected = whole_runs(model, PAIR, felt)
    return abs(felt["value"] - expected).max()


@pytest.fixture(autouse=True)
def starts_of_their_own(monkeypatch):
    """Start a run at each position, as with many sites; few sites would share one start."""
    monkeypatch.setattr(BridgeReplay, "flops_per_run", lambda self, block, position: 0.0)


def watched(module, run):
    """Return the result of a run, and the shape of each output of a module meanwhile."""
    shapes = []

    def look(module, args, output):
        shapes.append((output[0] if isinstance(output, tuple | list) else output).shape)

    with module.register_forward_hook(of_a_library(look)):
        return run(), shapes


def lengths(model, run):
    """Return how many positions the last block runs in batches of the three neurons."""
    result, shapes = watched(model.blocks[-1], run)
    return result, [shape[1] for shape in shapes if shape[0] == ROWS]


SUFFIXES = list(range(POS - FIRST, 0, -1))
"""Positions that each patch leaves to run, by its position; none before the prompts differ."""
WHOLE = [POS] * len(SUFFIXES)


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize(
    ("name", "state"),
    [*((name, "plain") for name in ("gpt2", "gemma2", "native")), ("llama", "processed")],
)
def test_positions_before_a_patch_are_not_run(name, state):
    model = exposed(name, state=state)
    frame, seen_lengths = lengths(model, lambda: sweep(model))
    assert seen_lengths == (WHOLE if name == "native" else SUFFIXES)
    assert worst(model, frame) < EXACT
    assert frame["value"].std() > 1e-4
    assert set(frame[frame.position < FIRST]["score"]) == {0.0}
    heads = sweep(model, ["L0H1", "L1H0", "L1N5"])
    assert worst(model, heads) < EXACT
    assert heads.groupby("name")["value"].std().min() > 1e-6


@pytest.mark.parametrize("fails", [False, True], ids=["counts on", "counts"])
def test_a_model_that_reads_its_vocabulary_keeps_it(fails, monkeypatch):
    """Code after the unembedding may need every column, or the number of columns."""
    model = exposed("gpt2")

    def softmax(module, args, kwargs, output):
        if fails and output.logits.shape[-1] != bridges.D_VOCAB:
            raise ValueError("so few logits")
        output.logits = output.logits.softmax(-1)
        return output

    model.original_model.register_forward_hook(of_a_library(softmax), with_kwargs=True)
    frame, shapes = watched(model.unembed, lambda: sweep(model))
    assert {shape[-1] for shape in shapes if shape[0] == ROWS} == {bridges.D_VOCAB}
    assert worst(model, frame) < EXACT
    assert frame["value"].std() > 1e-6
    # Control: without the test of the columns, the sweep is refused.
    monkeypatch.setattr(BridgeReplay, "_can_unembed_columns", lambda self: True)
    with pytest.raises(ValueError if fails else UnsupportedModelError):
        sweep(model)


# Wrong caches are not used.


class Ignored(KeyValues):
    """A model that accepts the cache and ignores it."""

    def before(self, first):
        return RecordedCache(layer_class_to_replicate=DynamicLayer)


def ignored(model, recording):
    return Ignored(record_key_values(model, recording).layers)


@pytest.mark.usefixtures("working_cache")
def test_a_cache_that_is_ignored_is_not_used(monkeypatch):
    model = exposed("gpt2")
    monkeypatch.setattr(bridge_replay, "record_key_values", ignored)
    frame, seen_lengths = lengths(model, lambda: sweep(model))
    assert seen_lengths == WHOLE
    assert worst(model, frame) < EXACT
    # Control: without the test of each start, the scores would be wrong.
    monkeypatch.setattr(BridgeReplay, "_test_start", lambda self, block, first, earlier: True)
    monkeypatch.setattr(BridgeReplay, "check", lambda self: None)
    assert worst(model, sweep(model)) > 1e-5


# Edits are tried before use


def require_exact(model, frame, part="z"):
    """Check every value against a whole run with a hook."""
    expected = whole_runs(model, PAIR, frame, part)
    np.testing.assert_allclose(frame["value"], expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("part", ["z", "pattern"])
def test_bert_whose_layers_run_no_module_for_their_mlp(part):
    model = exposed("bert")
    sites = ["L0N3", "L0N29", "L1N5", "L0H1", "L1H0"]
    if part == "pattern":
        with pytest.raises(UnsupportedModelError, match="does not use"):
            sweep(model, sites, part)
        sites = sites[:3]
    frame = sweep(model, p.Sites(sites, [1, 5, POS - 1]), part)
    require_exact(model, frame, part)
    felt = frame[(frame.layer == 0) | (frame.position == POS - 1)]
    felt = felt[felt.position > 1]  # at 1, only q of layer 0 differs between the runs
    assert felt.groupby("kind", observed=True)["value"].nunique().min() > 1
    assert (felt["value"] != frame["value"].mode()[0]).mean() > 0.5


@pytest.mark.parametrize(("site", "part"), [("L1N5", "z"), ("L1H0", "z"), ("L1H0", "pattern")])
def test_an_edit_that_a_replay_loses_or_makes_twice_is_refused(site, part, monkeypatch):
    leaving = BridgeReplay.block_output
    assert len(sweep(exposed("gpt2"), [site], part))

    def wrong_output(self, variants, times):
        hooks = [(name, lambda x, hook, f=f: f(x, hook) * times) for name, f in variants.hooks]
        if not times:
            hooks = []
        added = [(module, tensor * times) for module, tensor in variants.added]
        changed = Variants(variants.block, variants.first, variants.stream, hooks, added)
        return leaving(self, changed)

    for times in (0, 2):
        monkeypatch.setattr(
            BridgeReplay,
            "block_output",
            lambda self, variants, n=times: wrong_output(self, variants, n),
        )
        with pytest.raises(UnsupportedModelError, match="layer 1: noise at"):
            sweep(exposed("gpt2"), [site], part)


def test_what_acts_between_an_mlp_and_the_stream_is_patched_through():
    """A replaced forward method is neither a hook nor visible by name, and is still respected."""
    model = exposed("gpt2")
    mlp = model.blocks[0].mlp
    forward = mlp.forward
    vars(mlp)["forward"] = lambda *args, **kwargs: 3 * forward(*args, **kwargs)
    frame = sweep(model, ["L0N3", "L0N29"])
    require_exact(model, frame)
    assert frame["value"].std() > 1e-6


class LooksOn(HookPoint):
    """A hook point that ignores edits."""

    def __call__(self, x):
        super().__call__(x.clone())
        return x


class Silent(HookPoint):
    """A hook point that never fires."""

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("point", "reason"),
    [(LooksOn, "does not use|read-only"), (Silent, "did not fire in a forward pass")],
)
def test_nothing_is_said_of_heads_that_take_no_edits(point, reason):
    model = exposed("gpt2")
    sites = p.Sites(["L0H1", "L1H0", "L0N3"], POS - 1)
    ranking, one_run = p.attribution(model, PAIR, sites=sites), replace(PAIR, corrupted=None)
    calls = (
        partial(p.activation_patch, model, PAIR, sites=sites),
        partial(circuits.attribution_graph, model, one_run, top=5),
        partial(circuits.faithfulness, model, PAIR, ranking),
    )
    for call in calls:
        call()
    z = hook_point(model, "L1H0", "z")
    model.hook_dict[z].__class__ = point
    for call in calls:
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            call()
        assert z in str(caught.value)
        assert "blocks.0" not in str(caught.value)
