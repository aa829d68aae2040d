"""Compare attribution with exact repairs on SmolLM2-135M with exact patches of sampled sites.

A sweep of every site would take hours. So sites are sampled, separately for attention heads and
neuron-heads: the 250 with the largest expected error, the 250 with the largest |estimate|, and 250
random other sites. Each random site represents an equal share of the other sites, and correlations
are weighted accordingly. The top 20 are taken from the sampled sites of a kind.

    python -m analyses.studies.attribution_smollm2 out/smollm2 --out analyses/results
"""

import time
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from tqdm import tqdm

from analyses.studies.attribution_vs_patching import KINDS
from analyses.tools.benching import leave, machine, markdown
from analyses.tools.options import Device, Out, Seed
from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.models.load import load
from attn_only_lens.patching import _attribution
from attn_only_lens.patching.repairs import Repairer
from attn_only_lens.patching.site_groups import site_rows

PAIRS = {
    "number": ("The keys to the old cabinet", "The key to the old cabinet", " are", " is"),
    "capital": ("The capital of France is", "The capital of Germany is", " Paris", " Berlin"),
    "names": (
        "When Mary and John went to the store, John gave a drink to",
        "When Mary and John went to the store, Mary gave a drink to",
        " Mary",
        " John",
    ),
    "gender": ("The queen left the hall because", "The king left the hall because", " she", " he"),
}
BUDGETS = (0, 1, 3, 10, "auto")
EACH, TOP = 250, 20
SITE = ["name", "position"]


class Keeping(Repairer):
    """A repairer that stores its ranking keys, so that `main` can read them."""

    keys: pd.Series

    def __init__(self, runner: Any, groups: Any, keys: Any, *args: Any, **options: Any) -> None:
        rows = site_rows(groups)
        numbers = keys.cpu().double().numpy()
        type(self).keys = pd.Series(numbers, pd.MultiIndex.from_frame(rows[SITE].astype(object)))
        super().__init__(runner, groups, keys, *args, **options)


def effects(sweep: p.Sweep) -> pd.Series:
    """Return effects indexed by site."""
    sites = pd.MultiIndex.from_frame(sweep.frame[SITE].astype(object))
    return pd.Series(sweep.effect.to_numpy(), sites)


def sample(estimate: pd.Series, key: pd.Series, n: int, seed: int) -> pd.Series:
    """Return sampled sites, with the number of sites that each one represents."""
    largest = key.nlargest(n).index.union(estimate.abs().nlargest(n).index)
    others = estimate.index.difference(largest)
    drawn = others[np.random.default_rng(seed).choice(len(others), n, replace=False)]
    return pd.concat(
        [pd.Series(1.0, largest), pd.Series(len(others) / len(drawn), drawn)], verify_integrity=True
    )


def pearson(first: pd.Series, second: pd.Series, weight: pd.Series) -> float:
    """Return the weighted correlation."""
    cov = np.cov(first, second, aweights=weight)
    return float(cov[0, 1] / np.sqrt(cov[0, 0] * cov[1, 1]))


def main(
    folder: Annotated[Path, typer.Argument(help="SmolLM2-135M, as `make smollm2` writes it")],
    out: Out = Path("out/attribution"),
    device: Device = "cpu",
    seed: Seed = 0,
    n_each: Annotated[int, typer.Option("--each", help="sites of each kind, three times")] = EACH,
) -> None:
    """Measure, and write a page and its record."""
    started = time.perf_counter()
    model = expose_neuron_heads(load(folder, device=device)).model
    _attribution.Repairer = Keeping  # type: ignore[attr-defined]
    rows = []
    for task, (clean, corrupted, right, wrong) in tqdm(PAIRS.items(), unit="pair"):
        prompts = clean, corrupted, p.logit_diff(right, wrong)
        sweeps = {
            budget: p.attribution(model, *prompts, budget=budget, progress=False)
            for budget in BUDGETS
        }
        estimate = effects(sweeps[0])
        kinds = sweeps[0].frame["kind"].to_numpy()
        weights = {
            kind: sample(estimate[kinds == kind], Keeping.keys[kinds == kind], n_each, seed)
            for kind in KINDS
        }
        sites = [site for weight in weights.values() for site in weight.index]
        names = [f"{name}@{position}" for name, position in sites]
        patched = effects(p.activation_patch(model, *prompts, sites=names, progress=False))
        for (budget, sweep), (kind, weight) in product(sweeps.items(), weights.items()):
            mended, exact = (of.reindex(weight.index) for of in (effects(sweep), patched))
            best = exact.abs().idxmax()
            largest = [set(of.abs().nlargest(TOP).index) for of in (exact, mended)]
            rows.append(
                {
                    "pair": task,
                    "budget": budget,
                    "heads": KINDS[kind],
                    "Pearson": pearson(mended, exact, weight),
                    "expected": sweep.expected_pearson.get(kind),
                    "top-20": len(largest[0] & largest[1]) / TOP,
                    "patched": int(sweep.frame["exact"][kinds == kind].sum()),
                    "sites": int((kinds == kind).sum()),
                    "forwards": sweep.forwards,
                    "largest effect": f"{best[0]}@{best[1]}",
                    "its exact effect": exact[best],
                    "its effect here": mended[best],
                }
            )
    frame = pd.DataFrame(rows)
    lines = [["–" if pd.isna(x) else x for x in row] for row in frame.round(3).values.tolist()]
    shown = markdown(list(frame), lines)
    prompts_shown = "\n".join(
        f"- {task}: “{clean}” / “{corrupted}”, “{right}” against “{wrong}”"
        for task, (clean, corrupted, right, wrong) in PAIRS.items()
    )
    page = PAGE.format(
        table=shown, prompts=prompts_shown, machine=machine(device), each=n_each, seed=seed
    )
    settings = {"device": device, "smoke": False, "seed": seed}
    leave(__file__, out, {"attribution_smollm2.md": page}, started=started, **settings)
    typer.echo(page)


PAGE = """# Attribution with exact repairs on SmolLM2-135M

Clean activations into the corrupted run, every attention head and neuron at every position. Exact
effects are of a sample of either kind: {each} sites of the largest expected error, {each} of the
largest |estimate|, {each} of the others at random (seed {seed}), which stand for all of those.
Correlations are weighted so; top-20 is among the sampled sites. Budgets, and "forwards", what was
spent of them, are in flops of forward passes.

{prompts}

{table}

Made by `python -m analyses.studies.attribution_smollm2 out/smollm2`, on {machine}.
"""

if __name__ == "__main__":
    typer.run(main)
