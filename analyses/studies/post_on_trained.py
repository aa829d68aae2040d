"""Measure the cost and the error of the post's construction on trained models, as a function of Ω.

`omega_study.py` does this for random models with many layers and tokens. Here the weights are
trained, the error is measured on logits and probabilities, and the cost is measured too. The post
ignores layer norm and needs SiLU, or ReLU as SiLU(kx)/k. The shipped model (addition modulo 113,
one layer, SiLU) is one of the few that fit. `--model FOLDER` (config.json, model.safetensors),
which may be repeated, adds other models without norm whose tokens are (a, b, =) of that task. The
stored page includes a model that does not ship, `modular_addition_relu_1l`, trained by others on
the same task and with the same sizes, with ReLU.

The published construction, with its mask, in float64 and float32, and in float32 with scores
shifted by 2Ω (`analyses/post`), is compared with a direct float64 evaluation of the same weights.
Logits are compared at all positions; probabilities, accuracy and loss at the last position.

Predictions, written before the first run
-----------------------------------------
1. float64: the error falls as e^(-2Ω) to rounding (1e-15 of the largest logit) at Ω = 18, grows
   with Ω from there, and is below 1e-12 at the author's Ω = 1000.
2. float32: as accurate as direct evaluation from Ω = ½ ln(2²⁴ N) = 8.9 to 32; 10 to 50 times worse
   at Ω = 1000, which is still far too little to change an answer: accuracy is that of the original
   from Ω = 4 to 10,000.
3. "Ω > x for each x that appears in an attention entry" is sufficient, not necessary: what counts
   is how far a token's *largest* score lies below 0, since that is what the bias vector's -2Ω
   competes with; trained heads have large scores, but attend to something.
4. ReLU: the error is 0.2785 / k times what weights make of it, so it falls as 1/k. Steepness costs
   no Ω; it even pays for it: a score's rounding of 2Ω·2⁻²⁴ is divided by k, so with k = 1000,
   Ω = 1000 is as good as Ω = 9 in float32. Too steep is when 2Ω is below the spacing of floats at
   k |h|, so that a neuron cannot tell itself from other tokens: near k = 2Ω·2²⁴ / |h|, 10⁷ to 10⁸.
5. Cost: flops by a factor of 50 to 200 over the original; our one head a neuron, within 10 % of it.

    python -m analyses.studies.post_on_trained --out analyses/results
"""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.nn.functional as F
import typer
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from analyses.post import SUBLAYERS, PostTransformer, post_transformer
from analyses.studies.omega_models import direct, plain_of
from analyses.studies.omega_study import AUTHORS_OMEGA, KINDS
from analyses.tools.benching import medians, table
from analyses.tools.options import Device, Out, Smoke
from analyses.tools.study_files import keep, verdict
from attn_only_lens import convert
from attn_only_lens.models.source_folder import load_source
from attn_only_lens.tl import HookedTransformer

OMEGAS = [
    *map(float, range(1, 13)),
    *(14.0, 16.0, 18.0, 20.0, 32.0, 100.0, AUTHORS_OMEGA, 1e4, 1e5, 1e6),
]
SLOPES = {"silu": [1.0], "relu": [1.0, 10.0, 100.0, 1e3, 1e4, 1e6, 1e8]}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu}
SHIPPED = files("attn_only_lens.pretrained") / "data" / "modular_addition"


@dataclass(frozen=True)
class Case:
    """A model, prompts, and its direct evaluation in float64.

    Attributes:
        name: the name of the model's folder.
        model: the model in float32.
        tokens: prompts (a, b, =).
        logits: logits at all positions, [batch, pos, vocabulary].
        largest: the largest |score| of an attention head.
        hidden: the largest |h|, where h is a pre-activation.
    """

    name: str
    model: HookedTransformer
    tokens: Tensor
    logits: Tensor
    largest: float
    hidden: float

    @property
    def act(self) -> str:
        """The name of the model's activation."""
        return str(self.model.cfg.act_fn)

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


def case(folder: Path, n_prompts: int, device: str) -> Case:
    """Read a model and evaluate it.

    Raises:
        typer.BadParameter: the post's construction does not support the model.
    """
    model = load_source(folder, device=device)
    cfg = model.cfg
    expected = {"normalization_type": None, "positional_embedding_type": "standard", "n_ctx": 3}
    wrong = [f"{k}={getattr(cfg, k)!r}" for k, v in expected.items() if getattr(cfg, k) != v]
    if cfg.act_fn not in ACTIVATIONS or cfg.gated_mlp:
        wrong.append(f"act_fn={cfg.act_fn!r}, gated_mlp={cfg.gated_mlp}")
    if wrong:
        raise typer.BadParameter(
            f"{folder} has {', '.join(wrong)}; expected {expected} and a plain MLP with one of "
            f"{list(ACTIVATIONS)}"
        )
    modulus = cfg.d_vocab - 1
    drawn = torch.randint(modulus, (n_prompts, 2), generator=torch.Generator().manual_seed(0))
    tokens = F.pad(drawn, (0, 1), value=modulus).to(device)
    hidden: list[float] = []

    def activation(h: Tensor) -> Tensor:
        hidden.append(h.abs().max().item())
        return ACTIVATIONS[cfg.act_fn](h)

    case = Case(folder.name, model, tokens, torch.empty(0, device="cpu"), 0.0, 0.0)
    streams, scores = direct(
        plain_of(case.state(torch.float64)), case.stream(torch.float64), activation
    )
    logits = case.unembed(streams[-1])
    return Case(folder.name, model, tokens, logits, max(scores), max(hidden))


def errors(of: Case, logits: Tensor) -> dict[str, float]:
    """Return the errors of logits [batch, pos, vocabulary] against direct float64 evaluation."""
    got, last = logits.double(), logits[:, -1].double()
    exact = of.logits[:, -1]
    hits = last.argmax(-1) == of.answers
    return {
        "logits": ((got - of.logits).abs().max() / of.logits.abs().max()).item(),
        "probabilities": (last.softmax(-1) - exact.softmax(-1)).abs().max().item(),
        "accuracy": hits.double().mean().item(),
        "loss": F.cross_entropy(last, of.answers).item(),
    }


def measured(of: Case, omegas: list[float], slopes: list[float]) -> pd.DataFrame:
    """Return a row for each kind, slope and Ω, and rows for the evaluations without Ω."""
    kind, omega, slope = "kind", "omega", "slope"
    rows: list[dict[str, Any]] = [
        {kind: "direct float64"} | errors(of, of.logits),
        {kind: "our heads, float32"} | errors(of, convert(of.model)(of.tokens)),
    ]
    plain = plain_of(of.state(torch.float64))  # ReLU's slope is folded in before rounding
    streams, _ = direct(plain, of.stream(torch.float32), ACTIVATIONS[of.act])
    rows.append({kind: "direct float32"} | errors(of, of.unembed(streams[-1])))
    for k in tqdm(slopes, desc=of.name, leave=False):
        for value in omegas:
            for name, (dtype, gauge) in KINDS.items():
                post = post_transformer(plain, 3, omega=value, dtype=dtype, slope=k, gauge=gauge)
                measured = errors(of, of.unembed(post.run(of.stream(dtype)).output))
                rows.append({kind: name, slope: k, omega: value} | measured)
    return pd.DataFrame(rows).assign(model=of.name)


def costs(of: Case, rounds: int, device: str) -> pd.DataFrame:
    """Return the cost of one prompt in three forms, in float32."""
    plain, x = plain_of(of.state(torch.float32)), of.stream(torch.float32)
    post = post_transformer(plain, 3, omega=AUTHORS_OMEGA)
    heads = convert(of.model)
    cfg = of.model.cfg
    forms: dict[str, tuple[Callable[[], Tensor], dict[str, Any]]] = {
        "original": (
            lambda: of.model(of.tokens),
            {"vectors": 3, "width": cfg.d_model, "heads": f"{cfg.n_heads}"},
        ),
        "our heads": (
            lambda: heads(of.tokens),
            {
                "vectors": 4,  # 3 tokens and the bias token, which only neuron-heads see
                "width": cfg.d_model,
                "heads": f"{cfg.n_heads} + {cfg.d_mlp}",
            },
        ),
        "post": (
            lambda: of.unembed(post.run(x).output),
            {
                "vectors": post.coordinates.n_vectors,
                "width": post.coordinates.width,
                "heads": " + ".join(
                    str(len(sublayer.W_Q)) for sublayer in post.layers[0].sublayers
                ),
            },
        ),
    }
    took = medians({name: call for name, (call, _) in forms.items()}, rounds, device)
    rows = []
    for name, (call, sizes) in forms.items():
        with FlopCounterMode(display=False) as counter:
            call()
        weights = of.model if name != "our heads" else heads
        numbers = sum(p.numel() for p in weights.parameters())
        if name == "post":
            numbers += stored(post) - sum(
                p.numel() for n, p in of.model.named_parameters() if n.startswith("blocks")
            )
        rows.append(
            {"model": of.name, "form": name}
            | sizes
            | {
                "numbers in its weights": numbers,
                "Mflop a prompt": counter.get_total_flops() / len(of.tokens) / 1e6,
                "ms a prompt": took[name] / len(of.tokens),
            }
        )
    return pd.DataFrame(rows)


def stored(post: PostTransformer) -> int:
    """Return how many numbers the factored matrices hold; shared ones count once per head."""
    heads = [sublayer for layer in post.layers for sublayer in layer.sublayers]
    return sum(weight.numel() for h in heads for weight in (h.W_Q, h.W_K, h.W_V, h.W_O))


def best(frame: pd.DataFrame, kind: str, slope: float) -> pd.Series:
    """Return the logit errors by Ω."""
    rows = frame[(frame["kind"] == kind) & (frame["slope"] == slope)]
    return rows.set_index("omega")["logits"]


def answers(of: Case, frame: pd.DataFrame) -> str:
    """Return what the tables show, in sentences whose numbers come from the tables."""
    by_kind = frame.set_index("kind")
    float32 = by_kind.loc["direct float32", "logits"]
    slopes = sorted(frame["slope"].dropna().unique())
    slope = slopes[0] if of.act == "silu" else min(slopes, key=lambda k: abs(math.log10(k) - 6))
    accuracy = by_kind.loc["direct float64", "accuracy"]
    steep = "" if of.act == "silu" else f" (slope k = {slope:g})"
    lines = []
    for kind in KINDS:
        curve = best(frame, kind, slope)
        same = frame[(frame["kind"] == kind) & (frame["slope"] == slope)]
        right = same.loc[same["accuracy"] == accuracy, "omega"]
        near = curve.index[curve <= 2 * curve.min()]
        lines.append(
            f"{kind}{steep}: least error {curve.min():.2g} of the largest logit, within twice that "
            f"from Ω = {near.min():g} to {near.max():g}; {curve[AUTHORS_OMEGA]:.2g} at "
            f"Ω = {AUTHORS_OMEGA:g}; accuracy is the original's ({accuracy:.3g}) from "
            f"Ω = {right.min():g} to {right.max():g}"
        )
    lines.append(
        f"direct evaluation in float32 errs by {float32:.2g}, our heads by "
        f"{by_kind.loc['our heads, float32', 'logits']:.2g}; "
        f"the largest |score| is {of.largest:.3g}, the largest |h| {of.hidden:.3g}"
    )
    if of.act == "relu":
        lines.append(
            f"steepness, at Ω = {AUTHORS_OMEGA:g}, float64: "
            + ", ".join(f"k = {k:g} {best(frame, 'float64', k)[AUTHORS_OMEGA]:.2g}" for k in slopes)
        )
    return "\n".join(f"- {line}." for line in lines)


def predictions(frames: dict[str, pd.DataFrame], cases: list[Case], cost: pd.DataFrame) -> str:
    """Return each prediction, whether it held, and the numbers."""
    of, frame = cases[0], frames[cases[0].name]
    float64, float32 = (best(frame, kind, 1.0) for kind in ("float64", "float32"))
    by_kind = frame.set_index("kind")
    exact32 = by_kind.loc["direct float32", "logits"]
    largest = float64[float64.index >= 18.0]
    usual = float32[(float32.index >= 9.0) & (float32.index <= 32.0)]
    worse = float32[AUTHORS_OMEGA] / exact32
    right = frame[(frame["kind"] == "float32") & frame["omega"].between(4.0, 1e4)]["accuracy"]
    below = [o for o in float64.index if 3.0 <= o <= of.largest]
    shares = [float64[o] / (3 * math.exp(-2 * o)) for o in below] or [math.nan]
    lines = [
        verdict(
            "float64 errs by at most 1e-15 at Ω = 18 and less than 1e-12 at 1000.",
            largest.iloc[0] <= 1e-15 and float64[AUTHORS_OMEGA] < 1e-12,
            f"{largest.iloc[0]:.2g} at Ω = {largest.index[0]:g}, least from there "
            f"{largest.min():.2g}, {float64[AUTHORS_OMEGA]:.2g} at {AUTHORS_OMEGA:g}",
        ),
        verdict(
            "float32 is as good as direct evaluation (within 2) from Ω = 9 to 32.",
            usual.max() <= 2 * exact32,
            f"{usual.min():.2g} to {usual.max():.2g}; direct {exact32:.2g}",
        ),
        verdict(
            f"float32 is 10 to 50 times worse at Ω = {AUTHORS_OMEGA:g}.",
            10 <= worse <= 50,
            f"{worse:.2g} times",
        ),
        verdict(
            "accuracy in float32 is the original's from Ω = 4 to 10,000.",
            bool((right == by_kind.loc["direct float64", "accuracy"]).all()),
            f"{right.min():g} to {right.max():g}",
        ),
        verdict(
            "Ω below the largest score is no harm by itself: the error is the same multiple of "
            "N e^(-2Ω) there (within 2).",
            max(shares) <= 2 * min(shares),
            f"largest |score| {of.largest:.3g}; {min(shares):.3g} to {max(shares):.3g} times "
            f"N e^(-2Ω) at Ω = {', '.join(f'{o:g}' for o in below)}",
        ),
    ]
    for case in cases:
        if case.act == "relu":
            frame = frames[case.name]
            by_k = {
                k: best(frame, "float64", k)[AUTHORS_OMEGA] * k for k in (1.0, 10.0, 100.0, 1e3)
            }
            wide, narrow = (best(frame, "float32", k) for k in (1e3, 1e8))
            lines += [
                verdict(
                    "ReLU: the error falls as 1/k (k times the error, within 2).",
                    max(by_k.values()) <= 2 * min(by_k.values()),
                    "; ".join(f"{x:.2g} (k = {k:g})" for k, x in by_k.items()),
                ),
                verdict(
                    "ReLU, k = 1000, float32: Ω = 1000 is as good as Ω = 9 (within 2).",
                    wide[AUTHORS_OMEGA] <= 2 * wide[9.0],
                    f"{wide[AUTHORS_OMEGA]:.3g} against {wide[9.0]:.3g}",
                ),
                verdict(
                    "ReLU, k = 1e8, float32: too steep for Ω = 9.",
                    narrow[9.0] > 0.01,
                    f"{narrow[9.0]:.2g}; at Ω = {AUTHORS_OMEGA:g} {narrow[AUTHORS_OMEGA]:.2g}",
                ),
            ]
    flops = cost[cost["model"] == of.name].set_index("form")["Mflop a prompt"]
    post, ours = flops["post"] / flops["original"], flops["our heads"] / flops["original"]
    lines.append(
        verdict("the post takes 50 to 200 times the flops.", 50 <= post <= 200, f"{post:.3g}")
    )
    lines.append(verdict("our heads take at most 1.1 times the flops.", ours <= 1.1, f"{ours:.3g}"))
    return "\n".join(lines)


def by_omega(frame: pd.DataFrame, slope: float) -> str:
    """Return a table of logit errors, and of the other measures in float32."""
    rows = frame[frame["slope"] == slope]
    wide = rows.pivot(index="omega", columns="kind", values="logits")[list(KINDS)]
    rest = rows[rows["kind"] == "float32"].set_index("omega")
    rest = rest[["probabilities", "accuracy", "loss"]].add_prefix("float32: ")
    leak = pd.Series({omega: 3 * math.exp(-2 * omega) for omega in wide.index}, name="N e^(-2Ω)")
    joined = pd.concat([leak, wide, rest], axis=1).rename_axis("Ω").reset_index()
    return table(joined)


def by_slope(frame: pd.DataFrame) -> str:
    """Return a table of logit errors by slope, one column per kind and Ω."""
    rows = frame[frame["omega"].isin([9.0, AUTHORS_OMEGA]) & frame["kind"].isin(KINDS)]
    wide = rows.pivot(index="slope", columns=["kind", "omega"], values="logits")
    wide.columns = [f"{kind}, Ω = {omega:g}" for kind, omega in wide.columns]
    return table(wide.rename_axis("k").reset_index())


def figure(frames: dict[str, pd.DataFrame]) -> Figure:
    """Draw logit errors by Ω, one panel per model and two slopes for ReLU; then errors by slope."""
    panels = [
        (name, k)
        for name, frame in frames.items()
        for k in sorted(frame["slope"].dropna().unique())
        if k in (1.0, 100.0, 1e6) and (k > 1 or frame["slope"].nunique() == 1)
    ]
    picture = Figure(figsize=(4.6 * len(panels), 4.4), layout="constrained")
    styles = dict(zip(KINDS, (("C0", "-"), ("C1", "-"), ("C2", "--")), strict=True))
    axes = picture.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, k) in zip(axes, panels, strict=True):
        frame = frames[name]
        for kind, (colour, line) in styles.items():
            curve = best(frame, kind, k)
            axis.plot(curve.index, curve, line, color=colour, label=kind)
        exact = frame.set_index("kind")["logits"]["direct float32"]
        axis.axhline(exact, color="grey", lw=1, ls=":", label="direct float32")
        title = name if k == 1 else f"{name}, k = {k:g}"
        axis.set(xscale="log", yscale="log", xlabel="Ω", ylim=(1e-17, 10), title=title)
        axis.title.set_fontsize("medium")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("largest error / largest logit")
    axes[0].legend(fontsize="small", loc="upper right")
    return picture


@torch.no_grad()
def main(
    out: Out = Path("out/post-on-trained"),
    model: Annotated[
        list[Path] | None, typer.Option(help="folder of a model, besides the shipped one")
    ] = None,
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    started = time.perf_counter()
    warnings.filterwarnings("ignore", "HookedTransformer is deprecated")
    n_prompts, rounds = (3, 1) if smoke else (100, 5)
    omegas = [4.0, 9.0, AUTHORS_OMEGA] if smoke else OMEGAS
    frames, parts, cost = {}, [], []
    with as_file(SHIPPED) as shipped:
        cases = [case(folder, n_prompts, device) for folder in [shipped, *(model or [])]]
    for of in cases:
        slopes = SLOPES[of.act]
        frames[of.name] = frame = measured(of, omegas, slopes)
        cost.append(costs(of, rounds, device))
        shown = [k for k in slopes if k in (1.0, 100.0, 1e6) and (k > 1 or len(slopes) == 1)]
        tables = [
            f"### {of.name}, {of.act}"
            + (f", k = {k:g}" if len(slopes) > 1 else "")
            + f"\n\n{by_omega(frame, k)}"
            for k in shown
        ]
        if len(slopes) > 1:
            tables.append(f"### {of.name}: how steep\n\n{by_slope(frame)}")
        parts.append((f"**{of.name}** ({of.act})\n\n{answers(of, frame)}", "\n\n".join(tables)))
    costly = pd.concat(cost)
    text = PAGE.format(
        n_prompts=n_prompts,
        flags=(" --smoke" if smoke else "")
        + "".join(f" --model {folder.name}" for folder in model or []),
        answers="\n\n".join(answer for answer, _ in parts),
        factors=factors(costly),
        predictions=predictions(frames, cases, costly),
        cost=table(costly),
        tables="\n\n".join(part for _, part in parts),
        sublayers=", ".join(SUBLAYERS),
    )
    typer.echo(text)
    keep(
        __file__,
        out,
        text,
        {"": pd.concat(frames.values()), "cost": costly},
        figure(frames),
        started=started,
        models=list(frames),
        n_prompts=n_prompts,
        device=device,
        smoke=smoke,
    )


def factors(cost: pd.DataFrame) -> str:
    """Return costs divided by the original's, in one sentence per model."""
    lines = []
    for name, rows in cost.groupby("model", sort=False):
        of = rows.set_index("form")
        over = {
            form: [of.loc[form, column] / of.loc["original", column] for column in COLUMNS]
            for form in ("post", "our heads")
        }
        lines.append(
            f"- {name}: "
            + "; ".join(
                f"{form} {flops:.3g} times the flops, {ms:.3g} times the seconds, "
                f"{numbers:.3g} times the numbers"
                for form, (flops, ms, numbers) in over.items()
            )
            + "."
        )
    return "\n".join(lines)


COLUMNS = ("Mflop a prompt", "ms a prompt", "numbers in its weights")

PAGE = """# The post's construction on trained models

We measure the error of the construction's output as a function of Ω, and its cost. There are
{n_prompts} prompts (a, b, =). Errors of logits are taken at all positions, compared with a direct
evaluation of the same weights in float64, and divided by the largest logit. Probabilities, accuracy
and loss are those of the last position. "float64" and "float32" have the scores as published;
"shifted" subtracts 2Ω in each row. Predictions are at the top of the script. `modular_addition`
ships with the package; another model does not. [omega_study](omega_study.md) has random models that
are deeper and read longer texts.

Made by `python -m analyses.studies.post_on_trained{flags}`.

{answers}

Cost, divided by the original model's cost:

{factors}

## The predictions

{predictions}

## Cost

In float32, per prompt of a batch. The post has heads of these kinds: {sublayers}. Its numbers of
weights count factored matrices, with their zeros, embedding and unembedding. Flops are the flops of
matrix products, counted by torch.

{cost}

## Error by Ω

![Error by Ω](post_on_trained.svg)

{tables}
"""

if __name__ == "__main__":
    typer.run(main)
