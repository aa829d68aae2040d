"""Tests that growth of transformers bridges is exact, and that their folders need none of our code.

Most of these models compute norms, rotary angles and softmax in float32 for every dtype, which
would hide an error of 1e-8. So exactness is tested in float64 throughout, without these casts, and
again with the unmodified models. `python tests/growth/test_hugging_face.py` writes the table in
docs/growth_families.md.
"""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from bridges import CHOSEN, EVERY, FAMILIES, boot, bridged, original, randomise
from common import D_VOCAB, relative
from growing import worst_activation
from tiny_tokenizer import tiny_tokenizer
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

from analyses.tools.gradmax import grad_max, gradient_products
from analyses.tools.growth_training import Training
from attn_only_lens import compare, expose_neuron_heads, grow, load, save
from attn_only_lens import expansion as ex
from attn_only_lens import patching as p
from attn_only_lens.cli import app
from attn_only_lens.errors import GrowthError
from attn_only_lens.growth import read, read_provenance
from attn_only_lens.growth.hugging_face import HuggingFaceBridge
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER
from attn_only_lens.tolerances import LOGIT_TOLERANCE

EXACT, FLOAT32 = LOGIT_TOLERANCE[torch.float64], LOGIT_TOLERANCE[torch.float32]
NAMES = {
    "gpt2": "GPT-2",
    "neox": "GPT-NeoX, Pythia (parallel)",
    "neox_sequential": "GPT-NeoX (sequential)",
    "llama": "LLaMA",
    "granite": "Granite",
    "mistral": "Mistral",
    "qwen2": "Qwen 2",
    "qwen3": "Qwen 3",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "phi": "Phi",
    "phi3": "Phi 3",
    "olmo2": "OLMo 2",
}
POST_NORM = ("BERT, RoBERTa",)  # their tests are in test_post_norm.py
STEPS = {
    "d_mlp": ex.AddNeurons(4),
    "n_heads": ex.AddHeads(2),
    "d_head": ex.compose(ex.WidenValues(6), ex.WidenQueriesAndKeys(6)),
    "d_model": ex.WidenStream(11),
    "n_layers": ex.InsertLayer(at=1),
}
STEPS["all six"] = ex.compose(*STEPS.values())
HERE = [name for name in NAMES if name in EVERY]
# Sizes that each family's configuration accepts, with n_heads in groups of 2.
FITTING = {"d_mlp": 41, "n_heads": 4, "d_head": 20, "d_model": 80, "n_layers": 3}
NOT_IN_A_FOLDER = {  # what a transformers class requires of a configuration
    "gpt2": "n_heads · d_head = d_model",
    "neox": "n_heads · d_head = d_model",
    "neox_sequential": "n_heads · d_head = d_model",
    "llama": "d_model a multiple of n_heads",
    "gemma2": "d_model a multiple of n_heads",
    "gemma3": "d_model a multiple of n_heads",
    "phi3": "under longrope, n_heads · d_head = d_model",
}
DEAD = {
    "qwen3": "new coordinates of queries and keys never learn",
    "gemma3": "new coordinates of queries and keys never learn",
    "olmo2": "new coordinates of queries and keys never learn",
}
PAGE = Path(__file__).parents[2] / "docs" / "growth_families.md"


def prompts():
    return torch.randint(D_VOCAB, (2, 11), generator=torch.Generator().manual_seed(5))


def cast(value):
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64(monkeypatch):
    """Remove casts to float32, so that norms, angles and softmax compute in float64."""
    to, softmax, arange = Tensor.to, functional.softmax, torch.arange
    with monkeypatch.context() as patch:
        patch.setattr(
            Tensor,
            "to",
            lambda x, *args, **kw: to(x, *map(cast, args), **{k: cast(v) for k, v in kw.items()}),
        )
        patch.setattr(Tensor, "float", lambda x: to(x, torch.float64))
        patch.setattr(
            torch,
            "arange",
            lambda *args, **kw: arange(*args, **{k: cast(v) for k, v in kw.items()}),
        )
        patch.setattr(
            functional,
            "softmax",
            lambda x, dim=-1, dtype=None, **kw: softmax(x, dim=dim, dtype=cast(dtype)),
        )
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # for embed_scale
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


def state(bridge):
    return {name: tensor.clone() for name, tensor in bridge.state_dict().items()}


@pytest.mark.parametrize("name", HERE)
def test_every_expansion_is_exact(name, monkeypatch):
    tokens = prompts()
    with in_float64(monkeypatch), torch.no_grad():
        bridge = boot(name)
        logits, before = bridge(tokens), state(bridge)
        # All families test the parameter names; the families in CHOSEN also test single steps.
        for step in STEPS.values() if name in CHOSEN else [STEPS["all six"]]:
            # Free entries are not zero; required zeros come from the expansion, not from the init.
            grown = grow(bridge, step, init=ex.init.normal(0.3), seed=3)
            assert relative(grown.model(tokens), logits) < EXACT, step
            assert not grown.model.training
        twice = grow(grown.model, ex.compose(ex.InsertLayer(0), ex.WidenStream(3)), seed=4)
        assert relative(twice.model(tokens), logits) < EXACT
    assert all(torch.equal(before[key], value) for key, value in bridge.state_dict().items())
    with torch.no_grad():  # the unmodified model, with its float32 casts
        bridge = boot(name)
        logits = bridge(tokens)
        grown = grow(bridge, STEPS["all six"], init=ex.init.normal(0.3), seed=3)
        assert relative(grown.model(tokens), logits) < FLOAT32
        assert torch.equal(grown.shrink()(tokens), logits)


@pytest.mark.parametrize(
    ("name", "init"),
    [
        ("gpt2", ex.init.splits(0.3, 0.7)),
        ("llama", ex.init.cancelling(0.3)),
        ("olmo2", ex.init.cancelling(0.3)),
    ],
)
def test_starts_without_zeros_are_exact_and_a_way_back(name, init, monkeypatch):
    if name not in HERE:
        pytest.skip("transformer-lens 3.9 has no such bridge; run with 4")
    with in_float64(monkeypatch), torch.no_grad():
        bridge = boot(name)
        logits, step = bridge(prompts()), STEPS["all six"]
        grown = grow(bridge, step, init=init, seed=3)
        assert grown.provenance.ties
        assert relative(grown.model(prompts()), logits) < EXACT
        assert torch.equal(grown.shrink()(prompts()), logits)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "olmo2"])
def test_old_parts_do_what_they_did(name):
    if name not in HERE:
        pytest.skip("this family is run with transformer-lens 4: make pytest4")
    tokens, bridge = prompts(), boot(name)
    _, old = bridge.run_with_cache(tokens)
    grown = grow(bridge, STEPS["all six"], seed=3)
    _, new = grown.model.run_with_cache(tokens)
    groups = bridge.cfg.n_heads // (bridge.cfg.n_key_value_heads or bridge.cfg.n_heads)
    worst, _ = worst_activation(grown.provenance, dict(old), dict(new))
    assert max(worst.values()) < FLOAT32, max(worst, key=worst.get)
    assert sum("hook_pattern" in hook or "hook_post" in hook for hook in worst) == 4
    assert grown.provenance["L1H1"] == "L2H1"
    assert len(grown.provenance.new_heads) == 2 * 2 + bridge.cfg.n_heads + 2
    assert groups in (1, 2)


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("llama", lambda config: setattr(config, "rms_norm_eps", 0.1)),
        ("llama", lambda config: config.rope_parameters.update(rope_theta=1e4)),
        ("gemma2", lambda config: setattr(config, "query_pre_attn_scalar", 200)),
        ("neox", lambda config: config.rope_parameters.update(rope_theta=100.0)),
    ],
)
def test_a_wrong_configuration_is_noticed_before_the_model_is_returned(name, break_it, monkeypatch):
    usual = HuggingFaceBridge.grown_config

    def broken(self, weights):
        config = usual(self, weights)
        break_it(config)
        return config

    monkeypatch.setattr(HuggingFaceBridge, "grown_config", broken)
    with pytest.raises(GrowthError, match="logits would differ"):
        grow(boot(name), ex.compose(STEPS["d_head"], ex.WidenStream(26)))


def test_constraints_matter():
    bridge, tokens = boot("gemma2"), prompts()
    logits = bridge(tokens)
    for name in ("embed.W_E", "blocks.0.attn.W_O", "blocks.1.mlp.W_out", "blocks.0.attn.W_K"):
        grown = grow(bridge, STEPS["all six"], init=ex.init.normal(0.3))
        weights = read(grown.model)
        tensors = {key: tensor.clone() for key, tensor in weights.tensors.items()}
        zeros = next(zero for zero in grown.provenance.zeros if zero.name == name)
        index = torch.meshgrid(*map(torch.tensor, zeros.indices), indexing="ij")
        tensors[name][index] = 0.5
        model = HuggingFaceBridge(grown.model).write(
            type(weights)(tensors, weights.constants), lambda tensor: tensor
        )
        assert relative(model(tokens), logits) > 1e-3, name


@pytest.fixture
def tokenizer(tmp_path):
    return tiny_tokenizer(D_VOCAB, tmp_path / "tokenizer")


@pytest.mark.parametrize("name", HERE)
def test_the_folder_is_transformers_own(name, tokenizer, tmp_path):
    bridge, tokens = boot(name, torch.float32), prompts()
    bridge.tokenizer = tokenizer
    bridge.original_model.generation_config.max_length = 23
    logits = bridge(tokens)
    grown = grow(bridge, **FITTING, seed=1)
    folder = grown.save_pretrained(tmp_path / "grown")
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert type(alone) is type(bridge.original_model)
    assert alone.dtype == torch.float32
    assert not alone.config.output_attentions
    (Path(folder) / "mine").touch()
    mode = (Path(folder) / "mine").stat().st_mode
    assert (Path(folder) / "model.safetensors").stat().st_mode == mode
    (Path(folder) / "mine").unlink()
    assert alone.generation_config.max_length == 23
    assert relative(alone(tokens).logits, logits) < FLOAT32
    assert transformers.AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
    assert read_provenance(folder) == grown.provenance
    written = alone.generate(tokens[:1, :3], do_sample=False, max_new_tokens=5, min_new_tokens=5)
    reference = original(name, torch.float32)
    reference.generation_config = alone.generation_config
    assert torch.equal(
        written,
        reference.generate(tokens[:1, :3], do_sample=False, max_new_tokens=5, min_new_tokens=5),
    )
    alone.train()(tokens, labels=tokens).loss.backward()
    assert all(p.grad.isfinite().all() for p in alone.parameters() if p.grad is not None)
    again = grow(bridged(alone.eval()), d_mlp=43, n_layers=4)
    assert relative(again.model(tokens), logits) < FLOAT32
    changed = Path(folder) / "model.safetensors"
    changed.write_bytes(changed.read_bytes()[:-1])
    again.save_pretrained(folder)  # replaces an earlier save
    (Path(folder) / "thesis.tex").write_text("years of work")
    with pytest.raises(Exception, match=r"also holds thesis\.tex"):
        again.save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "step", "reason"),
    [
        ("gpt2", ex.AddHeads(1), "has no head_dim: 3 heads of width 13 need hidden_size 39"),
        ("neox", ex.WidenStream(4), "has no head_dim: 2 heads of width 13 need hidden_size 26"),
        ("llama", ex.AddHeads(2), "26.* is not a multiple of the number of attention heads .4."),
        ("llama", ex.AddNeurons(4, layers=[1]), "layers differ in d_mlp"),
        ("phi3", ex.AddNeurons(4, layers=[0]), "layers differ in d_mlp"),
    ],
)
def test_sizes_that_no_configuration_has_are_in_our_own_folder(name, step, reason, tmp_path):
    bridge, tokens = boot(name), prompts()
    grown = grow(bridge, step, seed=1)
    logits = grown.model(tokens)
    assert relative(logits, bridge(tokens)) < FLOAT32
    with pytest.raises(GrowthError, match=reason):
        grown.save_pretrained(tmp_path / "grown")
    assert not (tmp_path / "grown").exists()
    with expose_neuron_heads(grown.model):
        same = load(save(grown.model, tmp_path / "saved"))
    assert torch.equal(same(tokens), logits)
    clean, corrupted = tokens[0], tokens[0].clone()
    corrupted[7] = (corrupted[7] + 1) % D_VOCAB
    site = f"L1N{39 if 'Neurons' in repr(step) else 5}"  # patching a new neuron changes nothing
    if name == "llama" and "Neurons" in repr(step):
        sweep = p.activation_patch(same, clean, corrupted, p.logit_diff(3, 4), sites=[site])
        assert sweep.frame["value"].sub(sweep.corrupted_value).abs().max() < 1e-6
    again = grow(grown.model, ex.WidenStream(5))
    assert relative(again.model(tokens), logits) < FLOAT32


def test_embeddings_come_untied_where_they_must_differ():
    bridge, tokens = boot("gpt2"), prompts()
    logits = bridge(tokens)
    wider = grow(bridge, ex.WidenStream(2))
    model = wider.model.original_model
    assert any(note.startswith("untied: ") for note in wider.notes)
    assert not model.config.tie_word_embeddings
    assert relative(wider.model(tokens), logits) < EXACT
    again = wider.shrink().original_model
    assert again.config.tie_word_embeddings
    assert again.lm_head.weight is again.transformer.wte.weight
    tied = grow(bridge, d_mlp=41).model.original_model
    assert tied.lm_head.weight is tied.transformer.wte.weight
    gemma = grow(boot("gemma2"), ex.WidenStream(2)).model.original_model  # Gemma needs no untying
    assert gemma.lm_head.weight is gemma.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "phi3"])
def test_half_precision_is_rounded_once(name):
    bridge, tokens = boot(name, torch.bfloat16), prompts()
    logits = bridge(tokens)
    grown = grow(bridge, STEPS["all six"], seed=2)
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


def test_a_new_layer_may_be_a_copy():
    config = FAMILIES["gpt2"].config()
    config.scale_attn_by_inverse_layer_idx = True
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    bridge, tokens = bridged(randomise(model.double().eval())), prompts()
    logits, old = bridge.run_with_cache(tokens)
    grown = grow(bridge, ex.InsertLayer(at=2, like=0, copy=True))
    new_logits, new = grown.model.run_with_cache(tokens)
    assert relative(new_logits, logits) < EXACT
    tensors = read(grown.model).tensors
    assert torch.equal(tensors["blocks.2.mlp.W_in"], tensors["blocks.0.mlp.W_in"])
    assert not tensors["blocks.2.mlp.W_out"].any()
    assert not tensors["blocks.2.attn.W_O"].any()
    # The new layer divides scores by 3 instead of 1, so its keys are three times as long.
    mix = {"blocks.2.hook_in": old["blocks.0.hook_in"]}
    hook = ("blocks.2.hook_in", lambda x, hook: mix[hook.name])
    with grown.model.hooks([hook]):
        _, moved = grown.model.run_with_cache(tokens)
    assert relative(moved["blocks.2.attn.hook_pattern"], old["blocks.0.attn.hook_pattern"]) < EXACT
    assert relative(new["blocks.0.attn.hook_pattern"], old["blocks.0.attn.hook_pattern"]) < EXACT


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "phi3"])
def test_training_goes_on(name, tmp_path):
    bridge, tokens = boot(name), prompts()

    def step(model, optimizer):
        optimizer.zero_grad()
        model(tokens).log_softmax(-1)[..., D_VOCAB // 2].mean().neg().backward()
        optimizer.step()

    optimizer = torch.optim.AdamW(bridge.parameters(), lr=1e-2, eps=1e-2)
    for _ in range(2):
        step(bridge, optimizer)
    # d_model under LayerNorm and float32 computations are not exact here
    grown = grow(bridge, d_mlp=41, n_heads=4, d_head=20, n_layers=3)
    new = grown.optimizer(optimizer, bridge)
    step(bridge, optimizer)
    step(grown.model, new)
    old, now = read(bridge).tensors, read(grown.model).tensors
    for key, tensor in old.items():
        moved = grown.provenance.tensor_map(key)
        here = moved.unscaled(moved.old_part(now[moved.name]))
        assert torch.allclose(here, tensor, atol=1e-5 if name in ("llama", "phi3") else 1e-11), key
    fits = grow(grown.model, d_model=80)  # a configuration allows these sizes
    if HAS_HOOKED_TRANSFORMER:  # 3.9 gives the unembedding a bias, which was trained
        with pytest.raises(GrowthError, match=r"unembed\.b_U is not zero"):
            fits.save_pretrained(tmp_path / "grown")
        read(fits.model).tensors["unembed.b_U"].zero_()
    folder = fits.save_pretrained(tmp_path / "grown")  # joint matrices hold the trained weights
    alone = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert relative(alone(tokens).logits, fits.model(tokens)) < FLOAT32


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])  # the last two have joint weights
def test_a_schedule_is_resumed(name, tmp_path):
    tokens = prompts()

    def training():
        model = boot(name, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        return Training(model, optimizer, {1: ex.AddNeurons(4), 2: STEPS["d_head"]})

    def run(one, until):
        for _ in one.steps(until):
            one.optimizer.zero_grad()
            one.model(tokens).log_softmax(-1)[..., 3].mean().neg().backward()
            one.optimizer.step()
        return one

    whole, part, rest = run(training(), 4), run(training(), 3), training()
    part.save(tmp_path / "training.safetensors")
    rest.resume(tmp_path / "training.safetensors")
    assert torch.equal(run(rest, 4).model(tokens), whole.model(tokens))


@pytest.mark.parametrize("name", ["gpt2", "neox"])
def test_products_for_grad_max(name):
    bridge, tokens, seen = boot(name), prompts(), {}

    def keep(value, hook):
        seen[hook.name] = value
        value.retain_grad()

    names = [f"blocks.{layer}.mlp.hook_{end}" for layer in range(2) for end in ("in", "out")]
    with bridge.hooks([(name, keep) for name in names]):
        logits = bridge(tokens)
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
        (-log_probs.mean()).backward()
    products = gradient_products(bridge, tokens)
    for layer, product in products.items():
        x, g = seen[f"blocks.{layer}.mlp.hook_in"], seen[f"blocks.{layer}.mlp.hook_out"].grad
        assert relative(product, torch.einsum("bpm,bpn->mn", x, g)) < EXACT
    grow(bridge, d_mlp=41, init=grad_max(products))
    with pytest.raises(GrowthError, match="gated MLPs"):
        gradient_products(boot("llama"), tokens)


def test_compare():
    bridge, tokens = boot("llama", torch.float32), prompts()
    grown = grow(bridge, d_mlp=41, n_layers=3, d_head=20, seed=0)
    comparison = compare(
        bridge, grown, tokens, p.logit_diff([3, 5], [4, 6]), n_patched=5, n_nodes=7, progress=False
    )
    assert comparison.new["share"].abs().max() < 1e-6
    assert comparison.circuits["jaccard"].min() == 1


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("llama", {"rope_type": "linear", "factor": 2.0}),
        (
            "llama",
            {
                **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 5},
            },
        ),
        ("llama", {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 5}),
        (
            "phi3",
            {
                **{"rope_type": "longrope", "original_max_position_embeddings": 5},
                **{"short_factor": [1.5] * 7, "long_factor": [2.5] * 7},
            },
        ),
    ],
)
def test_scaled_rotary_positions(name, rope, monkeypatch):
    config = FAMILIES[name].config()
    config.rope_parameters = {**config.rope_parameters, **rope}
    config.original_max_position_embeddings = 5
    with in_float64(monkeypatch), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        bridge, tokens = bridged(randomise(model.double().eval())), prompts()
        for step in (STEPS["d_head"], STEPS["all six"]):
            grown = grow(bridge, step)
            assert relative(grown.model(tokens), bridge(tokens)) < EXACT


def bridge_of(name, **changes):
    config = FAMILIES[name].config()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return bridged(randomise(model.double().eval()))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"mlp_bias": True, "attention_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}),
    ],
)
def test_variants(name, changes, monkeypatch):
    if name not in HERE:
        pytest.skip("this family is run with transformer-lens 4: make pytest4")
    with in_float64(monkeypatch), torch.no_grad():
        bridge, tokens = bridge_of(name, **changes), prompts()
        grown = grow(bridge, STEPS["all six"], init=ex.init.normal(0.3))
        assert relative(grown.model(tokens), bridge(tokens)) < EXACT
        some = ex.compose(ex.WidenValues(2, heads=[0, 1]), ex.WidenQueriesAndKeys(2, heads=[0, 1]))
        assert relative(grow(bridge, some).model(tokens), bridge(tokens)) < EXACT


def test_the_caller_s_model_and_random_numbers_stay_as_they_are(monkeypatch):
    bridge = boot("gpt2")
    bridge.train()
    bridge.blocks[0].eval()
    modes = [module.training for module in bridge.modules()]
    state = torch.get_rng_state()
    grow(bridge, d_mlp=41).shrink()
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in bridge.modules()] == modes

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(bridge.original_model), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grow(bridge, d_mlp=41)
    assert [module.training for module in bridge.modules()] == modes


def test_what_does_not_matter_to_growth_is_no_reason_against_it():
    bridge, tokens = boot("gpt2"), prompts()
    bridge.original_model.transformer.gradient_checkpointing = True
    bridge.original_model.transformer.drop.p = 0.0
    assert grow(bridge, d_mlp=41).model.original_model.transformer.drop.p == 0.0
    model = original("llama")
    model.resize_token_embeddings(D_VOCAB + 3)
    resized = bridged(randomise(model))
    assert relative(grow(resized, d_mlp=41).model(tokens), resized(tokens)) < EXACT
    silent = boot("llama")
    silent.unembed.weight.data.zero_()
    assert not grow(silent, d_head=20).model(tokens).any()
    theta = boot("llama").original_model.config.rope_parameters
    assert grow(boot("llama"), d_head=20).shrink().original_model.config.rope_parameters == theta


def test_a_saved_model_grows_without_its_neuron_heads(tmp_path):
    bridge, tokens = boot("llama", torch.float32), prompts()
    logits = bridge(tokens)
    save(expose_neuron_heads(bridge, copy=True).model, tmp_path / "saved")
    arguments = ["grow", str(tmp_path / "saved"), str(tmp_path / "grown"), "--d-mlp", "41"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert relative(load(tmp_path / "grown")(tokens), logits) < FLOAT32


def test_refusals():
    with pytest.raises(GrowthError, match="would share keys and values"):
        grow(boot("gpt2"), ex.AddHeads(2, into_groups=True))
    for name, change, reason in (
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
    ):
        config = FAMILIES[name].config()
        for key, value in change.items():
            setattr(config, key, value)
        bridge = boot(name)
        bridge.original_model.config = config
        with pytest.raises(GrowthError, match=reason):
            grow(bridge, d_mlp=41)
    with pytest.raises(GrowthError, match="even number"):
        grow(boot("llama"), ex.WidenQueriesAndKeys(3))
    with pytest.raises(GrowthError, match=r"one d_head for both; widen both"):
        grow(boot("llama"), ex.WidenValues(2))
    with pytest.raises(GrowthError, match="differ in n_heads"):
        grow(boot("gpt2"), ex.AddHeads(2, layers=[0]))
    config = FAMILIES["llama"].config()
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(GrowthError, match="'dynamic'"):
        grow(bridged(model), STEPS["d_head"])
    changed = boot("llama")
    changed.original_model.model.norm._original_component.variance_epsilon = 0.5
    with pytest.raises(GrowthError, match=r"variance_epsilon is 0.5; the configuration says"):
        grow(changed, d_mlp=41)
    rotary = boot("llama")
    for module in rotary.original_model.modules():
        if "inv_freq" in module._buffers:
            module.inv_freq *= 2
    with pytest.raises(GrowthError, match="inv_freq differs from its value"):
        grow(rotary, d_mlp=41)
    processed = boot("llama", state="processed")
    with pytest.raises(GrowthError, match="compatibility mode"):
        grow(processed, d_mlp=41)
    with pytest.raises(GrowthError, match="undo"):
        grow(expose_neuron_heads(boot("gpt2")).model, d_mlp=41)


def table():
    """Return the page's table: the results that the tests above check."""
    columns = list(STEPS)
    lines = [
        f"| | {' | '.join(columns)} | a folder for transformers needs |",
        "| --- |" + " --- |" * (len(columns) + 1),
    ]
    for name, title in NAMES.items():
        cells = ["exact" for _ in columns]
        if name in DEAD:
            cells[columns.index("d_head")] = "exact [1]"
        if name == "olmo2":
            cells[columns.index("n_heads")] = "exact [2]"
        lines.append(f"| {title} | {' | '.join(cells)} | {NOT_IN_A_FOLDER.get(name, '')} |")
    for title in POST_NORM:
        cells = ["refused [3]" if of in ("d_model", "n_layers") else "exact" for of in STEPS]
        cells[columns.index("all six")] = "the four: exact"
        lines.append(f"| {title} | {' | '.join(cells)} | d_mlp alone: n_heads · d_head = d_model |")
    return "\n".join(lines)


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8"), (
        "run python tests/growth/test_hugging_face.py"
    )


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    start = text.index("| | d_mlp")
    end = text.index("\n\n", start)
    PAGE.write_text(text[:start] + table() + text[end:], encoding="utf-8")
