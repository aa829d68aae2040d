"""Tests that sweeps try their edits before use, and that edits which have no effect are refused."""

from dataclasses import replace

import bridges
import numpy as np
import pytest
from patched_runs import hook_point, whole_runs
from transformer_lens.hook_points import HookPoint

from attn_only_lens import Contrast, circuits, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.replay import Variants
from attn_only_lens.engine.replay.bridge import BridgeReplay
from attn_only_lens.errors import UnsupportedModelError

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
BATCH, POS, FIRST = 2, 7, 2
METRIC = p.logit_diff(correct=7, wrong=8)
EXACT = 1e-10


def exposed(name, **how):
    return expose_neuron_heads(bridges.boot(name, **how)).model


def pair():
    """Return prompts that differ from position 2 on."""
    clean = bridges.tokens(1)[:, :POS]
    corrupted = clean.clone()
    corrupted[:, FIRST:] = (clean[:, FIRST:] + 5) % bridges.D_VOCAB
    return Contrast(clean, corrupted, METRIC)


PAIR = pair()


def sweep(model, sites, part="z"):
    return p.activation_patch(model, PAIR, sites=sites, part=part).to_frame()


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
            sweep(model, sites, part=part)
        sites = sites[:3]
    frame = sweep(model, p.Sites(sites, [1, 4, POS - 1]), part)
    require_exact(model, frame, part)
    felt = frame[(frame.layer == 0) | (frame.position == POS - 1)]
    felt = felt[felt.position > 1]  # at 1, only q of layer 0 differs between the runs
    assert felt.groupby("kind", observed=True)["value"].nunique().min() > 1
    assert (felt["value"] != frame["value"].mode()[0]).mean() > 0.5


@pytest.mark.parametrize(("site", "part"), [("L1N5", "z"), ("L1H0", "z"), ("L1H0", "pattern")])
def test_an_edit_that_a_replay_loses_or_makes_twice_is_refused(site, part, monkeypatch):
    leaving = BridgeReplay.block_output
    assert len(sweep(exposed("gpt2"), [site], part=part))

    def wrong_output(self, variants, times):
        hooks = [(name, lambda x, hook, f=f: f(x, hook) * times) for name, f in variants.hooks]
        if not times:
            hooks = []
        added = None if variants.added is None else variants.added * times
        changed = Variants(
            *(variants.block, variants.first, variants.stream, hooks, variants.mlp, added)
        )
        return leaving(self, changed)

    for times in (0, 2):
        monkeypatch.setattr(
            BridgeReplay,
            "block_output",
            lambda self, variants, n=times: wrong_output(self, variants, n),
        )
        with pytest.raises(UnsupportedModelError, match="layer 1: noise at"):
            sweep(exposed("gpt2"), [site], part=part)


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


def ask(model, ranking):
    """Return the analyses that edit activations, by name."""
    sites = p.Sites(["L0H1", "L1H0", "L0N3"], POS - 1)
    return {
        "sweep": lambda: sweep(model, sites),
        "attribution": lambda: p.attribution(model, PAIR, sites=sites),
        "graph": lambda: circuits.attribution_graph(model, replace(PAIR, corrupted=None), top=5),
        "faithfulness": lambda: circuits.faithfulness(model, PAIR, ranking),
        "discover": lambda: circuits.discover(model, PAIR, sites=sites),
    }


@pytest.mark.parametrize(
    ("point", "reason"),
    [(LooksOn, "does not use|read-only"), (Silent, "did not fire in a forward pass")],
)
def test_nothing_is_said_of_heads_that_take_no_edits(point, reason):
    model = exposed("gpt2")
    ranking = p.attribution(model, PAIR, sites=p.Sites(positions=POS - 1))
    for run in ask(model, ranking).values():
        run()
    z = hook_point(model, "L1H0", "z")
    model.hook_dict[z].__class__ = point
    for name, run in ask(model, ranking).items():
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            run()
        assert z in str(caught.value), name
        assert "blocks.0" not in str(caught.value)
