"""All-attention layers, both ways: MLPs as persistent vectors, and persistent vectors as neurons.

Sukhbaatar et al., "Augmenting Self-attention with Persistent Memory" (2019), leave MLPs out, and
give each ordinary head N learned pairs of a key and a value: *persistent vectors*. A head's queries
attend, in one softmax, to the text and to its persistent vectors. This study compares both forms
(`all_attention_models.py` has the constructions), and trains four arms of `train_attention_only.py`
on Small English.

Let a_n = q·key_n / √d_head be the score of persistent vector n of a head at a token, and p_n its
weight in the pattern. *Leaving out* a vector has two meanings: `zeroed`, where its value is 0 and
the pattern stays; and `deleted`, where its key is removed, so that the other weights grow.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor
from tqdm import tqdm

from analyses.studies import all_attention_models as forms
from analyses.studies import attention_only_models as models
from analyses.studies.all_attention_models import AllAttentionModel, Layer, direct
from analyses.studies.attention_only_models import AllAttention, Neurons, sublayers_of
from analyses.studies.train_attention_only import COLOURS, SEED_OF_SEARCH, Text, late, slug, train
from analyses.study import Setting, Study, Tables
from analyses.tools import small_english as english
from analyses.tools.training import claim
from attn_only_lens import expose_neuron_heads, neuron_pattern
from attn_only_lens.gates import bilinear_gate
from attn_only_lens.gates.exact import GATES

ARMS = ("mlp", "mlp, an eighth", "all-attention", "neither")
TASK = "number, simple"
TENTH = 0.1
ENGLISH = Text(48, 4, 192, 1200, 480, 12, (8e-3, 1.6e-2, 3.2e-2), 50)
CS = (1e-1, 1e0, 1e1, 1e2, 1e3, 1e4, 1e6)  # sizes of memory tokens' embeddings
CS_OF_SMOKE = (1e3,)
RANGE = torch.linspace(-12, 12, 4801, dtype=torch.float64)
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "quick_gelu": lambda q: q * torch.sigmoid(1.702 * q),
    "gelu": torch.nn.functional.gelu,
    "gelu_new": lambda q: torch.nn.functional.gelu(q, approximate="tanh"),
    "relu": torch.relu,
}


@dataclass(frozen=True)
class Sizes:
    """What determines the result."""

    text: Text = ENGLISH
    few: int = 4  # held-out batches for measures of single vectors
    every: int = 24  # every 24th vector or neuron is left out alone


SMOKE = Sizes(
    Text(8, 2, 16, 4, 2, 2, (1e-2,), 2, n_layers=2, rows=3, n_held_out=2, prompts=5),
    few=2,
)


def run(setting: Setting) -> Tables:
    """Train and measure the arms; then read the models of seed 0."""
    sizes = SMOKE if setting.smoke else Sizes()
    claim(setting.runs / "study.txt", f"{sizes!r}\n")
    task, rows, curves, kept = sizes.text, [], [], {}
    held_out = task.pool(0, english.SEED_OF_HELD_OUT)[: task.n_held_out]
    batches = [x.to(setting.device) for x in sorted(held_out, key=lambda batch: batch.shape[1])]

    def trained(arm: str, seed: int, lr: float, steps: int) -> tuple[Any, pd.DataFrame]:
        folder = setting.runs / slug("text", arm, seed, lr)
        return train(task, arm, seed, lr, steps, folder, setting.device)

    for arm in tqdm(ARMS):
        search = {lr: trained(arm, SEED_OF_SEARCH, lr, task.search_steps)[1] for lr in task.lrs}
        best = min(search, key=lambda lr: late(search[lr]))
        spent = sum(curve["cpu_seconds"].iloc[-1] for curve in search.values())
        rows.append({"arm": arm, "seed": SEED_OF_SEARCH, "measure": "seconds", "value": spent})
        for seed in range(setting.n_seeds):
            model, curve = trained(arm, seed, best, task.steps)
            curves.append(curve.assign(arm=arm))
            kept.setdefault(arm, model)
            last = curve.iloc[-1]
            measures = {(None, name): last[name] for name in ("loss", "cpu_seconds")}
            measures |= {(None, "lr"): best} | measured(sizes, model, batches)
            measures |= ranks(model)
            rows += [
                {"arm": arm, "seed": seed, "layer": layer, "measure": measure, "value": value}
                for (layer, measure), value in measures.items()
            ]
    by = pd.concat(curves).groupby(["arm", "step"], sort=False)["loss"]
    return {
        "": pd.DataFrame(rows).replace({"measure": {"cpu_seconds": "seconds"}}),
        "curves": by.agg(["mean", "min", "max"]).reset_index(),
        "promoted": promoted(kept["all-attention"], batches, 8),
        **read(sizes, kept["mlp"].cpu(), kept["all-attention"].cpu()),
    }


Row = dict[str, Any]
Measures = dict[tuple[int | None, str], float]


@torch.no_grad()
def measured(sizes: Sizes, model: Any, batches: Sequence[Tensor]) -> Measures:
    """Return measures of a model by layer (None: of all) and name."""
    if isinstance(layer := sublayers_of(model)[0], AllAttention):
        if not layer.scaled_key.shape[1]:
            return {}
        found = usage(model, batches) | layer_costs(model, batches)
    elif models.size_of(layer) < sizes.text.d_mlp:
        return {}
    else:
        found = {}
    return found | summary_of(single_costs(model, batches, sizes.every, sizes.few))


def read(sizes: Sizes, mlp: Any, model: Any) -> dict[str, pd.DataFrame]:
    """Return what is exact, for two trained models."""
    weights, asked = forms.weights_of(model), english.questions(sizes.text.prompts)[TASK]
    of = english.tokenizer()
    clean = of(asked.clean[0], return_tensors="pt")["input_ids"][0]
    bridge = english.bridged(models.in_package(mlp.double()))
    few = torch.tensor([3, 1, 4, 1, 5, 9])
    cs = CS_OF_SMOKE if sizes is SMOKE else CS
    memory = [
        *by_size("trained, LayerNorm", weights, clean, cs),
        *by_size("random, RMSNorm", drawn("RMS"), few, cs),
        *by_size("random, no norm", drawn(None), few, cs),
    ]
    return {
        "exact": pd.DataFrame([*from_mlp(mlp, bridge, clean), *of_vectors(weights, clean)]),
        "gates": pd.DataFrame(of_gates()),
        "memory": pd.DataFrame(memory),
    }


def compared(part: str, claim: str, control: str, actual: Any, expected: Any, broken: Any) -> Row:
    """Return a row: how far two computations differ, and how far the control differs.

    Differences are relative to the largest expected number.
    """
    actual, expected, broken = (
        torch.as_tensor(x, dtype=torch.double).flatten() for x in (actual, expected, broken)
    )
    size = expected.abs().max()
    difference, of_control = ((actual - x).abs().max() / size for x in (expected, broken))
    row = {"part": part, "claim": claim, "difference": difference.item()}
    return row | {"control": control, "of control": of_control.item()}


# What persistent vectors do in trained models


@contextmanager
def deleted(sublayer: AllAttention, gone: Tensor) -> Iterator[None]:
    """Leave out persistent vectors [head, vector], so that other weights of their heads grow."""
    seen = sublayer.seen

    def without(pos: int, device: torch.device) -> Tensor:
        mask = seen(pos, device).expand(sublayer.n_heads, -1, -1).clone()
        mask[:, :, : gone.shape[1]] &= ~gone[:, None].to(device)
        return mask

    sublayer.seen = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        del sublayer.seen


@contextmanager
def zeroed(sublayer: AllAttention | Neurons, gone: Tensor) -> Iterator[None]:
    """Set values of persistent vectors [head, vector], or outputs of neurons [neuron], to zero."""
    weights = sublayer.W_O if isinstance(sublayer, Neurons) else sublayer.scaled_value
    kept = weights.data.clone()
    weights.data[gone] = 0
    try:
        yield
    finally:
        weights.data.copy_(kept)


def losses(model: Any, batches: Sequence[Tensor]) -> Tensor:
    """Return the mean loss of each batch."""
    return torch.stack([english.loss_of(model, batch) for batch in batches])


def usage(model: Any, batches: Sequence[Tensor]) -> Measures:
    """Return the use of persistent vectors in each layer, as means over heads.

    `weight` is the mean of Σ p_n; `effective`, the mean over tokens of the exponential of the
    entropy of p_n / Σ p_n; `explained`, the median over vectors of the share of the variance of
    log p_n that is linear in a_n. Padding does not count.
    """
    found: Measures = {}
    for layer, sublayer in enumerate(sublayers_of(model)):
        scores, weights = _at_tokens(model, sublayer, batches)
        share = weights / weights.sum(2, keepdim=True)
        entropy = -(share * share.clamp_min(1e-30).log()).sum(2)
        log = weights.clamp_min(1e-30).log()
        a, b = scores - scores.mean(1, keepdim=True), log - log.mean(1, keepdim=True)
        explained = (a * b).mean(1).square() / (a.square().mean(1) * b.square().mean(1))
        found[layer, "weight"] = weights.sum(2).mean().item()
        found[layer, "effective"] = entropy.exp().mean().item()
        found[layer, "explained"] = explained.median(1).values.mean().item()
    return found


def _at_tokens(model: Any, sublayer: Any, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return scores a_n and weights p_n of a layer, [head, token, vector], without padding."""
    n_vectors, scores, weights = sublayer.scaled_key.shape[1], [], []

    def note(module: Any, inputs: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        x = inputs[0] if inputs else kwargs["hidden_states"]
        a = sublayer.rows(x)[0] @ sublayer.key.transpose(-1, -2) / sublayer.d_head**0.5
        real = batch[:, :-1] != english.vocabulary()[english.EOS]
        scores.append(a.transpose(1, 2)[real])
        weights.append(sublayer.pattern(x)[..., :n_vectors].transpose(1, 2)[real])

    hook = sublayer.register_forward_pre_hook(note, with_kwargs=True)
    for batch in batches:
        model(batch[:, :-1])
    hook.remove()
    return torch.cat(scores).transpose(0, 1).double(), torch.cat(weights).transpose(0, 1).double()


def layer_costs(model: Any, batches: Sequence[Tensor]) -> Measures:
    """Return how much the loss grows without all persistent vectors of each layer."""
    whole, found = losses(model, batches).mean(), {}
    for layer, sublayer in enumerate(sublayers_of(model)):
        assert isinstance(sublayer, AllAttention)
        gone = torch.ones(sublayer.scaled_key.shape[:2], dtype=torch.bool)
        for name, without in (("deleted", deleted), ("zeroed", zeroed)):
            with without(sublayer, gone):
                found[layer, name] = (losses(model, batches).mean() - whole).item()
    return found


def single_costs(model: Any, batches: Sequence[Tensor], every: int, few: int) -> pd.DataFrame:
    """Return how much the loss grows without one persistent vector, or one neuron.

    Each `every`-th vector of a head, or neuron, is left out alone. Of the batches, sorted by
    length, `few` are used, from short to long; neighbours are in different halves, a and b.

    Returns:
        A frame with `layer`, `head`, `vector` (or neuron), `zeroed_a`, `zeroed_b`, `deleted_a` and
        `deleted_b`.
    """
    step = len(batches) // few
    chosen = batches[step // 2 :: step][:few]
    batches = [*chosen[::2], *chosen[1::2]]
    half, whole, rows = len(batches) // 2, losses(model, batches), []
    for layer, sublayer in enumerate(sublayers_of(model)):
        ways: dict[str, Any] = {"zeroed": zeroed}
        shape = (models.size_of(sublayer),)
        if isinstance(sublayer, AllAttention):
            ways, shape = ways | {"deleted": deleted}, (sublayer.n_heads, *shape)
        for head in range(shape[0] if len(shape) == 2 else 1):
            for vector in range(head, shape[-1], every):
                gone = torch.zeros(shape, dtype=torch.bool)
                gone[(head, vector)[-len(shape) :]] = True
                row = {"layer": layer, "head": head, "vector": vector}
                for name, without in ways.items():
                    with without(sublayer, gone):
                        more = losses(model, batches) - whole
                    row[f"{name}_a"], row[f"{name}_b"] = more[:half].mean(), more[half:].mean()
                rows.append(row)
    return pd.DataFrame(rows).astype(float)


def summary_of(costs: pd.DataFrame) -> Measures:
    """Return what predictions 5, 6 and 8 ask about single costs.

    `median` is the median cost of deleting, `order` is Spearman's ρ between zeroing and deleting,
    and `tenth` is the share of the summed positive costs on the second half of the texts that the
    strongest tenth has, chosen on the first half.
    """
    chosen = costs["zeroed_a"].nlargest(max(1, round(TENTH * len(costs)))).index
    positive = costs["zeroed_b"].clip(lower=0)
    found: Measures = {(None, "tenth"): positive[chosen].sum() / positive.sum()}
    if "deleted_a" in costs:
        means = {of: (costs[f"{of}_a"] + costs[f"{of}_b"]) / 2 for of in ("zeroed", "deleted")}
        found[None, "median"] = means["deleted"].median()
        found[None, "order"] = spearmanr(means["zeroed"], means["deleted"]).statistic
    return found


@torch.no_grad()
def promoted(model: Any, batches: Sequence[Tensor], k: int) -> pd.DataFrame:
    """Return what the vectors with the largest mean weight read and write in the last layer.

    Columns: `head`, `vector`, `weight` (the mean of p_n); `reads`, the tokens at which p_n is
    largest on average (over three occurrences or more); `writes`, the tokens whose logits
    value_n W_O raises most (with the last norm's gain, and its scale held).
    """
    sublayer: Any = sublayers_of(model)[-1]
    _, weights = _at_tokens(model, sublayer, batches)
    words = {i: word.strip() for word, i in english.vocabulary().items()}
    tokens = torch.cat([b[:, :-1][b[:, :-1] != english.vocabulary()[english.EOS]] for b in batches])
    counts = torch.bincount(tokens, minlength=len(words))
    W_O = sublayer.c_proj.weight.unflatten(0, (sublayer.n_heads, sublayer.d_head))
    rows, means = [], weights.mean(1)
    for index in means.flatten().topk(k).indices.tolist():
        head, vector = divmod(index, means.shape[1])
        sums = weights.new_zeros(len(words)).index_add_(0, tokens, weights[head, :, vector])
        read = (sums / counts).where(counts >= 3, -torch.inf)
        written = sublayer.value[head, vector] @ W_O[head]
        raised = model.lm_head.weight @ ((written - written.mean()) * model.transformer.ln_f.weight)
        row = {"head": head, "vector": vector, "weight": means[head, vector].item()}
        for name, of_tokens in (("reads", read), ("writes", raised)):
            row[name] = " ".join(words[i] for i in of_tokens.topk(4).indices.tolist())
        rows.append(row)
    return pd.DataFrame(rows)


# What is exact in the correspondence of persistent vectors and neurons, in float64


@torch.no_grad()
def from_mlp(model: Any, bridge: Any, text: Tensor) -> Iterator[Row]:
    """Yield rows about MLPs as all-attention layers (Remark 3), on a text [pos].

    The bridge is the same trained model, from `in_package`.
    """
    model, inputs, layers = model.double(), [], models.neurons_of(model)
    hooks = [x.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0])) for x in layers]
    logits = model(text[None]).logits[0]
    for hook in hooks:
        hook.remove()
    of_bridge, cache = expose_neuron_heads(bridge).model.run_with_cache(text[None])
    for layer, (sublayer, x) in enumerate(zip(layers, inputs, strict=True)):
        zero = x.new_zeros(sublayer.W_Q.shape[1])
        weights = (x, sublayer.W_Q, zero, sublayer.W_O, x.new_zeros(x.shape[1]))
        out, pattern = forms.neuron_layer(*weights)
        claim = f"MLP of layer {layer} = an all-attention layer with one persistent vector (-1, 0)"
        causal, other = (
            forms.neuron_layer(*weights, **x)[0] for x in ({"diagonal": False}, {"value": 1})
        )
        for control, broken in (
            ("a token sees earlier tokens too", causal),
            ("the vector's value is 1, not 0", other),
        ):
            yield compared("remark", claim, control, out, sublayer(x), broken)
        names = [f"L{layer}N{i}" for i in range(len(zero))]
        gates = torch.stack([neuron_pattern(cache, name)[0, :, 0] for name in names])
        claim = f"its weights on persistent vectors = 1 - the package's gates, layer {layer}"
        control, broken = "the gates of the next neuron", 1 - gates.roll(1, 0)
        yield compared("remark", claim, control, pattern[:, :, -1], 1 - gates, broken)
    what = "the package's model = the trained model", "of the next token"
    yield compared("remark", *what, of_bridge[0], logits, logits.roll(1, 0))


@torch.no_grad()
def of_gates() -> Iterator[Row]:
    """Yield how exact the persistent vector of a neuron is, by activation; the page has columns."""
    for name, act in ACTIVATIONS.items():
        gate, finest = GATES[name], bilinear_gate(name)
        output = gate.self_weight(RANGE) * gate.scale * RANGE
        row: Row = {"activation": name, "exact score": (output - act(RANGE)).abs().max().item()}
        row |= {"linear": gate.slope is not None, "one key": bilinear_gate(name, heads=1).bound}
        yield row | {"heads": len(finest.w), "their bound": finest.bound}


@torch.no_grad()
def of_vectors(model: AllAttentionModel, text: Tensor) -> Iterator[Row]:
    """Yield rows about persistent vectors as neurons, in each layer."""
    run, N = direct(model, text), model.n_vectors
    for number, layer in enumerate(model.layers):
        scores, weights = run.scores[number], run.weights[number]
        u = forms.normalised(run.streams[number], model.norm, model.eps) * layer.gain + layer.shift
        values = torch.cat([layer.value, u @ layer.W_V + layer.b_V[:, None]], dim=1)
        out = (weights @ values @ layer.W_O).sum(0) + layer.b_O
        offsets = (layer.key @ layer.b_Q[..., None]) / layer.key.shape[-1] ** 0.5
        a = torch.einsum("td,hnd->htn", u, reads_of(layer)) + offsets.transpose(1, 2)
        gates = (a - scores.logsumexp(-1, keepdim=True)).exp()
        text_part = (weights[..., N:] @ values[:, N:] @ layer.W_O).sum(0) + layer.b_O
        both, without_text = (
            text_part + torch.einsum("htn,hnd->td", x, layer.value @ layer.W_O)
            for x in (gates, a.softmax(-1))
        )
        claim = f"layer {number}: output = text part + Σ exp(a_n - log Z) value_n W_O"
        yield compared("vectors", claim, "Z without the text's scores", both, out, without_text)
        sigmoids = [
            (scores[..., n] - scores[..., torch.arange(N + len(text)) != n].logsumexp(-1)).sigmoid()
            for n in range(N)
        ]
        claim, p = f"layer {number}: p_n = σ(a_n - log Z of all other rows)", weights[..., :N]
        yield compared("vectors", claim, "σ(a_n)", torch.stack(sigmoids, -1), p, a.sigmoid())
        head, vector = divmod(int(weights[:, -1, :N].argmax()), N)
        without = direct(model, text, deleted=(number, head, vector))
        p = weights[head, :, vector, None]
        zeroed_z = weights[head] @ values[head] - p * layer.value[head, vector]
        deleted_z = without.weights[number][head] @ values[head]
        claim = f"layer {number}: deleting n = zeroing n, and dividing its head's z by 1 - p_n"
        yield compared("vectors", claim, "zeroing alone", zeroed_z / (1 - p), deleted_z, zeroed_z)
    shift = torch.linspace(-1, 1, model.layers[0].key.shape[-1]).double()
    keys = tuple(replace(x, key=x.key + shift) for x in model.layers)
    all_keys = tuple(replace(x, b_K=x.b_K + shift) for x in keys)
    both, alone = (direct(replace(model, layers=x), text).logits for x in (all_keys, keys))
    claim = "a shift of all keys of a head, of vectors and text, changes nothing"
    yield compared("vectors", claim, "a shift of persistent keys alone", both, run.logits, alone)


def reads_of(layer: Layer) -> Tensor:
    """Return W_Q key_n / √d_head, the input direction of each vector, [head, vector, d_model]."""
    return layer.key @ layer.W_Q.transpose(1, 2) / layer.key.shape[-1] ** 0.5


@torch.no_grad()
def ranks(model: Any) -> Measures:
    """Return how many dimensions the input and output directions of vectors of a head span.

    Directions of neurons are those of all neurons of a layer.
    """
    layers: list[Any] = models.neurons_of(model)
    found: Measures = {}
    for number, neurons in enumerate(layers):
        for name, directions in (("read", neurons.W_Q), ("write", neurons.W_O)):
            found[number, name] = float(torch.linalg.matrix_rank(directions.double()))
    if not layers and models.size_of(sublayers_of(model)[0]):
        for number, layer in enumerate(forms.weights_of(model).layers):
            for name, of_heads in (("read", reads_of(layer)), ("write", layer.value @ layer.W_O)):
                found[number, name] = float(torch.linalg.matrix_rank(of_heads).max())
    return found


@torch.no_grad()
def by_size(
    name: str, model: AllAttentionModel, text: Tensor, cs: Sequence[float]
) -> Iterator[Row]:
    """Yield the error of the loaded model's logits by the size c of memory tokens.

    `written` is the largest share of a memory row's length, before the last layer, that heads have
    written.
    """
    N, expected, width = model.n_vectors, direct(model, text).logits, model.W_E.shape[1]
    tokens = forms.with_memory(text[None], N, len(model.W_E))
    hook = f"blocks.{len(model.layers) - 1}.hook_resid_pre"
    for c in cs:
        row: Row = {"model": name, "c": c}
        for column, corrected in (("uncorrected", False), ("corrected", True)):
            host = forms.loaded(model, c, corrected=corrected)
            logits, cache = host.run_with_cache(tokens, names_filter=[hook])
            row[column] = ((logits[0, N:] - expected).abs().max() / expected.abs().max()).item()
        memory = cache[hook][0, :N]
        row["written"] = (memory[:, :width].norm(dim=1) / memory.norm(dim=1)).max().item()
        yield row


def drawn(norm: Any, seed: int = 1) -> AllAttentionModel:
    """Return a small model with random weights; sizes are distinct primes."""
    generator = torch.Generator().manual_seed(seed)
    width, heads, d_head, vectors, vocabulary, positions, n_layers = 7, 2, 3, 5, 11, 13, 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * (1 if norm else 0.3)

    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("W_Q", "W_K", "W_V"), (heads, width, d_head)
    )
    shapes |= {"W_O": (heads, d_head, width)} | dict.fromkeys(
        ("b_Q", "b_K", "b_V"), (heads, d_head)
    )
    shapes |= {"b_O": (width,)} | dict.fromkeys(("key", "value"), (heads, vectors, d_head))

    def gains() -> dict[str, Tensor]:
        gain = normal(width) if norm else torch.ones(width).double()
        return {"gain": gain, "shift": normal(width) if norm == "LN" else 0 * gain}

    layers = tuple(
        Layer(**{name: normal(*shape) for name, shape in shapes.items()}, **gains())
        for _ in range(n_layers)
    )
    ends = (normal(vocabulary, width), normal(positions, width), normal(width, vocabulary))
    return AllAttentionModel(layers, *ends, norm, **gains(), eps=1e-3)


# The page


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    measures, exact, memory = (tables[part] for part in ("", "exact", "memory"))
    trained = memory[memory["model"].str.startswith("trained")].set_index("c")

    def of(measure: str, arm: str = "all-attention", layer: int | None = None) -> Any:
        rows = measures.query("measure == @measure and arm == @arm and seed < @SEED_OF_SEARCH")
        rows = rows[rows["layer"].isna() if layer is None else rows["layer"] == layer]
        return rows.set_index("seed")["value"]

    def closed(arm: str = "all-attention") -> Any:
        neither, mlp = of("loss", "neither"), of("loss", "mlp")
        return (neither - of("loss", arm)) / (neither - mlp)

    def rows(part: str) -> pd.DataFrame:
        chosen = exact[exact["part"] == part].drop(columns="part").dropna(axis=1)
        return chosen.rename(columns={"of control": "difference of the control"})

    return {
        "of": of,
        "above": lambda arm="all-attention": of("loss", arm) / of("loss", "mlp") - 1,
        "closed": closed,
        "rows": rows,
        "arms": ARMS,
        "minutes": measures.query("measure == 'seconds'")["value"].sum() / 60,
        "trained": trained,
        "n_seeds": measures.query("measure == 'loss'")["seed"].nunique(),
    }


def figures(tables: Tables) -> Mapping[str, Figure]:
    """Draw losses by step (mean and range), and the error of memory tokens by c."""
    picture = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = picture.subplots(1, 2)
    for arm in ARMS:
        rows = tables["curves"].query("arm == @arm and step > 0")
        style = "--" if "," in arm else "-"
        left.plot(rows["step"], rows["mean"], color=COLOURS[arm], linestyle=style, label=arm)
        left.fill_between(
            rows["step"], rows["min"], rows["max"], color=COLOURS[arm], alpha=0.15, lw=0
        )
    left.set(xlabel="step", ylabel="held-out loss, nats", title="Small English")
    for number, (name, rows) in enumerate(tables["memory"].groupby("model", sort=False)):
        right.plot(rows["c"], rows["uncorrected"], f"C{number}--")
        right.plot(rows["c"], rows["corrected"], f"C{number}-", label=name)
    right.set(xscale="log", yscale="log", xlabel="size c of memory tokens")
    right.set_title("error of logits (dashed: uncorrected)")
    for panel, place in ((left, "upper right"), (right, (0.66, 0.22))):
        panel.legend(fontsize="small", loc=place)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    return {"": picture}


STUDY = Study(run, figures, facts, n_seeds=5)
