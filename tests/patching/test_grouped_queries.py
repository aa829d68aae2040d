"""Tests of patches of one head's share of a key or value that a group of heads uses.

The oracle is a copy of each model in which every head has its own keys and values. The copy
computes the same function, and a plain hook patches one head in it. If one norm spans all keys,
no such copy exists. The oracle is then a run that patches the group's key and restores the z of
all other heads.
"""

from functools import cache

import bridges
import pandas as pd
import pytest
import torch
import transformers
from common import needs_hooked_transformer
from patched_runs import cached, logit_diff, patched_logits
from transformers.models.llama import modeling_llama

from attn_only_lens import Contrast, Work, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.errors import UnsupportedModelError

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
BATCH, POS, N_HEADS, N_SHARED = 2, 11, 6, 2
METRIC = p.logit_diff(correct=7, wrong=8)
HEADS = [f"L{layer}H{head}" for layer in range(2) for head in (0, 1, 3, 4)]
SIZES = bridges.SIZES | {"num_attention_heads": N_HEADS, "num_key_value_heads": N_SHARED}
SIZES |= {"hidden_size": 36}  # divisible by the heads, with an even quotient
CONFIGS = {
    "llama": lambda **how: transformers.LlamaConfig(**SIZES | {"head_dim": 14} | how),
    "qwen3": lambda **how: transformers.Qwen3Config(**SIZES | {"head_dim": 14} | how),
    "olmo2": lambda **how: transformers.Olmo2Config(**SIZES | how),
}
MODELS = ["llama bridge", "qwen3 bridge"]
MODELS += [pytest.param("llama two blocks", marks=needs_hooked_transformer)]
MODELS += [pytest.param("grouped in place", marks=needs_hooked_transformer)]


def bridge(name, **how):
    config = CONFIGS[name](**how)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return bridges.randomise(model.double().eval())


@cache
def models_of(model):
    """Return a model, and a copy whose keys and values are repeated for each head."""
    name, kind = model.split(" ", 1)
    if kind == "bridge":
        shared, alone = bridge(name), bridge(name, num_key_value_heads=N_HEADS)
        state = shared.state_dict()
        for key in state:
            if "k_proj" in key or "v_proj" in key:
                of_heads = state[key].unflatten(0, (N_SHARED, -1))
                copies = [of_heads[head * N_SHARED // N_HEADS] for head in range(N_HEADS)]
                state[key] = torch.cat(copies)
        alone.load_state_dict(state)
        return tuple(
            expose_neuron_heads(bridges.bridged(family)).model for family in (shared, alone)
        )
    from models import build, written_out  # a module-level import would skip the module under 4

    from attn_only_lens import convert

    to_heads = convert if kind == "two blocks" else (lambda model: expose_neuron_heads(model).model)
    return tuple(to_heads(make(name, scale=0.3)) for make in (build, written_out))


def pair():
    """Return prompts that differ at different positions in each prompt."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.randint(0, 41, (BATCH, POS), generator=generator)
    corrupted = clean.clone()
    corrupted[0, 3], corrupted[1, 5] = (clean[0, 3] + 5) % 41, (clean[1, 5] + 7) % 41
    corrupted[:, 7] = (clean[:, 7] + 3) % 41
    return Contrast(clean, corrupted, METRIC, roles={"subject": [3, 5], "verb": 7})


PAIR = pair()


def sweep(model, function=p.activation_patch, positions="each", **how):
    return function(model, PAIR, sites=p.Sites(HEADS, positions), **how)


def by_site(of_sweep):
    return of_sweep.to_frame().set_index(["name", "position"])["value"]


def places(position):
    """Return a mask [batch, pos] of the positions that a label stands for."""
    places = torch.zeros(BATCH, POS, dtype=torch.bool)
    columns = PAIR.roles.get(position, position)
    places[torch.arange(BATCH), slice(None) if columns == "all" else torch.tensor(columns)] = True
    return places


def truths(alone, part, rows, noise=False):
    runs = PAIR.corrupted, PAIR.clean
    target, source_prompts = reversed(runs) if noise else runs
    source, last = cached(alone, source_prompts), torch.tensor([POS - 1] * BATCH)
    logits = [patched_logits(alone, target, source, *row[:1], part, places(row[1])) for row in rows]
    values = [logit_diff(logits_of, last, 7, 8) for logits_of in logits]
    return pd.Series(values, pd.MultiIndex.from_tuples(rows, names=["name", "position"]))


@pytest.mark.parametrize("part", ["value", "k"])
@pytest.mark.parametrize("name", MODELS)
def test_one_share_is_a_plain_patch_of_heads_that_share_nothing(name, part):
    model, alone = models_of(name)
    assert (model(PAIR.clean) - alone(PAIR.clean)).abs().max() < 1e-10  # the same function
    for how in ({"positions": [4, 7, 10]}, {"positions": "roles", "direction": "noise"}):
        effects = by_site(sweep(model, part=part, work=Work(batch_size=5), **how))
        expected = truths(alone, part, list(effects.index), noise="direction" in how)
        assert (effects - expected).abs().max() < 1e-10
        # Control: heads of one group have different effects.
        one = effects.unstack()
        assert (one.loc["L0H0"] - one.loc["L0H1"]).abs().max() > 1e-5
        assert (one.loc["L0H3"] - one.loc["L0H4"]).abs().max() > 1e-5
    assert (effects - truths(alone, part, list(effects.index))).abs().max() > 1e-4  # not denoised
    everywhere = by_site(sweep(model, part=part, positions="all"))
    assert (everywhere - truths(alone, part, list(everywhere.index))).abs().max() < 1e-10


@pytest.mark.parametrize("part", ["value", "k"])
def test_keys_that_are_normed_together(part):
    """Only the patched head reads the group's key, even if the norm changes other groups' keys.

    An estimate is the derivative in the size of such a patch. Finite differences would be too
    noisy, because norms of transformers compute in float32.
    """
    model = expose_neuron_heads(bridges.bridged(bridge("olmo2"))).model
    source, target = cached(model, PAIR.clean), cached(model, PAIR.corrupted)
    effects = by_site(sweep(model, part=part, positions=[4, 7]))
    method = p.Estimate(budget=0)
    estimates = sweep(model, p.attribution, [4, 7], part=part, method=method)
    moved = by_site(estimates) - estimates.corrupted_value
    for name, position in effects.index:
        layer, head = int(name[1]), int(name[3])
        attention = f"blocks.{layer}.attn.hook_"
        group, size = head * N_SHARED // N_HEADS, torch.tensor(0.0).double().requires_grad_()

        def patched(
            size, position=position, head=head, group=group, point=f"{attention}{part[0]}",
            z_point=f"{attention}z",
        ):  # fmt: skip
            def put(value, hook):
                change = torch.zeros_like(value)
                difference = source[hook.name] - target[hook.name]
                change[:, position, group] = difference[:, position, group]
                return value + size * change

            def restore(value, hook):
                restored = target[hook.name].clone()
                restored[:, :, head] = value[:, :, head]
                return restored

            logits = model.run_with_hooks(
                PAIR.corrupted, fwd_hooks=[(point, put), (z_point, restore)]
            )
            return (logits[:, -1, 7] - logits[:, -1, 8]).mean()

        assert effects[name, position] == pytest.approx(patched(1.0).item(), rel=0, abs=1e-10)
        (slope,) = torch.autograd.grad(patched(size), size)
        assert moved[name, position] == pytest.approx(slope.item(), rel=1e-5, abs=1e-10)


@pytest.mark.parametrize(("part", "method"), [("value", "gradient"), ("k", "integrated")])
@pytest.mark.parametrize("name", [MODELS[0], MODELS[2]])
def test_estimates_are_those_of_heads_that_share_nothing(name, part, method):
    model, alone = models_of(name)
    how = {"part": part, "method": p.Estimate(method, budget=0)}
    effects, expected = (by_site(sweep(model, p.attribution, **how)) for model in (model, alone))
    assert (effects - expected).abs().max() < 1e-10 * expected.abs().max()
    assert effects.std() > 1e-5


def test_groups_in_another_order_are_refused(monkeypatch):
    """Tile keys and values over the heads, so that heads 0, 2 and 4 read the first."""
    model = expose_neuron_heads(bridges.bridged(bridge("llama"))).model
    monkeypatch.setattr(modeling_llama, "repeat_kv", lambda x, n: x.repeat(1, n, 1, 1))
    with pytest.raises(
        UnsupportedModelError, match=r"heads \[1, 3, 5\] use the last .*; expected heads \[3"
    ):
        sweep(model, part="value")
