"""Tests of models that share weights with a model whose norms are folded later."""

import copy
import pickle

import pytest
import torch
from common import tokens
from models import build

import attn_only_lens as lens
from attn_only_lens import Contrast, circuits
from attn_only_lens import patching as p

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings from TransformerLens
FOLDED = "norms of that model were folded"
PAIR = Contrast(tokens(1), tokens(2), p.logit_diff(7, 8))
MAKE = {
    "converted": lambda model, **how: lens.convert(model, **how),
    "copied": lambda model, **how: lens.expose_neuron_heads(model, copy=True, **how).model,
}
USES = {
    "forward": lambda model: model(tokens()),
    "sweep": lambda model: p.activation_patch(model, PAIR, sites="L1N3@-1"),
    "composition": lambda model: circuits.composition(model, top=3).frame,
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.fixture
def source():
    return build("gelu", d_vocab_out=41)


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


def log_probs(model):
    with torch.no_grad():
        return model(tokens()).log_softmax(-1)


def close(first, second):
    """Return whether logits agree to 4e-3; TransformerLens' float32 processing errs by 4e-4."""
    return bool((first - second).abs().max() <= 4e-3)


@pytest.mark.parametrize("way", ["process_weights_", "load_and_process_state_dict"])
def test_folded_norms_part_a_model_from_its_source(source, make, way, tmp_path):
    model, alone, before = make(source), make(source, copy_weights=True), log_probs(source)
    how = () if way == "process_weights_" else (source.state_dict(),)
    getattr(source, way)(*how)
    assert close(log_probs(source), before)
    assert torch.equal(log_probs(alone), before)
    for use in USES.values():
        with pytest.raises(lens.errors.InputError, match=FOLDED):
            use(model)
    with pytest.raises(lens.errors.CheckpointError, match=FOLDED):
        lens.save(model, tmp_path / "saved")
    assert close(log_probs(make(source)), before)
    # The control: the forward pass that is refused is wrong.
    for block in model.blocks:
        block.forward  # noqa: B018
    with torch.no_grad():
        assert not close(type(source).forward(model, tokens()).log_softmax(-1), before)


def test_changes_of_weights_alone_are_no_matter(source, make):
    model = make(source)
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-2)
    source(tokens()).square().mean().backward()
    optimizer.step()
    assert torch.equal(log_probs(model), log_probs(source))
    source.load_state_dict(build("gelu", d_vocab_out=41, scale=0.3).state_dict())
    assert torch.equal(log_probs(model), log_probs(source))
    # Processing that keeps the norms changes both alike.
    source.process_weights_(fold_ln=False, center_writing_weights=True, center_unembed=True)
    assert torch.equal(log_probs(model), log_probs(source))
    USES["sweep"](model)
    # Weights that were cast before are no longer shared.
    source = build("gelu", d_vocab_out=41)
    kept, before = make(source), log_probs(source)
    source.to(torch.float32)
    source.process_weights_()
    assert torch.equal(log_probs(kept), before)
    # A deleted source cannot be processed.
    del source
    assert torch.equal(log_probs(kept), before)


def test_a_copy_is_not_processed_while_its_source_lives(source):
    exposed = lens.expose_neuron_heads(source, copy=True)
    converted, before = lens.convert(source), log_probs(source)
    with pytest.raises(lens.errors.InputError, match="another model shares its weights"):
        exposed.model.process_weights_()
    assert torch.equal(log_probs(source), before)
    # After `undo` the copy may be processed; the models that share its weights then raise.
    exposed.undo()
    exposed.model.process_weights_()
    assert close(log_probs(exposed.model), before)
    with pytest.raises(lens.errors.InputError, match=FOLDED):
        converted(tokens())
    # A model that is exposed in place is a single model, so it can be processed.
    alone = build("gelu", d_vocab_out=41)
    with lens.expose_neuron_heads(alone):
        alone.process_weights_()
        assert close(log_probs(alone), before)
        USES["sweep"](alone)
