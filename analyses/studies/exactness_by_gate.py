"""Measure the error of bilinear gates in a whole model: activations, logits, KL and top tokens.

Each model is converted with each bilinear gate, and compared with the unconverted model: in
float64, where the difference is the approximation error, and in float32, where rounding dominates.
`exactness_measures.py` defines the measures.

    python -m analyses.studies.exactness_by_gate --models-dir MODELS --out analyses/results
"""

import time
import warnings
from pathlib import Path

import pandas as pd
import typer
from matplotlib.figure import Figure
from tqdm import tqdm

from analyses.studies.exactness_measures import EXACT, PAPER, REAL, measure, subjects
from analyses.tools.options import Device, ModelsDir, Out, Smoke
from analyses.tools.study_files import keep

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
PANELS = {
    "activation": "largest activation error",
    "relative": "largest |Δ logit| / largest |logit|",
    "mean_kl": "mean KL, nats",
    "top1": "same top token",
}
KINDS = ("gelu", "gated", "relu")
STYLES = {"float64": "-", "float32": "--"}


def table(model: pd.DataFrame) -> str:
    """Return one model's rows in Markdown, with the range only where there is one."""
    columns = [name for name in COLUMNS if name != "reach" or model["reach"].any()]
    lines = [[COLUMNS[name] for name in columns], ["---"] * len(columns)]
    for row in model[columns].to_dict("records"):
        top1 = row.pop("top1")
        cells = [f"{cell:.3g}" if isinstance(cell, float) else cell for cell in row.values()]
        lines.append([*cells, "100%" if top1 == 1 else f"{top1:.3%}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(frame: pd.DataFrame) -> Figure:
    """Draw four errors by gate: a column per kind of MLP, a colour per model."""
    picture = Figure(figsize=(12, 11), layout="constrained")
    axes = picture.subplots(len(PANELS), len(KINDS), sharex="col", sharey="row")
    for column, kind in zip(axes.T, KINDS, strict=True):
        models = frame[frame["kind"] == kind].groupby("model", sort=False)
        for colour, (name, model) in enumerate(models):
            for dtype, line in model.groupby("dtype", sort=False):
                style = {"linestyle": STYLES[dtype], "color": f"C{colour}", "marker": "."}
                for panel, quantity in zip(column, PANELS, strict=True):
                    shown = line[quantity].where((line[quantity] > 0) | (quantity == "top1"))
                    panel.plot(line["gate"], shown, label=f"{name}, {dtype}", **style)
    for panel, quantity in zip(axes[:, 0], PANELS, strict=True):
        panel.set_ylabel(PANELS[quantity])
        panel.set_yscale("linear" if quantity == "top1" else "log")
    for panel, title in zip(axes[0], KINDS, strict=True):
        panel.set_title(title)
        if panel.lines:
            panel.legend(fontsize="small")
    for panel in axes.flat:
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    for panel in axes[-1]:
        panel.tick_params("x", rotation=45)
    return picture


def findings(frame: pd.DataFrame) -> str:
    """Return sentences whose numbers all come from the tables."""
    silu = frame[(frame["kind"] == "silu") & (frame["gate"] == "m = 1")]
    sentences = [
        f"silu, one head, no approximation: logits differ by {span(silu, 'relative', 'float64')} "
        f"of the largest in float64, {span(silu, 'relative', 'float32')} in float32."
    ]
    for kind in KINDS:
        of_kind = frame[frame["kind"] == kind]
        if len(of_kind):
            sentences.append(sweep(kind, of_kind))
    gelu = frame[(frame["kind"] == "gelu") & (frame["dtype"] == "float64")]
    if len(gelu):
        sentences.append(
            against_the_paper(gelu.pivot(index="gate", columns="model", values="mean_kl"))
        )
        falls = {name: fall(gelu, name) for name in ("activation", "relative", "mean_kl")}
        sentences.append(
            f"From m = 4 to m = 8 the activation error of the gelus falls by a factor of "
            f"{falls['activation']}, the largest logit error by {falls['relative']}, mean KL by "
            f"{falls['mean_kl']}."
        )
    return "\n".join(f"- {sentence}" for sentence in sentences)


def span(frame: pd.DataFrame, quantity: str, dtype: str) -> str:
    """Return the smallest and the largest value over several models, as text."""
    values = frame.loc[frame["dtype"] == dtype, quantity]
    ends = [f"{value:.2g}" for value in (values.min(), values.max())]
    return " to ".join(dict.fromkeys(ends))


def sweep(kind: str, frame: pd.DataFrame) -> str:
    """Return a sentence about the gates of one kind of model, from the coarsest to the finest."""
    gates = [gate for gate in frame["gate"].unique() if gate not in (PAPER, EXACT)]
    by_gate = {gate: frame[frame["gate"] == gate] for gate in [*gates, EXACT]}
    first, last, exact = by_gate[gates[0]], by_gate[gates[-1]], by_gate[EXACT]
    different = [gate for gate in gates if (by_gate[gate]["top1"] < 1).any()]
    agree = gates[len(gates) - gates[::-1].index(different[-1]) :] if different else gates
    return (
        f"{kind}, from {gates[0]} to {gates[-1]}, float64: logits differ by "
        f"{span(first, 'relative', 'float64')} of the largest, then "
        f"{span(last, 'relative', 'float64')}; mean KL is {span(first, 'mean_kl', 'float64')}, "
        f"then {span(last, 'mean_kl', 'float64')} nats. "
        + (f"Every top token is the same from {agree[0]} on. " if agree else "")
        + f"In float32 the last differ by {span(last, 'relative', 'float32')}, exact gates by "
        f"{span(exact, 'relative', 'float32')}."
    )


def against_the_paper(kl: pd.DataFrame) -> str:
    """Return the ratio of mean KL with few heads to mean KL with the paper's slope, by model."""
    ratios = {
        gate: ", ".join(
            f"{ratio:.2g} ({name})" for name, ratio in (kl.loc[gate] / kl.loc[PAPER]).items()
        )
        for gate in ("m = 1", "m = 2", "m = 4")
    }
    return (
        f"Mean KL over that of the paper's {PAPER}: with our one head {ratios['m = 1']}; with two "
        f"{ratios['m = 2']}; with four {ratios['m = 4']}. Above 1 the paper's slope has the "
        f"smaller KL, although its largest activation error is larger."
    )


def fall(gelu: pd.DataFrame, quantity: str) -> str:
    """Return the smallest and largest factor by which a value falls from four to eight heads."""
    by_model = gelu.pivot(index="gate", columns="model", values=quantity)
    factors = by_model.loc["m = 4"] / by_model.loc["m = 8"]
    return " to ".join(f"{factor:.3g}" for factor in (factors.min(), factors.max()))


def report(frame: pd.DataFrame, about: dict[str, str], *, smoke: bool) -> str:
    """Return the page."""
    missing = [] if smoke else [name for name in REAL if name not in about]
    sections = [
        f"## {name}\n\n{about[name]}\n\n{table(model)}"
        for name, model in frame.groupby("model", sort=False)
    ]
    return PAGE.format(
        flag=" --smoke" if smoke else "",
        missing=f"Left out, for their weights were not there: {', '.join(missing)}.\n\n"
        if missing
        else "",
        findings=findings(frame),
        sections="\n\n".join(sections),
    )


def main(
    out: Out = Path("out/exactness"),
    models_dir: ModelsDir = Path(__file__).parents[2] / "shared" / "models",
    device: Device = "cpu",
    smoke: Smoke = False,
) -> None:
    """Measure, print, and write the page, tables and figures (`study_files.py`)."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    started = time.perf_counter()
    frames, about = [], {}
    with tqdm(unit="gate", leave=False) as bar:
        for subject in subjects(models_dir, smoke=smoke):
            bar.set_description(subject.name)
            frames.append(measure(subject.on(device), bar.update))
            about[subject.name] = f"{subject.about}; {subject.tokens.numel()} tokens."
    frame = pd.concat(frames)
    text = report(frame, about, smoke=smoke)
    typer.echo(text)
    settings = {"models": list(about), "device": device, "smoke": smoke}
    keep(__file__, out, text, frame, figure(frame), started=started, **settings)


PAGE = """# What bilinear gates cost a model

We compare models converted with bilinear gates with their source models in the same dtype, at every
position of every text. float64 shows the error of the approximation, and float32 where rounding is
larger. All converted models, also the exact one, compute the patterns of their heads.

- *certified bound*, *activation error*: the largest over all layers. The gate is evaluated at the
  source's pre-activations in that dtype. The bound holds in real arithmetic, so float32 may exceed
  it by its rounding.
- *max abs Δ logit*: also relative to the source's largest |logit|.
- *KL*: KL(source ‖ converted) in nats, over positions. *same top token*: the share of positions.
- *slope 1.702*: the paper's single head for GELU, `Bilinear(slope="paper")`, with the bound that
  our certificate computes for it.
- Positions on which a model was not trained count, too: all but the last in modular addition, and
  the first five in sorting.
- *gated*: the range R of a layer's gates is 1.25 times the largest |g| on one half of the
  sequences, rounded up to a range for which we have fitted gates. All numbers are from the other
  half.

{missing}Made by `python -m analyses.studies.exactness_by_gate{flag}`.

![errors by gate](exactness_by_gate.svg)

An error of 0 is not drawn.

## What the tables show

{findings}

{sections}
"""

if __name__ == "__main__":
    typer.run(main)
