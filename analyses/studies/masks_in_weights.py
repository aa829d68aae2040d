"""How large must Ω be to encode a mask in the weights of a head (Theorem 9)?

    python -m analyses.studies.masks_in_weights --out analyses/results

`reference.unmasked_head` adds Ω(Λ - 1) to the scores, so the scores of visible tokens stay as they
are, and the scores of masked tokens fall by Ω. The blog post adds Ω to the scores of visible tokens
instead. Softmax is the same for both, but their rounding differs. This study measures the error of
both forms against a masked head, with random weights, in float64 and in float32.

`predictions` were written before the first run.
"""

import math
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor

from analyses.tools.benching import table
from analyses.tools.options import Device, Out, Smoke
from analyses.tools.study_files import keep, verdict
from attn_only_lens.reference import (
    Head,
    masking_error,
    sufficient_omega,
    unmasked_head,
    with_positions,
)

D = 16
OMEGAS = [1.0, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 50, 64, 100, 1e3, 1e4, 1e5, 1e6]
ERRORS = [1e-3, 1e-6, 1e-9, 1e-12]
FORMS = {"masked down": 0.0, "visible up": 1.0}
"""The multiple of Ω that is added to all scores of `unmasked_head`."""
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def masks(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return a mask [token, token] of each kind."""
    eye, ones = torch.eye(n, dtype=torch.float64), torch.ones(n, n, dtype=torch.float64)
    neuron = eye.clone()
    neuron[:, -1] = 1  # the last token is the bias token of Theorem 3
    random = (torch.rand(n, n, generator=generator) < 0.3).double()
    return {"causal": ones.tril(), "neuron": neuron, "random": (random + eye).clamp(max=1)}


def output(head: Head, Z: Tensor, dtype: torch.dtype, shift: float, device: str = "cpu") -> Tensor:
    """Return the output of a head without a mask, computed in a dtype.

    Args:
        head: made by `unmasked_head`.
        Z: its input.
        dtype: of the weights, the input and the products.
        shift: a number that is added to all scores, in the position coordinates of W_QK.
        device: where it is computed.
    """
    W_QK, n = head.W_QK.clone(), head.n_tokens
    W_QK[-n:, -n:] += shift
    W_QK, W_OV, Z = (matrix.to(device, dtype) for matrix in (W_QK, head.W_OV, Z))
    return ((Z @ W_QK @ Z.T).softmax(-1) @ Z @ W_OV).double().cpu()


def rows_of(n: int, scale: float, seed: int, device: str) -> list[dict[str, Any]]:
    """Return the errors of one random head, for each mask, form, dtype and Ω.

    Args:
        n: the number of tokens.
        scale: the standard deviation of the scores.
        seed: of the weights and the tokens.
        device: where the heads without masks are computed.
    """
    generator = torch.Generator().manual_seed(seed)
    X, W_QK, W_OV = (
        torch.randn(rows, D, generator=generator, dtype=torch.float64) for rows in (n, D, D)
    )
    W_QK, W_OV, rows = scale * W_QK / D, W_OV / math.sqrt(D), []
    for name, mask in masks(n, generator).items():
        head = Head(W_QK, W_OV, mask)
        exact, radius = head(X), X.norm(dim=1).max().item()
        size = exact.norm(dim=1).max()
        row: dict[str, Any] = {"tokens": n, "scale": scale, "seed": seed, "mask": name}
        for omega in OMEGAS:
            unmasked = unmasked_head(head, omega)
            bound = (masking_error(head, X, omega).max() / size).item()
            for form, times in FORMS.items():
                for dtype_name, dtype in DTYPES.items():
                    got = output(unmasked, with_positions(X), dtype, times * omega, device)[:, :D]
                    error = ((got - exact).norm(dim=1).max() / size).item()
                    row |= {"omega": omega, "form": form, "dtype": dtype_name, "error": error}
                    rows.append(row | {"bound": bound})
        for error in ERRORS:
            asked = sufficient_omega(head, radius=radius, error=error * size.item())
            rows.append(row | {"omega": asked, "form": "sufficient", "dtype": "", "error": error})
    return rows


def by_omega(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the largest error for each Ω: a column for each form and dtype, and the bound."""
    rows = frame[frame["form"].isin(list(FORMS))]
    wide = rows.pivot_table(
        index="omega", columns=["form", "dtype"], values="error", aggfunc="max", sort=False
    )
    wide.columns = [f"{form}, {dtype}" for form, dtype in wide.columns]
    return wide.assign(bound=rows.groupby("omega")["bound"].max()).rename_axis("Ω").reset_index()


def needed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the smallest measured Ω for each error, and the Ω that the theorem asks for."""
    exact = frame.query("form == 'masked down' and dtype == 'float64'")
    asked, rows = frame[frame["form"] == "sufficient"], []
    for (scale, n), group in exact.groupby(["scale", "tokens"]):
        worst = group.groupby("omega")[["error", "bound"]].max()
        for error in ERRORS:
            of = asked.query("scale == @scale and tokens == @n and error == @error")["omega"]
            enough = {name: worst.index[worst[name] <= error].min() for name in worst}
            row = {"scale of scores": scale, "tokens": n, "error": error}
            row |= {"Ω, measured": enough["error"], "Ω, bound for the tokens": enough["bound"]}
            rows.append(row | {"Ω, all tokens of that norm": of.max()})
    return pd.DataFrame(rows)


def predictions(frame: pd.DataFrame) -> str:
    """Return the predictions that were made before the first run, and whether they held."""
    down = frame.query("form == 'masked down'")
    exact = down.query("dtype == 'float64'")
    above = (exact["error"] > exact["bound"] * (1 + 1e-9) + 1e-14).sum()
    large = frame.query("omega == 1e6").groupby(["form", "dtype"])["error"].max()
    single = down.query("dtype == 'float32' and omega >= 100")["error"].max()
    slack = needed(frame).query("error == 1e-12")
    near = (slack["Ω, bound for the tokens"] - slack["Ω, measured"]).max()
    far = (slack["Ω, all tokens of that norm"] / slack["Ω, measured"]).min()
    up = large["visible up", "float32"]
    lines = [
        (
            "The error in float64 is never above the bound.",
            not above,
            f"{above} of {len(exact)} errors are above it",
        ),
        (
            "With masked scores lowered, no large Ω costs digits: in float32, the error for "
            "Ω ≥ 100 is below 1e-5.",
            single < 1e-5,
            f"at most {single:.2g}",
        ),
        (
            "With visible scores raised, float32 has an error above 1e-3 at Ω = 1e6.",
            up > 1e-3,
            f"{up:.2g}",
        ),
        (
            "The bound for given tokens asks for an Ω that is at most 10 larger than needed.",
            near <= 10,
            f"at most {near:.3g} larger, for an error of 1e-12",
        ),
        (
            "The Ω for all tokens of a given norm is more than twice as large as needed.",
            far > 2,
            f"{far:.2g} times as large or more, for an error of 1e-12",
        ),
    ]
    return "\n".join(verdict(*line) for line in lines)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw the largest error by Ω: a panel per scale, a line per form and dtype, and the bound."""
    scales = sorted(frame["scale"].unique().tolist())
    picture = Figure(figsize=(5 * len(scales), 4), layout="constrained")
    panels = picture.subplots(1, len(scales), sharey=True, squeeze=False)[0]
    for panel, scale in zip(panels, scales, strict=True):
        wide = by_omega(frame[frame["scale"] == scale]).set_index("Ω")
        for name in wide:
            style = "k:" if name == "bound" else "-"
            panel.plot(wide.index, wide[name].clip(lower=1e-17), style, label=name)
        panel.set(title=f"scores of standard deviation {scale:g}", xlabel="Ω")
        panel.set(xscale="log", yscale="log", ylim=(1e-17, 1e3))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("largest error / largest output")
    panels[0].legend(fontsize="small")
    return picture


def main(
    out: Out = Path("out/masks"),
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, table and figure (`study_files.py`)."""
    started = time.perf_counter()
    lengths, scales, seeds = ([5], [1.0], 1) if smoke else ([8, 32, 128], [1.0, 4.0], 5)
    frame = pd.DataFrame(
        row
        for n in lengths
        for scale in scales
        for seed in range(seeds)
        for row in rows_of(n, scale, seed, device)
    )
    page = PAGE.format(
        predictions=predictions(frame),
        by_omega=table(by_omega(frame)),
        needed=table(needed(frame)),
        seeds=seeds,
        D=D,
        flag=" --smoke" if smoke else "",
    )
    typer.echo(page)
    settings = {"seeds": seeds, "device": device, "smoke": smoke}
    keep(__file__, out, page, frame, figure(frame), started=started, **settings)


PAGE = """# How large must Ω be to encode a mask in weights?

Theorem 9: a head without a mask computes what a masked head computes, up to any error above 0, if
tokens have their position as extra coordinates. The head's weights then lower the score of every
masked token by Ω ("masked down", `reference.unmasked_head`). The blog post raises the scores of
visible tokens instead ("visible up"). We compare both with masked heads, for {seeds} random heads
of each size (d_model {D}, 8 to 128 tokens, scores with a standard deviation of 1 or 4) and three
masks: causal, a neuron-head's mask (the token itself and one other), and a random mask. An error is
the largest distance of an output from the exact output, divided by the largest norm of an exact
output.

Made by `python -m analyses.studies.masks_in_weights{flag}`; the CSV has a row for each head, mask,
form, dtype and Ω.

## Predictions, written before the first run

{predictions}

![error by Ω](masks_in_weights.svg)

## Error by Ω

The largest error over all heads and masks, and the largest bound (`reference.masking_error`).

{by_omega}

## How large an Ω is needed

In float64, for the largest error over all heads and masks. *Measured* is the smallest of the tried
Ω with at most this error. *Bound for the tokens* is the smallest tried Ω for which
`masking_error` is as small. *All tokens of that norm* is `sufficient_omega`, which holds for all
tokens whose norm is at most the largest norm of ours.

{needed}

These are single heads with random weights. `omega_study.md` and `post_on_trained.md` measure whole
models.
"""

if __name__ == "__main__":
    typer.run(main)
