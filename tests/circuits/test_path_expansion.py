"""Tests of path expansion against the model's own code, run with scaled heads and fixed patterns.

Every pattern, norm scale and held factor is reset to its value in one run, and every head's
output is multiplied by e. A path through h heads is then multiplied by e^h, so the logits are a
polynomial in e, whose coefficients are the logits of the paths by length. If all heads but two
are zero, the effect of both minus the effects of each alone is the path through both.
"""

import bridges
import numpy as np
import pytest
import torch

from attn_only_lens import Contrast, Work, circuits
from attn_only_lens import HeadName as Name
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
N_LAYERS = 2
PROMPT = torch.tensor([[3, 29, 7, 11, 5]])
ONE_RUN = Contrast(PROMPT, None, p.logit_diff(correct=7, wrong=8))


class Frozen:
    """A model whose patterns, norm scales and held factors are fixed at those of one run."""

    def __init__(self, model, gated=False, held="gate"):
        self.model, self.gated, self.held = model, gated, held
        first = [Name.parse(f"L{layer}{kind}0") for layer in range(N_LAYERS) for kind in "HN"]
        self.z, self.patterns = (
            [head.hook(point, model) for head in first] for point in ("z", "pattern")
        )
        self.scales = [name for name in model.hook_dict if name.endswith("hook_scale")]
        self.neurons = [Name.parse(f"L{layer}N0") for layer in range(N_LAYERS)]
        names = [*self.patterns, *self.scales]
        for name in self.neurons:
            names += [name.hook("q", model), name.hook("v", model)]
        self.seen = {}
        with torch.no_grad():
            self.value = model.run_with_hooks(
                PROMPT, fwd_hooks=[(name, self.keep(self.seen, name)) for name in names]
            )

    @staticmethod
    def keep(values, name):
        def hook(value, hook):
            values[name] = value.clone()

        return hook

    def product(self, now, name):
        """Return hooks that reset one factor of the gated neurons' value."""
        q, v = (name.hook(point, self.model) for point in "qv")

        def hook(value, hook):
            gate, gate_then, then = now[q], self.seen[q], self.seen[v]
            up, up_then = value / gate, then / gate_then
            return gate_then * up if self.held == "gate" else gate * up_then

        return [(q, self.keep(now, q)), (v, hook)]

    @torch.no_grad()
    def logits(self, scale):
        """Return logits with z of every sublayer multiplied by `scale(hook_name, z)`."""
        hooks = [
            (name, lambda value, hook, name=name: self.seen[name])
            for name in (*self.patterns, *self.scales)
            if name in self.seen
        ]
        now = {}
        for name in self.neurons if self.gated else ():
            hooks += self.product(now, name)
        hooks += [(name, lambda z, hook, name=name: z * scale(name, z)) for name in self.z]
        return self.model.run_with_hooks(PROMPT, fwd_hooks=hooks)

    def by_hops(self):
        """Return the logits of the paths by length: [hops, batch, pos, d_vocab]."""
        n = len(self.z) + 1
        nodes = np.cos(np.pi * (np.arange(n) + 0.5) / n)
        runs = torch.stack([self.logits(lambda name, z, e=float(e): e) for e in nodes])
        powers = torch.from_numpy(np.linalg.inv(np.vander(nodes, increasing=True)))
        return torch.einsum("hn,nbpv->hbpv", powers.to(runs), runs)

    def only(self, *heads):
        """Return the metric with all heads set to zero except some, written `L0H1@3`."""

        def scale(name, z):
            kept = torch.zeros_like(z)
            for head in heads:
                text, _, pos = head.partition("@")
                parsed = Name.parse(text)
                if parsed.hook("z", self.model) == name:
                    kept[:, int(pos), parsed.index] = 1.0
            return kept

        logits = self.logits(scale)[0, -1]
        return float(logits[7] - logits[8])


def check(model, tolerance, gated=False, held="gate", two=3):
    frozen = Frozen(model, gated, held)
    expected = frozen.by_hops()
    n = len(expected) - 1
    expansion = circuits.path_expansion(model, ONE_RUN, n, held=held)
    size = expected.abs().max()
    assert (expansion.logits[:-1] - expected).abs().max() < tolerance * size
    assert expansion.logits[-1].abs().max() < tolerance * size
    short = circuits.path_expansion(model, ONE_RUN, held=held)
    assert short.logits.shape[0] == 4
    assert (short.logits[3] - expected[3:].sum(0)).abs().max() < tolerance * size
    assert (short.logits.sum(0) - frozen.value).abs().max() < tolerance * size
    # Control: the paths of more than two hops are not zero; two parallel layers have none.
    assert short.logits[3].abs().max() > 1e-3 * size or model.cfg.parallel_attn_mlp
    effects = short.effects()
    unit = (short.logits[:, 0, -1, 7] - short.logits[:, 0, -1, 8]).numpy()
    assert abs(effects["effect"].to_numpy() - unit).max() < tolerance * size
    assert abs(effects["effect"].sum() - effects.attrs["value"]) < 10 * tolerance * size

    paths = short.paths(10**6, work=Work(batch_size=29))
    assert paths["effect"].abs().is_monotonic_decreasing
    assert not paths.duplicated(["first", "second"]).any()
    totals = paths.groupby("hops")["effect"].sum()
    for hops in (1, 2):
        assert abs(totals[hops] - unit[hops]) < 100 * tolerance * size
    none = frozen.only()
    rows = [*paths[paths["hops"] == 1].head(3).itertuples()]
    twos = paths[paths["hops"] == 2]
    rows += [*twos.head(two).itertuples(), *twos.sample(two, random_state=0).itertuples()]
    for row in rows:
        if row.hops == 1:
            effect = frozen.only(row.first) - none
        else:
            both = frozen.only(row.first, row.second)
            effect = both - frozen.only(row.first) - frozen.only(row.second) + none
        assert abs(row.effect - effect) < 10 * tolerance * size, row
    few = short.paths(13)
    assert abs(few["effect"] - paths["effect"][:13]).max() < tolerance * size
    return expansion


@pytest.mark.parametrize("name", ["gpt2", "neox", "native_gated"])
def test_paths(name):
    model = bridges.exposed_copy(bridges.boot(name))
    check(model, 1e-11, gated=name == "native_gated")


def test_a_soft_cap_is_after_the_paths():
    model = bridges.exposed_copy(bridges.boot("gemma2"))
    expansion, cap = circuits.path_expansion(model, ONE_RUN), 30.0
    total = expansion.logits.sum(0)
    with torch.no_grad():
        assert (cap * torch.tanh(total / cap) - model(PROMPT)).abs().max() < 1e-5
    slope = 1 - torch.tanh(total[0, -1] / cap) ** 2
    expected = slope[7] * expansion.logits[:, 0, -1, 7] - slope[8] * expansion.logits[:, 0, -1, 8]
    assert abs(expansion.effects()["effect"].to_numpy() - expected.numpy()).max() < 1e-6


def test_paths_of_a_small_gradient():
    """A metric of a thousandth has a thousandth of every effect, and as many paths."""
    model = bridges.exposed_copy(bridges.boot("gpt2"))

    def effects(size):
        metric = p.custom(lambda logits: size * (logits[:, -1, 7] - logits[:, -1, 8]))
        expansion = circuits.path_expansion(model, Contrast(PROMPT, None, metric))
        paths = expansion.paths(10**6, work=Work(batch_size=29))
        return paths.set_index(["first", "second"])["effect"].sort_index()

    whole, small = effects(1.0), effects(1e-9)
    assert (whole.index == small.index).all()
    np.testing.assert_allclose(1e9 * small, whole, atol=1e-12 * abs(whole).max())


def test_the_other_factor_held():
    """Bridged RMS norms compute in float32, so the tolerance is 1e-5."""
    model = bridges.exposed_copy(bridges.boot("llama"))
    up = check(model, 1e-5, gated=True, held="up").logits
    gate = circuits.path_expansion(model, ONE_RUN, 4).logits
    assert (up.sum(0) - gate.sum(0)).abs().max() < 1e-5 * gate.abs().max()
    assert (up - gate).abs().max() > 1e-2 * gate.abs().max()


def test_several_prompts_and_padding():
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    rows = [torch.tensor([3, 29, 7, 11, 5]), torch.tensor([13, 17, 7])]
    both = circuits.path_expansion(model, Contrast(rows, None, p.logit_diff([7, 5], wrong=8)))
    singles = [
        Contrast(row, None, p.logit_diff(correct, wrong=8))
        for row, correct in zip(rows, (7, 5), strict=True)
    ]
    alone = [circuits.path_expansion(model, one) for one in singles]
    for i, (row, one) in enumerate(zip(rows, alone, strict=True)):
        assert (both.logits[:, i, : len(row)] - one.logits[:, 0]).abs().max() < 1e-5
    mean = sum(one.effects()["effect"] / 2 for one in alone)
    assert abs(both.effects()["effect"] - mean).max() < 1e-5
    with pytest.raises(InputError, match="prompt 0 has 5 tokens, and prompt 1 has 3, so"):
        both.paths()
    rows = torch.stack([rows[0], rows[0].flip(0)])
    both = circuits.path_expansion(model, Contrast(rows, None, p.logit_diff([7, 5], wrong=8)))
    paths = both.paths(10**6)
    in_two = paths[paths["hops"] == 2]["effect"].sum()
    assert abs(in_two - both.effects()["effect"][2]) < 1e-4


def test_refusals():
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    expansion, kl = circuits.path_expansion(model, ONE_RUN), Contrast(PROMPT, None, p.kl())
    for match, call in (
        ("value is a product", lambda: circuits.path_expansion(model, ONE_RUN, held="up")),
        ("does not use resume", lambda: expansion.paths(work=Work(resume="folder"))),
        ("compares with another run", circuits.path_expansion(model, kl).effects),
    ):
        with pytest.raises(InputError, match=match):
            call()
