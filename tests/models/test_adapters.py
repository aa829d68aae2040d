"""Tests of modules that are replaced or wrapped before or after neuron-heads are exposed.

A model with a changed module is refused by every public function that takes a model, with one
row of `support.py` per function. The user's own forward pass still runs.
"""

import bridges
import pytest
import support
import torch
from common import tokens
from exposed_states import each
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.nn.utils import parametrize
from transformer_lens.model_bridge import TransformerBridge

import attn_only_lens as lens
from attn_only_lens import Contrast, circuits
from attn_only_lens import patching as p
from attn_only_lens.models.in_place.mixtures import experts_of

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from libraries
PAIR = Contrast(tokens(1), tokens(2), p.logit_diff(7, 8))
REFUSED = (lens.errors.InputError, lens.errors.CheckpointError)


def lora(name, **options):
    options = {"r": 3, "init_lora_weights": False} | options
    return LoraConfig(target_modules=rf".*\.{name}\._original_component", **options)


def exchange(bridge, part, make):
    """Exchange a part of layer 1 in the model that the bridge wraps."""
    owner, _, name = f"model.layers.1._original_component.{part}".rpartition(".")
    owner = bridge.original_model.get_submodule(owner)
    setattr(owner, name, make(getattr(owner, name)))


CHANGES = {
    "adapter in down_proj": lambda bridge: get_peft_model(bridge.original_model, lora("down_proj")),
    "around o_proj": lambda bridge: exchange(
        bridge, "self_attn._original_component.o_proj", nn.Sequential
    ),
    "another down_proj": lambda bridge: exchange(
        bridge,
        "mlp._original_component.down_proj",
        lambda old: nn.Linear(37, 26, bias=False, dtype=torch.float64),
    ),
}
RUNS = {
    "sweep": lambda model: p.activation_patch(model, PAIR, sites="L1N3@-1"),
    "attribution": lambda model: p.attribution(model, PAIR),
    "composition": lambda model: circuits.composition(model, top=3).frame,
    "copying_scores": lambda model: circuits.copying_scores(model),
}


@pytest.fixture
def llama():
    return bridges.boot("llama")


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_after_exposing_is_refused_as_one_before(llama, change, tmp_path):
    before = llama(tokens())
    exposed = lens.expose_neuron_heads(llama)
    CHANGES[change](llama)
    if "o_proj" not in change:  # the attention of this bridge runs its parts itself
        assert not torch.allclose(llama(tokens()), before)
    named = "o_proj" if "o_proj" in change else r"down_proj|mlp\b|W_out"
    # test_every_function_refuses_a_model_that_was_changed tries the other functions.
    with pytest.raises(REFUSED, match=named):
        RUNS["sweep"](llama)
    with pytest.raises(lens.errors.CheckpointError, match=named):
        lens.save(llama, tmp_path / "saved")
    with pytest.raises(lens.errors.UnsupportedModelError, match=named):
        lens.expose_neuron_heads(llama)
    exposed.undo()
    assert torch.isfinite(llama(tokens())).all()
    with pytest.raises(lens.errors.UnsupportedModelError, match=named):
        lens.expose_neuron_heads(llama)


@torch.no_grad()
def test_a_merged_adapter_is_served(llama):
    """After merging, an adapter is part of the weights; before, even a zero adapter is refused."""
    lens.expose_neuron_heads(llama)
    adapted = get_peft_model(llama.original_model, lora("down_proj", init_lora_weights=True))
    with pytest.raises(REFUSED, match=r"peft\.tuners\.lora"):
        RUNS["sweep"](llama)
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            parameter.copy_(torch.randn_like(parameter))
    expected, plain = llama(tokens()), bridges.boot("llama")
    for block, plain_block in zip(llama.blocks, plain.blocks, strict=True):
        layer = block.mlp.out.original_component
        layer.merge()
        block.mlp.out.set_original_component(layer.get_base_layer())
        plain_block.mlp.out.original_component.weight.copy_(layer.get_base_layer().weight)
    torch.testing.assert_close(llama(tokens()), expected)
    lens.expose_neuron_heads(plain)
    for name in ("attribution", "composition"):
        one, other = (RUNS[name](model) for model in (llama, plain))
        assert getattr(one, "frame", one).equals(getattr(other, "frame", other))


@torch.no_grad()
def test_parts_that_peft_replaces_are_refused(llama):
    """`merge_and_unload` replaces the parts that have hook points by plain modules."""
    lens.expose_neuron_heads(llama)
    get_peft_model(llama.original_model, lora("down_proj")).merge_and_unload()
    with pytest.raises(REFUSED, match="build the bridge again from a model without adapters"):
        RUNS["sweep"](llama)
    llama = lens.expose_neuron_heads(bridges.boot("llama")).model
    get_peft_model(llama.original_model, lora("q_proj", modules_to_save=["down_proj"]))
    with pytest.raises(lens.errors.UnsupportedCallError, match="modules_to_save"):
        llama(tokens())


@torch.no_grad()
def test_adapters_within_attention_run_and_no_weight_of_theirs_is_read(llama):
    """Ablating a head equals a plain torch hook on the adapter, which runs between hook points."""
    lens.expose_neuron_heads(llama)
    get_peft_model(llama.original_model, lora("o_proj"))
    o_proj = llama.blocks[1].attn.o.original_component

    def silence(module, args):
        z = args[0].clone()
        z[..., 14:] = 0  # head 1
        return (z,)

    with o_proj.register_forward_pre_hook(silence):
        expected = llama(tokens())
    with p.ablated(llama, ["L1H1"]):
        torch.testing.assert_close(llama(tokens()), expected)
    assert not torch.allclose(llama(tokens()), expected)
    for name in ("composition", "copying_scores"):
        with pytest.raises(lens.errors.InputError, match=r"W_O is not the matrix .* attn\.o"):
            RUNS[name](llama)


@torch.no_grad()
def test_torch_hooks_belong_on_the_module_in_a_part(llama):
    """Torch hooks on a part are refused before they run; on the wrapped module they see edits."""
    lens.expose_neuron_heads(llama)
    out, seen = llama.blocks[1].attn.o, []

    def look(module, args, output):
        seen.append(args[0])

    with out.register_forward_hook(look):
        match = r"blocks\.1\.attn\.o has a hook.*blocks\.1\.attn\.o\.original_component"
        with pytest.raises(lens.errors.UnsupportedModelError, match=match):
            p.ablated(llama, ["L1H1"]).__enter__()
    assert not seen
    with out.original_component.register_forward_hook(look), p.ablated(llama, ["L1H1"]):
        llama(tokens())
    assert seen[-1].any()
    assert not seen[-1][..., 14:].any()


@pytest.mark.parametrize("make", each(["gpt2"], ["gelu"]))
@torch.no_grad()
def test_an_mlp_that_was_replaced_is_named_and_can_be_undone(make):
    model = make()
    exposed = lens.expose_neuron_heads(model)
    model.blocks[1].mlp = make().blocks[0].mlp
    for run in (lambda: model(tokens()), lambda: RUNS["sweep"](model)):
        with pytest.raises(lens.errors.InputError, match=r"blocks\.1\.mlp was replaced.*undo\(\)"):
            run()
    exposed.undo()
    assert torch.isfinite(model(tokens())).all()
    assert not [name for name in model.hook_dict if "neuron" in name]
    if isinstance(model, TransformerBridge):  # the MLP was put into the wrapped model
        with pytest.raises(lens.errors.UnsupportedModelError, match=r"blocks\.1\.mlp: got a "):
            lens.expose_neuron_heads(model)
        return
    assert lens.expose_neuron_heads(model, check=tokens()).verification.ok


# Every public function


class ChangedKit(support.Kit):
    """Models whose MLP gets an adapter after their neuron-heads were exposed."""

    @property
    def exposed(self):
        if not hasattr(self, "_adapted"):
            self._adapted = lens.expose_neuron_heads(self.model, copy=True).model
            mlp = self._adapted.blocks[1].mlp
            if self.kind == support.HOOKED:
                parametrize.register_parametrization(mlp, "W_out", nn.Tanh())
            elif self.kind == support.MIXTURE:
                stacked = experts_of(mlp).stacked
                parametrize.register_parametrization(stacked, "down_proj", nn.Tanh())
            else:
                config = lora("c_proj", fan_in_fan_out=True)
                config.target_modules = r".*mlp.*\.c_proj\._original_component"
                inject_adapter_in_model(config, self._adapted.original_model)
        return self._adapted


OF_NO_SUCH_MODEL = {
    "HeadName.original_neuron",  # reads names and sizes, no weights
    # These take models without neuron-heads, tokens or files.
    *("Bilinear", "GeneralizedSiLU", "Bilinear.calibrated", "chat_tokens", "convert", "grow"),
    *("load", "compare", "agreement", "brackets", "greater_than", "ioi", "from_jsonl"),
    *("from_pair", "Contrast.solved_by", "comparison_report", *support.GROWTH),
    # These take models whose neurons are not exposed.
    *("expose_neuron_heads", "Grown.save_pretrained", "Grown.shrink"),
    # These take activations from the user's forward pass, or names.
    *("HeadName", "neuron_pattern", "to_stock"),
}
NOT_TRIED = ("attn-only-lens", "attn_only_lens.transcoders")
ROWS = [
    (package, name)
    for package, names in support.ROWS.items()
    for name in names
    if package not in NOT_TRIED
    if name not in OF_NO_SUCH_MODEL
]


@pytest.fixture(scope="module", params=support.HERE)
def kit(request, tmp_path_factory):
    return ChangedKit(request.param, tmp_path_factory.mktemp("kit"))


@pytest.mark.parametrize(("package", "name"), ROWS, ids=[".".join(row) for row in ROWS])
def test_every_function_refuses_a_model_that_was_changed(kit, package, name):
    changed = r"layer 1: (its (W_out|mlp) is|the experts of its mixture are) a"
    with pytest.raises(lens.errors.AttnOnlyLensError, match=changed):
        support.ROWS[package][name](kit)
