"""Tests of explanations: sums, circuits, patches, pages and files; and graphs by role."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from bridges import bridged
from page_of_circuit import read_back
from patched_runs import node_outputs, others_held

from attn_only_lens import (
    Contrast,
    Work,
    circuits,
    explain,
    expose_neuron_heads,
    load,
    tasks,
)
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError

pytestmark = pytest.mark.numeric

CLEAN, CORRUPTED = "The keys near the cabinet", "The key near the cabinet"
CONTRAST = Contrast(CLEAN, CORRUPTED, p.logit_diff(" are", " is"))
QUICK = {"strong": 1.0, "faithfulness": 0.5}


@pytest.fixture(scope="module")
def model():
    return expose_neuron_heads(load("small-english"), copy=True).model


@pytest.fixture(scope="module")
def why(model):
    return explain(model, CONTRAST)


def test_the_explanation_says_what_patching_says(why):
    table = why.table()
    assert table["id"][0] == "L3H3@5"
    assert why.circuit.faithfulness == pytest.approx(1, abs=0.1)
    whole = why.attribution.clean_value - why.attribution.corrupted_value
    assert why.graph.value / whole == pytest.approx(why.circuit.faithfulness, abs=1e-3)
    assert not (why.graph.edges["source"] == "rest").any()
    total = table["by_pattern"] + table["by_value"]
    assert np.allclose(total, table["share"])
    assert len(table) == len(why.circuit)
    assert np.corrcoef(table["share"], table[["denoise", "noise"]].mean(axis=1))[0, 1] > 0.9


def test_it_says_what_the_model_answers(model, why):
    """Compute the most probable token, and each answer's rank and probability, from the logits."""
    for row, text in zip(why.answers.to_dict("records"), (CLEAN, CORRUPTED), strict=True):
        last = model(text)[0, -1].detach().double()
        probabilities, order = last.softmax(-1), last.argsort(descending=True).tolist()
        assert row["top"] == {CLEAN: " are", CORRUPTED: " is"}[text]
        assert row["top_probability"] == pytest.approx(float(probabilities.max()), 1e-4)
        for role, answer in (("correct", " are"), ("wrong", " is")):
            token = model.to_single_token(answer)
            assert row[role] == answer
            assert row[f"{role}_rank"] == 1 + order.index(token)
            assert row[f"{role}_probability"] == pytest.approx(float(probabilities[token]), 1e-4)


def turned(why, name, ways):
    """Return an explanation in which the patches of one site have the opposite effect."""
    patches = dict(why.patches)
    for way in ways:
        frame = patches[way].to_frame()
        here = (frame["name"].astype(str) + "@" + frame["position"].astype(str) == name).to_numpy()
        unpatched = (
            why.attribution.corrupted_value if way == "denoise" else why.attribution.clean_value
        )
        frame.loc[here, "value"] = 2 * unpatched - frame.loc[here, "value"]
        patches[way] = replace(patches[way], frame=frame)
    return replace(why, patches=patches)


def test_a_share_is_marked_if_both_patches_have_the_opposite_sign(why):
    site = why.table()["id"][1]
    for changed in (why, turned(why, site, ["denoise"]), turned(why, site, ["noise"])):
        assert not changed.table()["disputed"].any()
    changed = turned(why, site, ["denoise", "noise"])
    table = changed.table()
    assert table.loc[table["disputed"], "id"].tolist() == [site]
    assert "!: both exact patches have the opposite sign" in " ".join(changed.text().split())
    assert ", sign disputed" in str(changed.view())


def test_it_counts_the_pairs_of_prompts_with_one_answer(model):
    clean, corrupted = [CLEAN, CLEAN, CORRUPTED], [CORRUPTED, "The keys near the cabinets", CLEAN]
    why = explain(model, Contrast(clean, corrupted, CONTRAST.metric), **QUICK)
    assert why.answers.groupby("run").size().to_dict() == {"clean": 3, "corrupted": 3}
    text = " ".join(repr(why).split())
    assert "for 1 of 3 pairs, the model prefers the same answer" in text
    assert "for 1 of 3 pairs, the model prefers the wrong answer on the clean prompt" in text
    heads = why.graph.heads.query("kind == 'attention'")
    outputs = node_outputs(model.run_with_cache(corrupted)[1], 4)
    with model.hooks(fwd_hooks=others_held(why.circuit.sites, outputs)):
        cache = model.run_with_cache(clean)[1]
    for node, name, position in heads[["id", "name", "position"]].to_numpy():
        pattern = cache["pattern", int(name[1])][:, int(name[3:]), int(position)].mean(0)
        assert f" ({float(pattern.max()):.0%})" in why.does[node]


def test_descriptions_and_labels_are_of_both_runs(model, why):
    """Compute patterns, gates and outputs of both runs, and what their change adds to the logits.

    The first run is the circuit's own: hooks give every other site its output in the corrupted run.
    A change δ of the final stream x changes r = 1 / √m, m = mean(x²) + ε, by a part of
    Δr = -Δm / (√m₁ √m₀ (√m₁ + √m₀)), where Δm = 2 mean(x̄ δ); the norm's output x r by r̄ δ + x̄ Δr.

    Answers are named only if the edge into the metric has a tenth of the node's attribution.
    """
    edges = why.graph.edges
    direct = edges[edges["target"] == "metric"].groupby("source")["weight"].sum()
    whole = why.graph.heads.set_index("id")["attribution"]
    corrupted_run = model.run_with_cache(CORRUPTED)[1]
    with model.hooks(fwd_hooks=others_held(why.circuit.sites, node_outputs(corrupted_run, 4))):
        runs = [model.run_with_cache(CLEAN)[1], corrupted_run]
    ends = [cache["resid_post", 3][0, -1].double() for cache in runs]
    roots = [(x.square().mean() + model.cfg.eps).sqrt() for x in ends]
    x_mean, r_mean = sum(ends) / 2, sum(1 / root for root in roots) / 2

    def added(change):
        """Return what a change of the final stream adds to the answers' logits, and the largest."""
        slope = -1 / (roots[0] * roots[1] * (roots[0] + roots[1]))
        normed = r_mean * change + x_mean * slope * 2 * (x_mean * change).mean()
        logits = (normed * model.ln_final.w.double()) @ model.W_U.double()
        logits = (logits - logits.mean()).detach()
        return {
            text: float(logits[model.to_single_token(text)]) for text in (" are", " is")
        }, logits

    texts = [model.to_str_tokens(text) for text in (CLEAN, CORRUPTED)]
    kinds = set()
    for node, name, kind, position in why.graph.heads[["id", "name", "kind", "position"]].values:
        layer, index = (int(number) for number in re.findall(r"\d+", name))
        pos, does, label = int(position), why.does[node], why.labels[node]
        if kind == "attention":
            z = [cache["z", layer][0, pos, index] for cache in runs]
            patterns = [cache["pattern", layer][0, index, pos] for cache in runs]
            keys = [int(pattern.argmax()) for pattern in patterns]
            tokens = [text[key] for text, key in zip(texts, keys, strict=True)]
            shares = [float(pattern.max()) for pattern in patterns]
            assert does.startswith(f"looks at {tokens[0]!r} ({shares[0]:.0%})")
            both = keys[0] != keys[1] or tokens[0] != tokens[1]
            said = f"), corrupted {tokens[1]!r} ({shares[1]:.0%})" in does
            assert said == (both or abs(shares[0] - shares[1]) > 0.1)
            short = [token.strip() for token in tokens]
            assert label == f"{name} ← {' / '.join(short if both else short[:1])}"
            change = (z[0] - z[1]) @ model.blocks[layer].attn.W_O[index]
        else:
            mlp = model.blocks[layer].mlp
            outputs = [cache[f"blocks.{layer}.mlp.hook_neuron_act"] for cache in runs]
            z = [float(output[0, pos, index, 0]) for output in outputs]
            differs = abs(z[0] - z[1]) > 0.1 * max(map(abs, z))
            said = f"z {z[0]:.2f}" + f", corrupted {z[1]:.2f}" * differs
            assert said in does.split("; ")
            change = (z[0] - z[1]) * mlp.W_out[index]
        has_tokens = bool(abs(direct.get(node, 0.0)) >= 0.1 * abs(whole[node]))
        said = [part for part in does.split("; ") if part.startswith("writes")]
        assert len(said) == has_tokens
        if has_tokens:
            expected, logits = added(change.detach().double())
            written = re.findall(r"([+-]\d+\.\d\d) '([^']*)'", said[0])
            for amount, text in written:
                effect = float(logits[model.to_single_token(text)])
                assert float(amount) == pytest.approx(effect, abs=0.006)
                assert text in expected or abs(effect) >= 2 * max(map(abs, expected.values()))
            best = max(expected, key=lambda text: abs(expected[text]))
            assert written[0][1] == best
            assert expected[" are"] - expected[" is"] == pytest.approx(direct[node], rel=1e-4)
        if kind == "neuron" and has_tokens:
            assert label == f"{name} {'↑' if expected[best] > 0 else '↓'} {best.strip()}"
        kinds.add((kind, has_tokens))
    assert kinds >= {("attention", False), ("neuron", True), ("neuron", False)}


def test_its_circuit_is_the_circuit_of_discover(model, why):
    circuit = circuits.discover(model, CONTRAST)
    pd.testing.assert_frame_equal(circuit.frame, why.circuit.frame)
    few = explain(model, CONTRAST, strong=1.0, faithfulness=0.7, most_nodes=4)
    assert len(few.table()) == 4 < len(few.circuit)


def all_effects(model, contrast):
    """Patch every site in both directions: the shares that it restores and removes, by id."""
    columns = {}
    for way, sign in (("denoise", 1), ("noise", -1)):
        sweep = p.activation_patch(model, contrast, direction=way, work=Work(progress=False))
        ids = sweep.frame["name"].astype(str) + "@" + sweep.frame["position"].astype(str)
        columns[way] = (sign * sweep.effect).set_axis(ids)
    return pd.DataFrame(columns)


def test_every_strong_site_has_a_row(model):
    """A small circuit leaves strong sites out; the table has all that an exhaustive sweep finds."""
    contrast = Contrast(
        "The cat behind the doors", "The cats behind the doors", p.logit_diff(" is", " are")
    )
    why = explain(model, contrast, faithfulness=0.05)
    table, inside = why.table().set_index("id"), set(why.circuit.sites)
    effects = all_effects(model, contrast)
    largest = effects.abs().max(axis=1)
    strong = set(largest.index[largest >= 0.1])
    assert set(table.index) == strong | inside > inside
    expected = effects.loc[table.index]
    np.testing.assert_allclose(table[["denoise", "noise"]], expected, atol=1e-5)
    signed = expected.to_numpy()[np.arange(len(table)), expected.abs().to_numpy().argmax(axis=1)]
    groups = np.where(signed > 0, "not needed", "against")
    groups = np.where(table.index.isin(inside), "circuit", groups)
    assert table["group"].tolist() == groups.tolist()
    assert table["group"].map(["circuit", "not needed", "against"].index).is_monotonic_increasing
    outside = table[table["group"] != "circuit"]
    assert outside["share"].isna().all()
    assert outside["does"].str.len().min() > 0
    nodes = pd.DataFrame(read_back(why.view())["nodes"]).set_index("id")
    assert set(nodes.index[nodes["outside"].eq(True)]) == set(outside.index)
    np.testing.assert_allclose(nodes.loc[table.index, ["denoise", "noise"]], expected, atol=1e-4)
    assert why.unpatched < 0.1


def test_it_is_saved_with_all_its_files_and_its_page_names_nodes(why, tmp_path):
    why.save(tmp_path / "why")
    files = {"attribution.parquet", "circuit.json", "contrast.json", "explanation.csv"}
    names = {path.name for path in (tmp_path / "why").iterdir()}
    assert names == files | {"graph.json", "page.html"}
    again = load(tmp_path / "why" / "graph.json")
    assert again.corrupted == why.graph.corrupted
    assert again.edges.equals(why.graph.edges)
    circuit = load(tmp_path / "why" / "circuit.json")
    assert circuit.contains(why.circuit.frame).all()
    attribution = load(tmp_path / "why" / "attribution.parquet")
    pd.testing.assert_frame_equal(attribution.to_frame(), why.attribution.to_frame())
    asked_again = explain(why.model, load(tmp_path / "why" / "contrast.json"))
    pd.testing.assert_frame_equal(asked_again.table(), table := why.table())
    assert len(table)
    why.save(tmp_path / "why")  # a second call replaces the saved files


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sites": p.Sites("heads", -1)}, "got the site 'L0H0@-1'; expected a head or neuron at"),
        ({"sites": ["L0H0@1"], "top": 3}, "at most one of them"),
    ],
)
def test_sites_that_make_no_graph_are_refused(model, settings, reason):
    with pytest.raises(InputError, match=reason):
        circuits.attribution_graph(model, CONTRAST, **settings)


def test_held_out_pairs_say_whether_the_circuit_holds(model):
    """Compare with `evaluate`, on pairs of other lengths. Bad pairs are refused at once."""
    pairs = tasks.agreement(model.tokenizer, 13, seed=3)
    why = explain(model, pairs[:5], held_out=pairs[5:], strong=1.0)
    measured = circuits.evaluate(model, why.circuit, pairs[5:])
    assert vars(why.held_out) == vars(measured)
    shares = f"{measured.faithfulness:.0%} ± {measured.standard_error:.0%}"
    assert why.title.endswith(f" on 5 pairs of prompts; {shares} on 8 held-out pairs")
    assert why.circuit.tried["error"].min() <= 0.1
    for held_out, reason in (
        (
            replace(pairs[5:], roles={"end": -1}),
            "held_out: the contrast lacks roles of the circuit: subj",
        ),
        (pairs[3:], "held_out: got 2 of the pairs that find the circuit; expected others"),
        (replace(pairs[5:], metric=p.kl()), "held_out: got kl; expected a metric like"),
    ):
        with pytest.raises(InputError, match=reason):
            explain(model, pairs[:5], held_out=held_out)


def test_a_layer_whose_queries_are_nothing_but_rounding():
    """A gate's jump at a subnormal query has an infinite slope."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **{"vocab_size": 41, "n_embd": 26, "n_layer": 3, "n_head": 2, "n_positions": 19},
        **{"n_inner": 37, "initializer_range": 0.3, "activation_function": "relu"},
    )
    source = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        source.transformer.h[1].mlp.c_fc.weight *= 1e-40
    model = expose_neuron_heads(bridged(source.eval())).model
    clean, corrupted = (torch.tensor([[3, x, 7, 11, 13]]) for x in (5, 17))
    contrast = Contrast(clean, corrupted, p.logit_diff(7, 11))
    why = explain(model, contrast)
    sweep = why.attribution.frame
    there = (sweep["layer"] == 1) & (sweep["kind"] == "neuron")
    assert sweep["score"][there].abs().max() < 1e-5 < sweep["score"].abs().max()
    assert why.circuit.faithfulness > 0.8
    assert circuits.path_expansion(model, contrast).logits.isfinite().all()
    circuits.attribution_graph(model, replace(contrast, corrupted=None))
