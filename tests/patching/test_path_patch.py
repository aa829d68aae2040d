"""Tests of path patching against TransformerLens' hooks on the original, unconverted model."""

import bridges
import pandas as pd
import pytest
import torch
from common import needs_hooked_transformer, tokens
from patch_oracle import CORRECT, WRONG, difference, seen
from path_oracle import PathOracle

from attn_only_lens import Bilinear, HeadName, convert, expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.engine.readers import Readers
from attn_only_lens.errors import InputError
from attn_only_lens.patching import _path_patch
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

pytestmark = pytest.mark.numeric

if HAS_HOOKED_TRANSFORMER:
    from models import CORE, build
    from transformer_lens.tools.analysis.direct_path_patching import get_act_patch_direct_path
else:
    from transformer_lens.patching import get_act_patch_direct_path

    CORE = ()

POS, AT, END = 5, 2, 4
METRIC = p.logit_diff(CORRECT, WRONG)


def prompts(batch=2):
    clean = tokens(0, batch=batch, pos=POS)
    corrupted = clean.clone()
    corrupted[:, 1] = (clean[:, 1] + 7) % 41
    return clean, corrupted


SENDERS = ("L0H1", "L0N3", "L1H1", "L1N29")
RECEIVERS = ("L1H0", "L1N5", "L2H1", "L2N36")


def compare(sweep, oracle, positions, tolerance=1e-10):
    """Compare every row with the oracle; return the number of rows."""
    frame, moved = sweep.to_frame(), 0.0
    span = abs(sweep.clean_value - sweep.corrupted_value)
    for row in frame.itertuples():
        to = row.receiver if row.receiver == "logits" else HeadName.parse(row.receiver)
        expected = oracle.value(HeadName.parse(row.sender), to, row.part, positions)
        assert abs(row.value - expected) < tolerance * span, row
        moved = max(moved, abs(expected - sweep.corrupted_value))
    assert moved > 1e-4 * span  # control: some paths have an effect
    return len(frame)


@needs_hooked_transformer
@pytest.mark.parametrize("family", CORE)
def test_equals_hooks(family):
    source, (clean, corrupted) = build(family, scale=0.25), prompts()
    held, anew = (PathOracle(source, clean, corrupted, scale) for scale in ("held", "anew"))
    converted = convert(source)
    pair = {"senders": SENDERS, "receivers": [*RECEIVERS, "logits"], "progress": False}
    with expose_neuron_heads(source, copy=True) as exposed:
        sweep = p.path_patch(converted, clean, corrupted, METRIC, positions=AT, part="z", **pair)
        n = compare(sweep, held, AT)
        assert n == 17 - source.cfg.parallel_attn_mlp  # if parallel, L1H1 does not reach L1N5
        again = p.path_patch(exposed, clean, corrupted, METRIC, positions=AT, part="z", **pair)
        pd.testing.assert_frame_equal(sweep.frame, again.frame, rtol=1e-9)
        by = {part: RECEIVERS for part in ("q", "value", "pattern")} | {"k": ("L1H0", "L2H1")}
        for part, to in by.items():
            few = pair | {"senders": ("L0H1", "L0N3"), "receivers": to}
            some = p.path_patch(exposed, clean, corrupted, METRIC, positions=AT, part=part, **few)
            compare(some, held, AT)
        pair |= {"positions": "all", "part": "z"}
        some = p.path_patch(converted, clean, corrupted, METRIC, scale="anew", **pair)
        compare(some, anew, slice(None))
        direct = p.path_patch(exposed, clean, corrupted, METRIC, **pair | {"receivers": "logits"})
        compare(direct, held, slice(None))


@needs_hooked_transformer
def test_heads_one_at_a_time(monkeypatch):
    """The code for norms over all heads gives the same result for models without such norms."""
    model, (clean, corrupted) = convert(build("grouped", scale=0.25)), prompts()
    options = {"senders": "L0N3", "receivers": p.heads(1), "positions": AT, "progress": False}
    for part in ("q", "k", "value"):
        together = p.path_patch(model, clean, corrupted, METRIC, part=part, **options)
        with monkeypatch.context() as patch:
            patch.setattr(Readers, "_is_joint", lambda readers, layer: True)
            alone = p.path_patch(model, clean, corrupted, METRIC, part=part, **options)
        pd.testing.assert_frame_equal(together.frame, alone.frame, rtol=1e-12)
        assert together.frame["value"].nunique() == 6


@pytest.mark.parametrize("name", ["gpt2", "llama", "granite", "gemma2"])
def test_bridges_equal_hooks(name):
    """Edit the pre-activation of a receiving neuron, with the norm scales from the cache.

    Bridged RMS norms compute in float32, so their tolerance is larger.
    """
    model, (clean, corrupted) = bridges.exposed_copy(bridges.boot(name)), prompts()
    sweep = p.path_patch(
        model,
        *(clean, corrupted, METRIC),
        senders=["L0H1", "L0N3", "L1H0"],
        receivers=["L1N5", "logits"],
        part="z",
        positions=END,
        progress=False,
    )
    gated = name != "gpt2"
    norm = model.blocks[1].ln2
    w = norm.original_component.weight.detach() + (name == "gemma2")
    rows = sweep.frame.set_index(["sender", "receiver"])["value"]
    for sender in ("L0H1", "L0N3", "L1H0"):
        head = HeadName.parse(sender)
        block, sublayer = model.blocks[head.layer], "attn" if head.kind == "attention" else "mlp"
        wrote = []
        for prompt in (clean, corrupted):
            z = seen(model, prompt, head.hook("z", model))[:, END, head.index]
            part = block.attn.W_O if sublayer == "attn" else block.mlp.W_out[:, None]
            out = z @ part[head.index]
            out = out * bridges.FACTORS["residual_multiplier"] if name == "granite" else out
            if name == "gemma2":
                prefix = f"blocks.{head.layer}.ln{1 if sublayer == 'attn' else 2}_post"
                after = getattr(block, prefix.rpartition(".")[2]).original_component.weight
                out = out / seen(model, prompt, f"{prefix}.hook_scale")[:, END] * (1 + after)
            wrote.append(out)
        delta = wrote[0] - wrote[1]
        delta = delta if gated else delta - delta.mean(-1, keepdim=True)
        entering = delta / seen(model, corrupted, "blocks.1.ln2.hook_scale")[:, END] * w
        mlp = model.blocks[1].mlp

        def add(value, hook, more):
            value = value.clone()
            value[:, END, 5] += more
            return value

        edits = [("blocks.1.mlp.hook_pre", (mlp.W_gate if gated else mlp.W_in)[:, 5])]
        edits += [("blocks.1.mlp.hook_pre_linear", mlp.W_in[:, 5])] * gated
        hooks = [
            (hook_name, lambda x, hook, m=entering @ W: add(x, hook, m)) for hook_name, W in edits
        ]
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            expected = difference(model(corrupted))
        span = abs(sweep.clean_value - sweep.corrupted_value)
        got = rows[sender, "L1N5"]
        assert abs(got - expected) < (1e-6 if gated else 1e-10) * span
        assert abs(got - sweep.corrupted_value) > 1e-4 * span


def test_equals_transformerlens():
    """Direct paths between heads agree; 3.9 holds the norms' scales, and 4 recomputes them."""
    source, (clean, corrupted) = bridges.boot("gpt2", state="processed"), prompts()
    reference_scale, other_scale = ("held", "anew") if HAS_HOOKED_TRANSFORMER else ("anew", "held")
    with torch.no_grad():
        caches = [source.run_with_cache(prompts)[1] for prompts in (clean, corrupted)]
    with expose_neuron_heads(source, copy=True) as model:
        for part, component in (("q", "q"), ("k", "k"), ("value", "v")):
            with torch.no_grad():
                reference = get_act_patch_direct_path(
                    *(source, corrupted, *caches, lambda x: torch.tensor(difference(x))),
                    *(0, 1, component),
                    verbose=False,
                )
            same, off = (
                p.path_patch(
                    *(model, clean, corrupted, METRIC),
                    senders="L0H1",
                    receivers=p.heads(),
                    part=part,
                    positions="all",
                    scale=scale,
                    progress=False,
                ).frame
                for scale in (reference_scale, other_scale)
            )
            assert same["receiver"].tolist() == ["L1H0", "L1H1"]
            got, control = (
                torch.tensor(frame["value"].to_numpy()).float() for frame in (same, off)
            )
            assert torch.allclose(got, reference[1], rtol=1e-6)  # the reference is in float32
            assert not torch.allclose(control, reference[1], rtol=1e-6)


@pytest.fixture(scope="module")
def small():
    return bridges.exposed_copy(bridges.boot("gpt2")), *prompts()


def test_top_is_patched_exactly(small, monkeypatch):
    model, clean, corrupted = small
    options = {"senders": p.all_heads(0), "receivers": p.all_heads(1), "part": "z"}
    options |= {"positions": [1, END], "progress": False}
    every = p.path_patch(model, clean, corrupted, METRIC, **options)
    monkeypatch.setattr(_path_patch, "_NUMBERS", 500)  # a few paths per block
    monkeypatch.setattr(_path_patch, "_AT_ONCE", 5)
    cut = p.path_patch(model, clean, corrupted, METRIC, **options)
    key = ["sender", "receiver", "position"]
    values = cut.frame.astype({"sender": str, "receiver": str}).set_index(key)["value"]
    whole = every.frame.astype({"sender": str, "receiver": str}).set_index(key)["value"]
    span = abs(every.clean_value - every.corrupted_value)
    assert (values - whole[values.index]).abs().max() < 1e-12 * span
    top = p.path_patch(model, clean, corrupted, METRIC, top=13, **options)
    assert len(top.frame) == 13
    assert top.n_paths == len(every.frame) == 2 * 39 * 39
    rows = top.frame.astype({"sender": str, "receiver": str}).set_index(key)
    assert (rows["value"] - whole[rows.index]).abs().max() < 1e-12 * span
    # Estimates find the largest paths, and all are within a third of the patched score.
    best = every.top(7).astype({"sender": str, "receiver": str})
    assert set(zip(*(best[name] for name in key), strict=True)) <= set(rows.index)
    assert ((rows["estimate"] - rows["score"]).abs() < rows["score"].abs() / 3 + 1e-6).all()


def test_resumes(small, tmp_path, monkeypatch):
    model, clean, corrupted = small
    monkeypatch.setattr(_path_patch, "_AT_ONCE", 3)
    monkeypatch.setattr(_path_patch, "_ESTIMATES_AT_ONCE", 5)
    options = {"senders": ["L0H1", "L0N3", "L0N5"], "receivers": ["L1H0", "L1N5", "logits"]}
    options |= {"positions": [1, END], "progress": False, "resume": tmp_path / "paths"}
    runs, values = [], _path_patch._PathRunner.values

    def count(runner, block, i, j):
        runs.append(len(i))
        return values(runner, block, i, j)

    monkeypatch.setattr(_path_patch._PathRunner, "values", count)
    picked, patches = [], _path_patch._PathPatches
    estimate = patches.estimate
    monkeypatch.setattr(patches, "estimate", lambda *a, **k: picked.append(1) or estimate(*a, **k))
    for top in (None, 7):
        options["resume"] = tmp_path / f"top {top}"
        expected = p.path_patch(model, clean, corrupted, METRIC, top=top, **options)
        chunks = sorted((tmp_path / f"top {top}").glob("*.safetensors"))
        if top:  # remove one chunk of estimates
            chunks[0].unlink()
            picked.clear()
        chunks[-1].unlink()
        runs.clear()
        again = p.path_patch(model, clean, corrupted, METRIC, top=top, **options)
        pd.testing.assert_frame_equal(expected.frame, again.frame, check_exact=True)
        assert 0 < sum(runs) < len(expected.frame)
        assert not top or (len(picked) == 1 and len(chunks) > 3)
        for name, value in {"part": "q", "scale": "anew", "direction": "noise", "top": 3}.items():
            changed = options | {"top": top, name: value}
            with pytest.raises(InputError, match=f"{name}: got"):
                p.path_patch(model, clean, corrupted, METRIC, **changed)
        expected.save(tmp_path / "paths.csv")
        loaded = p.Paths.load(tmp_path / "paths.csv")
        pd.testing.assert_frame_equal(expected.frame, loaded.frame, check_categorical=False)
        assert loaded.tokens == expected.tokens
        assert expected.tokens.clean == [[str(token) for token in row] for row in clean.tolist()]
    roles = options | {"resume": tmp_path / "roles", "positions": {"role": 1}}
    p.path_patch(model, clean, corrupted, METRIC, **roles)
    with pytest.raises(InputError, match="where: got"):  # the role's position differs
        p.path_patch(model, clean, corrupted, METRIC, **roles | {"positions": {"role": 2}})


def test_heads_that_share_a_neuron():
    """Heads of a bilinear gate receive together, and as a sender each writes only its share."""
    source, (clean, corrupted) = bridges.boot("gpt2"), prompts()
    model = bridges.exposed_copy(source, gate=Bilinear(2))
    sweep = p.path_patch(
        model,
        *(clean, corrupted, METRIC),
        senders=["L0N3", "L0N3.0", "L0N3.1"],
        receivers=["L1N5", "L1N5.0", "L1N5.1", "logits"],
        part="z",
        positions=END,
        progress=False,
    )
    effect = sweep.frame.assign(e=sweep.effect).set_index(["sender", "receiver"])["e"]
    norm, mlp = model.blocks[1].ln2, model.blocks[1].mlp
    z = [
        model.run_with_cache(prompts)[1]["blocks.0.mlp.hook_post"] for prompts in (clean, corrupted)
    ]
    delta = (z[0] - z[1])[:, END, 3, None] * model.blocks[0].mlp.W_out[3]
    delta = delta - delta.mean(-1, keepdim=True)
    scale = seen(model, corrupted, "blocks.1.ln2.hook_scale")[:, END]
    more = delta / scale * norm.original_component.weight @ mlp.W_in[:, 5]

    def add(value, hook):
        value = value.clone()
        value[:, END, 5] += more
        return value

    with torch.no_grad(), model.hooks(fwd_hooks=[("blocks.1.mlp.hook_pre", add)]):
        expected = difference(model(corrupted))
    got = sweep.frame.set_index(["sender", "receiver"])["value"]["L0N3", "L1N5"]
    assert abs(got - expected) < 1e-10 * abs(sweep.clean_value - sweep.corrupted_value)
    # To the logits, with held scales, the effects of two heads add up.
    parts = [effect["L0N3.0", "logits"], effect["L0N3.1", "logits"]]
    assert abs(sum(parts) - effect["L0N3", "logits"]) < 1e-10
    assert all(abs(value) > 1e-6 for value in parts)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(small, side):
    model, clean, corrupted = small
    options = {"senders": ["L0H1", "L0N3"], "receivers": ["L1H0", "L1N5", "logits"], "part": "z"}
    options |= {"positions": -1, "progress": False, "direction": "noise"}
    whole, short = (
        p.path_patch(model, clean[i, :n], corrupted[i, :n], METRIC, **options)
        for i, n in enumerate((POS, 3))
    )
    pad = torch.zeros(1, 2, dtype=torch.long)
    mask = torch.ones_like(clean)

    def padded(x):
        row = [pad, x[1:, :3]] if side == "left" else [x[1:, :3], pad]
        return torch.cat([x[:1], torch.cat(row, dim=1)])

    mask[1, slice(2) if side == "left" else slice(3, None)] = 0
    sweep = p.path_patch(model, padded(clean), padded(corrupted), METRIC, mask=mask, **options)
    expected = (whole.frame["value"] + short.frame["value"]) / 2
    assert (sweep.frame["value"] - expected).abs().max() < 1e-12
    assert (sweep.frame["value"] - sweep.clean_value).abs().min() > 1e-9


def test_senders_that_say_where(small):
    model, clean, corrupted = small
    options = {"receivers": ["L1H0", "logits"], "part": "z", "progress": False}
    sweep = p.path_patch(model, clean, corrupted, METRIC, senders=["L0H1@4", "L0N3@1"], **options)
    assert list(sweep.frame[["sender", "position"]].itertuples(index=False, name=None)) == [
        ("L0H1", END), ("L0H1", END), ("L0N3", 1), ("L0N3", 1)
    ]  # fmt: skip
    for sender, position in (("L0H1", END), ("L0N3", 1)):
        one = p.path_patch(
            model, clean, corrupted, METRIC, senders=sender, positions=position, **options
        )
        values = sweep.frame["value"][sweep.frame["sender"] == sender]
        assert values.tolist() == pytest.approx(one.frame["value"].tolist(), abs=1e-12)
        assert values.nunique() > 1


def test_refusals(small):
    model, clean, corrupted = small
    call = {"senders": "L0H1", "receivers": "L1H0", "progress": False}

    def refused(match, metric=METRIC, **options):
        with pytest.raises(InputError, match=match):
            p.path_patch(model, clean, corrupted, metric, **call | options)

    refused("expected one of q, k, value", part="v")
    refused("do not depend on the token", part="k", receivers=["L1H0", "L1N5"])
    refused("a later layer", senders="L1N5")
    refused("gradient is zero", metric=p.kl(), direction="noise", top=3)


def test_a_run_with_nan_says_so():
    """This bridge's logits are nan for every token of a prompt with left padding."""
    model, (clean, corrupted) = bridges.exposed_copy(bridges.boot("llama")), prompts()
    mask = torch.ones_like(clean)
    mask[1, 0] = 0
    assert model(clean, attention_mask=mask)[1].isnan().all()  # the bridge alone returns nan
    call = {"senders": "L0H1", "receivers": "L1H0", "mask": mask, "progress": False}
    with pytest.raises(
        InputError,
        match=r"(?s)float64, first at blocks\.0\.hook_resid_post, in 1 of 2.*use float32",
    ):
        p.path_patch(model, clean, corrupted, METRIC, **call)
