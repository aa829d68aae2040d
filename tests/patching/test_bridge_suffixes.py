"""Tests that bridges run a patch on its suffix of positions only where the model allows it."""

import bridges
import pytest
import torch
import transformers
from common import of_a_library
from patched_runs import cached, logit_diff, mask_at, patched_logits
from transformers.cache_utils import DynamicLayer

from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine import recording
from attn_only_lens.engine.cached_generation import RecordedCache
from attn_only_lens.engine.edits import attention_edit
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.recording import record
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
CACHED = [name for name in bridges.CHOSEN if not name.startswith("native")]


def exposed(name, state="plain", dtype=torch.float64):
    model = bridges.boot(name, dtype, state)
    if (name, state) == ("native_gated", "processed"):
        bridges.skip_unless_it_runs(model)
    expose_neuron_heads(model)
    return model


def pair():
    """Return clean and corrupted prompts that differ at FIRST and at all later positions."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.randint(0, bridges.D_VOCAB, (BATCH, POS), generator=generator)
    corrupted = clean.clone()
    corrupted[:, FIRST:] = (clean[:, FIRST:] + 5) % bridges.D_VOCAB
    return clean, corrupted


def sweep(model, sites=NEURONS, **how):
    return p.activation_patch(model, *pair(), METRIC, sites=sites, progress=False, **how).to_frame()


def worst(model, frame, mask=None, part="z"):
    """Return a sweep's largest error against whole runs with a hook, for one site per position."""
    clean, corrupted = pair()
    source = cached(model, clean, mask)
    last = torch.tensor([POS - 1] * BATCH) if mask is None else mask.cumsum(1).argmax(1)
    real = torch.ones(BATCH, POS) if mask is None else mask
    errors = []
    felt = frame[frame.position >= FIRST]
    for row in felt.groupby("position").sample(n=1, random_state=1).itertuples():
        places = mask_at(BATCH, POS, row.position) & real.bool()
        logits = patched_logits(model, corrupted, source, row.name, part, places, mask)
        errors.append(abs(row.value - logit_diff(logits, last, 7, 8)))
    return max(errors)


@pytest.fixture(autouse=True)
def starts_of_their_own(monkeypatch):
    """Start a run at each position, as with many sites; few sites would share one start."""
    monkeypatch.setattr(BridgeReplay, "flops_per_run", lambda self, block, position: 0.0)


def lengths(model, run):
    """Return how many positions the last block runs in batches of the three neurons."""
    seen_lengths = []

    def look(module, args, kwargs):
        stream = args[0] if args else kwargs["hidden_states"]
        if len(stream) == ROWS:
            seen_lengths.append(stream.shape[1])

    handle = model.blocks[-1].register_forward_pre_hook(of_a_library(look), with_kwargs=True)
    try:
        return run(), seen_lengths
    finally:
        handle.remove()


def replay_of_corrupted(model):
    clean, corrupted = pair()
    bound = bind(METRIC, model, p.prompt_pair(model, clean, corrupted))
    return BridgeReplay(model, record(model, corrupted, None), bound)


SUFFIXES = list(range(POS - FIRST, 0, -1))
"""Positions that each patch leaves to run, by its position; none before the prompts differ."""
WHOLE = [POS] * len(SUFFIXES)


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize("state", bridges.STATES)
@pytest.mark.parametrize("name", bridges.CHOSEN)
def test_positions_before_a_patch_are_not_run(name, state):
    model = exposed(name, state)
    frame, seen_lengths = lengths(model, lambda: sweep(model))
    assert seen_lengths == (SUFFIXES if name in CACHED else WHOLE)
    assert worst(model, frame) < EXACT
    assert frame["value"].std() > 1e-4
    assert set(frame[frame.position < FIRST]["score"]) == {0.0}
    heads = sweep(model, ["L0H1", "L1H0", "L1N5"])
    assert worst(model, heads) < EXACT
    assert heads.groupby("name")["value"].std().min() > 1e-6


SCATTERED = ["L0N5", "L0H1", "L1N29", "L1H0"]


def passes(model, run):
    """Return the batch rows of each pass through the unembedding."""
    seen_passes = []

    def look(module, args, output):
        seen_passes.append(len(output))

    handle = model.unembed.register_forward_hook(of_a_library(look))
    try:
        return run(), seen_passes
    finally:
        handle.remove()


# Only neurons of the last layer act at the metric's position alone, if no norm follows them.
@pytest.mark.parametrize(
    ("name", "felt"),
    [(name, 3 * len(SUFFIXES) + 1) for name in ("gpt2", "neox", "llama")]
    + [("gemma2", 4 * len(SUFFIXES)), ("bert", 4 * POS)],
)
def test_patches_of_all_layers_run_in_one_pass(name, felt, monkeypatch):
    """Variants that enter a block later join the batch of the earlier ones."""
    model = exposed(name)
    monkeypatch.setattr(BridgeReplay, "flops_per_run", lambda self, block, position: 1e30)
    frame, seen_passes = passes(model, lambda: sweep(model, SCATTERED))
    assert seen_passes[-1] == BATCH * felt
    assert worst(model, frame) < EXACT
    assert frame.groupby("name")["value"].std().min() > 1e-8


def test_a_model_that_wants_all_rows_in_every_block():
    """Control: with a model that needs all rows in each block, each layer's patches run alone."""
    model, rows = exposed("gpt2"), []

    def count(module, args, output):
        rows.append(len(output))

    def want(module, args):
        if len(args[0]) != rows[-1]:
            raise RuntimeError("all rows, please")

    handles = [
        model.embed.register_forward_hook(of_a_library(count)),
        model.blocks[1].register_forward_pre_hook(of_a_library(want)),
    ]
    frame, alone = passes(model, lambda: sweep(model, SCATTERED))
    for handle in handles:
        handle.remove()
    again, together = passes(model, lambda: sweep(model, SCATTERED))
    assert worst(model, frame) < EXACT
    assert (frame["value"] - again["value"]).abs().max() < EXACT
    assert len(alone) > len(together)


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "gemma2"])
def test_with_padding(name, side):
    model = exposed(name)
    mask = torch.ones(BATCH, POS, dtype=torch.long)
    mask[1, slice(0, 3) if side == "left" else slice(POS - 2, None)] = 0
    if model(pair()[0], attention_mask=mask).isnan().any():
        pytest.skip("the bridge itself puts out nan behind padding on the left")
    frame, seen_lengths = lengths(model, lambda: sweep(model, mask=mask))
    assert set(seen_lengths) <= set(range(1, POS - FIRST + 1))
    assert len(seen_lengths) == len(SUFFIXES)
    assert worst(model, frame, mask) < EXACT


@pytest.mark.parametrize("part", ["pattern", "value", "q"])
def test_parts_of_attention_heads(part):
    model = exposed("gpt2")
    assert worst(model, sweep(model, ["L0H1", "L1H0"], part=part), part=part) < EXACT


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_metric_that_reads_every_position(name):
    model, (clean, corrupted) = exposed(name), pair()
    sweep_of_loss = p.activation_patch(
        model, clean, corrupted, p.loss(), sites=NEURONS, progress=False
    )
    frame, seen = sweep_of_loss.to_frame(), cached(model, clean)
    bound = bind(p.loss(), model, p.prompt_pair(model, clean, corrupted))
    for row in frame[frame.position >= FIRST].itertuples():
        places = mask_at(BATCH, POS, row.position)
        logits = patched_logits(model, corrupted, seen, row.name, "z", places)
        assert row.value == pytest.approx(bound.of(logits), rel=0, abs=EXACT), row


@pytest.mark.usefixtures("working_cache")
def test_sites_that_the_metric_cannot_feel_are_not_run(monkeypatch):
    ran, values = [], BridgeReplay.values

    def counting(self, *variants):
        ran.extend(
            (variant.block, variant.first, len(variant.stream) // BATCH) for variant in variants
        )
        return values(self, *variants)

    monkeypatch.setattr(BridgeReplay, "values", counting)
    sweep(exposed("gpt2"), ["L0N5", "L1N5"])
    of_first = [(1, first, 1) for first in range(FIRST, POS)]
    assert ran == [*of_first, (2, POS - 1, 1)]  # the last layer runs at the metric's position only


def widths(model, run):
    """Return how many vocabulary columns are unembedded in batches of the three neurons."""
    seen_widths = set()

    def look(module, args, output):
        if len(output) == ROWS:
            seen_widths.add(output.shape[-1])

    handle = model.unembed.register_forward_hook(of_a_library(look))
    try:
        return run(), seen_widths
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "native"])
def test_columns_that_the_metric_does_not_read_are_left_out(name):
    model = exposed(name, "processed")
    before = model(pair()[0])
    frame, seen_widths = widths(model, lambda: sweep(model))
    assert seen_widths == {2}
    assert worst(model, frame) < EXACT
    assert torch.equal(model(pair()[0]), before)


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
    frame, seen_widths = widths(model, lambda: sweep(model))
    assert seen_widths == {bridges.D_VOCAB}
    assert worst(model, frame) < EXACT
    assert frame["value"].std() > 1e-6
    # Control: without the test of the columns, the sweep is refused.
    monkeypatch.setattr(BridgeReplay, "_can_unembed_columns", lambda self: True)
    with pytest.raises(ValueError if fails else UnsupportedModelError):
        sweep(model)


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize("tried", ["columns", "cache", "suffix"])
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), OSError("no disk"), TypeError("takes no")],
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


def test_a_sweep_that_fails_leaves_the_model_as_it_was():
    model = exposed("gpt2")

    def forwards():
        return {name for name, module in model.named_modules() if "forward" in vars(module)}

    def fail(module, args):
        if len(args[0]) == ROWS:
            raise RuntimeError("in the middle")

    before, expected = forwards(), model(pair()[0])
    handle = model.unembed.register_forward_pre_hook(of_a_library(fail))
    with pytest.raises(RuntimeError, match="in the middle"):
        sweep(model)
    handle.remove()
    assert forwards() == before
    assert torch.equal(model(pair()[0]), expected)


# Wrong caches are not used.


def other_keys(past, layer, position):
    """Return the same cache with changed keys of one layer at one position."""
    layers = list(past.layers)
    keys, values = layers[layer]
    keys = keys.clone()
    keys[..., position, :] = keys[..., position, :].roll(1, -1)
    layers[layer] = keys, values
    return KeyValues(tuple(layers))


def of_another_run(model, recording):
    return record_key_values(model, record(model, pair()[0], None))


def shifted(model, recording):
    layers = record_key_values(model, recording).layers
    return KeyValues(tuple((keys.roll(1, -2), values.roll(1, -2)) for keys, values in layers))


def late(model, recording):
    """The cache is wrong at a position that only later starts use."""
    return other_keys(record_key_values(model, recording), layer=1, position=FIRST + 2)


class Ignored(KeyValues):
    """A model that accepts the cache and ignores it."""

    def before(self, first):
        return RecordedCache(layer_class_to_replicate=DynamicLayer)


def ignored(model, recording):
    return Ignored(record_key_values(model, recording).layers)


WRONG = {"another": of_another_run, "shifted": shifted, "late": late, "ignored": ignored}


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_wrong_cache_is_seen(name, wrong, monkeypatch):
    model = exposed(name)
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
@torch.no_grad()
@pytest.mark.parametrize("amount", [0.0, 1e-9])
@pytest.mark.parametrize("index", [1, 2])
def test_every_later_block_must_come_out_alike(index, amount, monkeypatch):
    """Streams are compared token by token, even if the logits that the metric reads agree."""
    replay, original = replay_of_corrupted(exposed("gpt2")), BridgeReplay._streams_and_logits

    def off(self, variants):
        streams, logits = original(self, variants)
        if variants.first:
            streams[index][0, 0] *= 1 + amount
        return streams, logits

    monkeypatch.setattr(BridgeReplay, "_streams_and_logits", off)
    assert replay.can_start_at(0, FIRST) == (amount == 0.0)


@pytest.mark.usefixtures("working_cache")
@torch.no_grad()
def test_positions_are_tried_one_by_one(monkeypatch):
    """Suffixes that start before the wrong position are accepted."""
    model = exposed("gpt2")
    monkeypatch.setattr(bridge_replay, "record_key_values", late)
    replay = replay_of_corrupted(model)
    assert [replay.can_start_at(0, first) for first in (1, FIRST + 2, FIRST + 3)] == [
        True,
        True,
        False,
    ]
    assert not replay.can_start_at(0, 1)  # the start is no longer trusted


@pytest.mark.usefixtures("working_cache")
@torch.no_grad()
def test_later_blocks_are_trusted_where_earlier_ones_were_tried(monkeypatch):
    model, tried = exposed("gpt2"), []
    original = BridgeReplay._test_start

    def watching(self, block, first, earlier):
        tried.append((block, first))
        return original(self, block, first, earlier)

    monkeypatch.setattr(BridgeReplay, "_test_start", watching)
    replay = replay_of_corrupted(model)
    for block, first in [(1, 3), (1, 3), (2, 3), (0, 3), (1, 3), (1, 0)]:
        assert replay.can_start_at(block, first)
    assert tried == [(1, 3), (0, 3)]


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


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", torch.bfloat16), ("gpt2", torch.float16), ("native", torch.float64)],
)
def test_what_cannot_be_told_or_has_no_cache_is_run_whole(name, dtype):
    replay = replay_of_corrupted(exposed(name, dtype=dtype))
    assert replay.start(0, 5) == 0


@pytest.mark.usefixtures("working_cache")
@torch.no_grad()
def test_float32_runs_apart():
    assert replay_of_corrupted(exposed("gpt2", dtype=torch.float32)).start(0, 5) == 5


@pytest.mark.usefixtures("working_cache")
@torch.no_grad()
def test_a_cache_gives_and_does_not_take():
    model = exposed("llama")
    past = record_key_values(model, record(model, pair()[1], None))
    keys, values = past.layers[1]
    assert keys.shape == values.shape == (BATCH, 1, POS, 14)
    before = past.before(FIRST)
    new = torch.full((3 * BATCH, 1, 2, 14), 9.0, dtype=keys.dtype)
    for _ in range(2):
        returned, _ = before.update(new, new, 1)
        assert torch.equal(returned[..., :FIRST, :], keys[..., :FIRST, :].repeat(3, 1, 1, 1))
        assert torch.equal(returned[..., FIRST:, :], new)
        assert before.get_seq_length() == FIRST


def test_a_hook_point_that_shows_more_than_was_run_is_refused():
    heads, places = torch.tensor([[True, False]]), mask_at(BATCH, POS, POS - 1)[None]
    source = torch.zeros(BATCH, POS, 2, 13)
    hook = attention_edit(source, "value", heads, places, POS - 1)
    point = type("Point", (), {"name": "blocks.1.attn.hook_v"})
    assert torch.equal(hook(source[:, -1:], point), source[:, -1:])
    with pytest.raises(UnsupportedModelError, match=r"hook_v has shape \[2, 11, 2, 13\]"):
        hook(source, point)
