"""Tests of path patching against plain hooks and weights, and against TransformerLens."""

from dataclasses import replace
from functools import partial

import bridges
import pandas as pd
import patched_runs
import pytest
import torch
from common import changed, mlp_hook, tokens
from patched_runs import moved, seen
from path_oracle import PathOracle

from attn_only_lens import Bilinear, Contrast, HeadName, Work, expose_neuron_heads, load
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.gates import bilinear_gate
from attn_only_lens.patching import path_blocks, path_patches
from attn_only_lens.patching.path_runner import PathRunner
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

if HAS_HOOKED_TRANSFORMER:
    from transformer_lens.tools.analysis.direct_path_patching import get_act_patch_direct_path
else:
    from transformer_lens.patching import get_act_patch_direct_path

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore"),  # raised by TransformerLens and transformers
]

POS, END = 5, 4
METRIC = p.logit_diff(correct=7, wrong=11)
difference = partial(patched_runs.difference, wrong=11)


CLEAN = tokens(0, batch=2, pos=POS)
CORRUPTED = changed(CLEAN, 1)
PAIR = Contrast(CLEAN, CORRUPTED, METRIC, roles={"role": 1})


SENDERS = ["L0H1", "L0N3", "L1H1"]
RECEIVERS = ["L1H0", "L1N5", "logits"]


def require_exact(sweep, oracle, positions, tolerance):
    """Compare every row with the oracle; return the number of rows."""
    frame, moved = sweep.to_frame(), 0.0
    span = abs(sweep.clean_value - sweep.corrupted_value)
    for row in frame.itertuples():
        name, _, place = row.receiver.partition("@")
        to = name if name == "logits" else HeadName.parse(name)
        at = {"": slice(None), "role": 1}.get(place) or int(place)
        expected = oracle.value(HeadName.parse(row.sender), to, row.part, positions, at)
        assert abs(row.value - expected) < tolerance * span, row
        moved = max(moved, abs(expected - sweep.corrupted_value))
    assert moved > 10 * tolerance * span  # control: some paths have an effect
    return len(frame)


PARTS = {"q": ["L1H0", "L1N5"], "value": ["L1H0", "L1N5"], "pattern": ["L1H0", "L1N5"]}
PARTS |= {"k": ["L1H0"], "z": RECEIVERS}


@pytest.mark.parametrize("name", ["gpt2", "neox", "granite", "gemma2"])
def test_equals_hooks(name):
    """Heads and neurons of all kinds of blocks: parallel, with shared keys, norms, factors."""
    model, source = bridges.exposed_copy(bridges.boot(name)), bridges.boot(name, state="names")
    factor = bridges.FACTORS["residual_multiplier"] if name == "granite" else 1.0
    held, anew = (PathOracle(source, PAIR, x, factor) for x in ("held", "anew"))
    tolerance = 1e-10 if name == "gpt2" else 2e-6  # norms or rotations are in float32
    for part, receivers in PARTS.items():
        sweep = p.path_patch(model, PAIR, p.Edges(p.Sites(SENDERS, "all"), receivers, part))
        n = require_exact(sweep, held, slice(None), tolerance)
        if part == "z":  # L1H1 does not reach L1H0, nor L1N5 if the two are parallel
            assert n == 8 - (name == "neox")
    sweep = p.path_patch(model, PAIR, p.Edges(p.Sites(SENDERS, END), RECEIVERS, "z", "anew"))
    require_exact(sweep, anew, END, tolerance)


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_receivers_at_positions(name, monkeypatch):
    """A receiver's output changes only at its positions, and only if it reads the sender's."""
    monkeypatch.setitem(bridges.GPT, "n_layer", 3)
    monkeypatch.setitem(bridges.SIZES, "num_hidden_layers", 3)
    model, source = bridges.exposed_copy(bridges.boot(name)), bridges.boot(name, state="names")
    oracle, tolerance = PathOracle(source, PAIR), 1e-10 if name == "gpt2" else 2e-6
    reading = ["L2H0@-1", "L1N5@2", "L1H1@3", "L1H0@2", "L1H1", "logits"]
    unmoved = ["L1N5@3", "L1H0@1", "L2H0@3"]  # before the sender, elsewhere, or not followed

    def patched(receivers, place=2, **options):
        edges = p.Edges(p.Sites(["L0H1", "L0N3"], place), receivers, "z")
        return p.path_patch(model, PAIR, edges, **options)

    paths = patched([*reading, *unmoved])
    assert require_exact(paths, oracle, 2, tolerance) == 2 * 9
    end = patched([reading[0], "logits"], END)
    require_exact(end, oracle, END, tolerance)
    effects = paths.frame.assign(e=paths.effect.abs()).groupby("receiver", observed=True)["e"]
    assert effects.min()[reading[:-1]].min() > 1e-6
    assert effects.max()[[*unmoved, "logits"]].max() < 1e-12
    for positions, label in ((-1, "@-1"), ("role", "@role"), ("all", "")):
        some = patched(p.Sites("heads", positions, layers=2), 1)
        assert set(some.frame["receiver"]) == {f"L2H0{label}", f"L2H1{label}"}
        if label != "@role":  # the last layer's other positions do not reach the metric
            require_exact(some, oracle, 1, tolerance)
    top = patched(p.Sites("all", [2, 3], layers=1), top=9)
    require_exact(top, oracle, 2, tolerance)
    rows, span = top.frame, abs(top.frame["score"]).max()
    assert (abs(rows["estimate"] - rows["score"]) < span / 3).all()


def test_receivers_at_roles(model):
    """A role is another position in each prompt."""
    contrast = replace(PAIR, roles={"here": [1, 3]})
    edges = p.Edges(p.Sites("L0H1", "all"), ["L0N5@here", "L0N7@here"], "z")
    rows = p.path_patch(model, contrast, edges, per_prompt=True).frame
    alone = p.path_patch(model, contrast, edges, per_prompt=True, work=Work(prompts_at_once=1))
    for i, place in enumerate((1, 3)):
        placed = p.Edges(edges.senders, [f"L0N5@{place}", f"L0N7@{place}"], "z")
        one = p.path_patch(model, PAIR[i : i + 1], placed)
        assert one.effect.abs().min() > 1e-6
        for frame in (rows, alone.frame):
            values = frame[frame["prompt"] == i]["value"].to_numpy()
            assert values == pytest.approx(one.frame["value"].to_numpy(), rel=1e-12)


def test_equals_transformerlens():
    """Direct paths between heads agree; 3.9 holds the norms' scales, and 4 recomputes them."""
    source = bridges.boot("gpt2", state="processed")
    reference_scale, other_scale = ("held", "anew") if HAS_HOOKED_TRANSFORMER else ("anew", "held")
    with torch.no_grad():
        caches = [source.run_with_cache(prompts)[1] for prompts in (CLEAN, CORRUPTED)]
    with expose_neuron_heads(source, copy=True) as model:
        for part, component in (("q", "q"), ("k", "k"), ("value", "v")):
            with torch.no_grad():
                reference = get_act_patch_direct_path(
                    *(source, CORRUPTED, *caches, lambda x: torch.tensor(difference(x))),
                    *(0, 1, component),
                    verbose=False,
                )
            same, off = (
                p.path_patch(
                    model, PAIR, p.Edges(p.Sites("L0H1", "all"), "heads", part, scale)
                ).frame
                for scale in (reference_scale, other_scale)
            )
            assert same["receiver"].tolist() == ["L1H0", "L1H1"]
            got, control = (
                torch.tensor(frame["value"].to_numpy()).float() for frame in (same, off)
            )
            assert torch.allclose(got, reference[1], rtol=1e-6)  # the reference is in float32
            assert not torch.allclose(control, reference[1], rtol=1e-6)


def test_top_is_patched_exactly(model, monkeypatch):
    edges = p.Edges(p.Sites("all", [1, END], layers=0), p.Sites("heads", layers=1), "z")
    every = p.path_patch(model, PAIR, edges)
    monkeypatch.setattr(path_blocks, "_NUMBERS", 500)  # a few paths per block
    monkeypatch.setattr(path_patches, "_AT_ONCE", 5)
    cut = p.path_patch(model, PAIR, edges)
    key = ["sender", "receiver", "position"]
    values = cut.frame.astype({"sender": str, "receiver": str}).set_index(key)["value"]
    whole = every.frame.astype({"sender": str, "receiver": str}).set_index(key)["value"]
    span = abs(every.clean_value - every.corrupted_value)
    assert (values - whole[values.index]).abs().max() < 1e-12 * span
    top = p.path_patch(model, PAIR, edges, top=13)
    assert len(top.frame) == 13
    assert top.n_paths == len(every.frame) == 2 * 39 * 2
    rows = top.frame.astype({"sender": str, "receiver": str}).set_index(key)
    assert (rows["value"] - whole[rows.index]).abs().max() < 1e-12 * span
    # Estimates find the largest paths, and all are within a third of the patched score.
    best = every.top(7).astype({"sender": str, "receiver": str})
    assert set(zip(*(best[name] for name in key), strict=True)) <= set(rows.index)
    assert ((rows["estimate"] - rows["score"]).abs() < rows["score"].abs() / 3 + 1e-6).all()


def test_resumes(model, tmp_path, monkeypatch):
    monkeypatch.setattr(path_patches, "_AT_ONCE", 3)
    monkeypatch.setattr(path_patches, "_ESTIMATES_AT_ONCE", 5)
    folder, n_patched = tmp_path / "paths", []
    edges = p.Edges(p.Sites(["L0H1", "L0N3", "L0N5"], [1, END]), ["L1H0", "L1N5", "logits"])
    values = PathRunner.values
    monkeypatch.setattr(PathRunner, "values", lambda *x: n_patched.append(len(x[2])) or values(*x))

    def patched(**more):
        how = {"edges": edges, "top": 7, "work": Work(resume=folder)} | more
        return p.path_patch(model, PAIR, **how)

    expected = patched()
    chunks = sorted(folder.glob("*.safetensors"))
    assert len(chunks) > 3
    for chunk in (chunks[-1], chunks[0]):  # the first one has estimates
        chunk.unlink()
    n_patched.clear()
    pd.testing.assert_frame_equal(expected.frame, patched().frame, check_exact=True)
    assert 0 < sum(n_patched) < len(expected.frame)
    with pytest.raises(InputError, match=r"(?s)scale: got.*top: got"):
        patched(top=3, edges=replace(edges, scale="anew"))
    expected.save(tmp_path / "paths.csv")
    loaded = load(tmp_path / "paths.csv")
    pd.testing.assert_frame_equal(expected.frame, loaded.frame, check_categorical=False)
    assert loaded.tokens == expected.tokens


def test_neurons_of_bilinear_gates():
    """Every neuron sends its share of the original neuron, and receives in its own units."""
    model = bridges.exposed_copy(bridges.boot("gpt2"), gate=Bilinear(2))
    receivers = ["L1N10", "L1N11", "logits"]
    sweep = p.path_patch(model, PAIR, p.Edges(p.Sites(["L0N6", "L0N7"], END), receivers, "z"))
    effect = sweep.frame.assign(e=sweep.effect).set_index(["sender", "receiver"])["e"]
    gate = bilinear_gate("gelu_new", 2)
    q = seen(model, CORRUPTED, "blocks.1.mlp.hook_pre")[:, END, 5]
    scale = seen(model, CORRUPTED, "blocks.1.ln2.hook_scale")[:, END]
    span = sweep.clean_value - sweep.corrupted_value
    name = mlp_hook("z", 0)
    z = seen(model, CLEAN, name) - seen(model, CORRUPTED, name)
    for i, j in ((0, 0), (1, 0), (1, 1)):
        delta = z[:, END, 6 + i] * gate.w[i] * model.blocks[0].mlp.W_out[3]
        delta = delta - delta.mean(-1, keepdim=True)
        new_q = q + delta / scale * model.blocks[1].ln2.w @ model.blocks[1].mlp.W_in[:, 5]
        before, after = (torch.sigmoid(gate.b[j] * x + gate.c[j]) * x for x in (q, new_q))
        index = (slice(None), END, 10 + j)
        more = (after - before).unsqueeze(-1)
        expected = difference(moved(model, CORRUPTED, mlp_hook("z"), index, more))
        expected = (expected - sweep.corrupted_value) / span
        got = effect[f"L0N{6 + i}", f"L1N{10 + j}"]
        assert got == pytest.approx(expected, rel=0, abs=1e-10)
        assert abs(got) > 1e-9
    assert all(abs(effect[sender, "logits"]) > 1e-6 for sender in ("L0N6", "L0N7"))


def test_refusals(model):
    edges = p.Edges("L0H1", "L1H0")

    def refused(match, edges=edges, contrast=PAIR, **options):
        with pytest.raises(InputError, match=match):
            p.path_patch(model, contrast, edges, **options)

    refused("do not depend on the token", p.Edges("L0H1", ["L1H0", "L1N5"], "k"))
    refused("a later layer", p.Edges("L1N5", "L1H0"))
    refused("a sender changes the logits at its own", p.Edges("L0H1", p.Sites("logits", -1)))
    wrong = ["L7H0@2", "L1H0@9", "L1N5@nobody", "logits@1", "L8H0"]
    refused("(?s)logits.*L7H0.*nobody.*L1H0@9: got 9.*L8H0", p.Edges("L0H1", wrong))
    refused("more than once", p.Edges("L0H1", ["L1H0@-1", f"L1H0@{POS - 1}"]))
    refused("(?s)got a Tensor; expected Contrast.*got a str; expected Edges", "L0H1", CLEAN)
    refused("gradient is zero", contrast=replace(PAIR, metric=p.kl()), direction="noise", top=3)
