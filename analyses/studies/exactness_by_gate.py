"""Measure how exact MLPs made of attention heads are: bilinear gates, and the blog post's Ω.

Gates: a model that is converted with each bilinear gate is compared with its source, in float64,
where the difference is the error of the approximation, and in float32, where rounding dominates.

Ω: the blog post's construction (`analyses/post.py`) replaces masks with a large number Ω. The post
reports errors of about 1e-10 for each sublayer, in float64 at Ω = 1000: "I have not tested how such
errors propagate through multiple layers." Whole models are compared with a direct float64
evaluation of the same weights: deep random models, and trained models with one layer. The post
ignores layer norm and needs SiLU, or ReLU as SiLU(kx)/k; the trained models, for addition modulo
113, are two of the few that fit.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from analyses.benchmarks.models import TINY, model_of
from analyses.post import (
    Gauge,
    PlainLayer,
    PlainTransformer,
    plain_of,
    post_transformer,
)
from analyses.study import Setting, Study, Tables
from analyses.tools.benching import markdown, medians
from analyses.tools.real_models import REAL, real
from attn_only_lens import Bilinear, convert, load, pretrained
from attn_only_lens.gates.bilinear import BilinearGate
from attn_only_lens.gates.exact import Gate
from attn_only_lens.models.two_blocks.config import neurons_block
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig, quiet

COLUMNS = {
    "dtype": "dtype",
    "gate": "gate",
    "bound": "certified bound",
    "activation": "activation error",
    "reach": "largest abs g / R",
    "logit": "max abs Δ logit",
    "relative": "relative",
    "mean_kl": "KL mean",
    "max_kl": "KL max",
    "top1": "same top token",
}

Init: TypeAlias = Literal["scaled", "growing", "unit"]
AUTHORS_OMEGA = 1000.0
FINE = [0.5 * k for k in range(2, 33)]
COARSE = [20.0, 24.0, 32.0, 64.0, 128.0, 256.0, 512.0, AUTHORS_OMEGA, 1e4, 1e5, 1e6, 1e7, 1e8]
KINDS: dict[str, tuple[torch.dtype, Gauge]] = {
    "float64": (torch.float64, "post"),
    "float32": (torch.float32, "post"),
    "float32, shifted": (torch.float32, "shifted"),
}
SHIPPED, RELU = "modular_addition", "modular_addition_relu_1l"
TRAINED_OMEGAS = [*map(float, range(1, 13)), 14.0, 16.0, 18.0, 20.0, 32.0, 100.0, *COARSE[7:11]]
SLOPES, STEEP = (1.0, 10.0, 100.0, 1e3, 1e4, 1e6, 1e8), 1e6  # of ReLU; STEEP is for every Ω
COST = ["model", "form", "vectors", "width", "heads", "numbers in its weights"]
COST += ["Mflop a prompt", "ms a prompt"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu}


# ---- gates


@dataclass(frozen=True)
class Subject:
    """A model in float32, the tokens for comparing it, and the tokens for calibrating its gates."""

    name: str
    about: str
    source: HookedTransformer
    tokens: Tensor
    calibration: Tensor | None = None

    @property
    def kind(self) -> str:
        """The kind of its neurons that determines its gates: gated, gelu, relu or silu."""
        cfg = self.source.cfg
        return "gated" if cfg.gated_mlp else cfg.act_fn.split("_")[0]


def subjects(setting: Setting) -> Iterator[Subject]:
    """Yield the shipped model, the real models, and a random model like GPT-2; or tiny ones."""
    pairs = pretrained.modular_addition_tokens()
    about = "shipped: (a + b) mod 113, all inputs, 1 layer, silu"
    pairs = pairs[:101] if setting.smoke else pairs
    yield Subject(SHIPPED, about, load("modular-addition"), pairs)
    if setting.smoke:
        yield from tiny()
        return
    for name, about in REAL.items():
        yield split(Subject(name, about, *real(setting.models, name)))
    tokens = torch.randint(50257, (1, 64), generator=torch.Generator().manual_seed(0))
    about = "random weights, 12 layers, d_model 768, d_mlp 3072, gelu_new, random tokens"
    yield Subject("gpt2_shape", about, model_of("cpu"), tokens)


def tiny() -> Iterator[Subject]:
    """Yield a random model of every kind."""
    for act_fn, gated in [("gelu", False), ("gelu_new", False), ("relu", False), ("silu", True)]:
        source = model_of("cpu", smoke=True, act_fn=act_fn, gated_mlp=gated)
        size = (6, TINY["n_ctx"])
        tokens = torch.randint(TINY["d_vocab"], size, generator=torch.Generator().manual_seed(0))
        name = f"tiny_{act_fn}" + "_gated" * gated
        yield split(Subject(name, "random weights", source, tokens))


def split(subject: Subject) -> Subject:
    """Use half of the sequences of a gated model for calibration, and the other half for tests."""
    if not subject.source.cfg.gated_mlp:
        return subject
    seen, held_out = subject.tokens.chunk(2)
    return replace(subject, tokens=held_out, calibration=seen)


def gates(subject: Subject) -> dict[str, Literal["exact"] | Bilinear]:
    """Return the gates to compare, from the coarsest to the exact gate."""
    made: dict[str, Literal["exact"] | Bilinear]
    if subject.kind == "gated":
        assert subject.calibration is not None
        calibrated = Bilinear.calibrated(subject.source, subject.calibration)
        made = {f"{m} heads": replace(calibrated, heads=m) for m in (4, 6, 8, 12)}
    elif subject.kind == "gelu":
        made = {"slope 1.702": Bilinear(slope="paper")}
        made |= {f"m = {m}": Bilinear(m) for m in (1, 2, 4, 6, 8)}
    elif subject.kind == "relu":
        tolerances = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8)
        made = {f"tolerance {t:.0e}": Bilinear(tolerance=t) for t in tolerances}
    else:
        made = {"m = 1": Bilinear(1)}
    return made | {"exact": "exact"}


@torch.no_grad()
def measure(subject: Subject, device: str = "cpu") -> pd.DataFrame:
    """Return a row for each dtype and gate: errors against the source in the same dtype."""
    rows = []
    for dtype in (torch.float64, torch.float32):
        source = copy.deepcopy(subject.source).to(dtype, print_details=False)
        source.to(device, print_details=False)
        tokens = subject.tokens.to(device)
        hooks = [f"blocks.{layer}.mlp.hook_pre" for layer in range(source.cfg.n_layers)]
        expected, cache = source.run_with_cache(tokens, names_filter=hooks)
        for label, gate in gates(replace(subject, source=source)).items():
            model = convert(source, gate=gate)
            # This hook changes nothing. Without a hook, exact gates run the source's activation.
            look = [(lambda name: name.endswith("attn.hook_pattern"), lambda pattern, hook: None)]
            layers = range(source.cfg.n_layers)
            heads: list[Any] = [model.blocks[neurons_block(layer)].attn for layer in layers]
            of_layers = [x.gate if gate == "exact" else x.bilinear_gate for x in heads]
            rows.append(
                {
                    "model": subject.name,
                    "kind": subject.kind,
                    "dtype": str(dtype).removeprefix("torch."),
                    "gate": label,
                    **activations(source, of_layers, [cache[hook] for hook in hooks]),
                    **compare(expected, model.run_with_hooks(tokens, fwd_hooks=look)),
                }
            )
    return pd.DataFrame(rows)


def activations(
    source: HookedTransformer, gates: Sequence[Gate | BilinearGate], pre: list[Tensor]
) -> dict[str, float]:
    """Return the maximum over layers of the bound, the measured error, and |q| / the bound's range.

    The gate is evaluated in the dtype of the source's pre-activations, the activation in float64.
    """
    errors, bounds, reaches = [], [], []
    for block, gate, q in zip(source.blocks, gates, pre, strict=True):
        exact = block.mlp.act_fn(q.double())
        errors.append((gate.activation(q).double() - exact).abs().max().item())
        bounds.append(getattr(gate, "bound", 0.0))
        reaches.append(q.abs().max().item() / getattr(gate, "limit", math.inf))
    return {"bound": max(bounds), "activation": max(errors), "reach": max(reaches)}


def compare(expected: Tensor, got: Tensor) -> dict[str, float]:
    """Return logit errors, KL(expected ‖ got) in nats and top-1 agreement, over all positions.

    KL(p ‖ q) = Σ p (log p - log q) loses all digits if p and q agree to 1e-8. Because Σ p = Σ q =
    1, KL is also Σ p (e^d - 1 - d) with d = log q - log p. No term of this sum is negative, so the
    sum keeps its digits until d itself is a rounding error, near a KL of 1e-30.
    """
    expected, got = expected.double(), got.double()
    log_p = expected.log_softmax(-1)
    d = got.log_softmax(-1) - log_p
    kl = (log_p.exp() * (d.expm1() - d)).sum(-1)
    largest = (got - expected).abs().max().item()
    return {
        "logit": largest,
        "relative": largest / expected.abs().max().item(),
        "mean_kl": kl.mean().item(),
        "max_kl": kl.max().item(),
        "top1": (expected.argmax(-1) == got.argmax(-1)).double().mean().item(),
    }


# ---- Ω on random models


def random_transformer(
    n_layers: int,
    d_model: int,
    *,
    init: Init,
    seed: int,
    causal: bool = False,
    device: str = "cpu",
) -> PlainTransformer:
    """Return a model with normal weights that float32 stores exactly, and d_mlp = 4 d_model.

    `init` "scaled" has variance 1 / fan-in, and output weights times 1 / √(2 n_layers), as in
    GPT-2; "growing" has no such factor; "unit" has variance 1 and one head of width d_model, as in
    the post's demonstration.
    """
    generator = torch.Generator().manual_seed(seed)
    n_heads = 1 if init == "unit" else 4
    d_head, d_mlp = d_model // n_heads, 4 * d_model
    damping = 1 / math.sqrt(2 * n_layers) if init == "scaled" else 1.0

    def normal(*shape: int, fan_in: int) -> Tensor:
        scale = 1.0 if init == "unit" else 1 / math.sqrt(fan_in)
        return scale * torch.randn(shape, generator=generator).to(device)

    layers = [
        PlainLayer(
            W_Q=normal(n_heads, d_model, d_head, fan_in=d_model),
            W_K=normal(n_heads, d_model, d_head, fan_in=d_model),
            W_V=normal(n_heads, d_model, d_head, fan_in=d_model),
            W_O=damping * normal(n_heads, d_head, d_model, fan_in=n_heads * d_head),
            b_Q=torch.zeros(n_heads, d_head, device=device),
            b_K=torch.zeros(n_heads, d_head, device=device),
            b_V=torch.zeros(n_heads, d_head, device=device),
            b_O=torch.zeros(d_model, device=device),
            W_1=normal(d_model, d_mlp, fan_in=d_model),
            b_1=normal(d_mlp, fan_in=d_model),
            W_2=damping * normal(d_mlp, d_model, fan_in=d_mlp),
            b_2=damping * normal(d_model, fan_in=d_model),
        )
        for _ in range(n_layers)
    ]
    return PlainTransformer(tuple(layers), causal)


def direct(
    plain: PlainTransformer, x: Tensor, activation: Callable[[Tensor], Tensor] = F.silu
) -> tuple[Tensor, list[float], list[float]]:
    """Return the stream after each layer, and the largest |score| and pre-activation of each."""
    streams, scores_of, hidden = [], [], []
    for layer in plain.layers:
        w = layer.to(x.dtype)
        queries = torch.einsum("...td,hde->...hte", x, w.W_Q) + w.b_Q[:, None]
        keys = torch.einsum("...td,hde->...hte", x, w.W_K) + w.b_K[:, None]
        values = torch.einsum("...td,hde->...hte", x, w.W_V) + w.b_V[:, None]
        scores = queries @ keys.mT / math.sqrt(w.W_Q.shape[-1])
        scores_of.append(scores.abs().max().item())
        if plain.causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        x = x + torch.einsum("...hte,hed->...td", scores.softmax(-1) @ values, w.W_O) + w.b_O
        h = x @ w.W_1 + w.b_1
        hidden.append(h.abs().max().item())
        x = x + activation(h) @ w.W_2 + w.b_2
        streams.append(x)
    return torch.stack(streams), scores_of, hidden


def errors(plain: PlainTransformer, x: Tensor, omegas: Iterable[float]) -> pd.DataFrame:
    """Return errors for each Ω and depth, in columns by kind.

    An error is the largest one divided by the largest entry of the exact stream. "direct float32"
    is the error of direct evaluation; "largest score" is the largest |score| up to this depth.
    """
    exact, scores, _ = direct(plain, x.double())

    def relative(got: Tensor) -> list[float]:
        return ((got.double() - exact).abs().amax((1, 2)) / exact.abs().amax((1, 2))).tolist()

    same = {"direct float32": relative(direct(plain, x)[0])}
    same |= {"largest score": pd.Series(scores).cummax().tolist()}
    frames = []
    for omega in omegas:
        columns = {}
        for kind, (dtype, gauge) in KINDS.items():
            post = post_transformer(plain, len(x), omega=omega, dtype=dtype, gauge=gauge)
            columns[kind] = relative(post.coordinates.read(post.run(x.to(dtype)).streams[:, -1]))
        depth = range(1, len(plain.layers) + 1)
        frames.append(pd.DataFrame({"omega": omega, "depth": depth, **columns, **same}))
    return pd.concat(frames)


def sweep(
    weights: str, n_tokens: int, sizes: tuple[int, int], omegas: list[float], setting: Setting
) -> pd.DataFrame:
    """Return the maximum of errors over random models with (depth, width)."""
    frames = []
    init, _, mask = weights.partition(", ")
    for seed in tqdm(range(1 if init == "unit" else setting.n_seeds), f"{weights}, N = {n_tokens}"):
        how: dict[str, Any] = {"init": init, "seed": seed, "causal": mask == "causal"}
        plain = random_transformer(*sizes, **how, device=setting.device)
        x = torch.randn(n_tokens, sizes[1], generator=torch.Generator().manual_seed(seed))
        frames.append(errors(plain, x.to(setting.device), omegas))
    worst = pd.concat(frames).groupby(["depth", "omega"]).max().reset_index()
    return worst.assign(weights=weights, N=n_tokens)


def best_omegas(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the Ω of the smallest error in float32, and errors to compare it with."""
    rows = []
    for (weights, n_tokens, depth), part in frame.groupby(["weights", "N", "depth"], sort=False):
        of = part.set_index("omega")
        post = of["float32"]
        near = post.index[post <= 2 * post.min()]
        rows.append(
            {
                "weights": weights,
                "N": n_tokens,
                "depth": depth,
                "largest score": of["largest score"].iloc[0],
                "best Ω": post.idxmin(),
                "error there": post.min(),
                "Ω of at most twice that": f"{near.min():g} to {near.max():g}",
                "at Ω = 1000": post[AUTHORS_OMEGA],
                "shifted, largest Ω": of["float32, shifted"].iloc[-1],
                "float64, Ω = 1000": of["float64"][AUTHORS_OMEGA],
                "direct float32": of["direct float32"].iloc[0],
            }
        )
    return pd.DataFrame(rows)


def on_random_models(setting: Setting) -> dict[str, pd.DataFrame]:
    """Return errors by Ω for the first and last depth, and a row for each size with the best Ω."""
    lengths, depths, omegas = [8, 32, 128], [1, 2, 4, 8], FINE + COARSE
    if setting.smoke:
        lengths, depths, omegas = [5, 7], [1, 2], [4.0, 9.0, AUTHORS_OMEGA]
    size = depths[-1], 16
    frames = [sweep("scaled", n, size, omegas, setting) for n in lengths]
    every = [*frames, sweep("unit", 20, (4, 30), [AUTHORS_OMEGA], setting)]
    for weights in ("scaled, causal", "growing"):
        every += [sweep(weights, n, size, omegas, setting) for n in lengths[:2]]
    best = best_omegas(pd.concat(every))
    curves = pd.concat(frames)[["N", "depth", "omega", *KINDS]]
    return {
        "omega": rounded(curves[curves["depth"].isin([depths[0], depths[-1]])]),
        "omega_best": rounded(best[best["depth"].isin(depths) | (best["weights"] == "unit")]),
    }


# ---- Ω on trained models


@dataclass(frozen=True)
class Case:
    """A model with one layer and no norm in float32, and prompts (a, b, =)."""

    name: str
    model: HookedTransformer
    tokens: Tensor

    @classmethod
    def of(cls, name: str, model: HookedTransformer, n_prompts: int) -> "Case":
        """Return a model with random prompts."""
        modulus = model.cfg.d_vocab - 1
        drawn = torch.randint(modulus, (n_prompts, 2), generator=torch.Generator().manual_seed(0))
        return cls(name, model, F.pad(drawn, (0, 1), value=modulus).to(model.W_E.device))

    @property
    def answers(self) -> Tensor:
        """The right answers."""
        return self.tokens[:, :2].sum(1) % (self.model.cfg.d_vocab - 1)

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights in a dtype."""
        return {name: tensor.to(dtype) for name, tensor in self.model.state_dict().items()}

    def stream(self, dtype: torch.dtype) -> Tensor:
        """Return the input of the first layer."""
        state = self.state(dtype)
        return state["embed.W_E"][self.tokens] + state["pos_embed.W_pos"]

    def unembed(self, stream: Tensor) -> Tensor:
        """Return the logits for a stream after the last layer."""
        state = self.state(stream.dtype)
        return stream @ state["unembed.W_U"] + state["unembed.b_U"]

    def direct(self, dtype: torch.dtype) -> tuple[Tensor, list[float], list[float]]:
        """Evaluate the model directly, with weights that are rounded to a dtype."""
        plain = plain_of(self.state(torch.float64))
        return direct(plain, self.stream(dtype), ACTIVATIONS[self.model.cfg.act_fn])

    @cached_property
    def logits(self) -> Tensor:
        """The logits of direct float64 evaluation at all positions, [batch, pos, vocabulary]."""
        return self.unembed(self.direct(torch.float64)[0][-1])

    def errors(self, logits: Tensor) -> dict[str, float]:
        """Return the errors of logits [batch, pos, vocabulary] against direct evaluation."""
        got, last = logits.double(), logits[:, -1].double()
        hits = last.argmax(-1) == self.answers
        shares = last.softmax(-1) - self.logits[:, -1].softmax(-1)
        return {
            "logits": ((got - self.logits).abs().max() / self.logits.abs().max()).item(),
            "probabilities": shares.abs().max().item(),
            "accuracy": hits.double().mean().item(),
            "loss": F.cross_entropy(last, self.answers).item(),
        }


def measured(case: Case, slopes: Mapping[float, list[float]]) -> pd.DataFrame:
    """Return a row for each kind, slope and Ω, and rows for the evaluations without Ω."""
    without = {
        "direct float64": case.logits,
        "our heads, float32": convert(case.model)(case.tokens),
        "direct float32": case.unembed(case.direct(torch.float32)[0][-1]),
    }
    rows: list[dict[str, Any]] = [
        {"model": case.name, "kind": kind} | case.errors(logits) for kind, logits in without.items()
    ]
    plain = plain_of(case.state(torch.float64))  # ReLU's slope is folded in before rounding
    for slope, omegas in tqdm(slopes.items(), case.name):
        for omega in omegas:
            for kind, (dtype, gauge) in KINDS.items():
                how = {"omega": omega, "slope": slope}
                post = post_transformer(plain, 3, **how, dtype=dtype, gauge=gauge)
                found = case.errors(case.unembed(post.run(case.stream(dtype)).output))
                rows.append({"model": case.name, "kind": kind} | how | found)
    return pd.DataFrame(rows)


def costs(case: Case, rounds: int, device: str) -> pd.DataFrame:
    """Return the cost of one prompt in three forms, in float32."""
    plain, x = plain_of(case.state(torch.float32)), case.stream(torch.float32)
    post = post_transformer(plain, 3, omega=AUTHORS_OMEGA)
    heads, cfg = convert(case.model), case.model.cfg
    embeddings = sum(
        p.numel() for name, p in case.model.named_parameters() if not name.startswith("blocks")
    )
    sublayers = post.layers[0].sublayers
    # Factored matrices; shared ones count once per head.
    factors = [w for h in sublayers for w in (h.W_Q, h.W_K, h.W_V, h.W_O)]
    kinds = " + ".join(str(len(heads.W_Q)) for heads in sublayers)
    forms: dict[str, tuple[Callable[[], Tensor], int, int, str, int]] = {
        "original": (
            *(lambda: case.model(case.tokens), 3, cfg.d_model),
            *(f"{cfg.n_heads}", sum(p.numel() for p in case.model.parameters())),
        ),
        "our heads": (  # 3 tokens and the bias token, which only neuron-heads see
            *(lambda: heads(case.tokens), 4, cfg.d_model),
            *(f"{cfg.n_heads} + {cfg.d_mlp}", sum(p.numel() for p in heads.parameters())),
        ),
        "post": (
            *(lambda: case.unembed(post.run(x).output), post.coordinates.n_vectors),
            *(post.coordinates.width, kinds, embeddings + sum(w.numel() for w in factors)),
        ),
    }
    took = medians({name: form[0] for name, form in forms.items()}, rounds, device)
    rows = []
    for name, (call, *sizes) in forms.items():
        with FlopCounterMode(display=False) as counter:
            call()
        cost = [counter.get_total_flops() / len(case.tokens) / 1e6, took[name] / len(case.tokens)]
        rows.append([case.name, name, *sizes, *cost])
    return pd.DataFrame(rows, columns=COST)


def cases(setting: Setting) -> list[Case]:
    """Return the shipped model and one with ReLU, which others trained on the same task."""
    shipped, n_prompts = load("modular-addition"), 3 if setting.smoke else 100
    if setting.smoke:
        tiny = {"n_layers": 1, "d_model": 10, "n_heads": 2, "d_head": 5, "d_mlp": 11, "n_ctx": 3}
        tiny |= {"d_vocab": 8, "d_vocab_out": 7, "seed": 0}
        how = {"act_fn": "relu", "normalization_type": None, "device": "cpu"}
        relu = HookedTransformer(HookedTransformerConfig(**tiny, **how))
    else:
        relu, _ = real(setting.models, RELU)
    models = {SHIPPED: shipped, RELU: relu}
    return [
        Case.of(name, model.to(setting.device, print_details=False), n_prompts)
        for name, model in models.items()
    ]


def rounded(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with floats of three digits."""
    return frame.map(lambda x: float(f"{x:.3g}") if isinstance(x, float) else x)


@torch.no_grad()
def run(setting: Setting) -> Tables:
    """Measure gates, then Ω on random models, then Ω and costs on trained models."""
    few = [9.0, AUTHORS_OMEGA]
    omegas = [4.0, *few] if setting.smoke else TRAINED_OMEGAS
    with quiet():
        found, models, trained, cost = [], [], [], []
        for subject in tqdm(subjects(setting), "gates"):
            found.append(measure(subject, setting.device))
            n_tokens = subject.tokens.numel()
            models.append({"model": subject.name, "about": subject.about, "tokens": n_tokens})
        random = on_random_models(setting)
        sizes = []
        for case in cases(setting):
            slopes = {1.0: omegas}
            if case.name == RELU:
                slopes = {k: omegas if k == STEEP else few for k in SLOPES}
            trained.append(measured(case, slopes))
            cost.append(costs(case, 1 if setting.smoke else 5, setting.device))
            _, scores, hidden = case.direct(torch.float64)
            sizes.append({"model": case.name, "score": max(scores), "h": max(hidden)})
    about = pd.DataFrame(models).merge(rounded(pd.DataFrame(sizes)), how="outer")
    return {
        "": pd.concat(found),
        "models": about,
        **random,
        "trained": rounded(pd.concat(trained)),
        "cost": pd.concat(cost),
    }


# ---- the page


def gate_table(frame: pd.DataFrame, model: str) -> str:
    """Return one model's rows in Markdown, with the range only where there is one."""
    rows = frame[frame["model"] == model]
    columns = [name for name in COLUMNS if name != "reach" or rows["reach"].any()]
    lines = []
    for row in rows[columns].to_dict("records"):
        top1 = row.pop("top1")
        cells = [f"{cell:.3g}" if isinstance(cell, float) else cell for cell in row.values()]
        lines.append([*cells, "100%" if top1 == 1 else f"{top1:.3%}"])
    return markdown([COLUMNS[name] for name in columns], lines)


def span(frame: pd.DataFrame, kind: str, gate: str, measure: str, dtype: str = "float64") -> str:
    """Return the smallest and the largest value over the models of a kind, as text."""
    of = frame[(frame["kind"] == kind) & (frame["gate"] == gate) & (frame["dtype"] == dtype)]
    ends = [f"{value:.2g}" for value in (of[measure].min(), of[measure].max())]
    return " to ".join(dict.fromkeys(ends))


def agrees_from(frame: pd.DataFrame, kind: str) -> str:
    """Return the coarsest gate from which on all top tokens of all models are the same."""
    of = frame[(frame["kind"] == kind) & ~frame["gate"].isin(["exact", "slope 1.702"])]
    same = of["top1"].eq(1).groupby(of["gate"], sort=False).all()
    different = same.index[~same]
    after = 0 if different.empty else same.index.get_loc(different[-1]) + 1
    return str([*same.index, "exact"][after])


def over_the_paper(frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean KL with few heads over mean KL with the paper's slope, by model."""
    gelus = frame[(frame["kind"] == "gelu") & (frame["dtype"] == "float64")]
    kl = gelus.pivot(index="model", columns="gate", values="mean_kl")
    few = ["m = 1", "m = 2", "m = 4"]
    return kl[few].div(kl["slope 1.702"], axis=0).rename_axis(columns=None).reset_index()


def best_table(best: pd.DataFrame, weights: str) -> pd.DataFrame:
    """Return the rows of one kind of weights, and the Ω at which a leak is as small as rounding."""
    rows = best[best["weights"] == weights].drop(columns="weights")
    half_log = [math.log(2**24 * n_tokens) / 2 for n_tokens in rows["N"]]
    rows.insert(rows.columns.get_loc("at Ω = 1000"), "½ ln(2²⁴ N)", half_log)
    return rows


def omega_table(curves: pd.DataFrame, n_tokens: int) -> pd.DataFrame:
    """Return errors at even Ω, one column per kind and depth."""
    rows = curves[(curves["N"] == n_tokens) & (curves["omega"] % 2 == 0)]
    wide = rows.pivot(index="omega", columns="depth", values=list(KINDS))
    wide.columns = [f"{kind}, depth {depth}" for kind, depth in wide.columns]
    return wide.rename_axis("Ω").reset_index()


def curve(trained: pd.DataFrame, model: str, kind: str, slope: float = 1.0) -> "pd.Series[float]":
    """Return the logit errors of a trained model by Ω."""
    rows = trained[(trained["model"] == model) & (trained["kind"] == kind)]
    return rows[rows["slope"] == slope].set_index("omega")["logits"]


def trained_summary(trained: pd.DataFrame) -> pd.DataFrame:
    """Return least errors, the Ω where they are reached, and the Ω that change no accuracy."""
    rows = []
    for model, slope in ((SHIPPED, 1.0), (RELU, STEEP)):
        of = trained[trained["model"] == model].set_index("kind")
        for kind in KINDS:
            errors = curve(trained, model, kind, slope)
            same = of[(of["slope"] == slope) & (of.index == kind)]
            right = same.loc[same["accuracy"] == of.loc["direct float64", "accuracy"], "omega"]
            near = errors.index[errors <= 2 * errors.min()]
            rows.append(
                {
                    "model": model,
                    "kind": kind,
                    "least error": errors.min(),
                    "Ω of at most twice that": f"{near.min():g} to {near.max():g}",
                    "at Ω = 1000": errors[AUTHORS_OMEGA],
                    "Ω with the original's accuracy": f"{right.min():g} to {right.max():g}",
                }
            )
        for kind in ("direct float32", "our heads, float32"):
            rows.append({"model": model, "kind": kind, "least error": of.loc[kind, "logits"]})
    return pd.DataFrame(rows).map(lambda x: "" if isinstance(x, float) and math.isnan(x) else x)


def trained_table(trained: pd.DataFrame, model: str, slope: float) -> pd.DataFrame:
    """Return logit errors by Ω, and the other measures in float32."""
    rows = trained[(trained["model"] == model) & (trained["slope"] == slope)]
    wide = rows.pivot(index="omega", columns="kind", values="logits")[list(KINDS)]
    rest = rows[rows["kind"] == "float32"].set_index("omega")
    rest = rest[["probabilities", "accuracy", "loss"]].add_prefix("float32: ")
    leak = pd.Series({omega: 3 * math.exp(-2 * omega) for omega in wide.index}, name="N e^(-2Ω)")
    return pd.concat([leak, wide, rest], axis=1).rename_axis("Ω").reset_index()


def steepness(trained: pd.DataFrame) -> pd.DataFrame:
    """Return logit errors of the ReLU model by slope, one column per kind and Ω."""
    rows = trained[trained["omega"].isin([9.0, AUTHORS_OMEGA]) & (trained["model"] == RELU)]
    wide = rows.pivot(index="slope", columns=["kind", "omega"], values="logits")
    wide.columns = [f"{kind}, Ω = {omega:g}" for kind, omega in wide.columns]
    return wide.rename_axis("k").reset_index()


def found(trained: pd.DataFrame, models: pd.DataFrame, cost: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers that the predictions on trained models are about."""
    float64, float32 = (curve(trained, SHIPPED, kind) for kind in ("float64", "float32"))
    of = trained[trained["model"] == SHIPPED].set_index("kind")
    score = models.set_index("model").loc[SHIPPED, "score"]
    shares = {o: float64[o] / (3 * math.exp(-2 * o)) for o in float64.index if 3 <= o <= score}
    accuracy = of.loc["float32"].query("4 <= omega <= 1e4")["accuracy"]
    flops = cost[cost["model"] == SHIPPED].set_index("form")["Mflop a prompt"]
    steep = curve(trained, RELU, "float32", 1e3), curve(trained, RELU, "float32", 1e8)
    return {
        "late": float64[float64.index >= 18],
        "author64": float64[AUTHORS_OMEGA],
        "usual": float32.loc[9.0:32.0],
        "direct": of.loc["direct float32", "logits"],
        "worse": float32[AUTHORS_OMEGA] / of.loc["direct float32", "logits"],
        "accurate": bool((accuracy == of.loc["direct float64", "accuracy"]).all()),
        "shares": pd.Series(shares),
        "by_k": pd.Series(
            {k: k * curve(trained, RELU, "float64", k)[AUTHORS_OMEGA] for k in SLOPES[:4]}
        ),
        "wide": steep[0],
        "narrow": steep[1],
        "flops": flops / flops["original"],
    }


def facts(tables: Tables) -> dict[str, Any]:
    """Return the names that the page uses."""
    frame, trained, cost = tables[""], tables["trained"], tables["cost"]
    return {
        "span": partial(span, frame),
        "agrees_from": partial(agrees_from, frame),
        "over_the_paper": over_the_paper(frame),
        "gate_table": partial(gate_table, frame),
        "best": partial(best_table, tables["omega_best"]),
        "lengths": sorted(set(tables["omega"]["N"])),
        "omega_table": partial(omega_table, tables["omega"]),
        "trained_summary": trained_summary(trained),
        "trained_table": partial(trained_table, trained),
        "steepness": steepness(trained),
        "models": tables["models"].set_index("model").to_dict("index"),
        "found": found(trained, tables["models"], cost),
        "SHIPPED": SHIPPED,
        "RELU": RELU,
        "STEEP": STEEP,
    }


def gate_figure(frame: pd.DataFrame) -> Figure:
    """Draw errors by gate: a column per kind of MLP, a colour per model, dashes for float32."""
    rows = {"relative": "largest |Δ logit| / largest |logit|", "mean_kl": "mean KL, nats"}
    picture = Figure(figsize=(12, 7), layout="constrained")
    kinds = ("gelu", "gated", "relu")
    for column, kind in zip(
        picture.subplots(2, 3, sharex="col", sharey="row").T, kinds, strict=True
    ):
        of_kind = frame[frame["kind"] == kind].groupby("model", sort=False)
        for colour, (name, model) in enumerate(of_kind):
            for dtype, line in model.groupby("dtype", sort=False):
                style = {"ls": "-" if dtype == "float64" else "--", "color": f"C{colour}"}
                for panel, measure in zip(column, rows, strict=True):
                    shown = line[measure].where(line[measure] > 0)
                    panel.plot(
                        line["gate"].replace("slope 1.702", "paper's"),
                        shown,
                        label=f"{name}, {dtype}",
                        **style,
                    )
        column[0].set_title(kind)
        column[0].legend(fontsize="small")
        column[1].tick_params("x", rotation=45)
    for panel, label in zip(picture.axes[::3], rows.values(), strict=True):
        panel.set(yscale="log", ylabel=label)
        panel.minorticks_off()
    return picture


def draw_omegas(panel: Any, curves: Mapping[str, "pd.Series[float]"], title: str) -> None:
    """Draw errors by Ω, one line per label."""
    for label, errors in curves.items():
        colour = f"C{list(KINDS).index(label.split('; ')[0])}"
        line = "--" if label.endswith("depth 8") or label == "float32, shifted" else "-"
        panel.plot(errors.index, errors, line, color=colour, label=label)
    panel.set(xscale="log", yscale="log", xlabel="Ω")
    panel.set_title(title, fontsize="medium")
    panel.minorticks_off()


def omega_figure(curves: pd.DataFrame) -> Figure:
    """Draw the errors of random models by Ω: one panel per N, dashes for the last depth."""
    lengths = sorted(set(curves["N"]))
    picture = Figure(figsize=(4.6 * len(lengths), 4.6), layout="constrained")
    panels = picture.subplots(1, len(lengths), sharey=True)
    for panel, n_tokens in zip(panels, lengths, strict=True):
        lines = curves[curves["N"] == n_tokens].set_index("omega").groupby("depth")
        shown = {f"{kind}; depth {depth}": of[kind] for depth, of in lines for kind in KINDS}
        draw_omegas(panel, shown, f"N = {n_tokens}")
    panels[0].set_ylabel("largest error / largest entry")
    picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return picture


def trained_figure(trained: pd.DataFrame) -> Figure:
    """Draw the logit errors of trained models by Ω."""
    picture = Figure(figsize=(9.2, 4.4), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    for panel, (model, slope) in zip(panels, ((SHIPPED, 1.0), (RELU, STEEP)), strict=True):
        title = model if slope == 1 else f"{model}, k = {slope:g}"
        draw_omegas(panel, {kind: curve(trained, model, kind, slope) for kind in KINDS}, title)
        exact = trained[trained["model"] == model].set_index("kind")["logits"]["direct float32"]
        panel.axhline(exact, color="grey", lw=1, ls=":", label="direct float32")
    panels[0].set_ylabel("largest error / largest logit")
    panels[0].legend(fontsize="small", loc="upper right")
    return picture


def figures(tables: Tables) -> dict[str, Figure]:
    """Draw errors by gate, and by Ω on random and on trained models."""
    return {
        "": gate_figure(tables[""]),
        "omega": omega_figure(tables["omega"]),
        "trained": trained_figure(tables["trained"]),
    }


STUDY = Study(run, figures, facts, n_seeds=3)
