"""A model of which only a circuit is left: every other site puts out something else, all at once.

Sites are attention heads and neuron-heads at positions, as the rows of a `Sweep` name them. A site
of the circuit computes as it does, from what then reaches it. Any other is ablated: its z is

    "zero"      0
    "mean"      its mean over all real tokens of the clean prompts
    "resample"  what it is in the corrupted run, at the same position

Heads and positions that are no sites at all, the embedding and the biases stay what they are.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.errors import CircuitError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.runs.paired_runs import Runs
from attn_only_lens.runs.recording import Hooks, run
from attn_only_lens.runs.replacements import ablated, patched
from attn_only_lens.runs.replay.trials import require_read

__all__ = ["ABLATIONS", "Ablated", "Ablation", "Flags"]

Ablation = Literal["zero", "mean", "resample"]
ABLATIONS: tuple[str, ...] = get_args(Ablation)
Flags: TypeAlias = npt.NDArray[np.bool_]


class Ablated:
    """The metric of a model with only some of its sites left.

    Attributes:
        sites: a row for each: `layer`, `kind`, `index`, `position` ("all", or a number from 0).
        whole: the metric of the whole model.
        nothing: the metric with every site ablated.
    """

    def __init__(self, model: Any, runs: Runs, sites: pd.DataFrame, to: Ablation) -> None:
        """Begin, with the two runs that all others are between.

        Raises:
            CircuitError: another ablation; positions of the wrong kind, or beyond the prompts; a
                site twice; single heads of a neuron; to ablate everything changes nothing.
            UnsupportedModelError: to ablate some heads has no effect, as the model does not read
                them where they are hooked.
        """
        problem = "these sites cannot be ablated"
        reasons = []
        if to not in ABLATIONS:
            reasons.append(f"got ablation={to!r}; expected one of {', '.join(ABLATIONS)}")
        named = [name for name in sites["name"].astype(str) if "." in name]
        if named:
            reasons.append(f"got {named[0]}, one head of a neuron; expected whole neurons")
        positions = set(sites["position"].unique().tolist())
        numbers = positions - {"all"}
        n_pos = runs.clean.tokens.shape[1]
        if len(numbers) < len(positions) and numbers:
            reasons.append(
                "got sites at all positions beside sites at one; expected one of the two"
            )
        elif any(each < 0 for each in numbers):
            reasons.append("got positions from the end; expected 'each', 'all', or numbers from 0")
        elif any(each >= n_pos for each in numbers):
            reasons.append(
                f"got a site at position {max(numbers)}; the prompts have {n_pos} tokens: take a "
                "ranking of prompts of this length"
            )
        twice = sites[sites.duplicated(["name", "position"])]
        if len(twice):
            first = twice.iloc[0]
            reasons.append(
                f"got {len(twice)} sites twice, such as {first['name']} at {first['position']}"
            )
        if reasons:
            raise CircuitError(reasons, problem)
        self.sites = sites.reset_index(drop=True)
        self._model, self._runs = model, runs
        source = (
            patched(runs.corrupted)
            if to == "resample"
            else ablated(runs.clean, runs.clean, to, runs.pair.real)
        )
        self._groups: list[_Group] = []
        layers: dict[HeadKind, list[int]] = {}
        for key, rows in self.sites.groupby(["layer", "kind"], observed=True):
            layer, kind = cast("tuple[int, HeadKind]", key)
            layers.setdefault(kind, []).append(layer)
            name = host_of(model).hook_name(layer, kind, "z")
            if kind == "attention":
                other, width = source.hooked[name], 1
            else:
                other = source.neurons[layer].z.unsqueeze(-1)
                width = host_of(model).neurons[layer].heads_per_neuron
            self._groups.append(_Group(name, other, width, rows))
        for kind, of_kind in layers.items():
            require_read(model, runs.clean, kind, of_kind, "z")
        self.whole = runs.clean_value
        self.nothing = self._value(np.zeros(len(sites), dtype=bool))
        if not abs(self.whole - self.nothing) > 1e-6 * max(abs(self.whole), abs(self.nothing)):
            reason = (
                f"the metric is {self.whole} with all sites and {self.nothing} with none of them; "
                "expected sites, an ablation and a metric that tell the two apart"
            )
            raise CircuitError([reason], problem)

    def faithfulness(self, kept: Flags) -> float:
        """(m(C) - m(∅)) / (m(M) - m(∅)), with m the metric, C the sites that are kept, M all.

        Args:
            kept: for each row of `sites`, whether it is in the circuit.
        """
        return (self._value(kept) - self.nothing) / (self.whole - self.nothing)

    @torch.no_grad()
    def _value(self, kept: Flags) -> float:
        clean = self._runs.clean
        hooks = [hook for group in self._groups for hook in group.hooks(~kept)]
        return self._runs.metric.of(run(self._model, clean.tokens, clean.mask, hooks))


@dataclass(frozen=True, eq=False)
class _Group:
    """Sites at one hook point.

    Attributes:
        name: of the hook point.
        other: what an ablation puts there.
        width: heads to a node.
        rows: of the sites.
    """

    name: str
    other: Float[Tensor, "batch pos head_index d_head"]
    width: int
    rows: pd.DataFrame

    def hooks(self, gone: Flags) -> Hooks:
        """The hook that ablates those that are gone; none where none is."""
        gone = gone[self.rows.index.to_numpy()]
        if not gone.any():
            return []
        n_pos, n_heads = self.other.shape[1:3]
        at = np.zeros((n_pos, n_heads // self.width), dtype=bool)
        rows = self.rows[gone]
        if (rows["position"] == "all").all():
            at[:, rows["index"]] = True
        else:
            at[rows["position"], rows["index"]] = True
        where = torch.from_numpy(at).repeat_interleave(self.width, dim=1)[None, :, :, None]

        def hook(value: Tensor, hook: Any) -> Tensor:
            return torch.where(where.to(value.device), self.other.to(value), value)

        return [(self.name, hook)]
