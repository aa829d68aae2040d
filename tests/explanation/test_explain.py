"""Tests of explanations: sums, circuits, patches, pages and files; and graphs by role."""

import itertools
import json
import re
from dataclasses import replace
from html import escape

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from bridges import bridged

from attn_only_lens import (
    Contrast,
    Work,
    circuits,
    explain,
    expose_neuron_heads,
    neurons,
    pretrained,
    tasks,
)
from attn_only_lens import patching as p
from attn_only_lens.engine.tokens import is_readable
from attn_only_lens.errors import InputError
from attn_only_lens.explanation.model_answers import answer_cells, answer_warnings
from attn_only_lens.explanation.node_descriptions import _writes

pytestmark = pytest.mark.numeric

CLEAN, CORRUPTED = "The keys near the cabinet", "The key near the cabinet"
FILES = ("explanation.csv", "graph.json", "page.html")
CONTRAST = Contrast(CLEAN, CORRUPTED, p.logit_diff(" are", " is"))
QUICK = {"strong": 1.0, "faithfulness": 0.5}


@pytest.fixture(scope="module")
def model():
    return expose_neuron_heads(pretrained.small_english(), copy=True).model


@pytest.fixture(scope="module")
def why(model):
    return explain(model, CONTRAST)


def test_the_explanation_says_what_patching_says(why):
    table = why.table()
    assert table["id"][0] == "L3H3@5"
    assert why.circuit.faithfulness == pytest.approx(1, abs=0.1)
    whole = why.attribution.clean_value - why.attribution.corrupted_value
    kept = f"{why.graph.value:.3g} of {whole:.3g} ({why.graph.value / whole:.0%})"
    sites = f"{len(why.circuit)} of {why.circuit.n_sites:,} sites"
    assert why.title == f"{sites} keep {kept}; found on one pair, not tested on other pairs"
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
    lines = repr(why).splitlines()  # the title has two lines
    clean, corrupted = why.attribution.clean_value, why.attribution.corrupted_value
    assert f"Logit difference {clean:.3g} (clean), {corrupted:.3g} (corrupted)" in lines
    kept, asked = why.title.partition(";")[0], CONTRAST.metric.name
    title = f"{kept}: {asked} after '{CLEAN}' and '{CORRUPTED}'"  # without BOS
    assert f"<title>small-english-4l: {escape(title)}</title>" in str(why.view())
    assert lines[3].split() == ["clean", "corrupted"]
    assert f" ' are' {why.answers['top_probability'][0]:.1%} " in lines[4]


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
        assert "!: both" not in changed.text()
        assert "isputed" not in str(changed.view())
    changed = turned(why, site, ["denoise", "noise"])
    table = changed.table()
    assert table.loc[table["disputed"], "id"].tolist() == [site]
    (line,) = [line for line in changed.text().splitlines() if line.startswith(site)]
    assert f" {table['share'][1]:.2f} ! " in line
    assert max(map(len, changed.text().splitlines())) <= 80
    assert "!: both exact patches have the opposite sign" in " ".join(changed.text().split())
    assert ", sign disputed" in str(changed.view())
    assert "Sign disputed: both exact patches" in str(changed.view())


def test_the_text_has_80_columns_and_says_what_it_leaves_out(why):
    table = why.table()
    for k in (3, len(table)):
        lines = why.text(k).splitlines()
        assert max(map(len, lines)) <= 80
        shown = [line.split()[0] for line in lines if "@" in line.split(" ")[0]]
        assert shown == table["id"][:k].tolist()
        more = f"... {len(table) - k} more rows: .table() in Python, --top in a shell"
        assert (more in lines) == (k < len(table))
        assert all(f"{name}:" in why.text(k) for name in ("share", "denoise, noise"))
    assert "Warning" not in why.text()


@pytest.mark.parametrize(
    ("corrupted", "metric", "warnings"),
    [
        (
            "The keys near the cabinets",
            p.logit_diff(" is", " are"),
            ["same answer on both prompts", "wrong answer on the clean prompt"],
        ),
        (CORRUPTED, p.custom(lambda logits: logits[:, -1, 7]), []),
    ],
)
def test_it_warns_if_the_model_does_not_change_its_answer(model, corrupted, metric, warnings):
    why = explain(model, Contrast(CLEAN, corrupted, metric), **QUICK)
    text = " ".join(repr(why).split())
    assert text.count("Warning: ") == len(warnings)
    assert all(f"the model prefers the {warning}" in text for warning in warnings)
    assert all(warning in str(why.view()) for warning in warnings)


def test_it_counts_the_pairs_of_prompts_with_one_answer(model):
    clean, corrupted = [CLEAN, CLEAN, CORRUPTED], [CORRUPTED, "The keys near the cabinets", CLEAN]
    why = explain(model, Contrast(clean, corrupted, CONTRAST.metric), strong=1.0)
    assert why.answers.groupby("run").size().to_dict() == {"clean": 3, "corrupted": 3}
    text = " ".join(repr(why).split())
    assert "for 1 of 3 pairs, the model prefers the same answer" in text
    assert "for 1 of 3 pairs, the model prefers the wrong answer on the clean prompt" in text
    assert "' are' on 2 of 3, ' is' on 1 of 3" in text
    assert "median rank 1, " in text
    assert why.shown == 2
    assert "looks at ' key' in prompt 2 (" in text
    heads = why.graph.heads.query("kind == 'attention'")
    with model.hooks(fwd_hooks=others_held(why.circuit, model.run_with_cache(corrupted)[1])):
        cache = model.run_with_cache(clean)[1]
    for node, name, position in heads[["id", "name", "position"]].to_numpy():
        pattern = cache["pattern", int(name[1])][:, int(name[3:]), int(position)].mean(0)
        assert f" ({float(pattern.max()):.0%})" in why.does[node]


def others_held(circuit, run):
    """Return hooks that give every site outside a circuit its output in a run."""
    hooks = []
    for layer in range(4):
        for kind, name in (("H", "attn.hook_z"), ("N", "mlp.hook_neuron_act")):
            held = run[f"blocks.{layer}.{name}"]
            outside = torch.ones(held.shape[:3], dtype=torch.bool)
            for site in (x for x in circuit.sites if x.startswith(f"L{layer}{kind}")):
                index, _, position = site.partition(kind)[2].partition("@")
                outside[:, int(position), int(index)] = False

            def hold(z, hook, held=held, outside=outside[..., None]):
                return torch.where(outside, held, z)

            hooks.append((f"blocks.{layer}.{name}", hold))
    return hooks


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
    with model.hooks(fwd_hooks=others_held(why.circuit, corrupted_run)):
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
        if kind == "neuron":
            label_ends = (
                f" {'↑' if expected[best] > 0 else '↓'} {best.strip()}" if has_tokens else ""
            )
            assert label == name + label_ends
        kinds.add((kind, has_tokens))
    assert kinds >= {("attention", False), ("neuron", True), ("neuron", False)}


def test_other_tokens_are_named_if_they_are_probable_and_change_twice_as_much(model):
    are, is_, was, dog = (model.to_single_token(f" {word}") for word in ("are", "is", "was", "dog"))
    change = torch.zeros(model.cfg.d_vocab_out)
    for of_was, answers, probable, written in (
        (0.9, [are, is_], [was], "writes +0.50 ' are', -0.20 ' is'"),
        (-1.1, [are, is_], [was], "writes +0.50 ' are', -0.20 ' is', -1.10 ' was'"),
        (-1.1, [are, is_], [dog], "writes +0.50 ' are', -0.20 ' is'"),
        (-1.1, [], [was, is_, dog], "writes -1.10 ' was', -0.20 ' is'"),
        (-1.1, [dog], [], ""),
    ):
        change[[are, is_, was]] = torch.tensor([0.5, -0.2, of_was])
        text, label = _writes(model, change, answers, probable)
        assert text == written
        assert label == ("" if not written else "↑ are" if answers else "↓ was")


def test_tokens_that_cannot_be_printed_are_not_named():
    assert all(map(is_readable, (" are", "ära", "7", "<s>")))
    assert not any(map(is_readable, ("<0xBB>", "a<0xE2><0x80>", "\n", "", " ")))


@pytest.mark.parametrize("by_prompt", [True, False])
def test_labels_do_not_depend_on_an_equal_pair_or_on_the_order_of_pairs(model, by_prompt):
    pairs = [("The cars near the wall",) * 2, (CLEAN, CORRUPTED)]
    pairs.append(("The dogs near the houses", "The dog near the houses"))
    are, is_ = (model.to_single_token(text) for text in (" are", " is"))
    change = p.custom(lambda logits: (logits[:, -1, are] - logits[:, -1, is_]).mean(), name="mean")
    metric = CONTRAST.metric if by_prompt else change
    results = []
    for order in ([0, 1, 2], [2, 1, 0]):
        clean, corrupted = map(list, zip(*(pairs[i] for i in order), strict=True))
        why = explain(model, Contrast(clean, corrupted, metric), **QUICK)
        state = json.loads(str(why.view()).split('id="state">')[1].split("</script>")[0])
        results.append((order[why.shown], why.labels, list(why.table()["token"]), state["names"]))
    assert results[0] == results[1]
    changes = [model(clean)[0, -1] - model(corrupted)[0, -1] for clean, corrupted in pairs]
    largest = max(range(3), key=lambda i: changes[i][are] - changes[i][is_])
    assert results[0][0] == (largest if by_prompt else 2)  # "The dogs …" has the smaller tokens
    assert any("↑" in label or "↓" in label for label in why.labels.values())


@pytest.mark.parametrize(("shown", "example"), [(0, "dog"), (1, "dog"), (2, "cat")])
def test_the_answers_do_not_depend_on_the_order_of_pairs(shown, example):
    """The example of a warning is the shown pair; if it has no fault, the most probable one."""
    columns = ["top", "top_probability", "answer", "answer_rank", "answer_probability"]
    of_pairs = [("dog", 0.5, "a", 3, 0.1), ("ant", 0.9, "a", 1, 0.9), ("cat", 0.4, "a", 2, 0.2)]
    for order in itertools.permutations(range(3)):
        frame = pd.DataFrame([of_pairs[i] for i in order], columns=columns)
        runs = [frame.assign(run=run, prompt=range(3)) for run in ("clean", "corrupted")]
        answers = pd.concat(runs)
        (warning,) = answer_warnings(answers, order.index(shown))
        number = order.index([pair[0] for pair in of_pairs].index(example))
        assert f"such as prompt {number}, the model answers {example!r}" in warning
        cells = answer_cells(answers.drop(columns=columns[2:]))
        assert cells["clean"]["top token"] == "'ant' on 1 of 3"


def test_its_circuit_is_the_circuit_of_discover(model, why):
    circuit = circuits.discover(model, CONTRAST)
    pd.testing.assert_frame_equal(circuit.frame, why.circuit.frame)
    few = explain(model, CONTRAST, strong=1.0, most_nodes=4)
    assert len(few.table()) == 4 < len(few.circuit)
    said = f"Of the circuit's {len(few.circuit)} sites, the graph and the table have the 4"
    assert said in " ".join(few.text().split())
    assert said in str(few.view())
    assert "Of the circuit's" not in why.text()


def all_effects(model, contrast):
    """Patch every site in both directions: the shares that it restores and removes, by id."""
    columns = {}
    for way, sign in (("denoise", 1), ("noise", -1)):
        sweep = p.activation_patch(model, contrast, direction=way, work=Work(progress=False))
        ids = sweep.frame["name"].astype(str) + "@" + sweep.frame["position"].astype(str)
        columns[way] = (sign * sweep.effect).set_axis(ids)
    return pd.DataFrame(columns)


@pytest.mark.parametrize(
    ("clean", "corrupted", "answers"),
    [
        (CLEAN, CORRUPTED, (" are", " is")),
        ("The cat behind the doors", "The cats behind the doors", (" is", " are")),
    ],
)
def test_every_strong_site_has_a_row(model, clean, corrupted, answers):
    """A small circuit leaves strong sites out; the table has all that an exhaustive sweep finds."""
    contrast = Contrast(clean, corrupted, p.logit_diff(*answers))
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
    for _, some in table.groupby("group"):
        assert some[["denoise", "noise"]].abs().max(axis=1).is_monotonic_decreasing
    outside = table[table["group"] != "circuit"]
    assert outside["share"].isna().all()
    assert outside["does"].str.len().min() > 0
    text, page = why.text(), str(why.view())
    assert "Strong, but not needed: others carry the same" in text
    data = json.loads(page.split('id="circuit">')[1].split("</script>")[0])["nodes"]
    grey = {site for site, on in zip(data["id"], data["outside"], strict=True) if on}
    assert grey == set(outside.index)
    rows = dict(zip(data["id"], zip(data["denoise"], data["noise"], strict=True), strict=True))
    for site, row in table.iterrows():
        assert rows[site] == pytest.approx((row["denoise"], row["noise"]), rel=1e-3, abs=1e-4)
    assert why.unpatched < 0.1
    n = len(why.patches["noise"])
    assert f"{n} sites were patched one by one, in both directions" in " ".join(text.split())


def test_it_warns_if_the_model_gives_another_answer(model):
    """The answers' ranks are computed from the logits."""
    order = model(CLEAN)[0, -1].argsort(descending=True).tolist()
    last = [model.to_single_str_token(token) for token in order]
    far = [text for text in last if text.islower() and text.startswith(" ")][-2:]
    for answers in ((" keys", " cat"), far):
        ranks = [1 + order.index(model.to_single_token(answer)) for answer in answers]
        why = explain(model, replace(CONTRAST, metric=p.logit_diff(*answers)), **QUICK)
        text = " ".join(repr(why).split())
        (first, second), (rank, second_rank) = answers, ranks
        said = f"not {first!r} (rank {rank:,}) or {second!r} (rank {second_rank:,})."
        assert f"on the clean prompt, the model answers ' are' (29%), {said}" in text
        assert ("very improbable" in text) == (min(ranks) >= 1000)


def test_patches_of_the_table_are_those_of_a_sweep(model, why):
    row = why.table().set_index("id").loc["L0H3@2"]
    for way, sign in (("denoise", 1), ("noise", -1)):
        sweep = p.activation_patch(model, CONTRAST, sites=["L0H3@2"], direction=way)
        assert row[way] == pytest.approx(sign * sweep.effect.item(), abs=1e-5)


def test_the_token_that_differs_gets_all_of_it(why):
    nodes = why.graph.nodes.set_index("id")["attribution"]
    assert nodes["embed@2"] == pytest.approx(why.graph.value, rel=1e-5)
    others = nodes[nodes.index.str.startswith("embed")].drop("embed@2")
    assert others.abs().max() < 1e-5 * why.graph.value


def test_it_is_saved_with_all_its_files_and_its_page_names_nodes(why, tmp_path):
    why.save(tmp_path / "why")
    names = {path.name for path in (tmp_path / "why").iterdir()}
    assert names == {"attribution.parquet", "circuit.json", "contrast.json", *FILES}
    again = circuits.CircuitGraph.load(tmp_path / "why" / "graph.json")
    assert again.corrupted == why.graph.corrupted
    assert again.edges.equals(why.graph.edges)
    circuit = circuits.Circuit.load(tmp_path / "why" / "circuit.json")
    assert circuit.contains(why.circuit.frame).all()
    attribution = p.Sweep.load(tmp_path / "why" / "attribution.parquet")
    pd.testing.assert_frame_equal(attribution.to_frame(), why.attribution.to_frame())
    assert ", by pattern" in (tmp_path / "why" / "page.html").read_text("utf-8")
    asked_again = explain(why.model, Contrast.load(tmp_path / "why" / "contrast.json"))
    pd.testing.assert_frame_equal(asked_again.table(), table := why.table())
    assert len(table)
    why.save(tmp_path / "why")  # a second call replaces the saved files


def test_a_page_without_words_separates_numbers_and_says_what_carries_each_share():
    model = expose_neuron_heads(pretrained.modular_addition(), copy=True).model
    model.cfg.model_name = "custom"  # TransformerLens' name for a model built from a config
    clean, corrupted = torch.tensor([[3, 4, 113]]), torch.tensor([[3, 5, 113]])
    why = explain(model, Contrast(clean, corrupted, p.logit_diff(7, 8)), strong=1.0)
    page = str(why.view())
    assert "Corrupted prompt: 3 5 113" in page
    assert f"<title>{why.title.partition(';')[0]}: logit_diff(7, 8) after " in page
    names = json.loads(page.split('id="state">')[1].split("</script>")[0])["names"]
    carriers = set()
    for row in why.table().to_dict("records"):
        parts = {name: abs(row[f"by_{name}"]) for name in ("pattern", "value")}
        smaller = min(parts.values()) / sum(parts.values())
        carrier = "both" if smaller > 1 / 3 else max(parts, key=lambda name: parts[name])
        assert names[row["id"]].endswith(f", by {carrier}") == (carrier != "value")
        carriers.add(carrier)
    assert "both" in carriers


def test_neurons_are_named_after_the_tokens_where_they_are_largest(model, why):
    assert {name for name in why.graph.heads["name"] if "N" in name} == set(why.neurons)
    corpus = neurons.Corpus(pretrained.small_english_texts()[:20])
    examples = neurons.top_examples(model, why.neurons, corpus, k=2)
    page = str(why.view(examples))
    rows = examples[(examples["name"] == why.neurons[0]) & (examples["rank"] == 1)]
    best = rows.loc[rows["value"].abs().idxmax()]
    label = f"{best['name']} at “{best['tokens'][best['position']].strip()}”"
    assert json.dumps(label).strip('"') in page


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"strong": 0}, "got strong=0"),
        ({"faithfulness": 2}, "got faithfulness=2"),
        ({"resamples": None}, "got resamples=None"),
        ({"contrast": replace(CONTRAST, corrupted="The key")}, "same number of tokens|as many"),
        ({"contrast": replace(CONTRAST, corrupted=None)}, "without corrupted prompts"),
        (
            {"contrast": CLEAN, "work": Work(batch_size=3), "strong": 0},
            r"(?s)got a str; expected Contrast\(.*does not use batch_size.*got strong=0",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(model, settings, reason):
    with pytest.raises(InputError, match=reason):
        explain(model, **{"contrast": CONTRAST} | settings)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"contrast": replace(CONTRAST, corrupted=CLEAN)}, "identical prompts"),
        ({"sites": ["L9H9@1"]}, "got .L9H9.; the model has layers 0 to 3"),
        ({"sites": p.Sites("heads", -1)}, "got the site 'L0H0@-1'; expected a head or neuron at"),
        ({"sites": ["L0H0@99"]}, "L0H0@99"),
        ({"sites": []}, "got an empty list"),
        ({"sites": ["L0H0@1"], "top": 3}, "expected at most one of them"),
    ],
)
def test_graphs_that_make_no_sense_are_refused(model, how, reason):
    with pytest.raises(InputError, match=reason):
        circuits.attribution_graph(model, **{"contrast": CONTRAST} | how)


def test_a_graph_by_role_is_the_mean_of_the_graphs_of_its_prompts(model):
    n, key = 3, ["source", "target"]
    task = tasks.agreement(model.tokenizer, n, seed=3)
    graph = circuits.attribution_graph(model, task, positions="roles", top=12)
    ids = list(graph.heads["id"])
    singles, edges = [], []
    for i in range(n):
        length = int(model.to_tokens(task.clean[i]).shape[1])
        places = {role: where[i] % length for role, where in task.roles.items()}
        renamed = {f"{name.split('@')[0]}@{places[name.split('@')[1]]}": name for name in ids}
        metric = p.logit_diff(task.answers[i], task.wrong[i])
        contrast = Contrast(task.clean[i], task.corrupted[i], metric)
        alone = circuits.attribution_graph(model, contrast, sites=list(renamed))
        singles.append(alone.heads.replace({"id": renamed}).set_index("id")["attribution"])
        within = alone.edges[alone.edges[key].isin(list(renamed)).all(axis=1)]
        edges.append(within.replace(dict.fromkeys(key, renamed)).groupby(key)["weight"].sum())
    singles, edges = pd.concat(singles, axis=1), pd.concat(edges, axis=1).fillna(0.0)
    heads = graph.heads.set_index("id")
    np.testing.assert_allclose(heads["attribution"], singles.mean(axis=1)[ids], atol=1e-4)
    errors = singles.std(axis=1)[ids] / np.sqrt(n)
    np.testing.assert_allclose(heads["error"].astype(float), errors, atol=1e-4)
    got = graph.edges.groupby(key)["weight"].sum().reindex(edges.index).fillna(0.0)
    np.testing.assert_allclose(got, edges.mean(axis=1), atol=1e-4)
    assert (edges.mean(axis=1).abs() > 1e-2).sum() > 3
    inflow = graph.inflow()
    nodes = graph.nodes.set_index("id")["attribution"]
    assert (inflow - nodes.reindex(inflow.index)).abs().max() < 1e-4 * graph.value


def test_json_of_one_run_has_no_corrupted_prompt(model, tmp_path):
    graph = circuits.attribution_graph(model, replace(CONTRAST, corrupted=None), top=5)
    graph.save(tmp_path / "g.json")
    assert json.loads((tmp_path / "g.json").read_text("utf-8"))["graph"]["corrupted"] == []
    assert circuits.CircuitGraph.load(tmp_path / "g.json").additive_kinds == ("value",)


def test_held_out_pairs_say_whether_the_circuit_holds(model):
    """Compare with `evaluate`, on pairs of other lengths. Bad pairs are refused at once."""
    pairs = tasks.agreement(model.tokenizer, 13, seed=3)
    why = explain(model, pairs[:5], held_out=pairs[5:], strong=1.0)
    measured = circuits.evaluate(model, why.circuit, pairs[5:])
    assert vars(why.held_out) == vars(measured)
    shares = f"{measured.faithfulness:.0%} ± {measured.standard_error:.0%}"
    assert why.title.endswith(f" on 5 pairs of prompts; {shares} on 8 held-out pairs")
    found, whole = why.circuit.faithfulness, why.circuit.whole - why.circuit.nothing
    assert f" sites keep {found * whole:.3g} of the {whole:.3g} that all of them" in why.title
    assert f" ({found:.0%}) on 5 pairs" in why.title
    assert why.title.partition("±")[0] in str(why.view())
    assert "Test it on other pairs" not in why.text()
    assert why.circuit.tried["error"].min() <= 0.1
    with_less = explain(model, pairs[:2], held_out=pairs[5:], strong=1.0, faithfulness=0.5)
    warns = with_less.held_out.faithfulness < 0.7 * with_less.circuit.faithfulness
    assert ("does not hold there" in with_less.text()) == warns
    for held_out, reason in (
        (
            replace(pairs[5:], roles={"end": -1}),
            "held_out: the contrast lacks roles of the circuit: subj",
        ),
        (replace(pairs[5:], corrupted=None), "held_out: got a contrast without corrupted prompts"),
        (pairs.clean, "held_out: got a tuple; expected Contrast"),
        (pairs[3:], "held_out: got 2 of the pairs that find the circuit; expected others"),
        (replace(pairs[5:], metric=p.kl()), "held_out: got kl; expected a metric like"),
        (replace(pairs[5:], roles={"subject": 50, "end": -1}), "held_out: .*50"),
    ):
        with pytest.raises(InputError, match=reason):
            explain(model, pairs[:5], held_out=held_out)
    rows = [torch.nn.functional.pad(model.to_tokens(x), (1, 0)) for x in (CLEAN, CORRUPTED)]
    mask = torch.ones_like(rows[0])
    mask[0, 0] = 0
    with pytest.raises(InputError, match="held_out: got prompts whose first token has position 1"):
        explain(model, CONTRAST, held_out=Contrast(*rows, CONTRAST.metric, mask=mask))
    longer = Contrast(f"{CLEAN} here", f"{CORRUPTED} here", CONTRAST.metric)
    with pytest.raises(InputError, match="held_out: got prompts of 7 tokens; expected 6"):
        explain(model, CONTRAST, held_out=longer)


def test_resampled_prompts_say_how_stable_each_site_is(model):
    nouns = ["key", "car", "door", "dog"]
    clean, corrupted = ([f"The {x}{s} near the cabinet" for x in nouns] for s in ("s", ""))
    contrast = Contrast(clean, corrupted, CONTRAST.metric)
    why = explain(model, contrast, strong=1.0, resamples=2)
    stability = why.circuit.stability
    page = str(why.view())
    held_out = stability.held_out["mean"]["faithfulness"]
    assert why.title.endswith(f" on 4 pairs of prompts; {held_out:.0%} on held-out halves of them")
    assert why.title in page
    warns = "keep only" in why.text()
    assert warns == (held_out < 0.7 * why.circuit.faithfulness)
    assert f"a core of {stability.n_core} sites in a union of {stability.n_union}" in page
    inclusion = json.loads(page.split('id="circuit">')[1].split("</script>")[0])["nodes"]
    shares = dict(zip(inclusion["id"], inclusion["inclusion"], strict=True))
    sites = stability.sites.assign(
        id=lambda x: x["name"].astype(str) + "@" + x["position"].astype(str)
    )
    expected = sites.set_index("id")["inclusion"].to_dict()
    heads = list(why.graph.heads["id"])
    assert [shares[node] for node in heads] == [
        pytest.approx(expected[node], rel=1e-4) if node in expected else None for node in heads
    ]
    assert shares["metric"] is None
    assert stability.n_core > 0


def small_gpt2(act, scale):
    """Return a float32 bridge in which `scale` changes W_in of layer 1."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **{"vocab_size": 41, "n_embd": 26, "n_layer": 3, "n_head": 2, "n_positions": 19},
        **{"n_inner": 37, "initializer_range": 0.3, "activation_function": act},
    )
    source = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        weight = source.transformer.h[1].mlp.c_fc.weight
        weight.copy_(scale(weight))
    return expose_neuron_heads(bridged(source.eval())).model


@pytest.mark.parametrize(
    ("act", "scale"),
    [
        ("relu", lambda W: W * 1e-40),  # a gate's jump at a subnormal query has an infinite slope
        ("gelu_new", lambda W: torch.full_like(W, 3.0)),  # after a LayerNorm, 3 Σ x is rounding
    ],
    ids=["decayed", "near zero"],
)
def test_a_layer_whose_queries_are_nothing_but_rounding(act, scale):
    model = small_gpt2(act, scale)
    clean, corrupted = (torch.tensor([[3, x, 7, 11, 13]]) for x in (5, 17))
    contrast = Contrast(clean, corrupted, p.logit_diff(7, 11))
    why = explain(model, contrast)
    sweep = why.attribution.frame
    there = (sweep["layer"] == 1) & (sweep["kind"] == "neuron")
    assert sweep["score"][there].abs().max() < 1e-5 < sweep["score"].abs().max()
    assert why.circuit.faithfulness > 0.8
    assert circuits.path_expansion(model, contrast).logits.isfinite().all()
    circuits.attribution_graph(model, replace(contrast, corrupted=None))
