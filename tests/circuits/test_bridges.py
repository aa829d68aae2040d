"""Tests of composition on bridges, against raw weights of the bridged modules."""

import math
import warnings

import pytest
import torch
import transformers
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

from attn_only_lens import circuits, expose_neuron_heads
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]
D_MLP, HEADS, LAYERS = 37, 2, 2
SIZES = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": D_MLP}
SIZES |= {"vocab_size": 41, "hidden_size": 28, "max_position_embeddings": 17, "pad_token_id": 0}
GROUPED = {"num_key_value_heads": 1, "head_dim": 14}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=41, n_positions=17, n_layer=LAYERS, n_head=HEADS, n_inner=D_MLP, n_embd=28
    ),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "neox_sequential": lambda: transformers.GPTNeoXConfig(
        **SIZES, rotary_pct=0.5, use_parallel_residual=False
    ),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**SIZES, **GROUPED),
    "llama_grouped": lambda: transformers.LlamaConfig(
        **SIZES | {"num_attention_heads": 4}, num_key_value_heads=2, head_dim=14
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES, num_key_value_heads=1),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **GROUPED),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **GROUPED),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
}


def boot(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation="eager"
    )
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.2 * (parameter.ndim == 1))
    raw = {key: value.clone() for key, value in model.state_dict().items()}
    return build_bridge_from_module(model, type(model).__name__, hf_config=model.config), raw


def parts(name, raw, layer):
    """Return q, k, v [head, d, d_head]; o; in, gate, out; norms [d, d] before, after; parallel."""
    d, h = 28, 14
    one = torch.eye(d, dtype=torch.float64)
    centre = one - torch.full_like(one, 1 / d)
    stem = {"gpt2": "transformer.h", "neox": "gpt_neox.layers"}.get(name.split("_")[0])
    state = {
        key.removeprefix(f"{stem or 'model.layers'}.{layer}."): value for key, value in raw.items()
    }

    def heads(weight):  # weight: [out, in] as in nn.Linear
        return weight.reshape(-1, h, d).transpose(1, 2)

    def rms(key, plus=0.0):
        return torch.diag(state[key + ".weight"] + plus)

    def ln(key):
        return centre @ torch.diag(state[key + ".weight"])

    gate, parallel, after, qk = None, False, (one, one), None
    if name == "gpt2":
        q, k, v = (
            w.T.reshape(-1, h, d).transpose(1, 2) for w in state["attn.c_attn.weight"].split(d, 1)
        )
        o = state["attn.c_proj.weight"].reshape(-1, h, d)
        into, out = state["mlp.c_fc.weight"], state["mlp.c_proj.weight"]
        before = ln("ln_1"), ln("ln_2")
    elif name.startswith("neox"):
        q, k, v = (
            state["attention.query_key_value.weight"].reshape(-1, 3, h, d).transpose(2, 3).unbind(1)
        )
        o = state["attention.dense.weight"].T.reshape(-1, h, d)
        into, out = state["mlp.dense_h_to_4h.weight"].T, state["mlp.dense_4h_to_h.weight"].T
        before = ln("input_layernorm"), ln("post_attention_layernorm")
        parallel = name == "neox"
    else:
        prefix = "self_attn."
        if name == "phi3":
            q, k, v = (heads(w) for w in state[prefix + "qkv_proj.weight"].split([28, 14, 14]))
            gate, into = (w.T for w in state["mlp.gate_up_proj.weight"].chunk(2))
        else:
            q, k, v = (heads(state[f"{prefix}{x}_proj.weight"]) for x in "qkv")
        o = state[prefix + ("dense.weight" if name == "phi" else "o_proj.weight")].T.reshape(
            -1, h, d
        )
        if name == "phi":
            into, out = state["mlp.fc1.weight"].T, state["mlp.fc2.weight"].T
            before, parallel = (ln("input_layernorm"),) * 2, True
        else:
            out = state["mlp.down_proj.weight"].T
            if name != "phi3":
                into, gate = state["mlp.up_proj.weight"].T, state["mlp.gate_proj.weight"].T
            plus = 1.0 if name.startswith("gemma") else 0.0
            if name.startswith("gemma"):
                before = rms("input_layernorm", plus), rms("pre_feedforward_layernorm", plus)
            elif name != "olmo2":
                before = rms("input_layernorm"), rms("post_attention_layernorm")
            if name.startswith("gemma") or name == "olmo2":
                after = (
                    rms("post_attention_layernorm", plus),
                    rms("post_feedforward_layernorm", plus),
                )
            if name == "olmo2":
                before = one, one
            if name in ("qwen3", "gemma3", "olmo2"):
                qk = (state[f"{prefix}{x}_norm.weight"] + plus for x in "qk")
    if qk is not None:
        q, k = (w * n.reshape(-1, 1, h) for w, n in zip((q, k), qk, strict=True))
    repeat = len(q) // len(k)
    k, v = (w.repeat_interleave(repeat, 0) for w in (k, v))
    return q, k, v, o, into, into if gate is None else gate, out, before, after, parallel


def dense(name, raw):
    writes, reads = {}, {}
    for layer in range(LAYERS):
        q, k, v, o, into, gate, out, before, after, parallel = parts(name, raw, layer)
        for head in range(len(q)):
            ov = before[0] @ v[head] @ o[head] @ after[0]
            qk = before[0] @ q[head] @ k[head].T @ before[0].T
            writes[f"L{layer}H{head}"] = ov
            reads[f"L{layer}H{head}"] = {"q": qk, "k": qk.T, "v": ov}
        for neuron in (5, 36):
            writes[f"L{layer}N{neuron}"] = (out[neuron] @ after[1])[None]
            reads[f"L{layer}N{neuron}"] = {
                "q": (before[1] @ gate[:, neuron])[:, None],
                "v": (before[1] @ into[:, neuron])[:, None],
            }
    return writes, reads, parallel


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_pair_is_that_of_the_raw_weights(name, compatible):
    bridge, raw = boot(name)
    if compatible:
        # TransformerLens folds nothing into the weights that are read here; they stay raw.
        bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    exposed = expose_neuron_heads(bridge).model
    writes, reads, parallel = dense(name, raw)
    for kind in ("q", "k", "v"):
        frame = circuits.composition(exposed, list(writes), list(reads), kind)
        within = frame[frame.writer.str.startswith("L0H") & frame.reader.str.startswith("L0N")]
        n_heads = len(reads) // LAYERS - 2
        assert len(within) == (0 if parallel else 2 * n_heads)
        assert len(frame) == (n_heads + 2) ** 2 + LAYERS * len(within)
        for row in frame.itertuples():
            R = reads[row.reader].get(kind)
            expected = 0.0
            if R is not None:
                W = writes[row.writer]
                expected = ((W @ R).norm() / (W.norm() * R.norm())).item()
            assert abs(row.score - expected) < 1e-10, row
            assert math.isclose(row.ratio_to_baseline, row.score * math.sqrt(28))
    top = circuits.top_compositions(exposed, 5, "v", block=7)
    assert top.score.is_monotonic_decreasing
    # Control: without the norms, the scores differ.
    plain = circuits.composition(exposed, list(writes), list(reads), kind, fold_norms=False)
    assert abs(plain.score - frame.score).max() > 1e-3


def test_a_matrix_that_is_not_what_it_is_called_is_refused(monkeypatch):
    bridge, _ = boot("gpt2")
    exposed = expose_neuron_heads(bridge).model
    kind = type(bridge.blocks[1].attn)
    right = kind.W_Q
    monkeypatch.setattr(kind, "W_Q", property(lambda self: right.fget(self).flip(1)))
    with pytest.raises(InputError, match=r"layer 1: W_Q is not the matrix that its attn\.q"):
        circuits.composition(exposed, "L0H0", "L1H0", "q")


def test_a_norm_that_is_another_is_refused():
    bridge, _ = boot("llama")
    exposed = expose_neuron_heads(bridge).model
    norm = exposed.blocks[1].ln2
    norm.register_forward_hook(lambda module, args, output: output + 3.0)
    with pytest.raises(InputError, match="layer 1: its ln2 is neither LayerNorm nor RMSNorm"):
        circuits.composition(exposed, "L0H0", "L1H0", "q")
    with warnings.catch_warnings():
        circuits.composition(exposed, "L0H0", "L1H0", "q", fold_norms=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_that_writes_nothing_has_the_norms_that_it_has(name):
    """Layers that growth adds have W_O and W_out of zero, and their norms are still read."""
    bridge, _ = boot(name)
    expected = host_of(expose_neuron_heads(bridge, copy=True).model).norms()
    with torch.no_grad():
        for attn, mlp in ((block.attn, block.mlp) for block in bridge.blocks):
            for part in (attn.o, mlp.out):
                for parameter in part.original_component.parameters():
                    parameter.zero_()
    norms = host_of(expose_neuron_heads(bridge, copy=True).model).norms()
    for here, there in zip(norms, expected, strict=True):
        assert here.parallel == there.parallel
        norms_here, norms_there = ([*layer.attention, *layer.neuron] for layer in (here, there))
        assert [norm.centres for norm in norms_here] == [norm.centres for norm in norms_there]
        for first, second in zip(norms_here, norms_there, strict=True):
            assert first.weight is second.weight or torch.equal(first.weight, second.weight)
