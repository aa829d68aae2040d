"""Tests that bridges run a patch on its suffix of positions only where the model allows it."""

from dataclasses import replace

import bridges
import pytest
import torch
import transformers
from common import of_a_library
from patched_runs import whole_runs
from transformers.cache_utils import DynamicLayer

from attn_only_lens import Contrast, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine import recording
from attn_only_lens.engine.cached_generation import RecordedCache
from attn_only_lens.engine.replay import bridge as bridge_replay
from attn_only_lens.engine.replay.bridge import BridgeReplay
from attn_only_lens.engine.replay.key_values import KeyValues, record_key_values
from attn_only_lens.errors import UnsupportedModelError

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
BATCH, POS, FIRST = 2, 11, 4
EXACT = 1e-10
METRIC = p.logit_diff(correct=7, wrong=8)
NEURONS = ["L0N5", "L0N29", "L0N36"]
ROWS = BATCH * len(NEURONS)  # rows in a batch of variants; tests of a start have other sizes


def exposed(name, state="plain", dtype=torch.float64):
    model = bridges.boot(name, dtype, state)
    expose_neuron_heads(model)
    return model


def pair():
    """Return prompts that differ at FIRST and at all later positions."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.randint(0, bridges.D_VOCAB, (BATCH, POS), generator=generator)
    corrupted = clean.clone()
    corrupted[:, FIRST:] = (clean[:, FIRST:] + 5) % bridges.D_VOCAB
    return Contrast(clean, corrupted, METRIC)


PAIR = pair()


def sweep(model, sites=NEURONS, contrast=PAIR, **how):
    return p.activation_patch(model, contrast, sites=sites, **how).to_frame()


def worst(model, frame, contrast=PAIR):
    """Return a sweep's largest error against whole runs with a hook, for one site per position."""
    felt = frame[frame.position >= FIRST].groupby("position").sample(n=1, random_state=1)
    expected = whole_runs(model, contrast, felt)
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
    [*((name, "plain") for name in ("gpt2", "neox", "gemma2", "native")), ("llama", "processed")],
)
def test_positions_before_a_patch_are_not_run(name, state):
    model = exposed(name, state)
    frame, seen_lengths = lengths(model, lambda: sweep(model))
    assert seen_lengths == (WHOLE if name == "native" else SUFFIXES)
    assert worst(model, frame) < EXACT
    assert frame["value"].std() > 1e-4
    assert set(frame[frame.position < FIRST]["score"]) == {0.0}
    heads = sweep(model, ["L0H1", "L1H0", "L1N5"])
    assert worst(model, heads) < EXACT
    assert heads.groupby("name")["value"].std().min() > 1e-6


SCATTERED = ["L0N5", "L0H1", "L1N29", "L1H0"]


# Only neurons of the last layer act at the metric's position alone, if no norm follows them.
@pytest.mark.parametrize(
    ("name", "felt"),
    [("gpt2", 3 * len(SUFFIXES) + 1), ("gemma2", 4 * len(SUFFIXES)), ("bert", 4 * POS)],
)
def test_patches_of_all_layers_run_in_one_pass(name, felt, monkeypatch):
    """Variants that enter a block later join the batch of the earlier ones."""
    model = exposed(name)
    monkeypatch.setattr(BridgeReplay, "flops_per_run", lambda self, block, position: 1e30)
    frame, shapes = watched(model.unembed, lambda: sweep(model, SCATTERED))
    assert shapes[-1][0] == BATCH * felt
    assert worst(model, frame) < EXACT
    assert frame.groupby("name")["value"].std().min() > 1e-8


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize(("name", "side"), [("gpt2", "left"), ("llama", "right")])
def test_with_padding(name, side):
    model = exposed(name)
    mask = torch.ones(BATCH, POS, dtype=torch.long)
    mask[1, slice(0, 3) if side == "left" else slice(POS - 2, None)] = 0
    padded = replace(PAIR, mask=mask)
    frame, seen_lengths = lengths(model, lambda: sweep(model, contrast=padded, per_prompt=True))
    assert set(seen_lengths) <= set(range(1, POS - FIRST + 1))
    assert len(seen_lengths) == len(SUFFIXES)
    assert worst(model, frame, padded) < EXACT


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_columns_that_the_metric_does_not_read_are_left_out(name):
    model = exposed(name, "processed")
    before = model(PAIR.clean)
    frame, shapes = watched(model.unembed, lambda: sweep(model))
    assert {shape[-1] for shape in shapes if shape[0] == ROWS} == {2}
    assert worst(model, frame) < EXACT
    assert torch.equal(model(PAIR.clean), before)


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


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize(
    ("tried", "error"),
    [
        ("columns", torch.OutOfMemoryError("out of memory")),
        ("suffix", torch.OutOfMemoryError("out of memory")),
        ("cache", TypeError("takes no")),
    ],
)
def test_errors_that_say_nothing_about_the_model_are_heard(tried, error, monkeypatch):
    if tried == "cache":  # else the recording already has the keys and values of its run
        monkeypatch.setattr(recording, "keys_and_values", lambda cache, tokens: ())
    model = exposed("gpt2")

    def fail(module, args, kwargs):
        cache = kwargs.get("past_key_values")
        if cache is not None and tried == ("suffix" if cache.get_seq_length() else "cache"):
            raise error

    def fail_late(module, args, output):
        if tried == "columns" and output.logits.shape[-1] != bridges.D_VOCAB:
            raise error

    model.original_model.register_forward_pre_hook(of_a_library(fail), with_kwargs=True)
    model.original_model.register_forward_hook(of_a_library(fail_late))
    if isinstance(error, TypeError):
        assert worst(model, sweep(model)) < EXACT
    else:
        with pytest.raises(type(error), match=str(error)):
            sweep(model)


# Wrong caches are not used.


def late(model, recording):
    """The cache is wrong at a position that only later starts use."""
    layers = list(record_key_values(model, recording).layers)
    keys, values = layers[1]
    keys = keys.clone()
    keys[..., FIRST + 2, :] = keys[..., FIRST + 2, :].roll(1, -1)
    layers[1] = keys, values
    return KeyValues(tuple(layers))


class Ignored(KeyValues):
    """A model that accepts the cache and ignores it."""

    def before(self, first):
        return RecordedCache(layer_class_to_replicate=DynamicLayer)


def ignored(model, recording):
    return Ignored(record_key_values(model, recording).layers)


WRONG = {"late": late, "ignored": ignored}


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_cache_is_seen(wrong, monkeypatch):
    model = exposed("gpt2")
    monkeypatch.setattr(bridge_replay, "record_key_values", WRONG[wrong])
    frame, seen_lengths = lengths(model, lambda: sweep(model))
    # Every start is tested, so starts after the wrong position run whole.
    assert seen_lengths[-1] == WHOLE[-1]
    assert worst(model, frame) < EXACT
    # Control: without the test of each start, the scores would be wrong.
    monkeypatch.setattr(BridgeReplay, "_test_start", lambda self, block, first, earlier: True)
    monkeypatch.setattr(BridgeReplay, "check", lambda self: None)
    assert worst(model, sweep(model)) > 1e-5


@pytest.mark.usefixtures("working_cache")
def test_a_model_that_is_not_causal_is_run_whole(monkeypatch):
    """The cache works, and only patched runs show that earlier positions depend on later ones."""
    config = transformers.Gemma3TextConfig(
        **bridges.SIZES | {"num_hidden_layers": 3},
        **bridges.GROUPED,
        use_bidirectional_attention=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = bridges.bridged(bridges.randomise(model.double().eval()))
    expose_neuron_heads(model)
    frame, seen_lengths = lengths(model, lambda: sweep(model))
    assert set(seen_lengths) == {POS}
    assert worst(model, frame) < EXACT
    # Control: the unpatched run in `check` does not show the error.
    monkeypatch.setattr(BridgeReplay, "_test_start", lambda self, block, first, earlier: True)
    frame, seen_lengths = lengths(model, lambda: sweep(model))
    assert min(seen_lengths) < POS
    assert worst(model, frame) > 1e-3
