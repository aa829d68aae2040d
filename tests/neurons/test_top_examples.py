"""Tests of top examples and histograms against a slow loop over texts, a cache, and a sort."""

import json
import math
from functools import partial

import pytest
import torch
from allocations import Allocated
from bridges import boot, exposed_copy
from common import D_VOCAB
from tiny_tokenizer import tiny_tokenizer

from attn_only_lens import (
    Bilinear,
    HeadName,
    Work,
    expose_neuron_heads,
    load,
    neuron_pattern,
    neurons,
)
from attn_only_lens import patching as p
from attn_only_lens.errors import InputError
from attn_only_lens.neurons import statistics
from attn_only_lens.neurons import summary as so_far
from attn_only_lens.neurons.statistics import examples_of

pytestmark = pytest.mark.numeric

NAMES = ["L0N3", "L1N0", "L1N29"]
CONTEXT = 7
corpus_of = partial(neurons.Corpus, context=CONTEXT)
MODELS = {
    "plain": lambda: exposed_copy(boot("gpt2")),
    "gated": lambda: exposed_copy(boot("llama")),
    "relu": lambda: exposed_copy(boot("neox_sequential")),  # its gates are exactly 0 or 1
    "bilinear": lambda: exposed_copy(boot("gpt2"), gate=Bilinear(2)),
    "attends to padding": lambda: exposed_copy(boot("bert")),
}


@pytest.fixture(scope="module", params=MODELS)
def model_and_rows(request):
    """Return a model, and its neurons at every token."""
    model = MODELS[request.param]()
    return model, looked_up(model, corpus(), NAMES)


@pytest.fixture(scope="module")
def plain():
    return MODELS["plain"]()


def corpus():
    """Return texts of different lengths: one is empty, one is cut in three, and two occur twice."""
    generator = torch.Generator().manual_seed(5)
    made = [
        torch.randint(0, D_VOCAB, (n,), generator=generator).tolist() for n in (5, 17, 3, 0, 7, 2)
    ]
    return [*made, made[2], made[0]]


def pieces(texts):
    for number, text in enumerate(texts):
        for first in range(0, len(text), CONTEXT):
            yield number, first, text[first : first + CONTEXT]


@torch.no_grad()
def looked_up(model, texts, names):
    """Return z, gate and value at every token by neuron, with its text and position, in order."""
    rows = {name: [] for name in names}
    for number, first, piece in pieces(texts):
        _, cache = model.run_with_cache(torch.tensor([piece]))
        for name in names:
            head = HeadName.parse(name)
            z, v = (cache[head.hook(point, model)][0] for point in "zv")
            z, v = (x[:, head.index, 0] for x in (z, v))
            gate = neuron_pattern(cache, name)[..., 0][0].tolist()
            for i, token in enumerate(piece):
                window = slice(max(0, i - 2), i + 2)
                rows[name].append(
                    {
                        **{"z": z[i].item(), "gate": gate[i], "value": v[i].item()},
                        **{"text": number, "at": first + i, "token": token},
                        **{"tokens": [str(token) for token in piece[window]]},
                        **{"values": z[window].tolist(), "gates": gate[window]},
                        "position": i - window.start,
                    }
                )
    return rows


@pytest.mark.parametrize("by", ["z", "gate"])
def test_they_are_those_of_a_sort(model_and_rows, by):
    (model, every), texts = model_and_rows, corpus()
    asked = model, NAMES, corpus_of(texts, before=2, after=1)
    one = neurons.top_examples(*asked, k=4, by=by, work=Work(batch_size=1))
    many = neurons.top_examples(*asked, k=4, by=by, work=Work(batch_size=3))
    has_equals = False
    for name in NAMES:
        for end, sign in (("largest", -1), ("smallest", 1)):
            expected = sorted(every[name], key=lambda row: sign * row[by])[:4]  # stable
            last = sorted(every[name][::-1], key=lambda row: sign * row[by])[:4]
            has_equals |= last != expected
            rows, others = (
                f[(f["name"] == name) & (f["end"] == end)].to_dict("records") for f in (one, many)
            )
            assert [row["rank"] for row in rows] == [1, 2, 3, 4]
            for row, expected_row in zip(rows, expected, strict=True):
                for key in ("text", "at", "tokens", "position"):
                    assert row[key] == expected_row[key]
                assert row["values"] == pytest.approx(expected_row["values"], rel=1e-9, abs=1e-12)
                assert row["gates"] == pytest.approx(expected_row["gates"], rel=1e-9)
                assert row["value"] == pytest.approx(expected_row[by], rel=1e-9, abs=1e-12)
            # Another batch size only changes rounding.
            values, others = ([row["value"] for row in x] for x in (rows, others))
            assert others == pytest.approx(values, rel=1e-9, abs=1e-12)
    assert has_equals  # control: the order of equal values is tested


def bins(x):
    """Count values in 64 bins of |x| for each sign, one by one."""
    limit = 2.0 ** max(math.ceil(math.log2(abs(value))) if value else -40 for value in x)
    counts = [0] * 128
    for value in x:
        place = max(1, math.ceil(abs(value) * 64 / limit))
        counts[64 - place if value < 0 else 63 + place] += 1
    return counts, limit


def test_histograms_are_those_of_all_tokens_at_once(model_and_rows):
    (model, rows), texts = model_and_rows, corpus()
    statistics = neurons.corpus_statistics(
        model, NAMES, corpus_of(texts), work=Work(batch_size=3)
    ).neurons
    assert statistics.n_tokens == sum(map(len, texts))
    assert statistics.n_texts == len(texts)
    for number, name in enumerate(NAMES):
        for quantity in ("z", "gate", "value"):
            counts, limit = bins([row[quantity] for row in rows[name]])
            got, edges = statistics.histogram(name, quantity)
            assert got.tolist() == counts
            assert (edges[0], edges[64], edges[-1]) == (-limit, 0, limit)
        zeros = sum(row["z"] == 0 for row in rows[name])
        assert statistics.counts["zeros"][number] == zeros
        joint = statistics.counts["joint"][number]
        for quantity, of_axis in (("gate", joint.sum(1)), ("value", joint.sum(0))):
            fine = torch.tensor(bins([row[quantity] for row in rows[name]])[0])
            coarse = fine.view(32, 4).sum(1)
            assert of_axis.tolist() == [*coarse[:16].flip(0).tolist(), *coarse[16:].tolist()]


def mlp_of(model, name):
    return model.original_model.model.layers[HeadName.parse(name).layer].mlp


def test_quadrants_are_those_of_a_sort(plain, tmp_path):
    """An input of exactly 0 counts as positive, whatever the sign of the other factor."""
    model, texts = MODELS["gated"](), corpus()
    with torch.no_grad():
        mlp_of(model, "L0N3").gate_proj.weight[3] = 0.0
        mlp_of(model, "L1N0").up_proj.weight[0] = 0.0
    statistics = neurons.corpus_statistics(
        model, NAMES, corpus_of(texts), k=4, work=Work(batch_size=3)
    ).neurons
    read = load(statistics.save(tmp_path / "found.safetensors"))
    frame, shares = read.quadrant_examples(), read.quadrants().set_index("name")
    for name, every in looked_up(model, texts, NAMES).items():
        mlp, seen = mlp_of(model, name), []
        hook = mlp.register_forward_pre_hook(lambda module, args, to=seen: to.append(args[0][0]))
        with torch.no_grad():
            for _, _, piece in pieces(texts):
                model(torch.tensor([piece]))
        hook.remove()
        x, index = torch.cat(seen), HeadName.parse(name).index
        signs = [(x @ part.weight[index] >= 0).tolist() for part in (mlp.gate_proj, mlp.up_proj)]
        for quadrant in ("++", "+-", "-+", "--"):
            inside = [
                row
                for row, *both in zip(every, *signs, strict=True)
                if both == [sign == "+" for sign in quadrant]
            ]
            assert shares[quadrant][name] == pytest.approx(len(inside) / len(every))
            rows = frame[(frame["name"] == name) & (frame["end"] == quadrant)]
            expected = sorted((abs(row["z"]) for row in inside), reverse=True)[:3]
            assert rows["value"].tolist() == pytest.approx(expected)
            for row in rows.to_dict("records"):
                place = next(x for x in inside if (x["text"], x["at"]) == (row["text"], row["at"]))
                assert abs(place["z"]) == pytest.approx(row["value"])
    assert (frame["end"].value_counts() > 0).sum() == 4
    ungated = neurons.corpus_statistics(plain, NAMES, corpus_of(texts)).neurons
    with pytest.raises(InputError, match="the neurons have no quadrants"):
        ungated.quadrant_examples()


def test_statistics_are_kept(plain, tmp_path):
    statistics = neurons.corpus_statistics(plain, NAMES, corpus_of(corpus()), k=3).neurons
    read = load(statistics.save(tmp_path / "found.safetensors"))
    assert read.frame().equals(statistics.frame())
    assert torch.equal(read.counts["joint"], statistics.counts["joint"])
    one, frame = read.of(["L1N29"]), statistics.frame()
    assert one.frame().equals(frame[frame["name"] == "L1N29"].reset_index(drop=True))
    examples = examples_of(frame, "L1N29")
    assert len(examples) == 6
    assert examples[0].values[examples[0].position] == examples[0].value


def test_a_frame_without_pyarrow_holds_the_same_lists(plain, monkeypatch):
    result = neurons.corpus_statistics(plain, NAMES, corpus_of(corpus()), k=3).neurons
    arrow = result.frame()
    monkeypatch.setattr(statistics, "find_spec", lambda name: None)
    plain_lists = result.frame()
    assert plain_lists["tokens"].dtype == object != arrow["tokens"].dtype
    assert plain_lists.to_dict("records") == arrow.to_dict("records")


def by_loss(model, text, name, position, scale):
    """Return the loss of a text when a neuron's z at a position is multiplied by `scale`."""
    head = HeadName.parse(name)

    def multiply(z, hook):
        z = z.clone()
        z[:, position, head.index] *= scale
        return z

    with torch.no_grad():
        hooks = [(head.hook("z", model), multiply)]
        logits = model.run_with_hooks(torch.tensor([text]), fwd_hooks=hooks)
    logs = logits[0, :-1].log_softmax(-1)
    return -logs[torch.arange(len(text) - 1), torch.tensor(text[1:])].mean().item()


def test_attributions_are_derivatives():
    model, texts = exposed_copy(boot("llama")), [[3, 5, 7, 11], [2, 13, 17]]
    names, by = ["L0N3", "L1N29"], {"by": "attribution", "metric": p.loss()}
    corpus = corpus_of(texts, ends="largest")
    found = neurons.corpus_statistics(model, [*names, "L1H1"], corpus, k=7, **by)
    frame = found.neurons.frame()
    assert len(frame) == 14
    assert (frame["value"].abs() > 1e-7).sum() >= 8  # z of the last tokens has no effect
    for row in [*frame.to_dict("records"), *found.heads.frame().to_dict("records")]:
        place = texts[row["text"]], row["name"], row["at"]
        # The steps are large because LLaMA's norm computes in float32.
        slope = (by_loss(model, *place, 1.01) - by_loss(model, *place, 0.99)) / 0.02
        assert row["value"] == pytest.approx(slope, rel=0.005, abs=1e-5)
    # Texts of one token have no loss, and other texts are not affected.
    short = corpus_of([[3], [5], *texts], ends="largest")
    shifted = neurons.top_examples(model, names, short, k=9, work=Work(batch_size=2), **by)
    shifted = shifted[shifted["text"] > 1]
    places = ["name", "text", "at"]
    values, expected = (
        examples.sort_values(places)["value"].tolist() for examples in (shifted, frame)
    )
    assert values == pytest.approx(expected, rel=1e-6, abs=1e-9)
    whole = p.custom(lambda logits: logits[:, -1].mean())
    with pytest.raises(InputError, match="one number for 2 texts; expected a tensor"):
        neurons.top_examples(model, "L0N3", corpus_of(texts), **by | {"metric": whole})


@pytest.fixture(scope="module")
def of_words(tmp_path_factory):
    model = boot("gpt2")
    model.cfg.tokenizer_prepends_bos, model.cfg.default_prepend_bos = False, True
    model.tokenizer = tiny_tokenizer(D_VOCAB, tmp_path_factory.mktemp("words"))
    return expose_neuron_heads(model).model


def test_corpora_of_every_form(of_words, tmp_path):
    texts = ["w3 w5 w7", "", "w11 w2 w13 w17 w19 w23 w29 w31", "w3 w5 w7"]
    (tmp_path / "texts.txt").write_bytes("\r\n".join(["\ufeff" + texts[0], *texts[1:]]).encode())
    of_dicts = [{"text": text, "other": 1} for text in texts]
    lines = [json.dumps(text) if text["text"] else "" for text in of_dicts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    forms = [
        *(texts, (text for text in texts), of_dicts),
        *([of_words.to_tokens(text)[0] for text in texts], tmp_path / "texts.txt"),
        str(tmp_path / "texts.jsonl"),
    ]
    frames = [neurons.top_examples(of_words, NAMES, corpus_of(form), k=5) for form in forms]
    assert all(frame.equals(frames[0]) for frame in frames)
    # If texts have BOS, it starts every piece and is not an example.
    assert (frames[0]["at"] > 0).all()
    largest = corpus_of(texts, ends="largest")
    whole = neurons.top_examples(of_words, "L0N3", largest, k=20)
    assert sorted(whole["at"][whole["text"] == 2]) == list(range(1, 9))
    assert len(whole) == 3 + 8 + 3
    begun = whole[(whole["text"] == 2) & (whole["at"] == 7)].iloc[0]
    assert "".join(begun["tokens"]).strip() == "<bos> w29 w31"


def interrupted(texts, after):
    for number, text in enumerate(texts):
        if number == after:
            raise KeyboardInterrupt
        yield text


def test_an_interrupted_pass_goes_on(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(so_far, "_SECONDS", 0.0)
    texts, folder = corpus(), tmp_path / "kept"
    options = {"k": 3, "work": Work(batch_size=2, resume=folder)}
    with pytest.raises(KeyboardInterrupt):
        neurons.corpus_statistics(plain, NAMES, corpus_of(interrupted(texts, 5)), **options)
    ran = []
    add = so_far.add_counts
    monkeypatch.setattr(so_far, "add_counts", lambda *x: (ran.append(1), add(*x)))
    statistics = neurons.corpus_statistics(plain, NAMES, corpus_of(iter(texts)), **options).neurons
    assert len(ran) == 2 * 2  # two layers and two batches: 6 of 9 pieces were done, and 3 are left
    whole = neurons.corpus_statistics(
        plain, NAMES, corpus_of(texts), k=3, work=Work(batch_size=2)
    ).neurons
    assert statistics.frame().equals(whole.frame())
    assert torch.equal(statistics.counts["joint"], whole.counts["joint"])
    assert (statistics.n_texts, statistics.n_tokens) == (whole.n_texts, whole.n_tokens)
    # The folder accepts more texts after the first ones, but no changed texts or options.
    longer = neurons.corpus_statistics(plain, NAMES, corpus_of([*texts, [3, 4]]), **options).neurons
    assert longer.n_tokens == whole.n_tokens + 2
    for other_texts, more, reason in (
        ([[1, 2, 3], *texts[1:], [3, 4]], {}, "does not begin with"),
        ([[], *texts, [3, 4]], {}, "does not begin with"),  # other text numbers
        (texts[:3], {}, "does not begin with"),
        (texts, {"k": 5}, "k: got 5; the folder has 3"),
    ):
        with pytest.raises(InputError, match=reason):
            neurons.corpus_statistics(plain, NAMES, corpus_of(other_texts), **(options | more))


@pytest.mark.parametrize(
    ("names", "corpus", "reason"),
    [
        (["L0H1"], corpus_of([[1]]), "got L0H1, an attention head; expected neurons"),
        (
            p.Sites(NAMES, -1),
            corpus_of([[1]]),
            "got positions=-1; expected heads without",
        ),
        (NAMES, corpus_of([[]]), "has no tokens except BOS"),
        (NAMES, corpus_of("no.txt"), "'no.txt' is not a file of texts.*put a single text into a"),
        (NAMES, neurons.Corpus([[1]], context=18), "got context=18; expected 2 to 17, the model's"),
    ],
)
def test_refused(plain, names, corpus, reason):
    with pytest.raises(InputError, match=reason):
        neurons.top_examples(plain, names, corpus)


def test_a_corpus_is_refused_with_every_reason():
    with pytest.raises(InputError) as refused:
        neurons.Corpus({"text": "a"}, context=1, ends="first", before=-1, after=0.5)
    assert len(refused.value.reasons) == 5


def test_activations_that_are_not_finite_are_refused():
    model = exposed_copy(boot("gpt2"))
    with torch.no_grad():
        model.W_E[7] = math.inf  # padding cannot be tested, so each text runs alone
    with pytest.raises(InputError, match="an activation in texts 1 to 1 is not finite"):
        neurons.top_examples(model, NAMES, corpus_of([[1, 2], [3, 7]]))


def test_memory_holds_the_result_once(plain):
    """Layers write to parts of one tensor, so that no copy joins them."""
    with Allocated() as memory:
        found = neurons.corpus_statistics(plain, "neurons", corpus_of(corpus()), k=40).neurons
    kept = sum(x.nbytes for x in (*found.examples.values(), *found.counts.values()))
    assert memory.most < 1.8 * kept  # 2.0 with a copy
