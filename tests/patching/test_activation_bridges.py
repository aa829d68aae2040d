"""Tests of sweeps on TransformerBridges against whole runs, under TransformerLens 3.9 and 4."""

from itertools import product

import bridges
import pytest
import torch
import transformers
from common import of_a_library
from patched_runs import cached, hook_point, logit_diff, mask_at, patched_logits
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from attn_only_lens import Bilinear, circuits, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.metrics import bind
from attn_only_lens.engine.recording import record
from attn_only_lens.engine.replay import make_replay
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = [
    pytest.mark.both_versions,
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
BATCH, POS, D_MLP = 2, 11, 37
EXACT = 1e-10
METRIC = p.logit_diff(correct=7, wrong=8)
SITES = ["L0N36", "L1N5", "L1N29", "L0H1", "L1H0"]
PARTS = ["z", "pattern", "value", "q", "k"]
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": D_MLP}
SIZES |= {"vocab_size": 41, "hidden_size": 26, "max_position_embeddings": 17}
GROUPED = {"num_key_value_heads": 1, "head_dim": 14}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=41, n_positions=17, n_layer=2, n_head=2, n_inner=D_MLP, n_embd=26
    ),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),  # parallel sublayers
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED),
    "granite": lambda: transformers.GraniteConfig(**SIZES, **GROUPED, **bridges.FACTORS),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **GROUPED),  # norms before and after
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "openai": lambda: transformers.OpenAIGPTConfig(  # blocks return lists and end in a norm
        vocab_size=41, n_positions=17, n_layer=2, n_head=2, n_embd=26
    ),
}
NATIVE = {"n_layers": 2, "d_model": 26, "n_heads": 2, "d_head": 13, "d_mlp": D_MLP, "d_vocab": 41}
NATIVE |= {"n_ctx": 17, "init_mode": "gpt2", "seed": 0}
NAMES = [*CONFIGS, "native", "native_gated"]
if HAS_HOOKED_TRANSFORMER:  # the same condition as in `bridges`
    NAMES = ["gpt2", "llama", "granite", "gemma2", "native"]


@torch.no_grad()
def made(name, compatible=False, dtype=torch.float64, **gates):
    """Return a bridge with exposed neuron-heads."""
    torch.manual_seed(0)
    if name in CONFIGS:
        config = CONFIGS[name]()
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        model = model.to(dtype).eval()
        bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    else:
        gated = {"gated_mlp": True, "act_fn": "silu"} if name == "native_gated" else {}
        cfg = TransformerBridgeConfig(**NATIVE | {"act_fn": "gelu_new"} | gated)
        bridge = TransformerBridge.boot_native(cfg, dtype=dtype)
    for parameter in bridge.original_model.parameters():
        parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    expose_neuron_heads(bridge, **gates)
    if compatible:
        bridge.enable_compatibility_mode(disable_warnings=True)
    return bridge


def pair():
    """Return clean and corrupted prompts that differ from position 4 on."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.randint(0, 41, (BATCH, POS), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 4], corrupted[:, 7] = (clean[:, 4] + 5) % 41, (clean[:, 7] + 3) % 41
    return clean, corrupted


def sweep(model, metric=METRIC, **how):
    return p.activation_patch(model, *pair(), metric, **{"sites": SITES, "progress": False} | how)


def whole(model, name, part, places, mask=None, noise=False, per_neuron=1):
    """Return the metric of a whole run with the patch."""
    clean, corrupted = pair()
    target, source_prompts = (clean, corrupted) if noise else (corrupted, clean)
    source = cached(model, source_prompts, mask)
    logits = patched_logits(model, target, source, name, part, places, mask, per_neuron)
    last = torch.tensor([POS - 1] * BATCH) if mask is None else mask.cumsum(1).argmax(1)
    return logit_diff(logits, last, 7, 8)


SHARED = {(name, part) for name in ("llama", "granite", "gemma2") for part in ("value", "k")}
"""Of attention heads: `test_grouped_queries.py`."""
READ_ONLY = {(name, "pattern") for name in ("native", "native_gated")}
"""Patterns of attention heads that are not read back."""


def patchable(name, part):
    kinds = "N" if (name, part) in SHARED | READ_ONLY else "H" if part == "k" else "HN"
    return [site for site in SITES if any(kind in site for kind in kinds)]


@pytest.mark.parametrize("compatible", [False, True], ids=["plain", "compatible"])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        combination
        for combination in product(NAMES, PARTS)
        if combination not in SHARED or combination[1] != "k"
    ],
)
def test_every_part(name, part, compatible):
    model = made(name, compatible)
    if (name, compatible) == ("native_gated", True):
        bridges.skip_unless_it_runs(model)
    frame = sweep(model, part=part, sites=patchable(name, part)).to_frame()
    rows = frame[frame.position >= 4].sample(7, random_state=1)
    for row in rows.itertuples():
        expected = whole(model, row.name, part, mask_at(BATCH, POS, row.position))
        assert row.value == pytest.approx(expected, rel=0, abs=EXACT), row
    # Patches of every kind of head have an effect, so the model uses all patched hook points.
    for _, of_kind in frame[frame.position >= 4].groupby("kind", observed=True):
        assert of_kind["value"].std() > 1e-6
    assert set(frame[frame.position < 4]["score"]) == {0.0}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "native"])
def test_padding_noise_and_all_positions(name, side):
    model = made(name)
    mask = torch.ones(BATCH, POS, dtype=torch.long)
    mask[1, slice(0, 3) if side == "left" else slice(POS - 2, None)] = 0
    if model(pair()[0], attention_mask=mask).isnan().any():
        # The bridge's own logits are nan behind padding on the left.
        with pytest.raises(InputError, match="not finite"):
            sweep(model, mask=mask)
        return
    frame = sweep(model, positions="all", direction="noise", mask=mask).to_frame()
    for row in frame.itertuples():
        expected = whole(model, row.name, "z", mask.bool(), mask, noise=True)
        assert row.value == pytest.approx(expected, rel=0, abs=EXACT), row
    assert frame["value"].std() > 1e-4


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
@pytest.mark.parametrize(
    "metric", [p.loss(), p.kl(), lambda logits: logits[:, 3:9].square().mean()]
)
def test_metrics_that_read_more(name, metric):
    model = made(name)
    clean, corrupted = pair()
    sweep_ = sweep(model, metric, sites=["L0N36", "L1H0"], positions=[4, 9])
    bound = bind(metric, model, p.prompt_pair(model, clean, corrupted), model(clean).detach())
    source = cached(model, clean)
    for row in sweep_.to_frame().itertuples():
        places = mask_at(BATCH, POS, row.position)
        logits = patched_logits(model, corrupted, source, row.name, "z", places)
        assert row.value == pytest.approx(bound.of(logits), rel=0, abs=EXACT), row


def test_heads_that_share_a_neuron():
    model = made("gpt2", gate=Bilinear(4))
    frame = sweep(model, sites=["L0N36", "L0N36.2", "L1N5.3"], positions=[4, 8]).to_frame()
    for row in frame.itertuples():
        expected = whole(model, row.name, "z", mask_at(BATCH, POS, row.position), per_neuron=4)
        assert row.value == pytest.approx(expected, rel=0, abs=EXACT), row


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "adds"), [("gpt2", True), ("neox", True), ("gemma2", False)])
def test_whether_a_norm_follows_the_mlp_is_seen_in_every_precision(name, adds, dtype):
    """Adding an MLP's output to the stream would skip the norm that follows the MLP in Gemma 2."""
    model = made(name, dtype=dtype)
    clean, _ = pair()
    recording = record(model, clean, None)
    bound = bind(METRIC, model, p.prompt_pair(model, *pair()))
    replay = make_replay(model, recording, bound)
    assert [replay.adds_mlp_output(i, block.mlp) for i, block in enumerate(model.blocks)] == [
        adds,
        adds,
    ]


def test_a_hook_point_that_takes_no_edits_is_refused():
    model = made("native")
    point = hook_point(model, "L1H0", "pattern")
    edited = model.run_with_hooks(pair()[0], fwd_hooks=[(point, lambda x, hook: x + 1)])
    if not torch.equal(edited, model(pair()[0])):  # transformer-lens 4 uses edited patterns
        assert sweep(model, part="pattern", sites=["L1H0"]).to_frame()["value"].std() > 1e-6
        return
    with pytest.raises(UnsupportedModelError, match="the model does not use") as caught:
        sweep(model, part="pattern")
    assert [reason.split()[0] for reason in caught.value.reasons] == [
        f"blocks.{layer}.attn.hook_pattern" for layer in (0, 1)
    ]
    assert len(sweep(model, part="q").to_frame())


def state(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return {
        name: (type(m), vars(m).get("forward"), [dict(getattr(m, k)) for k in kinds])
        for name, m in model.named_modules()
    }


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "native"])
@pytest.mark.parametrize("after", [1, 6, 9, 12])
def test_an_error_leaves_the_bridge_as_it_was(name, after):
    model = made(name)
    logits = model(pair()[0])
    block, calls = model.blocks[-1], []
    forward = block.forward
    vars(block)["forward"] = forward  # accelerate leaves this on models that it places
    block.register_forward_pre_hook(lambda *_: None).remove()
    before = state(model)

    def fail(module, args):
        calls.append(1)
        if len(calls) > after:
            raise ZeroDivisionError

    handle = model.blocks[-1].mlp.register_forward_pre_hook(of_a_library(fail))
    with pytest.raises(ZeroDivisionError):
        sweep(model, batch_size=3)
    handle.remove()
    assert state(model) == before
    assert torch.equal(model(pair()[0]), logits)
    assert len(sweep(model).to_frame()) == len(SITES) * POS


def test_a_bridge_that_is_not_itself():
    """Sweeps refuse a model whose forward pass has state or that has active hooks."""
    model, calls = made("gpt2"), []

    def drift(module, args, output):
        calls.append(1)
        return output * (1 + 1e-6 * len(calls))

    handle = model.original_model.lm_head.register_forward_hook(of_a_library(drift))
    with pytest.raises(UnsupportedModelError, match="run that starts at block"):
        sweep(model)
    handle.remove()
    hooks = model.hooks([(hook_point(model, "L1N5", "z"), lambda z, hook: z * 2)])
    with hooks, pytest.raises(InputError, match="hooks are attached"):
        sweep(model)
    assert len(sweep(model).to_frame())


@pytest.mark.parametrize("state", ["checkpointing", "quantized"])
def test_models_in_training_or_of_integers_are_refused(state):
    """A backward pass would fail in torch's checkpoints, and integers have no gradient."""
    model = bridges.exposed_copy(bridges.boot("llama", torch.float32))
    if state == "checkpointing":
        model.original_model.gradient_checkpointing_enable()
        model.train()
        match = "gradient checkpointing is active; call model.eval"
    else:
        # `quantize_dynamic` puts such layers in the place of linear layers.
        layer = next(x for x in model.original_model.modules() if type(x) is torch.nn.Linear)
        layer.__class__ = type(
            "Linear", (torch.nn.Linear,), {"__module__": "torch.ao.nn.quantized.dynamic.modules"}
        )
        match = "is quantized, so its weights have no gradient"
    clean, corrupted = torch.tensor([[3, 5, 7]]), torch.tensor([[3, 11, 7]])
    arguments, metric = (model, clean, corrupted), p.logit_diff(7, 8)
    for call in (
        lambda: p.activation_patch(*arguments, metric),
        lambda: p.attribution(*arguments, metric),
        lambda: p.path_patch(*arguments, metric, senders=["L0H0"], receivers="logits"),
        lambda: circuits.discover(*arguments, metric),
        lambda: circuits.explain(*arguments, metric),
        lambda: circuits.attribution_graph(model, clean, metric, corrupted=corrupted),
        lambda: circuits.attribution_graph(model, clean, metric),
        lambda: circuits.path_expansion(model, clean),
    ):
        with pytest.raises(InputError, match=match):
            call()


def test_dropout_without_a_module_is_refused():
    model = made("llama")
    for layer in model.original_model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert len(sweep(model).to_frame())
    model.train()
    with pytest.raises(InputError, match="dropout is active"):
        sweep(model)
