"""A model in which everything but a circuit is ablated.

Sites are attention heads and neuron-heads at positions, as the rows of a `Sweep` name them. A site
of the circuit computes as usual, from what then reaches it. Any other is ablated: its z becomes

    "zero"      0
    "mean"      its mean over all real tokens of the clean prompts
    "resample"  its value in the corrupted run, at the same position

Heads and positions that are no sites, the embedding and the biases are never ablated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.results import Sweep
from attn_only_lens.runs.edit_checks import require_edits_read
from attn_only_lens.runs.inputs import option_reasons, reasons_not_to_run
from attn_only_lens.runs.interventions import ablate
from attn_only_lens.runs.metrics import AnyMetric
from attn_only_lens.runs.prompts import Prompts, prompt_pair
from attn_only_lens.runs.recording import Hooks, record_pair, run
from attn_only_lens.runs.sites import resolve_sites

Ablation = Literal["zero", "mean", "resample"]
Order = Literal["magnitude", "signed"]
_Rows: TypeAlias = npt.NDArray[np.int64]
_Flags: TypeAlias = npt.NDArray[np.bool_]
_PROBLEM = "these sites cannot be ablated"
_EXPECTED_POSITIONS = "expected 'each', 'all', or numbers from 0"


class AblatedModel:
    """A model of which only a circuit of ranked sites is left.

    Attributes:
        ranked: rows of the ranking, the highest ranked site first; ties in the given order.
        whole: the metric of the whole model.
        nothing: the metric with every site ablated.
    """

    def __init__(
        self,
        model: Any,
        clean: Prompts,
        corrupted: Prompts,
        metric: AnyMetric,
        ranking: Sweep,
        *,
        ablation: Ablation,
        order: Order,
        mask: Tensor | None,
    ) -> None:
        """Run both prompts, and the clean ones with every site ablated.

        Raises:
            InputError: an unknown ablation or order; positions from the end, or beyond the
                prompts; single heads of a neuron; ablating everything changes nothing.
            InputError: prompts or a metric that do not fit.
            UnsupportedModelError: ablating some heads has no effect, as the model does not read
                them where they are hooked.
        """
        settings = option_reasons("ablation", ablation, get_args(Ablation))
        settings += option_reasons("order", order, get_args(Order))
        if ranking.has_prompts:
            settings.append("got a ranking with rows of each prompt; expected one without")
        InputError.raise_if(settings, _PROBLEM)
        InputError.raise_if(reasons_not_to_run(model), "this model cannot be ablated")
        sites = ranking.frame.reset_index(drop=True)
        groups = resolve_sites(model, list(sites["name"].unique()))
        pair = prompt_pair(model, clean, corrupted, mask)
        self._model, self._runs = model, record_pair(model, pair, metric, groups, "z")
        InputError.raise_if(_reasons_against_sites(sites, pair.clean.shape[1]), _PROBLEM)
        # What helps the clean run raises the score when put in, and lowers it when taken out.
        effect = ranking.effect.to_numpy() * (1 if ranking.baseline == 0 else -1)
        score = abs(effect) if order == "magnitude" else effect
        self.ranked: _Rows = np.argsort(-score, kind="stable")
        source = (
            self._runs.corrupted
            if ablation == "resample"
            else ablate(self._runs.clean, self._runs.clean, ablation, pair.real)
        )
        self._points: list[_AblatedPoint] = []
        layers: dict[HeadKind, list[int]] = {}
        for key, rows in sites.groupby(["layer", "kind"], observed=True):
            layer, kind = cast("tuple[int, HeadKind]", key)
            layers.setdefault(kind, []).append(layer)
            name = host_of(model).hook_name(layer, kind, "z")
            if kind == "attention":
                other, width = source.hooked[name], 1
            else:
                other = source.neurons[layer].z.unsqueeze(-1)
                width = host_of(model).neurons[layer].heads_per_neuron
            self._points.append(_AblatedPoint(name, other, width, rows))
        for kind, of_kind in layers.items():
            require_edits_read(model, self._runs.clean, kind, of_kind, "z")
        self.whole = self._runs.clean_value
        self.nothing = self._value(np.zeros(len(sites), dtype=bool))
        if not abs(self.whole - self.nothing) > 1e-6 * max(abs(self.whole), abs(self.nothing)):
            reason = (
                f"the metric is {self.whole} with all sites and {self.nothing} with none of them; "
                "expected sites, an ablation and a metric that tell the two apart"
            )
            raise InputError([reason], _PROBLEM)

    def faithfulness(self, circuit: _Rows) -> float:
        """Return (m(C) - m(∅)) / (m(M) - m(∅)), with m the metric, C the circuit, M all sites.

        Args:
            circuit: rows of the ranking.
        """
        kept = np.zeros(len(self.ranked), dtype=bool)
        kept[circuit] = True
        return self._share(kept)

    def completeness(self, circuit: _Rows) -> float:
        """Return the faithfulness of all sites outside a circuit."""
        kept = np.ones(len(self.ranked), dtype=bool)
        kept[circuit] = False
        return self._share(kept)

    def random_faithfulness(
        self, sizes: Sequence[int], n_random: int, seed: int
    ) -> Float[np.ndarray, "random size"]:
        """Return the faithfulness of the first sites of random rankings."""
        generator = np.random.default_rng(seed)
        orders = [generator.permutation(len(self.ranked)) for _ in range(n_random)]
        found = [[self.faithfulness(order[:size]) for size in sizes] for order in orders]
        return np.array(found, dtype=float).reshape(n_random, len(sizes))

    def _share(self, kept: _Flags) -> float:
        return (self._value(kept) - self.nothing) / (self.whole - self.nothing)

    @torch.no_grad()
    def _value(self, kept: _Flags) -> float:
        clean = self._runs.clean
        hooks = [hook for point in self._points for hook in point.hooks(~kept)]
        return self._runs.metric.of(run(self._model, clean.tokens, clean.mask, hooks))


def _reasons_against_sites(sites: pd.DataFrame, n_pos: int) -> list[str]:
    reasons = []
    single = [name for name in sites["name"].astype(str) if "." in name]
    if single:
        reasons.append(f"got {single[0]}, one head of a neuron; expected whole neurons")
    numbers = set(sites["position"].unique().tolist()) - {"all"}
    if any(isinstance(each, str) for each in numbers):
        reasons.append(f"got positions by role; {_EXPECTED_POSITIONS}")
    elif any(each < 0 for each in numbers):
        reasons.append(f"got positions from the end; {_EXPECTED_POSITIONS}")
    elif any(each >= n_pos for each in numbers):
        reasons.append(
            f"got a site at position {max(numbers)}; the prompts have {n_pos} tokens: pass a "
            "ranking of prompts of this length"
        )
    return reasons


@dataclass(frozen=True, eq=False)
class _AblatedPoint:
    """Sites at one hook point.

    Attributes:
        name: of the hook point.
        replacement: of every z there.
        width: heads of a node.
        rows: of the sites.
    """

    name: str
    replacement: Float[Tensor, "batch pos head_index d_head"]
    width: int
    rows: pd.DataFrame

    def hooks(self, ablate: _Flags) -> Hooks:
        """The hook that ablates these sites; none if there are none."""
        rows = self.rows[ablate[self.rows.index.to_numpy()]]
        if rows.empty:
            return []
        n_pos, n_heads = self.replacement.shape[1:3]
        at = np.zeros((n_pos, n_heads // self.width), dtype=bool)
        if (rows["position"] == "all").all():
            at[:, rows["index"]] = True
        else:
            at[rows["position"], rows["index"]] = True
        where = torch.from_numpy(at).repeat_interleave(self.width, dim=1)[None, :, :, None]

        def hook(value: Tensor, hook: Any) -> Tensor:
            return torch.where(where.to(value.device), self.replacement.to(value), value)

        return [(self.name, hook)]
