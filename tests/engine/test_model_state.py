"""Tests that a model's state is everything that its forward pass reads, and nothing else."""

import copy
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache, partial
from types import MethodType, ModuleType, SimpleNamespace

import bridges
import pytest
import torch
import transformers
from common import needs_hooked_transformer, tokens
from drawn_transcoders import drawn
from transformers.models.llama import modeling_llama

from attn_only_lens import Bilinear, Contrast, Work, convert, expose_neuron_heads, load, neurons
from attn_only_lens import patching as p
from attn_only_lens.engine.model_state import fingerprint, snapshot
from attn_only_lens.errors import InputError
from attn_only_lens.transcoders import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # by TransformerLens and transformers


CLEAN, CORRUPTED = tokens(pos=5), tokens(1, pos=5)
PAIR = Contrast(CLEAN, CORRUPTED, p.logit_diff(7, 8))
FEW = {"sites": ["L0N3", "L1H0"]}


def exposed(name):
    return expose_neuron_heads(bridges.boot(name)).model


def with_transcoders(activation):
    model = bridges.boot("llama")
    return attach(model, {1: drawn(model.cfg.d_model, activation=activation)}).model


def rotary(model):
    return model.original_model.model.rotary_emb


def inner(model):
    return model.original_model.model.layers[1].self_attn


def hugging_face(option, value):
    return lambda model: setattr(model.original_model.config, option, value)


def function(x):
    return x


class Options:
    """A plain object, as models keep their options in."""

    def __init__(self):
        self.scale = {"a": [1.0, 2.0]}


def in_place(model):
    rotary(model).inv_freq.data.mul_(1.5)


LLAMA = {
    "a weight": lambda model: next(model.parameters()).detach().mul_(1.5),
    "one bit of a weight": lambda model: (
        next(model.parameters()).detach()[0, 0].nextafter_(torch.tensor(9.0).double())
    ),
    "a buffer in place": lambda model: rotary(model).inv_freq.mul_(1.5),
    "a buffer through .data": in_place,
    "rope_theta": lambda model: rotary(model).config.rope_parameters.update(rope_theta=77.0),
    "sliding_window": lambda model: setattr(inner(model), "sliding_window", 3),
    "a norm's epsilon": lambda model: setattr(
        model.original_model.model.norm, "variance_epsilon", 0.5
    ),
    "an option": lambda model: setattr(model.cfg, "output_logits_soft_cap", 3.0),
    "a text": lambda model: setattr(rotary(model), "rope_type", "dynamic"),
    "a list": lambda model: setattr(inner(model), "shifts", [1, 2]),
    "a tensor": lambda model: setattr(inner(model), "shift", torch.ones(2, 3)),
    "a dtype": lambda model: setattr(inner(model), "accumulated_in", torch.float64),
    "an array": lambda model: setattr(inner(model), "shift", torch.ones(2).numpy()),
    "a function": lambda model: setattr(inner(model), "function", function),
    "an object": lambda model: setattr(inner(model), "options", Options()),
    "a module in a list": lambda model: setattr(inner(model), "more", [torch.nn.Linear(2, 3)]),
    "a forward pass": lambda model: setattr(
        inner(model), "forward", MethodType(lambda self, *x: x, inner(model))
    ),
}
OTHERS = {
    "rotary_pct": (partial(exposed, "neox"), hugging_face("partial_rotary_factor", 1.0)),
    "a threshold": (
        partial(with_transcoders, "jumprelu"),
        lambda model: model.blocks[1].mlp.threshold.data.add_(0.5),
    ),
    "k": (partial(with_transcoders, "topk"), lambda model: setattr(model.blocks[1].mlp, "k", 1)),
}


def require_noticed(model, make, change):
    before = fingerprint(model), snapshot(model)
    model(tokens())
    assert (fingerprint(model), snapshot(model)) == before  # a run changes nothing
    assert fingerprint(make()) == before[0]  # an equal model has the same fingerprint
    change(model)
    assert fingerprint(model) != before[0]
    assert snapshot(model) != before[1]


@pytest.mark.parametrize("case", LLAMA)
def test_a_change_is_noticed(case):
    model = exposed("llama")
    model(tokens())
    require_noticed(model, lambda: copy.deepcopy(exposed("llama")), LLAMA[case])


@pytest.mark.parametrize("case", OTHERS)
def test_a_change_of_another_model_is_noticed(case):
    make, change = OTHERS[case]
    require_noticed(make(), make, change)


@needs_hooked_transformer
@pytest.mark.parametrize("constant", ["rotary_sin", "attn_scale", "window_size"])
def test_a_change_of_a_hooked_transformer_is_noticed(constant):
    from models import build  # a module-level import would skip the module under 4

    make, changes = (
        lambda: convert(build("llama")),
        {
            "rotary_sin": lambda model: model.blocks[2].attn.rotary_sin.mul_(1.5),
            "attn_scale": lambda model: setattr(model.blocks[0].attn, "attn_scale", 1.0),
            "window_size": lambda model: setattr(model.cfg, "window_size", 3),
        },
    )
    require_noticed(make(), make, changes[constant])


def test_gates_and_precisions_are_told_apart():
    made = [exposed("gpt2"), exposed("gpt2").to(torch.float32)]
    made += [expose_neuron_heads(bridges.boot("gpt2"), gate=Bilinear(n)).model for n in (2, 4)]
    assert len({fingerprint(model) for model in made}) == 4


def use(model):
    """Generate, switch hook points on, and set options that do not affect what is computed."""
    if "CausalLM" in (getattr(model.cfg, "architecture", None) or "CausalLM"):
        model.generate(CLEAN[:1], max_new_tokens=2, stop_at_eos=False, verbose=False)
    for name in "attn_result", "hook_mlp_in", "split_qkv_input":
        with suppress(ValueError, NotImplementedError):  # some models lack these hook points
            getattr(model, f"set_use_{name}")(True)
    model.cfg.default_prepend_bos = False
    inner = getattr(model, "original_model", None)
    if hasattr(inner, "config"):
        inner.config.use_cache = False
        if getattr(inner, "supports_gradient_checkpointing", False):
            inner.gradient_checkpointing_enable()
            inner.gradient_checkpointing_disable()


@pytest.mark.both_versions
@pytest.mark.parametrize("name", [*bridges.CHOSEN, "bert"])
def test_runs_change_nothing(name):
    """A model that has run in every way has the same fingerprint as a new one."""
    model = exposed(name)
    model.run_with_cache(CLEAN)
    p.activation_patch(model, PAIR, **FEW)
    p.attribution(model, PAIR, **FEW)
    use(model)
    assert fingerprint(model) == fingerprint(exposed(name))


def shifted(q, k, cos, sin, *args):
    return q, k


@pytest.mark.parametrize("of", ["a module", "a method of a class", "a table of functions"])
def test_changed_code_is_noticed(of, monkeypatch):
    """Functions that a forward pass mentions are part of the state, in their module or class."""
    model = exposed("llama")
    before = fingerprint(model), snapshot(model)
    if of == "a module":
        attention = sys.modules[type(model.blocks[0].attn).__module__]
        name = "apply_rotary_pos_emb"
        monkeypatch.setattr(modeling_llama, name, shifted)
        assert hasattr(attention, "torch")
    elif of == "a method of a class":
        monkeypatch.setattr(type(model.blocks[0].attn), "_masked_softmax", shifted, raising=False)
        monkeypatch.setattr(type(model.blocks[0].attn), "forward", shifted)
    else:
        eager = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        monkeypatch.setitem(eager._global_mapping, "sdpa", shifted)
    assert fingerprint(model) != before[0]
    assert snapshot(model) != before[1]
    monkeypatch.undo()
    assert fingerprint(model) == before[0]


def module_with(**values):
    module = ModuleType("a_module")
    vars(module).update(values)
    return module


class Shared:
    """An object whose class holds a value."""


def with_class(value):
    Shared.scale = value
    return Shared()


GLOBAL = None
READ = {
    "a tensor in a dictionary": (
        lambda value: {"a": torch.tensor([[value]])},
        lambda: GLOBAL["a"].item(),
    ),
    "an attribute of a class": (with_class, lambda: GLOBAL.scale),
    "a nested dictionary": (lambda value: {"a": {"b": [value]}}, lambda: GLOBAL["a"]["b"][0]),
    "a namespace": (lambda value: SimpleNamespace(scale=value), lambda: GLOBAL.scale),
    "a fraction": (Fraction, lambda: float(GLOBAL)),
    "a cached function": (lambda value: lru_cache(lambda: value), lambda: GLOBAL()),
    "a module": (lambda value: module_with(scale=value), lambda: GLOBAL.scale),
    "a dictionary of a module": (
        lambda value: module_with(options={"scale": value}),
        lambda: GLOBAL.options["scale"],
    ),
}
ATTRIBUTES = ("a tensor in a dictionary", "a namespace", "a fraction", "a cached function")
WAYS = [("global", name) for name in READ] + [("attribute", name) for name in ATTRIBUTES]


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_a_value_that_a_forward_pass_reads_is_noticed(way, name, monkeypatch):
    """Values of every kind are part of the state, as globals and as attributes."""
    make, read = READ[name]
    model = exposed("llama")
    norm = model.original_model.model.norm
    plain = type(norm).forward

    def forward(self, *args, **kwargs):
        return plain(self, *args, **kwargs) * read()

    def put(value):
        monkeypatch.setattr(sys.modules[__name__], "GLOBAL", make(value))
        norm.held = make(value) if way == "attribute" else None
        return fingerprint(model), snapshot(model)

    if way == "global":
        norm.forward = MethodType(forward, norm)
    one, again = put(1.0), put(1.0)
    assert again[0] == one[0]
    two = put(2.0)
    assert two[0] != one[0]
    assert two[1] != again[1]


IN_ANOTHER_PROCESS = """
import sys
from attn_only_lens import expose_neuron_heads, load
from attn_only_lens.engine.model_state import fingerprint
print(fingerprint(expose_neuron_heads(load(sys.argv[1])).model))
"""


def test_a_copied_folder_has_the_same_fingerprint(tmp_path):
    """Neither the folder, the process nor the order of sets in this process matter."""
    bridges.hf_folder(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "elsewhere")
    expected = fingerprint(expose_neuron_heads(load(tmp_path / "here")).model)
    command = [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS]
    done = subprocess.run(
        [*command, str(tmp_path / "elsewhere")],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-1:] == [expected], done.stderr


RESUMED = {
    "activation_patch": lambda model, work: p.activation_patch(model, PAIR, **FEW, work=work),
    "attribution": lambda model, work: p.attribution(model, PAIR, **FEW, work=work),
    "path_patch": lambda model, work: p.path_patch(model, PAIR, p.Edges("L0N3", "L1H0"), work=work),
    "top_examples": lambda model, work: neurons.top_examples(
        model, ["L1N3"], neurons.Corpus(CLEAN.tolist()), k=2, work=work
    ),
}


def resumed(use, model, folder):
    result = RESUMED[use](model, Work(resume=folder))
    return getattr(result, "frame", result)


@pytest.mark.both_versions
@pytest.mark.parametrize("use", RESUMED)
def test_another_models_results_are_not_resumed(use, tmp_path):
    first = resumed(use, exposed("llama"), tmp_path)
    again = exposed("llama")
    assert resumed(use, again, tmp_path).equals(first)
    LLAMA["a buffer in place"](again)
    with pytest.raises(InputError, match="model: got"):
        resumed(use, again, tmp_path)
    assert not resumed(use, again, tmp_path / "other").equals(first)


@pytest.mark.parametrize("use", ["attribution", "top_examples"])
def test_an_error_names_the_mode(use, tmp_path):
    """Because the forward pass may read it, but functions such as `generate` set it."""
    model = exposed("llama").train()
    tested = snapshot(model)
    first = resumed(use, model, tmp_path)
    model.blocks[1].attn.eval()
    assert snapshot(model) != tested
    with pytest.raises(InputError, match=r'training: got .*"blocks\.1\.attn": false') as refused:
        resumed(use, model, tmp_path)
    assert "model: got" not in str(refused.value)
    model.eval()
    with pytest.raises(InputError, match=r'training: got \{"the whole model": false}'):
        resumed(use, model, tmp_path)
    model.train()
    assert resumed(use, model, tmp_path).equals(first)
