"""Tests of ablated and steered heads in runs, caches and generation, against plain hooks."""

import threading

import bridges
import pytest
import torch
from common import in_threads, meeting, needs_hooked_transformer, of_a_library, tokens
from patched_runs import head_of, hook_point
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import convert
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # raised by TransformerLens and transformers
NAMES = ["L0H1", "L0N29", "L1N3", "L1N36"]
# The operations are equal in float64, but llama's norms round to float32.
EXACT = {"llama": 1e-6}
KINDS = ["gpt2", "llama", pytest.param("converted", marks=needs_hooked_transformer)]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    if request.param in bridges.FAMILIES:
        return bridges.exposed_copy(bridges.boot(request.param))
    from models import build

    source = build("gelu", d_vocab_out=41, n_layers=2)
    # Without a tokenizer, TransformerLens' cached generation loses count of positions.
    source.set_tokenizer(tiny_tokenizer(41, tmp_path_factory.mktemp("words")))
    return convert(source)


@pytest.fixture
def close(request, model):
    eps = EXACT.get(request.node.callspec.params["model"], 1e-12)
    return lambda got, expected: (got - expected).abs().max() <= eps * expected.abs().max()


def prompts():
    """Return two prompts, the second with two padding tokens, and their mask."""
    return tokens(3, pos=7), torch.tensor([[1] * 7, [1] * 5 + [0] * 2])


@torch.no_grad()
def z_of(model, name, text, mask=None):
    """Return one head's values at its hook point z."""
    seen = []

    def keep(value, hook):
        seen.append(value[:, :, head_of(name)].clone())

    with model.hooks(fwd_hooks=[(hook_point(model, name, "z"), keep)]):
        model(text, attention_mask=mask)
    return seen[0]


def edits(model, change, positions=None):
    """Return plain hooks: `change` maps a name and z [batch, d_head] at a position to a new z."""

    def hook_of(name):
        def edit(value, hook):
            value = value.clone()
            for pos in range(value.shape[1]) if positions is None else positions:
                if pos < value.shape[1]:
                    value[:, pos, head_of(name)] = change(name, value[:, pos, head_of(name)])
            return value

        return hook_point(model, name, "z"), edit

    return [hook_of(name) for name in NAMES]


def steering(model):
    """Return a number for each neuron and a vector for each attention head."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(z_of(model, name, tokens()).shape[-1], generator=generator) * 9).tolist()
        if "H" in name
        else 7.0 + len(name)
        for name in NAMES
    }


@pytest.mark.parametrize(("to", "positions"), [("zero", [0, 4]), ("mean", None)])
def test_ablated(model, close, to, positions):
    text, mask = prompts()
    means = {name: z_of(model, name, text, mask)[mask.bool()].mean(dim=0) for name in NAMES}
    here = [positions] if isinstance(positions, int) else positions
    hooks = edits(model, lambda name, z: means[name] if to == "mean" else z * 0, here)
    batch = tokens(8, pos=5)
    plain = model(batch)
    expected = model.run_with_hooks(batch, fwd_hooks=hooks)
    sources = {"prompts": text, "mask": mask} if to == "mean" else {}
    sites = p.Sites(NAMES, "all" if positions is None else positions)
    with p.ablated(model, sites, to=to, **sources):
        assert close(model(batch), expected)
        logits, cache = model.run_with_cache(batch)
        assert close(logits, expected)
        assert close(model(batch), expected)  # run_with_cache has not removed the hooks
    z = cache[hook_point(model, "L1N3", "z")][:, :, 3]
    places = [pos for pos in range(5) if here is None or pos in here]
    assert (
        close(z[:, places], means["L1N3"].expand_as(z[:, places]))
        if to == "mean"
        else not z[:, places].any()
    )
    assert torch.equal(model(batch), plain)
    assert not close(plain, expected)


def test_bias_is_zero_of_neurons_and_shows_in_the_pattern(model, close):
    neurons, text = NAMES[1:], tokens(8)
    with p.ablated(model, neurons):
        expected = model(text)
    with p.ablated(model, neurons, to="bias"):
        logits, cache = model.run_with_cache(text)
    assert close(logits, expected)
    pattern = cache[hook_point(model, "L1N3", "pattern")][:, 3]
    assert torch.equal(pattern, torch.tensor([0.0, 1.0]).to(pattern).expand_as(pattern))
    with p.ablated(model, p.Sites(neurons, 1), to="bias"), p.ablated(model, NAMES[:1]):
        both = model(text)
    zero = edits(model, lambda name, z: z * 0, [1])[1:]
    every = [edits(model, lambda name, z: z * 0)[0]]
    assert close(both, model.run_with_hooks(text, fwd_hooks=zero + every))


def by_hand(model, text, n, hooks):
    """Generate greedily without a cache, with one whole run for each token."""
    for _ in range(n):
        with torch.no_grad():
            logits = model.run_with_hooks(text, fwd_hooks=hooks)
        text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
    return text


@pytest.mark.usefixtures("working_cache")
@pytest.mark.parametrize(
    ("positions", "cached"), [(None, True), ([2, 5, 6], True), ([2, 5, 6], False)]
)
def test_steered_generation(model, close, positions, cached):
    """Each generated token comes from a fully steered run, and is itself steered."""
    added, text, n = steering(model), tokens(2, batch=3, pos=4), 4
    how = {"max_new_tokens": n, "do_sample": False, "verbose": False, "stop_at_eos": False}
    how |= {"return_type": "tokens", "use_past_kv_cache": cached}
    hooks = edits(model, lambda name, z: z + torch.tensor(added[name]).to(z), positions)
    expected = by_hand(model, text, n, hooks)
    seen, point = [], hook_point(model, "L1N36", "z")
    keep = (point, lambda value, hook: seen.append(value.clone()))
    with p.steered(model, added, positions=positions), model.hooks(fwd_hooks=[keep]):
        assert torch.equal(model.generate(text, **how), expected)
        assert [z.shape[1] for z in seen] == [4, *([1] * 3 if cached else [5, 6, 7])]
    z = torch.cat(seen, dim=1) if cached else seen[-1]
    with model.hooks(fwd_hooks=[*hooks, keep]):
        model(expected[:, :-1])
    assert close(z, seen[-1])
    # Control: steering the prompt alone gives other activations at later tokens.
    short = range(4) if positions is None else [2]
    fewer = edits(model, lambda name, z: z + torch.tensor(added[name]).to(z), short)
    with model.hooks(fwd_hooks=[*fewer, keep]):
        model(expected[:, :-1])
    assert not close(z[:, 5:], seen[-1][:, 5:])


def test_hooks_are_gone_after_an_error_and_refusals_come_first(model):
    text = tokens(8)
    plain, d_head = model(text), z_of(model, "L0H1", text).shape[-1]
    with pytest.raises(KeyError), p.steered(model, steering(model), positions=[1]):
        raise KeyError
    with pytest.raises(KeyError), p.ablated(model, "all", to="mean", prompts=text):
        raise KeyError
    assert torch.equal(model(text), plain)
    assert not model.blocks[0]._forward_pre_hooks
    for refused, reasons in {
        p.ablated(model, p.Sites(NAMES, -1), to="bias"): ["no bias token", "positions [-1]"],
        p.ablated(model, NAMES, to="mean"): ["got no prompts"],
        p.steered(model, {"L0H1": 4.0, "L0N3": [1.0, 2.0], "L1N3": float("nan")}): [
            f"L0H1: got 4.0; expected a vector of {d_head}",
            "L0N3: got 2 numbers; expected a finite number",
            "L1N3: got nan",
        ],
    }.items():
        with pytest.raises(InputError) as caught, refused:
            pass
        assert all(reason in str(caught.value) for reason in reasons)


def test_names_that_say_where(model):
    text, d_head = tokens(8), z_of(model, "L0H1", tokens()).shape[-1]
    with p.ablated(model, p.Sites(["L0N29@1", "L0N29@4", "L0H1"], [2])):
        ablated = model(text)
    with p.ablated(model, p.Sites("L0N29", [4, 1])), p.ablated(model, "L0H1@2"):
        assert torch.equal(model(text), ablated)
    names = {"L1N3": 7.0, "L1N3@5": -3.0, "L0H1@0": [2.0] * d_head}
    with p.steered(model, names, positions=2):
        steered = model(text)
    with (
        p.steered(model, {"L1N3": 7.0}, positions=2),
        p.steered(model, {"L1N3": -3.0}, positions=5),
        p.steered(model, {"L0H1": [2.0] * d_head}, positions=0),
    ):
        assert torch.equal(model(text), steered)


@pytest.mark.usefixtures("working_cache")
@torch.no_grad()
def test_passes_of_threads_count_their_tokens_apart():
    """All threads finish block 0 before any of them starts block 1."""
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    texts = [tokens(2, batch=1, pos=pos) for pos in (6, 7, 8)]
    shown = {}

    def keep(value, hook):
        shown.setdefault(threading.get_ident(), []).append(value.clone())

    @torch.no_grad()
    def seen(text):
        """Run all tokens but three, then one in each pass (`generate` has one cache for all)."""
        shown.pop(threading.get_ident(), None)
        wrapped = model.original_model
        cache = wrapped(text[:, :-3], use_cache=True).past_key_values
        for token in text[:, -3:].T:
            wrapped(token[None], past_key_values=cache, use_cache=True)
        return torch.cat(shown[threading.get_ident()], dim=1)

    last = [(hook_point(model, "L1N36", "z"), keep)]
    with p.steered(model, {"L1N36": 11.0}, positions=[2, 5, 6]), model.hooks(fwd_hooks=last):
        alone = [seen(text) for text in texts]
        with model.blocks[0].register_forward_hook(of_a_library(meeting(texts))):
            together = in_threads(seen, texts, times=1)
    for z, (z_together,) in zip(alone, together, strict=True):
        assert torch.equal(z_together, z)
    # Control: the same token is steered at position 5 in one run, and not at 4 in another.
    assert alone[0][0, 5, 36] - alone[0][0, 4, 36] > 1.0
