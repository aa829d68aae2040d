"""Tests of scores as sums over writers, against the model's scores and terms computed singly."""

import bridges
import pytest
import torch
import transformers
from common import needs_hooked_transformer, tokens
from patch_oracle import seen
from path_oracle import PathOracle

from attn_only_lens import HeadName, circuits, convert, expose_neuron_heads
from attn_only_lens.errors import InputError, UnknownHeadError, UnsupportedModelError
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.numeric

if HAS_HOOKED_TRANSFORMER:
    from models import build

HEAD, NEURON, QUERY, KEY = "L1H1", "L1N5", 4, 2
PROMPT = tokens(3, batch=1, pos=7)
WRITERS = ("embed", "L0H0", "L0N3")
FAMILIES = ("llama", "qk_norm", "soft_caps", "norms_before_and_after", "alibi", "post_norm")


class ScoreOracle(PathOracle):
    """Terms of a score, computed from the model's weights and cache."""

    def __init__(self, model):
        super().__init__(model, PROMPT, PROMPT)
        self.block, self.attn = model.blocks[1], model.blocks[1].attn

    def stream(self, writer):
        if writer == "embed":
            return self.target["blocks.0.hook_resid_pre"]
        return self.write(HeadName.parse(writer), self.target)

    def side(self, writer, side, pos):
        """Return a writer's query or key at a position, after norms and rotation."""
        head = HeadName.parse(HEAD)
        (norm, block), _ = self.around(head)
        x = self.normed(norm, self.target, block, self.stream(writer))
        W = getattr(self.attn, f"W_{side.upper()}")
        rows = head.index * len(W) // self.cfg.n_heads
        vector = x @ W[rows]
        name = f"blocks.1.attn.{side}_norm"
        if f"{name}.hook_scale" in self.target:
            scale, w = self.target[f"{name}.hook_scale"], getattr(self.attn, f"{side}_norm").w
            if len(w) > vector.shape[-1]:  # the norm spans all heads together
                vector = vector / scale * w.view(-1, vector.shape[-1])[rows]
            else:
                vector = vector / scale.view(*vector.shape[:2], -1, 1)[:, :, rows] * w
        if self.cfg.positional_embedding_type == "rotary":
            vector = self.attn.apply_rotary(vector[:, :, None])[:, :, 0]
        return vector[0, pos]

    @torch.no_grad()
    def share(self, query_writer, key_writer):
        return (
            float(self.side(query_writer, "q", QUERY) @ self.side(key_writer, "k", KEY))
            / self.attn.attn_scale
        )

    @torch.no_grad()
    def neuron_share(self, writer):
        (norm, block), _ = self.around(HeadName.parse(NEURON))
        mlp = self.block.mlp
        W = (mlp.W_gate if self.cfg.gated_mlp else mlp.W_in)[:, 5]
        return float(self.normed(norm, self.target, block, self.stream(writer))[0, QUERY] @ W)


@needs_hooked_transformer
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_of_a_score(family):
    source = build(family, scale=0.25)
    oracle = ScoreOracle(source)
    cap = source.cfg.attn_scores_soft_cap
    score = oracle.target["blocks.1.attn.hook_attn_scores"][0, 1, QUERY, KEY]
    score = float(cap * torch.atanh(score / cap) if cap > 0 else score)
    pre = float(oracle.target["blocks.1.mlp.hook_pre"][0, QUERY, 5])
    for model in (convert(source), expose_neuron_heads(source, copy=True).model):
        frame = circuits.score_sources(model, PROMPT, HEAD, QUERY, KEY)
        assert abs(frame["share"].sum() - score) < 1e-12 * frame["share"].abs().sum()
        assert abs(frame.attrs["score"] - score) < 1e-12 * frame["share"].abs().sum()
        shares = frame.set_index(["writer_q", "writer_k"])["share"]
        assert shares.index.is_unique
        for query_writer in WRITERS:
            for key_writer in WRITERS:
                expected = oracle.share(query_writer, key_writer)
                assert abs(shares[query_writer, key_writer] - expected) < 1e-11 * shares.abs().max()
        assert abs(shares["L0H0", "L0N3"] - oracle.share("L0N3", "L0H0")) > 1e-9  # control
        top = circuits.score_sources(model, PROMPT, HEAD, QUERY, KEY, top=5)
        assert top["share"][:5].tolist() == frame["share"][:5].tolist()
        assert top["writer_q"].iloc[-1] == "rest"
        assert abs(top["share"].sum() - score) < 1e-12 * frame["share"].abs().sum()

        neuron = circuits.score_sources(model, PROMPT, NEURON, QUERY)
        assert abs(neuron["share"].sum() - pre) < 1e-12 * neuron["share"].abs().sum()
        by_name = neuron.set_index("name")["share"]
        for writer in (*WRITERS, "L1H0"):
            expected = oracle.neuron_share(writer)
            assert abs(by_name[writer] - expected) < 1e-11 * by_name.abs().max()


BRIDGES = ("gpt2", "llama", "gemma2") if HAS_HOOKED_TRANSFORMER else ("neox", "qwen3", "olmo2")
BRIDGES += ("granite",)


@pytest.mark.parametrize("name", BRIDGES)
def test_shares_add_up_in_bridges(name):
    model = bridges.exposed_copy(bridges.boot(name))
    frame = circuits.score_sources(model, PROMPT, HEAD, QUERY, KEY)
    score = float(seen(model, PROMPT, "blocks.1.attn.hook_attn_scores")[0, 1, QUERY, KEY])
    size = frame["share"].abs().sum()
    capped = 50.0 * float(torch.tanh(torch.tensor(frame["share"].sum() / 50.0).double()))
    total = capped if name == "gemma2" else frame["share"].sum()
    assert abs(total - score) < 1e-6 * size  # bridged RMS norms compute in float32
    assert abs(score) > 1e-4 * size
    neuron = circuits.score_sources(model, PROMPT, NEURON, QUERY, top=3)
    pre = float(seen(model, PROMPT, "blocks.1.mlp.hook_pre")[0, QUERY, 5])
    assert len(neuron) == 4
    assert abs(neuron["share"].sum() - pre) < 1e-6 * neuron["share"].abs().sum()


def test_several_heads_of_several_groups():
    """With four heads and two keys, a head's key is not the one that its index modulo two gives."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "hidden_size": 28}
    cfg = transformers.LlamaConfig(**bridges.SIZES | sizes)
    made = transformers.AutoModelForCausalLM.from_config(cfg, attn_implementation="eager")
    model = bridges.exposed_copy(bridges.bridged(bridges.randomise(made.double().eval())))
    scores = seen(model, PROMPT, "blocks.1.attn.hook_attn_scores")
    for head in range(4):
        frame = circuits.score_sources(model, PROMPT, f"L1H{head}", QUERY, KEY)
        size = frame["share"].abs().sum()
        assert abs(frame["share"].sum() - float(scores[0, head, QUERY, KEY])) < 1e-6 * size


@pytest.mark.parametrize("name", ["native"] if HAS_HOOKED_TRANSFORMER else ["native", "gptj"])
def test_where_the_hook_of_scores_shows_the_pattern(name):
    """The attention is one fused call; scores match the logs of its pattern, up to a constant."""
    model = bridges.exposed_copy(bridges.boot(name))
    keys = range(QUERY + 1)
    scores = [circuits.score_sources(model, PROMPT, HEAD, QUERY, key) for key in keys]
    totals = torch.tensor([frame["share"].sum() for frame in scores])
    pattern = seen(model, PROMPT, "blocks.1.attn.hook_pattern")[0, 1, QUERY, : QUERY + 1]
    assert (totals.softmax(0) - pattern).abs().max() < 1e-6
    assert totals.std() > 1e-3
    if name == "native":  # the score is q · k / √d_head, without a rotation
        q, k = (seen(model, PROMPT, f"blocks.1.attn.hook_{side}")[0, :, 1] for side in "qk")
        expected = (k[: QUERY + 1] @ q[QUERY]) / q.shape[-1] ** 0.5
        assert (totals - expected).abs().max() < 1e-6


def test_refusals():
    model = bridges.exposed_copy(bridges.boot("gpt2"))
    for match, *places in (
        ("the score is masked", HEAD, KEY, QUERY),
        ("expected a position from -7 to 6", HEAD, QUERY, 7),
        ("expected a position", HEAD, QUERY),
        ("do not depend on tokens", NEURON, QUERY, KEY),
    ):
        with pytest.raises(InputError, match=match):
            circuits.score_sources(model, PROMPT, *places)
    with pytest.raises(InputError, match="got 2 prompts; expected one"):
        circuits.score_sources(model, tokens(), HEAD, QUERY, KEY)
    with pytest.raises(UnknownHeadError, match="layers 0 to 1"):
        circuits.score_sources(model, PROMPT, "L7H0", QUERY, KEY)
    native = bridges.exposed_copy(bridges.boot("native"))
    with pytest.raises(UnsupportedModelError, match="only to position 0"):
        circuits.score_sources(native, PROMPT, HEAD, 0, 0)


@needs_hooked_transformer
def test_a_score_that_is_no_sum_is_refused():
    model = convert(build("clip_qkv"))
    with pytest.raises(UnsupportedModelError, match="shares do not add up to the value"):
        circuits.score_sources(model, PROMPT, HEAD, QUERY, KEY)
