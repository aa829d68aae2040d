"""Tests of the transcoders of Small English: their files, and their accuracy."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import attn_only_lens as lens
from attn_only_lens import Contrast, load, neurons, pretrained, viz
from attn_only_lens import patching as p

DATA = Path(str(files("attn_only_lens.pretrained") / "data" / "small_english" / "transcoders"))
METRICS = json.loads((DATA / "metrics.json").read_text("utf-8"))
TEXTS = pretrained.small_english_texts()[:100]


@pytest.fixture(scope="module")
def transcoders():
    return lens.transcoders.load("small-english")


def test_there_is_one_for_each_layer(transcoders):
    assert sorted(transcoders) == [0, 1, 2, 3]
    for layer, transcoder in transcoders.items():
        assert transcoder.d_model == 128
        assert 500 < transcoder.d_features <= METRICS["d_features"]
        assert (transcoder.activation, transcoder.reads) == ("jumprelu", "input")
        assert str(layer) in transcoder.name
        assert transcoder.W_enc.dtype == torch.float32
        torch.testing.assert_close(
            transcoder.W_dec.norm(dim=1), torch.ones(transcoder.d_features), rtol=2e-3, atol=0
        )


@torch.no_grad()
def test_they_imitate_the_mlps_on_held_out_texts(transcoders):
    """The bounds of FVU and L0 are the results of the trial in the model card."""
    model = load("small-english")
    inputs = {layer: [] for layer in transcoders}
    outputs = {layer: [] for layer in transcoders}
    divergences, same_top = [], []

    def note_input(x, hook):
        inputs[hook.layer()].append(x[0])

    def note_output(y, hook):
        outputs[hook.layer()].append(y[0])

    def imitate(y, hook):
        # In this run, too, the MLP's input was noted before its output.
        transcoder = transcoders[hook.layer()]
        return transcoder.decode(transcoder.encode(inputs[hook.layer()].pop()))[None]

    def hooks(at_output):
        ends = [("in", note_input), ("out", at_output)]
        return [
            (f"blocks.{layer}.mlp.hook_{end}", hook) for layer in transcoders for end, hook in ends
        ]

    for text in TEXTS:
        tokens = model.to_tokens(text)
        original, replaced = (
            model.run_with_hooks(tokens, fwd_hooks=hooks(at_output))[0].log_softmax(-1)
            for at_output in (note_output, imitate)
        )
        divergences.append((original.exp() * (original - replaced)).sum(-1))
        same_top.append(original.argmax(-1) == replaced.argmax(-1))
    assert torch.cat(divergences).mean() == pytest.approx(METRICS["together"]["kl"], rel=0.25)
    assert torch.cat(same_top).double().mean() > 0.9
    for layer, transcoder in transcoders.items():
        x, y = torch.cat(inputs[layer]), torch.cat(outputs[layer])
        z = transcoder.encode(x)
        error = (y - transcoder.decode(z)).square().sum()
        measured = {
            "fvu": (error / (y - y.mean(0)).square().sum()).item(),
            "l0": (z > 0).sum(1).double().mean().item(),
        }
        for name, bounds in (("fvu", (0.066, 0.041, 0.022, 0.018)), ("l0", (46, 15, 21, 58))):
            assert measured[name] < bounds[layer]
            assert measured[name] == pytest.approx(METRICS["together"][name][layer], rel=0.25)
    assert METRICS["together"]["loss_recovered"] > 0.98
    assert max(METRICS["together"]["dead"]) < 0.05


def test_no_feature_is_a_copy_of_another(transcoders):
    for transcoder in transcoders.values():
        encoders, decoders = (
            torch.nn.functional.normalize(x, dim=1) for x in (transcoder.W_enc.T, transcoder.W_dec)
        )
        alike = torch.minimum(encoders @ encoders.T, decoders @ decoders.T)
        assert alike.fill_diagonal_(0).max() < 0.9995


CROSS_LAYER = DATA.with_name("cross_layer")


def test_a_cross_layer_transcoder_ships_too():
    """It is as sparse as transcoders that were trained for as many steps, and explains more."""
    loaded = lens.transcoders.load("small-english-cross-layer")
    assert [x.n_later for x in loaded.values()] == [3, 2, 1, 0]
    assert sum(x.stat().st_size for x in CROSS_LAYER.rglob("*.safetensors")) < 3e6
    metrics = json.loads((CROSS_LAYER / "metrics.json").read_text("utf-8"))
    cross, per_layer = metrics["cross_layer"], metrics["per_layer"]
    for layer in loaded:
        assert cross["fvu"][layer] < per_layer["fvu"][layer]
        assert cross["l0"][layer] == pytest.approx(per_layer["l0"][layer], rel=0.03)
    assert cross["kl"] < per_layer["kl"]


@torch.no_grad()
def test_the_cross_layer_transcoder_imitates_the_mlps_on_held_out_texts():
    """The oracle adds up the writes of all earlier features in hooks."""
    model, loaded = load("small-english"), lens.transcoders.load("small-english-cross-layer")
    metrics = json.loads((CROSS_LAYER / "metrics.json").read_text("utf-8"))["cross_layer"]
    inputs, divergences, errors, outputs = {}, [], {i: [] for i in loaded}, {i: [] for i in loaded}

    def note_input(x, hook):
        inputs[hook.layer()] = x[0]

    def imitated(layer):
        z = [loaded[i].encode(inputs[i]) for i in range(layer + 1)]
        later = [z[i] @ loaded[i].W_later[layer - i - 1] for i in range(layer)]
        return sum(later, loaded[layer].decode(z[layer]))

    def note_output(y, hook):
        outputs[hook.layer()].append(y[0])
        errors[hook.layer()].append(y[0] - imitated(hook.layer()))

    def imitate(y, hook):
        return imitated(hook.layer())[None]

    for text in TEXTS:
        logs = []
        for at_output in (note_output, imitate):
            hooks = [(f"blocks.{i}.mlp.hook_in", note_input) for i in loaded]
            hooks += [(f"blocks.{i}.mlp.hook_out", at_output) for i in loaded]
            logits = model.run_with_hooks(model.to_tokens(text), fwd_hooks=hooks)
            logs.append(logits[0].log_softmax(-1))
        divergences.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1))
    assert torch.cat(divergences).mean() == pytest.approx(metrics["kl"], rel=0.25)
    for layer in loaded:
        error, y = torch.cat(errors[layer]), torch.cat(outputs[layer])
        fvu = (error.square().sum() / (y - y.mean(0)).square().sum()).item()
        assert fvu == pytest.approx(metrics["fvu"][layer], rel=0.25)


def test_pages_of_features_that_write_to_several_layers(tmp_path):
    """A circuit's graph is that of its own run; a page says why it has no connections."""
    model = load("small-english")
    keys = Contrast(
        "The keys near the cabinet", "The key near the cabinet", p.logit_diff(" are", " is")
    )
    with lens.transcoders.attach(model, lens.transcoders.load("small-english-cross-layer")):
        why = lens.explain(model, keys, strong=0.2)
        names = [name for name in why.does if "F" in name]
        assert len({name[:2] for name in names}) > 1  # features of several layers
        into = why.graph.inflow()
        attributions = why.graph.nodes.set_index("id")["attribution"].loc[into.index]
        assert (into - attributions).abs().max() < 1e-5 * attributions.abs().sum()
        feature = names[0].partition("@")[0]
        page = viz.neuron_page(model, [feature], neurons.Corpus(TEXTS[:20]))
        assert "Connections are left out: the features of a cross-layer transcoder" in page
        assert "It writes" in page
        why.graph.save(tmp_path / "graph.json", format="neuronpedia")
        nodes = json.loads((tmp_path / "graph.json").read_text("utf-8"))["nodes"]
        assert "cross layer transcoder" in {node["feature_type"] for node in nodes}
