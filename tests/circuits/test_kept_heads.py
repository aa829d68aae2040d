"""Tests of fast runs of small circuits: the same metric as plain hooks, in all families."""

from collections import Counter
from contextlib import contextmanager

import bridges
import numpy as np
import patched_runs as oracle
import pytest
import torch
import transformers
from common import needs_hooked_transformer, tokens

from attn_only_lens import Contrast
from attn_only_lens import patching as p
from attn_only_lens.circuits import kept_heads
from attn_only_lens.circuits.ablated_model import AblatedModel
from attn_only_lens.engine.sites import Sites
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.patching.site_groups import site_groups, site_rows

pytestmark = pytest.mark.numeric

POS, CORRECT, WRONG = 5, 7, 11
KINDS = [
    *("gpt2", "neox", "gptj", "llama", "granite", "qwen3", "gemma2", "gemma3", "phi3", "olmo2"),
    *("native", "native_gated", "mistral"),
    *(
        pytest.param(f"converted {kind}", marks=needs_hooked_transformer)
        for kind in ("gelu", "silu_gated", "grouped", "norms_before_and_after", "alibi")
    ),
]


def ablated_model(model, positions="each", ablation="resample", sites="all", metric=None):
    clean = tokens(0, batch=2, pos=POS)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    metric = metric or p.logit_diff(CORRECT, WRONG)
    contrast = Contrast(clean, corrupted, metric)
    pair = contrast.pair(model)
    rows = site_rows(site_groups(model, pair, Sites(sites, positions), "z"))
    return AblatedModel(model, pair, metric, rows, ablation=ablation), contrast


PATHS = ["L0H@1", "L0N@1", "L0N@4", "L0H@4", "L1H@4", "L1N@4"]


def circuits_of(ablated, n=4, seed=0, paths=PATHS):
    """Return random circuits through which the changed token 1 can reach the last token.

    Together, they keep less than a fourth of the neurons of layer 0.
    """
    generator, sites = np.random.default_rng(seed), ablated.sites

    def some(path):
        beginning, position = path.split("@")
        here = sites["position"].isin([int(position), "all"])
        possible = np.flatnonzero(here & sites["name"].str.startswith(beginning))
        return generator.permutation(possible)[:1]  # some kinds or positions have no sites

    rows = [[some(path) for path in paths] for _ in range(n)]
    return [np.unique(np.concatenate(some)) for some in rows]


@contextmanager
def counted():
    """Yield a counter of the sublayers that compute only kept heads, by the hook name of z."""
    counts, forward = Counter(), kept_heads._Sublayer.forward

    def count(self, kept):
        counts[self.point.name] += 1
        return forward(self, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_heads._Sublayer, "forward", count)
        yield counts


@torch.no_grad()
def by_hooks(model, ablated, contrast, circuit):
    """The metric of each prompt if plain hooks hold every site outside a circuit."""
    outside = ablated.sites.drop(index=ablated.sites.index[circuit])
    hooks = []
    for _, rows in outside.groupby(["layer", "kind"], observed=True):
        name = HeadName.parse(rows["name"].iloc[0]).hook("z", model)
        held = oracle.seen(model, contrast.corrupted, name)
        gone = torch.zeros(held.shape[:3], dtype=torch.bool)
        for site in rows.itertuples():
            gone[:, slice(None) if site.position == "all" else site.position, site.index] = True
        hooks.append(
            (name, lambda z, hook, at=gone[..., None], held=held: torch.where(at, held, z))
        )
    logits = model.run_with_hooks(contrast.clean, fwd_hooks=hooks)[:, -1]
    return (logits[:, CORRECT] - logits[:, WRONG]).numpy()


@pytest.mark.parametrize("positions", ["each", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_circuits_have_the_metric_that_plain_hooks_give(kind, positions):
    model = bridges.with_heads(kind)
    ablated, contrast = ablated_model(model, positions)
    layers = range(host_of(model).n_layers - 1)
    heads, neurons = (
        {HeadName.parse(f"L{layer}{kind}0").hook("z", model) for layer in layers} for kind in "HN"
    )
    assert {*ablated._kept_heads.sublayers} == heads | neurons
    without_heads = [path for path in PATHS if not path.startswith("L0H")]
    for paths in (PATHS, without_heads):
        circuits = circuits_of(ablated, paths=paths)
        with counted() as counts:
            got = ablated.by_prompt(circuits)
        assert HeadName.parse("L0N0").hook("z", model) in counts
        assert (HeadName.parse("L0H0").hook("z", model) in counts) == (paths is without_heads)
        for row, circuit in zip(got, circuits, strict=True):
            expected = by_hooks(model, ablated, contrast, circuit)
            assert row == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert np.ptp(got, axis=0).min() > 1e-6  # the circuits differ
    usual, _ = ablated_model(model, positions)
    for circuit in circuits[:2]:
        expected = usual.worth(circuit)
        assert "_kept_heads" not in vars(usual)  # without several circuits, all heads run
        assert ablated.worth(circuit) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert (expected[ablated.sites["name"].str.startswith("L0N")] != 0).sum() > 5


def test_only_the_kept_heads_run():
    model = bridges.with_heads("llama")
    ablated, _ = ablated_model(model)
    names, layers = ablated.sites["name"], ablated.sites["layer"]
    ablated.by_prompt(circuits_of(ablated))  # tests the model first
    ran, block = [], model.blocks[0]
    for part in ("attn.q", "mlp.gate"):
        module = block.get_submodule(part)
        module.register_forward_hook(lambda *_, part=part: ran.append(part))
    neuron, head = (np.flatnonzero(names.isin([name]))[:1] for name in ("L0N3", "L0H1"))
    later = np.flatnonzero(layers == 1)[:1]
    for circuit, expected in ((neuron, []), (later, []), (head, ["attn.q"])):
        ran.clear()
        ablated.by_prompt([circuit])
        assert ran == expected


@pytest.mark.parametrize(
    ("ablation", "sites", "positions", "n"),
    [
        *(
            ("zero", "all", "each", 2),
            ("mean", "all", "all", 2),
            ("positional_mean", "all", "each", 2),
        ),
        *(("resample", "neurons", "each", 1), ("resample", "heads", "each", 1)),
        *(("resample", "all", [1, 2], 0), ("resample", "all", [2, 3, 4], 0)),
        ("resample", "all", [1, 2, 3, 4], 2),
    ],
)
def test_sublayers_run_as_usual_unless_all_their_heads_are_sites(ablation, sites, positions, n):
    model = bridges.with_heads("llama")
    ablated, _ = ablated_model(model, positions, ablation, sites)
    circuits = circuits_of(ablated)
    got = ablated.by_prompt(circuits)
    assert len(ablated._kept_heads.sublayers) == n
    one_by_one, _ = ablated_model(model, positions, ablation, sites)
    slow = [one_by_one.by_prompt([circuit])[0] for circuit in circuits]
    assert "_kept_heads" not in vars(one_by_one)  # a single circuit runs with hooks
    assert got == pytest.approx(np.array(slow), rel=1e-10, abs=1e-10)


def test_a_model_that_computes_otherwise_runs_as_usual(monkeypatch):
    """A wrong fast run is noticed, and then not used."""
    model = bridges.with_heads("llama")
    ablated, contrast = ablated_model(model)
    forward = kept_heads._Sublayer.forward

    def wrong(self, kept):
        correct = forward(self, kept)
        return lambda *args, **kwargs: (
            correct(*args, **kwargs) if self.heads is None else (correct(*args, **kwargs) + 1e-3)
        )

    monkeypatch.setattr(kept_heads._Sublayer, "forward", wrong)
    circuits = circuits_of(ablated)
    got = ablated.by_prompt(circuits)
    assert not ablated._kept_heads.sublayers
    expected = np.array([by_hooks(model, ablated, contrast, circuit) for circuit in circuits])
    assert got == pytest.approx(expected, rel=1e-10, abs=1e-10)


class WithAdapter(torch.nn.Linear):
    """A linear layer that adds a product of two small matrices, as LoRA does."""

    def forward(self, x):
        return super().forward(x) + x @ self.A @ self.B


@pytest.mark.parametrize("layer", [0, 1])
def test_an_mlp_with_more_than_its_matrix_runs_as_usual(layer):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**bridges.SIZES | {"num_hidden_layers": 3}, **bridges.GROUPED)
    llama = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    llama = bridges.randomise(llama.double().eval())
    gate = llama.model.layers[layer].mlp.gate_proj
    gate.__class__ = WithAdapter
    gate.A = torch.randn(gate.in_features, 3, dtype=torch.float64)
    gate.B = torch.randn(3, gate.out_features, dtype=torch.float64) * 0.1
    model = bridges.exposed_copy(bridges.bridged(llama))
    ablated, contrast = ablated_model(model)
    circuits = circuits_of(ablated)
    got = ablated.by_prompt(circuits)
    assert not ablated._kept_heads.sublayers
    expected = np.array([by_hooks(model, ablated, contrast, circuit) for circuit in circuits])
    assert got == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_a_metric_may_run_the_model():
    """Its own run is that of the whole model, not of a circuit."""
    model = bridges.with_heads("gpt2")
    clean = tokens(0, batch=2, pos=POS)
    whole = model(clean).detach()[:, -1, CORRECT].mean()
    seen = []

    def metric(logits):
        now = model(clean)[:, -1, CORRECT].mean()
        seen.append(float(now.detach()))
        return (logits[:, -1, CORRECT] - now).mean()

    ablated, _ = ablated_model(model, metric=metric)
    circuits = circuits_of(ablated)
    ablated.by_prompt(circuits)
    ablated.worth(circuits[0])
    assert ablated._kept_heads.sublayers
    assert seen == pytest.approx([float(whole)] * len(seen), rel=1e-12)


def test_no_circuits_have_no_metric():
    ablated, _ = ablated_model(bridges.with_heads("llama"))
    assert ablated.by_prompt([]).shape == (0, 2)
    ablated.by_prompt(circuits_of(ablated))
    assert ablated.by_prompt([]).shape == (0, 2)
