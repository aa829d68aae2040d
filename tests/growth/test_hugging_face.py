"""Tests that growth of transformers bridges is exact, and that their folders need none of our code.

Most of these models compute norms, rotary angles and softmax in float32 for every dtype, which
would hide an error of 1e-8. So exactness is tested in float64 throughout, without these casts, and
again with the unmodified models. The families are those of the table in docs/growth_families.md.
"""

from pathlib import Path

import pytest
import torch
import transformers
from bridges import FAMILIES, NO_DROPOUT, SIZES, boot, bridged, original, randomise
from common import D_VOCAB, relative
from growing import (
    cached,
    in_float64,
    largest_difference,
    state,
    training_step,
    worst_activation,
)
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import Contrast, expose_neuron_heads, grow, growth, load, save
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.expansion import compose
from attn_only_lens.growth.models._grow import read
from attn_only_lens.growth.models.hugging_face import HuggingFaceBridge
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER
from attn_only_lens.tolerances import LOGIT_TOLERANCE

pytestmark = pytest.mark.numeric

EXACT, FLOAT32 = LOGIT_TOLERANCE[torch.float64], LOGIT_TOLERANCE[torch.float32]
NAMES = ("gpt2", "neox", "neox_sequential", "llama", "granite", "mistral", "qwen2", "qwen3")
NAMES += ("gemma", "gemma2", "gemma3", "phi", "phi3", "olmo2")
# A family of each structure. The folders of all are tested below.
STRUCTURES = ("gpt2", "neox", "llama", "gemma2", "phi3", "qwen3", "olmo2", "granite")
STEPS = {
    "d_mlp": growth.AddNeurons(4),
    "n_heads": growth.AddHeads(2),
    "d_head": compose(growth.WidenValues(6), growth.WidenQueriesAndKeys(6)),
    "d_model": growth.WidenStream(11),
    "n_layers": growth.InsertLayer(at=1),
}
ALL = compose(*STEPS.values())
# Sizes that each family's configuration accepts, with n_heads in groups of 2.
FITTING = {"d_mlp": 41, "n_heads": 4, "d_head": 20, "d_model": 80, "n_layers": 3}


def prompts():
    return torch.randint(3, D_VOCAB, (2, 11), generator=torch.Generator().manual_seed(5))


def bridge_of(name, **changes):
    """Return a bridge of a family with other values in its configuration."""
    config = FAMILIES[name].config()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return bridged(randomise(model.double().eval()))


@pytest.mark.parametrize("name", STRUCTURES)
def test_all_expansions_are_exact(name, monkeypatch):
    tokens = prompts()
    with in_float64(monkeypatch), torch.no_grad():
        bridge = boot(name)
        before, (logits, old) = state(bridge), cached(bridge, tokens)
        # Free entries are not zero; required zeros come from the expansion, not from the init.
        grown = grow(bridge, ALL, init=growth.init.normal(0.3), seed=3)
        assert not grown.model.training
        new_logits, new = cached(grown.model, tokens)
        assert relative(new_logits, logits) < EXACT
        worst, _ = worst_activation(grown.provenance, old, new)
        assert max(worst.values()) < EXACT, max(worst, key=worst.get)
        assert sum("hook_pattern" in hook or "hook_post" in hook for hook in worst) == 4
        more = compose(growth.InsertLayer(0), growth.WidenStream(3))
        twice = grow(grown.model, more, seed=4)
        assert relative(twice.model(tokens), logits) < EXACT
    assert all(torch.equal(before[key], value) for key, value in bridge.state_dict().items())
    with torch.no_grad():  # the unmodified model, with its float32 casts
        bridge = boot(name)
        logits = bridge(tokens)
        grown = grow(bridge, ALL, init=growth.init.normal(0.3), seed=3)
        assert relative(grown.model(tokens), logits) < FLOAT32
        assert torch.equal(grown.shrink()(tokens), logits)


@pytest.mark.parametrize(
    ("name", "init"),
    [("gpt2", growth.init.splits(0.3, 0.7)), ("llama", growth.init.cancelling(0.3))],
)
def test_starts_without_zeros_are_exact_and_a_way_back(name, init, monkeypatch):
    with in_float64(monkeypatch), torch.no_grad():
        bridge = boot(name)
        logits = bridge(prompts())
        grown = grow(bridge, ALL, init=init, seed=3)
        assert grown.provenance.ties
        assert relative(grown.model(prompts()), logits) < EXACT
        assert torch.equal(grown.shrink()(prompts()), logits)


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 5}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 5}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 5}
LONG |= {"short_factor": [1.5] * 7, "long_factor": [2.5] * 7}
VARIANTS = [
    ("llama", {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True}),
    ("gpt2", {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}),
    *(("llama", {"rope_parameters": rope}) for rope in (LLAMA3, YARN)),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 5}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_variants(name, changes, monkeypatch):
    if rope := changes.get("rope_parameters"):
        usual = FAMILIES[name].config().rope_parameters
        changes = changes | {"rope_parameters": {**usual, **rope}}
    with in_float64(monkeypatch), torch.no_grad():
        bridge, tokens = bridge_of(name, **changes), prompts()
        logits = bridge(tokens)
        for step in (ALL, STEPS["d_head"]):
            grown = grow(bridge, step, init=growth.init.normal(0.3))
            assert relative(grown.model(tokens), logits) < EXACT


def test_a_wrong_configuration_is_noticed_before_the_model_is_returned(monkeypatch):
    usual = HuggingFaceBridge.grown_config

    def broken(self, weights):
        config = usual(self, weights)
        config.rope_parameters.update(rope_theta=1e4)
        return config

    monkeypatch.setattr(HuggingFaceBridge, "grown_config", broken)
    with pytest.raises(InputError, match="logits would differ"):
        grow(boot("llama"), STEPS["d_head"])


# Folders


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_transformers_own(name, tmp_path):
    bridge, tokens = boot(name, torch.float32), prompts()
    logits = bridge(tokens)
    folder = grow(bridge, **FITTING, seed=1).save_pretrained(tmp_path / "grown")
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert type(alone) is type(bridge.original_model)
    assert alone.dtype == torch.float32
    assert relative(alone(tokens).logits, logits) < FLOAT32
    reference = original(name, torch.float32)
    reference.generation_config = alone.generation_config
    how = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
    written, expected = (model.generate(tokens[:1, :3], **how) for model in (alone, reference))
    assert torch.equal(written, expected)
    alone.train()(tokens, labels=tokens).loss.backward()
    assert all(p.grad.isfinite().all() for p in alone.parameters() if p.grad is not None)


def test_what_else_is_in_the_folder(tmp_path):
    bridge = boot("gpt2", torch.float32)
    bridge.tokenizer = tiny_tokenizer(D_VOCAB, tmp_path / "tokenizer")
    bridge.original_model.generation_config.max_length = 23
    grown = grow(bridge, **FITTING, seed=1)
    folder = Path(grown.save_pretrained(tmp_path / "grown"))
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert not alone.config.output_attentions
    assert alone.generation_config.max_length == 23
    words = transformers.AutoTokenizer.from_pretrained(folder)
    assert words.get_vocab() == bridge.tokenizer.get_vocab()
    assert load(folder / "provenance.json") == grown.provenance
    (tmp_path / "mine").touch()
    mode = (tmp_path / "mine").stat().st_mode  # readable for other users
    assert (folder / "model.safetensors").stat().st_mode == mode
    again = grow(bridged(alone), d_mlp=43, n_layers=4)
    assert relative(again.model(prompts()), bridge(prompts())) < FLOAT32
    again.save_pretrained(folder)  # replaces an earlier save
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(Exception, match=r"also holds thesis\.tex"):
        again.save_pretrained(folder)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "step", "reason"),
    [
        ("gpt2", STEPS["n_heads"], "has no head_dim: 4 heads of width 13 need hidden_size 52"),
        ("llama", STEPS["n_heads"], "26.* is not a multiple of the number of attention heads .4."),
        ("llama", growth.AddNeurons(4, layers=[1]), "layers differ in d_mlp"),
        ("bert", STEPS["d_head"], "heads of width 19 need hidden_size 38, but it is 26; sav"),
    ],
)
def test_sizes_that_no_configuration_has_are_in_our_own_folder(name, step, reason, tmp_path):
    bridge, tokens = boot(name), prompts()
    grown = grow(bridge, step, seed=1)
    logits = grown.model(tokens)
    assert relative(logits, bridge(tokens)) < FLOAT32
    with pytest.raises(InputError, match=reason):
        grown.save_pretrained(tmp_path / "grown")
    assert not (tmp_path / "grown").exists()
    with expose_neuron_heads(grown.model):
        same = load(save(grown.model, tmp_path / "saved"))
    assert torch.equal(same(tokens), logits)
    if name == "llama" and "layers=[1]" in repr(step):  # patching a new neuron changes nothing
        contrast = Contrast(tokens[0], tokens[1], p.logit_diff(3, 4))
        sweep = p.activation_patch(same, contrast, sites=["L1N39"])
        assert sweep.frame["value"].sub(sweep.corrupted_value).abs().max() < 1e-6
    again = grow(grown.model, growth.AddNeurons(5))
    assert relative(again.model(tokens), logits) < FLOAT32


def test_embeddings_come_untied_where_they_must_differ():
    bridge, tokens = boot("gpt2"), prompts()
    wider = grow(bridge, growth.WidenStream(2))
    model = wider.model.original_model
    assert any(note.startswith("untied: ") for note in wider.notes)
    assert not model.config.tie_word_embeddings
    assert relative(wider.model(tokens), bridge(tokens)) < EXACT
    again = wider.shrink().original_model
    assert again.config.tie_word_embeddings
    assert again.lm_head.weight is again.transformer.wte.weight
    gemma = grow(boot("gemma2"), growth.WidenStream(2)).model.original_model
    assert gemma.lm_head.weight is gemma.model.embed_tokens.weight  # it needs no untying


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_half_precision_is_rounded_once(name):
    bridge, tokens = boot(name, torch.bfloat16), prompts()
    logits = bridge(tokens)
    grown = grow(bridge, ALL, seed=2)
    assert {tensor.dtype for tensor in grown.model.parameters()} == {torch.bfloat16}
    assert relative(grown.model(tokens), logits) < LOGIT_TOLERANCE[torch.bfloat16]
    (note,) = [note for note in grown.notes if note.startswith("rounded: ")]
    assert " of its norm" in note
    # Each scaled entry is the exact product, rounded by at most half a unit in the last place.
    old, new = read(bridge).tensors, read(grown.model).tensors
    for of in ("ln1.w", "attn.W_K"):
        moved = grown.provenance.tensor_map(f"blocks.0.{of}")
        exact = moved.scaled(old[f"blocks.0.{of}"].double())
        got = moved.old_part(new[moved.name]).double()
        assert ((got - exact).abs() <= exact.abs() * 2**-8 + 1e-12).all()
    assert torch.equal(grown.shrink()(tokens), logits)
    assert not any("rounded" in note for note in grow(bridge, d_mlp=41).notes)


# Training


@pytest.mark.both_versions
@pytest.mark.parametrize("name", ["gpt2", "phi3"])  # both have joint matrices
def test_training_goes_on(name, tmp_path):
    bridge = boot(name)
    optimizer = torch.optim.AdamW(bridge.parameters(), lr=1e-2, eps=1e-2)
    for _ in range(2):
        training_step(bridge, optimizer, prompts())
    # d_model under LayerNorm and float32 computations are not exact here
    grown = grow(bridge, d_mlp=41, n_heads=4, d_head=20, n_layers=3)
    new = grown.optimizer(optimizer, bridge)
    training_step(bridge, optimizer, prompts())
    training_step(grown.model, new, prompts())
    assert largest_difference(bridge, grown) < (1e-5 if name == "phi3" else 1e-11)
    assert read(grown.model).tensors["blocks.0.mlp.W_out"][-1].any()  # new parts learn
    fits = grow(grown.model, d_model=80)  # a configuration allows these sizes
    if HAS_HOOKED_TRANSFORMER:  # 3.9 gives the unembedding a bias, which was trained
        with pytest.raises(InputError, match=r"unembed\.b_U is not zero"):
            fits.save_pretrained(tmp_path / "grown")
        read(fits.model).tensors["unembed.b_U"].zero_()
    folder = fits.save_pretrained(tmp_path / "grown")  # joint matrices hold the trained weights
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert relative(alone(prompts()).logits, fits.model(prompts())) < FLOAT32


def test_the_caller_s_model_and_random_numbers_stay_as_they_are(monkeypatch):
    bridge = boot("gpt2")
    bridge.train()
    bridge.blocks[0].eval()
    modes = [module.training for module in bridge.modules()]
    numbers = torch.get_rng_state()
    grow(bridge, d_mlp=41).shrink()
    assert torch.equal(torch.get_rng_state(), numbers)
    assert [module.training for module in bridge.modules()] == modes

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(bridge.original_model), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grow(bridge, d_mlp=41)
    assert [module.training for module in bridge.modules()] == modes


# BERT and RoBERTa, whose norms stand on the stream: x becomes norm(x + f(x)). New layers and a
# wider stream are refused (test_refused.py), because no weights keep the function there.

ON_THE_STREAM = compose(STEPS["d_mlp"], growth.AddHeads(3), STEPS["d_head"])


def masked_model(name, dtype=torch.float64):
    if name == "bert":
        return original("bert", dtype)
    config = transformers.RobertaConfig(**SIZES | NO_DROPOUT | {"max_position_embeddings": 19})
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    return randomise(model.to(dtype).eval())


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_norms_on_the_stream(name, tmp_path):
    model, tokens = masked_model(name), prompts()
    logits = model(tokens).logits
    bridge = bridged(model)
    before = state(bridge)
    grown = grow(bridge, ON_THE_STREAM, init=growth.init.normal(0.3), seed=3)
    assert relative(grown.model(tokens), logits) < EXACT
    assert relative(grown.model.original_model(tokens).logits, logits) < EXACT
    assert all(torch.equal(before[key], value) for key, value in bridge.state_dict().items())
    assert torch.equal(grown.shrink()(tokens), logits)
    # Controls: zeros that are not zero; norms remove a constant, so they are random.
    named = grown.model.original_model.named_parameters()
    weights = {name.replace("_original_component.", ""): tensor for name, tensor in named}
    for part in ("output.dense", "attention.output.dense", "attention.self.key"):
        tensor = weights[f"{name}.encoder.layer.0.{part}.weight"]
        kept, zeros = tensor.clone(), tensor == 0
        assert zeros.any(), part
        tensor[zeros] = torch.randn_like(kept)[zeros]
        assert relative(grown.model(tokens), logits) > 1e-3, part
        tensor.copy_(kept)
    # The folder is transformers' own, if its configuration has these sizes.
    model = masked_model(name, torch.float32)
    logits, bridge = model(tokens).logits, bridged(model)
    bridge.tokenizer = tiny_tokenizer(D_VOCAB, tmp_path / "tokenizer")
    grown = grow(bridge, d_mlp=41)
    folder = grown.save_pretrained(tmp_path / "grown")
    alone = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    assert type(alone) is type(bridge.original_model)
    assert relative(alone(tokens).logits, logits) < FLOAT32
    assert load(folder / "provenance.json") == grown.provenance
    again = grow(load(folder), d_mlp=43, n_heads=5)
    assert relative(again.model(tokens), logits) < FLOAT32
