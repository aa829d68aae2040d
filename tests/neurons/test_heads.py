"""Tests of attention heads over a corpus, against a slow loop over texts with a cache."""

from collections import defaultdict
from functools import partial

import pytest
import torch
from bridges import boot, exposed_copy
from common import D_VOCAB
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import HeadName, Work, load, neurons
from attn_only_lens.engine.tokens import token_text
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.neurons import summary as so_far

pytestmark = pytest.mark.numeric

CONTEXT = 7
corpus_of = partial(neurons.Corpus, context=CONTEXT, before=1, after=1)
NAMES = ["L0H1", "L1H0", "L1H1"]
MODELS = {
    "plain": lambda: exposed_copy(boot("gpt2")),
    "grouped queries": lambda: exposed_copy(boot("llama")),
    "attends to padding": lambda: exposed_copy(boot("bert")),
}


@pytest.fixture(scope="module")
def plain():
    return MODELS["plain"]()


def corpus(bos=1):
    """Return short texts with few different tokens; one is empty and one is cut in three."""
    generator = torch.Generator().manual_seed(7)
    return [
        [bos] * (n > 0) + torch.randint(5, 15, (n,), generator=generator).tolist()
        for n in (5, 15, 2, 0, 6)
    ]


@torch.no_grad()
def looked_up(model, texts, name, has_bos):
    """Return one row per token: a head's attention and the norm of its output."""
    head, rows = HeadName.parse(name), []
    W_O = host_of(model).attention(head.layer).W_O[head.index].detach()
    for number, text in enumerate(texts):
        step, body = CONTEXT - has_bos, text[has_bos:]
        for first in range(0, len(body), step):
            piece = text[:has_bos] + body[first : first + step]
            _, cache = model.run_with_cache(torch.tensor([piece]))
            pattern = cache[head.hook("pattern", model)][0, head.index]
            z = cache[head.hook("z", model)][0, :, head.index]
            for q in range(has_bos, len(piece)):
                low = max(0, q - 4)
                rows.append(
                    {
                        "piece": piece,
                        "q": q,
                        "row": pattern[q].tolist(),
                        "norm": (z[q] @ W_O).norm().item(),
                        "place": (number, first + q),
                        "tokens": piece[low : q + 2],
                        "weights": pattern[q, low : q + 2].tolist(),
                        "position": q - low,
                        "bos": pattern[q, 0].item() * has_bos,
                    }
                )
    return rows


@pytest.mark.parametrize(
    ("name", "has_bos"),
    [("plain", True), ("grouped queries", False), ("attends to padding", False)],
)
def test_they_are_those_of_a_loop_over_texts(name, has_bos, monkeypatch, tmp_path):
    model = MODELS[name]()
    tokenizer = tiny_tokenizer(D_VOCAB, tmp_path) if has_bos else None
    monkeypatch.setattr(model, "tokenizer", tokenizer)
    bos = tokenizer.bos_token_id if has_bos else 1
    texts, shown = corpus(bos), partial(token_text, model)
    work = Work(batch_size=1 + 2 * has_bos)
    statistics = neurons.corpus_statistics(model, NAMES, corpus_of(texts), k=4, work=work).heads
    frame, looks = statistics.frame(), statistics.looks().set_index("name")
    for name in NAMES:
        every = looked_up(model, texts, name, has_bos)
        n = len(every)
        assert statistics.n_tokens == n
        assert looks["bos"][name] == pytest.approx(sum(row["bos"] for row in every) / n)
        offsets, moved = defaultdict(float), [defaultdict(float), defaultdict(float)]
        count = defaultdict(int)
        for row in every:
            count[row["piece"][row["q"]]] += 1
            for k in range(has_bos, len(row["piece"])):
                offsets[row["q"] - k] += row["row"][k] / n
                if k != row["q"]:
                    moved[0][row["piece"][k]] += row["row"][k]
                    moved[1][row["piece"][row["q"]]] += row["row"][k]
        got = statistics.offsets(name)
        assert got.to_dict() == pytest.approx({i: offsets[i] for i in got.index}, abs=1e-12)
        assert looks["itself"][name] == pytest.approx(offsets[0])
        assert looks["previous"][name] == pytest.approx(offsets[1])
        assert looks["bos"][name] + got.sum() == pytest.approx(1)
        for side, sums in zip(("attended", "attending"), moved, strict=True):
            rows = statistics.tokens(name, side)
            shares = {shown(t): x / sum(sums.values()) for t, x in sums.items() if x}
            assert dict(zip(rows["token"], rows["share"], strict=True)) == pytest.approx(shares)
            means = {shown(token): x / count[token] for token, x in sums.items() if x}
            assert dict(zip(rows["token"], rows["mean"], strict=True)) == pytest.approx(means)
            assert rows["share"].is_monotonic_decreasing
        expected = sorted(every, key=lambda row: -row["norm"])[:4]
        for row, oracle in zip(
            frame[frame["name"] == name].to_dict("records"), expected, strict=True
        ):
            assert row["value"] == pytest.approx(oracle["norm"], rel=1e-9)
            # Rounding may change the order of equal values.
            place = row["text"], row["at"]
            oracle = next(candidate for candidate in every if candidate["place"] == place)
            assert row["value"] == pytest.approx(oracle["norm"], rel=1e-9)
            assert row["position"] == oracle["position"]
            assert list(row["tokens"]) == list(map(shown, oracle["tokens"]))
            assert list(row["weights"]) == pytest.approx(oracle["weights"], rel=1e-9, abs=1e-12)
            assert row["bos"] == pytest.approx(oracle["bos"], rel=1e-9)


def test_one_pass_for_both_is_kept_and_goes_on(plain, tmp_path, monkeypatch):
    texts, names = corpus()[:3] + corpus()[4:], [*NAMES, "L0N3", "L1N29"]
    options, whole = {"k": 3, "work": Work(batch_size=2)}, corpus_of(texts)
    both = neurons.corpus_statistics(plain, names, whole, **options)
    heads = neurons.corpus_statistics(plain, NAMES, whole, **options).heads
    only = neurons.corpus_statistics(plain, ["L0N3", "L1N29"], whole, **options).neurons
    for got, reference in ((both.heads, heads), (both.neurons, only)):
        values, others = (x.frame()["value"].tolist() for x in (got, reference))
        assert values == pytest.approx(others, rel=1e-9)
    read = load(heads.save(tmp_path / "heads.safetensors"))
    assert read.frame().equals(heads.frame())
    assert read.of(["L1H0"]).looks().equals(heads.looks().iloc[[1]].reset_index(drop=True))
    monkeypatch.setattr(so_far, "_SECONDS", 0.0)
    options["work"] = Work(batch_size=2, resume=tmp_path / "kept")
    neurons.corpus_statistics(plain, names, corpus_of(texts[:2]), **options)
    resumed = neurons.corpus_statistics(plain, names, whole, **options)
    assert resumed.heads.looks()["bos"].tolist() == pytest.approx(both.heads.looks()["bos"])
    for side in ("attended", "attending"):
        got, reference = (x.heads.tokens("L1H0", side) for x in (resumed, both))
        assert got["token"].tolist() == reference["token"].tolist()
        assert got["mean"].tolist() == pytest.approx(reference["mean"].tolist())
    with pytest.raises(InputError, match="got L0H1, an attention head"):
        neurons.top_examples(plain, ["L0H1"], whole)
