"""How large should Ω be? Measure the error of the post's construction in a whole multi-layer model.

The post replaces masks with a large number Ω and reports, for each sublayer separately, errors of
about 1e-10 in float64 at Ω = 1000: "I have not tested how such errors propagate through multiple
layers." This study runs a deep model, and compares the stream after each layer with a direct
float64 evaluation of the same weights.

python -m analyses.studies.omega_study --out out/omega
"""

import math
import time
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from analyses.post import Gauge, PlainTransformer, post_transformer
from analyses.studies.omega_models import Init, direct, random_transformer
from analyses.tools.benching import table
from analyses.tools.options import Device, Out, Smoke
from analyses.tools.study_files import keep

AUTHORS_OMEGA = 1000.0
FINE = [0.5 * k for k in range(2, 33)]
COARSE = [20.0, 24.0, 32.0, 64.0, 128.0, 256.0, 512.0, AUTHORS_OMEGA, 1e4, 1e5, 1e6, 1e7, 1e8]
KINDS: dict[str, tuple[torch.dtype, Gauge]] = {
    "float64": (torch.float64, "post"),
    "float32": (torch.float32, "post"),
    "float32, shifted": (torch.float32, "shifted"),
}


def relative(got: Tensor, exact: Tensor) -> list[float]:
    """Return the largest error by layer, divided by the largest entry of the exact stream."""
    return ((got.double() - exact).abs().amax((1, 2)) / exact.abs().amax((1, 2))).tolist()


def errors(plain: PlainTransformer, x: Tensor, omegas: Iterable[float]) -> pd.DataFrame:
    """Return a row for each kind, Ω and depth, and rows for two kinds without Ω.

    "direct float32" is the error of the direct evaluation in float32. "largest score" is not an
    error, but the largest |score| of the original heads up to this depth.
    """
    exact, scores = direct(plain, x.double())
    errors = {
        ("direct float32", math.nan): relative(direct(plain, x)[0], exact),
        ("largest score", math.nan): [max(scores[: k + 1]) for k in range(len(scores))],
    }
    for omega in omegas:
        for kind, (dtype, gauge) in KINDS.items():
            post = post_transformer(plain, len(x), omega=omega, dtype=dtype, gauge=gauge)
            after = post.run(x.to(dtype)).streams[:, -1]
            errors[kind, omega] = relative(post.coordinates.read(after), exact)
    return pd.DataFrame(
        {"kind": kind, "omega": omega, "depth": depth, "value": value}
        for (kind, omega), by_layer in errors.items()
        for depth, value in enumerate(by_layer, start=1)
    )


def sweep(
    lengths: list[int],
    depth: int,
    omegas: list[float],
    init: Init,
    *,
    seeds: int,
    causal: bool,
    device: str,
) -> pd.DataFrame:
    """Return errors for several numbers of tokens, each the maximum over random models."""
    frames = []
    for n_tokens in lengths:
        for seed in tqdm(range(seeds), desc=f"{init}, N = {n_tokens}", leave=False):
            plain = random_transformer(
                depth, 16, init=init, seed=seed, causal=causal, device=device
            )
            x = torch.randn(n_tokens, 16, generator=torch.Generator().manual_seed(seed)).to(device)
            frames.append(errors(plain, x, omegas).assign(N=n_tokens))
    by = ["N", "kind", "depth", "omega"]
    return pd.concat(frames).groupby(by, dropna=False)["value"].max().reset_index()


def best_float32(frame: pd.DataFrame, depths: list[int]) -> str:
    """Return a table with the Ω of the smallest error in float32, and errors to compare it with."""
    rows = []
    for (n_tokens, depth), group in frame[frame["depth"].isin(depths)].groupby(["N", "depth"]):
        of = {kind: part.set_index("omega")["value"] for kind, part in group.groupby("kind")}
        post = of["float32"]
        near = post.index[post <= 2 * post.min()]
        rows.append(
            {
                "N": n_tokens,
                "depth": depth,
                "largest score": of["largest score"].item(),
                "best Ω": post.idxmin(),
                "error there": post.min(),
                "Ω of at most twice that": f"{near.min():g} to {near.max():g}",
                "½ ln(2²⁴ N)": math.log(2**24 * n_tokens) / 2,
                "at Ω = 1000": post[AUTHORS_OMEGA],
                "shifted, largest Ω": of["float32, shifted"].iloc[-1],
                "float64, Ω = 1000": of["float64"][AUTHORS_OMEGA],
                "direct float32": of["direct float32"].item(),
            }
        )
    return table(pd.DataFrame(rows))


def demonstration(depth: int, device: str) -> str:
    """Return errors for a deep model with the sizes and weights of the post's demonstration."""
    plain = random_transformer(depth, 30, init="unit", seed=0, device=device)
    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)).to(device)
    frame = errors(plain, x, [AUTHORS_OMEGA])
    return table(frame.pivot(index="depth", columns="kind", values="value").reset_index())


def by_omega(frame: pd.DataFrame, kind: str, depths: list[int]) -> str:
    """Return a table of errors at even Ω, one column per depth."""
    rows = frame[(frame["kind"] == kind) & frame["depth"].isin(depths) & (frame["omega"] % 2 == 0)]
    wide = rows.pivot(index="omega", columns="depth", values="value")
    return table(wide.add_prefix("depth ").reset_index().rename(columns={"omega": "Ω"}))


def figure(frame: pd.DataFrame, depths: list[int]) -> Figure:
    """Draw error against Ω: one panel per N, one colour per kind, dashes for depth."""
    lengths = sorted(frame["N"].unique().tolist())
    picture = Figure(figsize=(5 * len(lengths), 5), layout="constrained")
    panels = picture.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    colours = {kind: f"C{number}" for number, kind in enumerate(KINDS)}
    dashes = dict(zip(depths, ("-", "--"), strict=True))
    for panel, n_tokens in zip(panels, lengths, strict=True):
        for (kind, depth), line in frame[frame["N"] == n_tokens].groupby(["kind", "depth"]):
            if kind in KINDS and depth in depths:
                style = {"color": colours[kind], "linestyle": dashes[depth]}
                panel.plot(line["omega"], line["value"], label=f"{kind}, depth {depth}", **style)
        panel.set(title=f"N = {n_tokens}", xlabel="Ω", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("largest error / largest entry")
    panels[0].legend(fontsize="small")
    return picture


@torch.no_grad()
def main(
    out: Out = Path("out/omega"),
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    started = time.perf_counter()
    lengths, depths, seeds = ([5], [1, 2], 1) if smoke else ([8, 32, 128], [1, 2, 4, 8], 3)
    omegas = [4.0, 9.0, AUTHORS_OMEGA] if smoke else FINE + COARSE
    few, shown = lengths[:2], lengths[len(lengths) // 2]
    scaled = sweep(lengths, depths[-1], omegas, "scaled", seeds=seeds, causal=False, device=device)
    causal = sweep(few, depths[-1], omegas, "scaled", seeds=seeds, causal=True, device=device)
    growing = sweep(few, depths[-1], omegas, "growing", seeds=seeds, causal=False, device=device)
    kinds = "\n\n".join(
        f"### {kind}\n\n{by_omega(scaled[scaled['N'] == shown], kind, depths)}" for kind in KINDS
    )
    text = PAGE.format(
        seeds=seeds,
        flag=" --smoke" if smoke else "",
        shown=shown,
        largest=omegas[-1],
        scaled=best_float32(scaled, depths),
        kinds=kinds,
        causal=best_float32(causal, depths),
        growing=best_float32(growing, depths),
        demonstration=demonstration(2 if smoke else 4, device),
    )
    typer.echo(text)
    frames = {"scaled": scaled, "scaled, causal": causal, "growing": growing}
    every = pd.concat([frame.assign(weights=name) for name, frame in frames.items()])
    picture = figure(scaled, [depths[0], depths[-1]])
    keep(
        __file__,
        out,
        text,
        every,
        picture,
        started=started,
        seeds=seeds,
        device=device,
        smoke=smoke,
    )


PAGE = """# How large should Ω be?

We compare the post's construction as a whole model with a direct evaluation in float64. An error is
the largest error divided by the largest entry of the stream after this layer, for the worst of
{seeds} random models (D = 16, d_mlp = 64, 4 heads, and no norm, like the post). "float64" and
"float32" have the scores as published, +2Ω for the tokens to which a head attends. "shifted"
subtracts 2Ω from all scores, which does not change the softmax, and is shown at the largest Ω that
we tried, {largest:g}.

Made by `python -m analyses.studies.omega_study{flag}`; what all but the last table show
is in `omega_study.csv`.

![Error by Ω](omega_study.svg)

## The best Ω in float32 if scores stay small

Weights scaled as GPT-2's, so that the stream does not grow with depth. Below the best Ω, attention
leaks in proportion to N e^(-2Ω); above it, the self score 2Ω - h loses digits of h. At ½ ln(2²⁴ N),
the leak is as small as the rounding of float32.

{scaled}

## Error by Ω, N = {shown}

{kinds}

## The best Ω in float32 if Ω also makes the causal mask

{causal}

## Scores that grow with depth

The same without GPT-2's factor 1/√(2 · depth): the stream grows, and scores grow with its square.
If scores exceed Ω, a token can attend to the bias vector more than to any token, in any precision.
Then float32, with scores as published, may have no Ω that is large enough for the scores and small
enough for its digits.

{growing}

## The demonstration's own sizes and weights

N = 20, D = 30, unit normal weights, Ω = 1000.

{demonstration}
"""

if __name__ == "__main__":
    typer.run(main)
