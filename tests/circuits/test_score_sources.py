"""Tests of scores as sums over writers, against the model's scores and terms computed singly."""

import bridges
import pytest
import torch
from common import tokens
from dense_heads import original
from patched_runs import seen

from attn_only_lens import circuits
from attn_only_lens.errors import InputError, UnsupportedModelError

pytestmark = pytest.mark.numeric

HEAD, NEURON, QUERY, KEY = "L1H1", "L1N5", 4, 2
PROMPT = tokens(3, batch=1, pos=7)
WRITERS = ("embed", "L0H0", "L0N3", "L1H0")
BOUND = 1e-6  # relative to the sizes of the shares: bridged RMS norms compute in float32


class Terms:
    """Terms of a score and of a pre-activation, from a bridge's weights and cache."""

    def __init__(self, family):
        self.bridge, self.family = bridges.boot(family), family
        self.cache = self.bridge.run_with_cache(PROMPT)[1]
        self.block = self.bridge.blocks[1]

    def normed(self, layer, name, x):
        """Apply a norm's scale in the run, and its weights, to a part of the stream."""
        norm = getattr(self.bridge.blocks[layer], name).original_component
        gain = norm.weight + (self.family == "gemma2")
        return x / self.cache[f"blocks.{layer}.{name}.hook_scale"] * gain

    def written(self, writer):
        if writer == "embed":
            return self.cache["blocks.0.hook_resid_pre"]
        layer, index, block = int(writer[1]), int(writer[3:]), self.bridge.blocks[int(writer[1])]
        if "H" in writer:
            z = self.cache[f"blocks.{layer}.attn.hook_z"][:, :, index]
            out, name = z @ block.attn.W_O[index], "ln1_post"
        else:
            post = self.cache[f"blocks.{layer}.mlp.hook_post"][:, :, index, None]
            out, name = post * block.mlp.W_out[index], "ln2_post"
        return self.normed(layer, name, out) if self.family == "gemma2" else out

    def side(self, writer, side, pos):
        """Return a writer's query or key at a position, after norms and rotation."""
        attn = self.block.attn
        W = getattr(attn, f"W_{side.upper()}")
        W = W[len(W) - 1]  # of the second of two query heads
        vector = self.normed(1, "ln1", self.written(writer)) @ W
        if self.family == "qwen3":
            whole = self.normed(1, "ln1", self.cache["blocks.1.hook_resid_pre"]) @ W
            norm = getattr(attn.original_component, f"{side}_norm")
            scale = (whole.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
            vector = vector / scale * norm.weight
        cos, sin = (self.cache[f"blocks.1.attn.hook_{name}"] for name in ("cos", "sin"))
        first, second = vector.chunk(2, -1)
        vector = vector * cos + torch.cat([-second, first], -1) * sin
        return vector[0, pos]

    @torch.no_grad()
    def share(self, query_writer, key_writer):
        scale = self.bridge.cfg.d_head**0.5
        if self.family == "gemma2":
            scale = self.block.attn.original_component.config.query_pre_attn_scalar**0.5
        return float(self.side(query_writer, "q", QUERY) @ self.side(key_writer, "k", KEY)) / scale

    @torch.no_grad()
    def neuron_share(self, writer):
        entered = self.normed(1, "ln2", self.written(writer))
        return float(entered[0, QUERY] @ self.block.mlp.W_gate[:, 5])


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_shares_are_terms_of_a_score(family):
    terms = Terms(family)
    model = bridges.exposed_copy(terms.bridge)
    frame = circuits.score_sources(model, PROMPT, HEAD, QUERY, KEY)
    shares = frame.set_index(["writer_q", "writer_k"])["share"]
    size = shares.abs().max()
    assert shares.index.is_unique
    for query_writer in WRITERS[:3]:
        for key_writer in WRITERS[:3]:
            expected = terms.share(query_writer, key_writer)
            assert abs(shares[query_writer, key_writer] - expected) < BOUND * size
    assert abs(shares["L0H0", "L0N3"] - terms.share("L0N3", "L0H0")) > 10 * BOUND * size  # control
    top = circuits.score_sources(model, PROMPT, HEAD, QUERY, KEY, top=5)
    assert top["share"][:5].tolist() == frame["share"][:5].tolist()
    assert top["writer_q"].iloc[-1] == "rest"
    assert abs(top["share"].sum() - frame["share"].sum()) < BOUND * shares.abs().sum()
    neuron = circuits.score_sources(model, PROMPT, NEURON, QUERY).set_index("name")["share"]
    for writer in WRITERS:
        assert abs(neuron[writer] - terms.neuron_share(writer)) < BOUND * neuron.abs().max()


@pytest.mark.parametrize("family", ["neox", "grouped", "olmo2"])
def test_shares_add_up(family):
    """In `grouped`, a head's key is not the one that its index modulo two gives."""
    model = bridges.exposed_copy(bridges.bridged(original(family)))
    scores = seen(model, PROMPT, "blocks.1.attn.hook_attn_scores")[0]
    for head in range(len(scores)):
        frame = circuits.score_sources(model, PROMPT, f"L1H{head}", QUERY, KEY)
        score, size = float(scores[head, QUERY, KEY]), frame["share"].abs().sum()
        assert abs(frame["share"].sum() - score) < BOUND * size
        assert abs(score) > 1e-4 * size
        assert abs(frame.attrs["score"] - frame["share"].sum()) < BOUND * size
    neuron = circuits.score_sources(model, PROMPT, NEURON, QUERY, top=3)
    pre = float(seen(model, PROMPT, "blocks.1.mlp.hook_pre")[0, QUERY, 5])
    assert len(neuron) == 4
    assert abs(neuron["share"].sum() - pre) < BOUND * neuron["share"].abs().sum()


def test_where_the_hook_of_scores_shows_the_pattern():
    """The attention is one fused call; scores match the logs of its pattern, up to a constant."""
    model = bridges.exposed_copy(bridges.boot("gptj"))
    keys = range(QUERY + 1)
    scores = [circuits.score_sources(model, PROMPT, HEAD, QUERY, key) for key in keys]
    totals = torch.tensor([frame["share"].sum() for frame in scores])
    pattern = seen(model, PROMPT, "blocks.1.attn.hook_pattern")[0, 1, QUERY, : QUERY + 1]
    assert (totals.softmax(0) - pattern).abs().max() < 1e-6
    assert totals.std() > 1e-3


def test_refusals():
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    for match, *places in (
        ("the score is masked", HEAD, KEY, QUERY),
        ("expected a position from -7 to 6", HEAD, QUERY, 7),
        ("do not depend on tokens", NEURON, QUERY, KEY),
    ):
        with pytest.raises(InputError, match=match):
            circuits.score_sources(model, PROMPT, *places)
    with pytest.raises(InputError, match="got 2 prompts; expected one"):
        circuits.score_sources(model, tokens(), HEAD, QUERY, KEY)
    native = bridges.exposed_copy(bridges.boot("native"))
    with pytest.raises(UnsupportedModelError, match="only to position 0"):
        circuits.score_sources(native, PROMPT, HEAD, 0, 0)
