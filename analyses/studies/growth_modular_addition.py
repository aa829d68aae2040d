"""Does growth save compute? Addition modulo 53, with grown models and full-size models.

Every arm trains for the same number of epochs on the same pairs:

    small        never grows
    early, late  small at first; neurons, then heads, then the width of the stream are added
    full         at the grown size from the start
    late again   as late, but with other random new entries: a baseline for circuits

AdamW's state grows with the model. Figures show loss and accuracy against the flops of matrix
products so far, key frequencies before and after growth, and the role of new neuron-heads: whether
they are tuned to frequencies of the old circuit, and which of them `compare` finds in the new one.
`growth_measures.py` defines the measures.

An arm writes checkpoints to `--runs`, so an interrupted study resumes where it stopped.

    python -m analyses.studies.growth_modular_addition --out analyses/results
"""

import os
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer

from analyses.studies.growth_arms import SMOKE, Run, Study, runs
from analyses.studies.growth_measures import (
    by_offset,
    frequency_shares,
    joined,
    key_frequencies,
    neurons,
)
from analyses.studies.growth_report import curves_figure, neurons_figure, page
from analyses.tools.benching import machine
from analyses.tools.options import Device, Out, Runs, Seeds, Smoke
from analyses.tools.study_files import keep
from analyses.tools.train_modular_addition import fast_logits, pairs
from attn_only_lens import compare, grow
from attn_only_lens import expansion as ex
from attn_only_lens import patching as p
from attn_only_lens.errors import InputWarning
from attn_only_lens.tl import HookedTransformer


def looked_at(done: Run, study: Study) -> dict[str, pd.DataFrame]:
    """Return key frequencies and neuron-heads of one run, before growth and at the end."""
    model = done.training.model
    tokens, answers, _ = (tensor.to(model.cfg.device) for tensor in pairs(study.recipe("full", 0)))
    stages = {"after": model} | ({"before": done.before} if done.before else {})
    frequencies, heads = [], []
    for when, model_then in stages.items():
        with torch.no_grad():
            shares = frequency_shares(by_offset(fast_logits(model_then, tokens), answers))
        frequencies.append(shares.rename("share").reset_index().assign(when=when))
        frame = neurons(model_then, tokens, answers).assign(when=when, is_new=False)
        if when == "after" and done.training.provenance is not None:
            frame["is_new"] = frame["name"].isin(done.training.provenance.new_neurons)
        heads.append(frame)
    return {"frequencies": pd.concat(frequencies), "neurons": pd.concat(heads)}


def circuits_of(done: Run, null: HookedTransformer | None, study: Study) -> pd.DataFrame:
    """Compare the circuit before growth with the circuits right after growth and at the end.

    Each clean prompt a, b has a corrupted prompt a, b' with a random b'. The metric is the
    difference between the logits of a + b and a + b'.
    """
    assert done.before is not None
    modulus, generator = study.modulus, torch.Generator().manual_seed(done.seed)
    drawn = torch.randint(modulus, (study.n_compared, 2), generator=generator)
    shift = torch.randint(1, modulus, (study.n_compared,), generator=generator)
    equals = torch.full_like(shift, modulus)
    clean = torch.stack([drawn[:, 0], drawn[:, 1], equals], dim=1)
    corrupted = torch.stack([drawn[:, 0], (drawn[:, 1] + shift) % modulus, equals], dim=1)
    correct, wrong = (prompt[:, :2].sum(1) % modulus for prompt in (clean, corrupted))
    settings: dict[str, Any] = dict(corrupted=corrupted, batch_size=len(clean), n_patched=0)
    at_once = grow(done.before, ex.compose(*done.training.schedule.values()), seed=1)
    frames = []
    for when, model, nothing in (
        ("right after growth", at_once.model, None),
        ("at the end", done.training.model, null),
    ):
        comparison = compare(
            *(done.before, model, clean, p.logit_diff(correct.tolist(), wrong.tolist())),
            provenance=done.training.provenance,
            null=nothing,
            progress=False,
            **settings,
        )
        nodes = comparison.nodes.query("status == 'gained'")
        gained = nodes.loc[nodes["original_name"].isna(), "name"].str.contains("N").sum()
        heads = comparison.new.query("kind == 'attention'")["share"].sum()
        extra = {"when": when, "new_neurons_in_circuit": gained, "share_new_heads": heads}
        names = {"original and grown": "grown", "grown and null": "again"}
        overlap = comparison.circuits.rename(columns={"first": "original", "second": "grown"})
        frames.append(overlap.replace({"pair": names}).assign(**extra))
    return pd.concat(frames)


def measured(study: Study, folder: Path, device: str) -> dict[str, pd.DataFrame]:
    """Train and measure every arm; return frames by name, each with columns `arm` and `seed`."""
    collected: dict[str, list[pd.DataFrame]] = {}
    done = {(run.arm, run.seed): run for run in runs(study, folder, device)}
    for (arm, seed), run in done.items():
        frames = {"curves": run.curve} | looked_at(run, study)
        if arm in ("early", "late"):
            null = done["late again", seed].training.model if arm == "late" else None
            frames["circuits"] = circuits_of(run, null, study)
            keys = frames["frequencies"].query("when == 'before'").set_index("frequency")["share"]
            after = frames["neurons"].query("when == 'after'")
            frames["joined"] = pd.DataFrame([joined(after, key_frequencies(keys))])
        for name, frame in frames.items():
            frame.insert(0, "arm", arm)
            frame.insert(1, "seed", seed)
            collected.setdefault(name, []).append(frame)
    return {name: pd.concat(frames, ignore_index=True) for name, frames in collected.items()}


def main(
    out: Out = Path("out/growth"),
    runs_dir: Runs = Path("out/runs"),
    device: Device = "cpu",
    n_seeds: Seeds = 3,
    smoke: Smoke = False,
) -> None:
    """Train, measure, print; write the page, tables and figures (`study_files.py`)."""
    warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
    warnings.simplefilter("ignore", InputWarning)  # a model that fails at the task causes a warning
    started = time.perf_counter()
    study = replace(SMOKE if smoke else Study(), n_seeds=n_seeds)
    frames = measured(study, runs_dir, device)
    spent = frames["curves"].groupby(["arm", "seed"])[["cpu_seconds", "wall_seconds"]].last()
    about = {
        "study": asdict(study),
        "machine": machine(device),
        "load_average": os.getloadavg(),
        # The training time of all seeds, summed over all sessions.
        **spent.groupby("arm").sum().round(1).to_dict(),
    }
    settings = {"device": device, "smoke": smoke, **about}
    text = page(frames, settings)
    typer.echo(text)
    pictures = {"": curves_figure(frames["curves"]), "neurons": neurons_figure(frames["neurons"])}
    keep(__file__, out, text, frames, pictures, started=started, **settings)


if __name__ == "__main__":
    typer.run(main)
