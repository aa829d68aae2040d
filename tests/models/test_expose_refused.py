"""Tests that `expose_neuron_heads` refuses some bridges with a reason and leaves them unchanged."""

import models
import pytest
import torch
import transformers
from bridges import WIDE, boot, bridged, randomise
from common import D_MLP, D_VOCAB, mlp_hook, needs_hooked_transformer, relative, tokens
from exposed_states import state
from torch import nn
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import Bilinear, convert, expose_neuron_heads
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError
from attn_only_lens.models.in_place import exposed

pytestmark = pytest.mark.filterwarnings("ignore")
SSM = {"vocab_size": D_VOCAB, "hidden_size": 26, "num_hidden_layers": 2, "state_size": 5}
KINDS = {
    "opt": (
        lambda: transformers.OPTConfig(
            **{"vocab_size": D_VOCAB, "hidden_size": 26, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "ffn_dim": D_MLP, "word_embed_proj_dim": 26},
        ),
        "one axis holds the tokens of all prompts",
    ),
    "mamba": (lambda: transformers.MambaConfig(**SSM), "it has no MLP"),
    "t5": (
        lambda: transformers.T5Config(
            vocab_size=41, d_model=26, d_kv=13, d_ff=D_MLP, num_layers=2, num_heads=2
        ),
        "it has no blocks",
    ),
}


def build(name):
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    return bridged(randomise(auto.from_config(KINDS[name][0]()).eval()))


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name):
    bridge, reason = build(name), KINDS[name][1]
    before = state(bridge)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        expose_neuron_heads(bridge)
    assert state(bridge) == before
    if name != "t5":
        assert [text[:7] for text in caught.value.reasons] == ["layer 0", "layer 1"]


class Adapted(nn.Module):
    """A projection with an adapter."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight, self.bias = base, base.weight, base.bias
        self.A = nn.Parameter(torch.randn_like(base.weight))

    def forward(self, x):
        return self.base(x) + x @ self.A


def scale_output(mlp):
    forward = mlp.forward
    mlp.forward = lambda *args: 1.01 * forward(*args)


SPOILS = {
    "learnable activation": (
        lambda b, m: setattr(m, "act", nn.PReLU(dtype=torch.float64)),
        "expected one of gelu",
    ),
    "in place": (lambda b, m: setattr(m, "act", nn.SiLU(inplace=True)), "no longer computes silu"),
    "scale after": (lambda b, m: scale_output(m), "output is not the sum"),
    "bridge forward": (
        lambda b, m: setattr(b, "forward", lambda x: 2 * x),
        "fired .* expected once",
    ),
    "tuple": (lambda b, m: setattr(b, "forward", lambda x: (x, None)), "returns a tuple"),
    "fails": (lambda b, m: setattr(b, "forward", lambda x: {}["?"]), "cannot be run separately"),
    "W_out bypassed": (lambda b, m: setattr(m, "forward", lambda x: torch.relu(x)), "fired"),
    "shared": (None, "shares its MLP"),
}


@pytest.mark.parametrize("name", SPOILS)
def test_an_mlp_that_was_changed_by_hand(name):
    spoil, reason = SPOILS[name]
    bridge = boot("gpt2")
    for block in bridge.blocks:
        block.mlp.original_component.act = nn.SiLU()
    if spoil is None:
        block._modules["mlp"] = bridge.blocks[0].mlp
    else:
        spoil(block.mlp, block.mlp.original_component)
    before = state(bridge)
    with pytest.raises(UnsupportedModelError, match=f"layer 1: .*({reason})") as caught:
        expose_neuron_heads(bridge)
    assert len(caught.value.reasons) == 1, "the other layer is as it should be"
    assert state(bridge) == before


@torch.no_grad()
def test_an_adapter_on_w_in_is_part_of_the_query():
    bridge = boot("gpt2")
    for block in bridge.blocks:
        part = getattr(block.mlp, "in")
        part._original_component = Adapted(part.original_component)
    expected = bridge(tokens())
    assert relative(boot("gpt2")(tokens()), expected) > 1e-3
    with expose_neuron_heads(bridge):
        logits, cache = bridge.run_with_cache(tokens())
    assert relative(logits, expected) <= 1e-12
    pre = cache["blocks.1.mlp.in.hook_out"]
    assert torch.equal(cache[mlp_hook("q")].squeeze(-1), pre)


@pytest.mark.parametrize("gate", ["exact", "bilinear"])
@torch.no_grad()
def test_what_changes_later_is_an_error_and_not_another_function(gate):
    """Dropout before W_out in training mode, or an activation swapped later, raises an error."""
    bridge = boot("gpt2")
    act = bridge.blocks[1].mlp.original_component.act
    bridge.blocks[1].mlp.original_component.act = nn.Sequential(act, nn.Dropout(0.2)).eval()
    keep = [(mlp_hook("q"), lambda q, hook: None)]
    exact = bridge(tokens())
    with expose_neuron_heads(bridge, gate=Bilinear(8) if gate == "bilinear" else gate):
        assert relative(bridge.run_with_hooks(tokens(), fwd_hooks=keep), exact) < 0.1
        bridge.train()
        # Without hooks, exact gates leave dropout to the MLP.
        for hooks in (keep, []) if gate == "bilinear" else (keep,):
            with pytest.raises(UnsupportedCallError, match=r"dropout.*model.eval\(\)"):
                bridge.run_with_hooks(tokens(), fwd_hooks=hooks)
        bridge.eval()
        bridge.blocks[1].mlp.original_component.act = nn.SiLU()
        with pytest.raises(UnsupportedCallError, match=r"layer 1: .* no longer computes gelu_new"):
            bridge.run_with_hooks(tokens(), fwd_hooks=keep)


def test_a_failure_on_the_way_leaves_nothing(monkeypatch):
    """A failure after the heads were attached leaves the bridge unchanged."""
    bridge = boot("llama")
    before = state(bridge)
    monkeypatch.setattr(exposed.InPlace, "write", lambda self, out: 1 / 0)
    with pytest.raises(UnsupportedModelError, match="division by zero"):
        expose_neuron_heads(bridge)
    assert state(bridge) == before
    assert type(bridge) is TransformerBridge


@needs_hooked_transformer
def test_hooked_transformers():
    for change, reason in (
        (lambda m: setattr(m.blocks[1].mlp, "act_fn", torch.tanh), "act_fn is not gelu"),
        (lambda m: setattr(m.cfg, "n_devices", 2), "spread over 2 devices"),
    ):
        model = models.build("gelu")
        change(model)
        before = state(model)
        with pytest.raises(UnsupportedModelError, match=reason):
            expose_neuron_heads(model)
        assert state(model) == before
    with pytest.raises(UnsupportedModelError, match="attention-only"):
        expose_neuron_heads(models.build("gelu", attn_only=True, d_mlp=None, act_fn=None))
    with pytest.raises(UnsupportedModelError):
        expose_neuron_heads(convert(models.build("gelu")))
    with pytest.raises(UnsupportedModelError, match=r"undo\(\)"):
        convert(expose_neuron_heads(models.build("gelu")).model)


def test_an_mlp_that_overflows():
    bridge = boot("llama", torch.float16)
    with torch.no_grad():
        for matrix in bridge.original_model.model.layers[1].mlp.parameters():
            matrix.mul_(3e4)
    match = r"layer 1: its MLP computes nan or inf in torch.float16 .* load the model in float32"
    with pytest.raises(UnsupportedModelError, match=match):
        expose_neuron_heads(bridge)


@needs_hooked_transformer
def test_mixtures_need_a_newer_transformer_lens():
    config = transformers.MixtralConfig(**WIDE, num_local_experts=3)
    bridge = bridged(transformers.AutoModelForCausalLM.from_config(config))
    with pytest.raises(UnsupportedModelError, match=r"expected transformer-lens 4\.3 or later"):
        expose_neuron_heads(bridge)
