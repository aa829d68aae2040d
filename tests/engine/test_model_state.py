"""Tests that a model's state is everything that its forward pass reads, and nothing else."""

import copy
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import lru_cache
from types import MethodType, ModuleType

import bridges
import pytest
import torch
import transformers
from bridges import exposed
from common import needs_hooked_transformer, tokens
from drawn_transcoders import drawn
from transformers.models.llama import modeling_llama

from attn_only_lens import Contrast, Work, convert, expose_neuron_heads, load, neurons
from attn_only_lens import patching as p
from attn_only_lens.engine.model_state import fingerprint, snapshot
from attn_only_lens.errors import InputError
from attn_only_lens.transcoders import attach

pytestmark = pytest.mark.filterwarnings("ignore")  # by TransformerLens and transformers


CLEAN, CORRUPTED = tokens(pos=5), tokens(1, pos=5)
PAIR = Contrast(CLEAN, CORRUPTED, p.logit_diff(7, 8))
FEW = {"sites": ["L0N3", "L1H0"]}


def rotary(model):
    return model.original_model.model.rotary_emb


def inner(model):
    return model.original_model.model.layers[1].self_attn


class Options:
    """A plain object, as models keep their options in."""

    def __init__(self):
        self.scale = {"a": [1.0, 2.0]}


def held(value):
    return lambda model: setattr(inner(model), "held", value)


CHANGES = {
    "one bit of a weight": lambda model: (
        next(model.parameters()).detach()[0, 0].nextafter_(torch.tensor(9.0).double())
    ),
    "a buffer in place": lambda model: rotary(model).inv_freq.mul_(1.5),
    "a buffer through .data": lambda model: rotary(model).inv_freq.data.mul_(1.5),
    "rope_theta": lambda model: rotary(model).config.rope_parameters.update(rope_theta=77.0),
    "a norm's epsilon": lambda model: setattr(
        model.original_model.model.norm, "variance_epsilon", 0.5
    ),
    "an option": lambda model: setattr(model.cfg, "output_logits_soft_cap", 3.0),
    "a text": lambda model: setattr(rotary(model), "rope_type", "dynamic"),
    "a tensor": held(torch.ones(2, 3)),
    "a dtype": held(torch.float64),
    "an array": held(torch.ones(2).numpy()),
    "a function": held(lambda x: x),
    "an object": held(Options()),
    "a module in a list": held([torch.nn.Linear(2, 3)]),
    "a forward pass": lambda model: setattr(
        inner(model), "forward", MethodType(lambda self, *x: x, inner(model))
    ),
}


def state(model):
    return fingerprint(model), snapshot(model)


def differ(one, other):
    return one[0] != other[0] and one[1] != other[1]


def test_each_change_is_noticed():
    """Each is a change of what the changes before it have left."""
    model = exposed("llama")
    model(tokens())
    before = state(model)
    assert before[0] == fingerprint(copy.deepcopy(exposed("llama")))
    for name, change in CHANGES.items():
        change(model)
        after = state(model)
        assert differ(before, after), name
        assert state(model) == after
        before = after


def test_changes_of_transcoders_are_noticed():
    model = bridges.boot("llama")
    attach(model, {1: drawn(model.cfg.d_model, activation="jumprelu")})
    before = state(model)
    model.blocks[1].mlp.threshold.data.add_(0.5)
    assert differ(before, state(model))


@needs_hooked_transformer
def test_changes_of_a_hooked_transformer_are_noticed():
    from models import build  # a module-level import would skip the module under 4

    model = convert(build("llama"))
    before = state(model)
    assert before[0] == fingerprint(convert(build("llama")))
    model.blocks[2].attn.rotary_sin.mul_(1.5)
    after = state(model)
    assert differ(before, after)
    model.blocks[0].attn.attn_scale = 1.0
    assert differ(after, state(model))


def use(model):
    """Generate, switch hook points on, and set options that do not affect what is computed."""
    model.generate(CLEAN[:1], max_new_tokens=2, stop_at_eos=False, verbose=False)
    for name in "attn_result", "hook_mlp_in", "split_qkv_input":
        with suppress(ValueError, NotImplementedError):  # some models lack these hook points
            getattr(model, f"set_use_{name}")(True)
    model.cfg.default_prepend_bos = False
    if hasattr(model.original_model, "config"):
        model.original_model.config.use_cache = False
        model.original_model.gradient_checkpointing_enable()
        model.original_model.gradient_checkpointing_disable()


@pytest.mark.both_versions
@pytest.mark.parametrize("name", ["llama", "native"])
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


def test_changed_code_is_noticed(monkeypatch):
    """Functions that a forward pass mentions are part of the state, in their module or class."""
    model = exposed("llama")
    before = state(model)
    eager = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    for change in (
        lambda: monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", shifted),
        lambda: monkeypatch.setattr(type(model.blocks[0].attn), "forward", shifted),
        lambda: monkeypatch.setitem(eager._global_mapping, "sdpa", shifted),
    ):
        change()
        assert differ(before, state(model))
        monkeypatch.undo()
        assert fingerprint(model) == before[0]


def module_with(**values):
    module = ModuleType("a_module")
    vars(module).update(values)
    return module


GLOBAL = None
READ = {
    "a tensor in a dictionary": (
        lambda value: {"a": torch.tensor([[value]])},
        lambda: GLOBAL["a"].item(),
    ),
    "a cached function": (lambda value: lru_cache(lambda: value), lambda: GLOBAL()),
    "a dictionary of a module": (
        lambda value: module_with(options={"scale": value}),
        lambda: GLOBAL.options["scale"],
    ),
}


def times(plain, read):
    def forward(self, *args, **kwargs):
        return plain(self, *args, **kwargs) * read()

    return forward


def test_a_value_that_a_forward_pass_reads_is_noticed(monkeypatch):
    """Values of every kind are part of the state, as globals and as attributes."""
    model = exposed("llama")
    norm = model.original_model.model.norm
    plain = type(norm).forward
    for name, (make, read) in READ.items():

        def put_global(value, make=make):
            monkeypatch.setattr(sys.modules[__name__], "GLOBAL", make(value))
            return state(model)

        def put_attribute(value, make=make):
            norm.held = make(value)
            return state(model)

        norm.forward = MethodType(times(plain, read), norm)
        ways = [put_global] if "module" in name else [put_global, put_attribute]
        for put in ways:
            one, again, two = put(1.0), put(1.0), put(2.0)
            assert again[0] == one[0], name
            assert differ(again, two), name


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


def swept(model, work):
    return p.activation_patch(model, PAIR, **FEW, work=work).frame


def looked_up(model, work):
    corpus = neurons.Corpus(CLEAN.tolist())
    return neurons.top_examples(model, ["L1N3"], corpus, k=2, work=work)


@pytest.mark.parametrize("use", [swept, looked_up])
def test_another_models_results_are_not_resumed(use, tmp_path):
    """An error names the mode, which forward passes may read but `generate` sets."""
    work, model = Work(resume=tmp_path), exposed("llama")
    first = use(model, work)
    assert use(model, work).equals(first)
    model.blocks[1].attn.train()
    with pytest.raises(InputError, match=r'training: got .*"blocks\.1\.attn": true') as refused:
        use(model, work)
    assert "model: got" not in str(refused.value)
    model.eval()
    assert use(model, work).equals(first)
    CHANGES["a buffer in place"](model)
    with pytest.raises(InputError, match="model: got"):
        use(model, work)
