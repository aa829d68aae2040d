"""The results of a sweep: a row for each site and position, on a scale from 0 to 1.

    score = (value - corrupted) / (clean - corrupted)

is 0 on the corrupted run and 1 on the clean one, in either direction: denoising (clean activations
into the corrupted run) raises it from 0, noising lowers it from 1. Values are means over prompts.
In rows of each prompt, with `unpatched` the prompt's own value in the run that is patched into,

    score = baseline + (value - unpatched) / (clean - corrupted)

so that a patch without effect leaves the baseline, and the mean over prompts is the score above.
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.engine.metrics import require_distinct
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.over_prompts import SPREAD, OverPrompts
from attn_only_lens.patching.prompt_tokens import PromptTokens
from attn_only_lens.patching.scored_frame import ScoredFrame
from attn_only_lens.patching.site_groups import SiteGroup
from attn_only_lens.patching.sweep_rows import PROBLEM, SweepRows
from attn_only_lens.storage import Document
from attn_only_lens.storage.tables import TableFields

MEASURED = "patching"
"""The method of a sweep that ran every patch."""


class _Fields(TableFields):
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    method: str
    expected_pearson: dict[HeadKind, float | None]
    forwards: float
    tokens: PromptTokens | None


_DOCUMENT = Document("attn_only_lens.Sweep", 4, _Fields)


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(ScoredFrame):
    """The results of a sweep, with its settings.

    Attributes:
        frame: a row for each site and position, with columns `layer`, `kind`, `index`, `name`,
            `position` (a number, "all", or a role), `part`, `value` (the metric after the patch),
            `score`; a frame that is given, the first argument, needs no `part` and `score`. It is
            made when first asked for: of ten million rows it takes half a gigabyte, where `top`,
            `effects`, `agreement` and `len` need a third of that. Of several prompts
            `value_standard_error` and `score_standard_error` (see `over_prompts.py`), missing where
            the metric is one number of all prompts; or, with `per_prompt`, a row for each prompt,
            with `prompt`, counted from 0, and `unpatched`, its metric before the patch.
        part: the part of each head that was patched: "z", "pattern", "value", "q", "k".
        direction: "denoise", clean into corrupted; "noise", corrupted into clean; or the
            ablation of z in the clean run, "zero", "mean", "resample", "bias".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: pairs of prompts, over which values are means unless rows are of each.
        model: the model's name.
        method: "patching" where values are measured, or how `attribution` estimated them.
        expected_pearson: of an attribution with exact repairs, the correlation with patching to
            expect over all rows of attention heads ("attention") and of neuron-heads ("neuron"). It
            has a margin, but is not a bound. None if too few sites were patched to tell.
        forwards: of such an attribution, what its patches cost, in flops of forward passes.
        tokens: the texts of the prompts' tokens, which pictures show at positions; None of a frame
            that was given without.

    Raises:
        InputError: columns are missing or unknown, a value is not finite, a site is there
            twice, positions are of two kinds, a name is of two heads, or the clean value is the
            corrupted one.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
        ...                        "name": ["L0N5", "L0N7"], "position": -1, "value": [2.0, -1.0]})
        >>> sweep = p.Sweep(values, part="z", direction="denoise", metric="logit_diff(7, 8)",
        ...                 clean_value=3.0, corrupted_value=-1.0, n_prompts=1, model="adder")
        >>> sweep.to_frame()["score"].tolist()
        [0.75, 0.0]
        >>> sweep.top(1)["name"].tolist()
        ['L0N5']
    """

    _document = _DOCUMENT

    given: InitVar[pd.DataFrame | SweepRows]
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    method: str = MEASURED
    expected_pearson: dict[HeadKind, float | None] = field(default_factory=dict)
    forwards: float = 0.0
    tokens: PromptTokens | None = None
    rows: SweepRows = field(init=False)

    def __post_init__(self, rows_or_frame: pd.DataFrame | SweepRows) -> None:
        InputError.raise_if(self._setting_reasons(), PROBLEM)
        rows = (
            rows_or_frame
            if isinstance(rows_or_frame, SweepRows)
            else SweepRows.of_frame(rows_or_frame, self.part)
        )
        reasons = []
        if self.tokens is not None and len(self.tokens.clean) != self.n_prompts:
            got = f"tokens of {len(self.tokens.clean)} prompts"
            reasons.append(f"got {got} and n_prompts={self.n_prompts}; expected as many")
        InputError.raise_if(reasons + rows.reasons_against_values(), PROBLEM)
        object.__setattr__(self, "rows", rows)

    @classmethod
    def of_prompts(
        cls,
        model: Any,
        pair: PromptPair,
        groups: Sequence[SiteGroup],
        over: OverPrompts,
        part: str,
        method: str = MEASURED,
        *,
        exact: Bool[Tensor, "row"] | None = None,
        **fields: Any,
    ) -> "Sweep":
        """Return the sweep of the values of all prompts.

        Args:
            model: that was patched.
            pair: the prompts.
            groups: the sites.
            over: their values.
            part: of each head.
            method: how they were found.
            exact: which are of patches, where others are estimates; None if all are.
            fields: of an attribution, or of rounded products.

        Raises:
            InputError: the metric does not tell the clean run from the corrupted one.
        """
        columns = over.columns()
        if exact is not None:
            columns["exact"] = np.repeat(exact.numpy(), len(columns["value"]) // len(exact))
        clean_value, corrupted_value = over.ends
        require_distinct(clean_value, corrupted_value, next(model.parameters()).dtype)
        return cls(
            SweepRows.of_groups(groups, [columns]),
            part=part,
            direction=over.direction,
            metric=over.name,
            clean_value=clean_value,
            corrupted_value=corrupted_value,
            n_prompts=over.n_prompts,
            model=str(getattr(model.cfg, "model_name", "")),
            method=method,
            tokens=PromptTokens.of_groups(model, pair, groups),
            **fields,
        )

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def frame(self) -> pd.DataFrame:  # type: ignore[override]
        """The rows with their names, positions and scores; made when first asked for."""
        return self.rows.frame(self.part, self.scores)

    @cached_property
    def scores(self) -> Float[np.ndarray, "row"]:
        """The score of each row."""
        numbers, span = self.rows.numbers, self.clean_value - self.corrupted_value
        if "unpatched" in numbers:
            return self.baseline + (numbers["value"] - numbers["unpatched"]) / span
        return (numbers["value"] - self.corrupted_value) / span

    @property
    def effects(self) -> Float[np.ndarray, "row"]:
        """The change of the score by each patch, from `baseline`."""
        return self.scores - self.baseline

    def _chosen(self, rows: Int[np.ndarray, "some"]) -> pd.DataFrame:
        return self.rows[rows].frame(self.part, self.scores[rows]).set_index(pd.Index(rows))

    def query(self, condition: str) -> "Sweep":
        """Return the rows that meet a condition, such as `layer == 3 and kind == 'neuron'`.

        Names after an @ are variables of the caller: `name in @names`.

        Raises:
            InputError: it is no condition on columns of the frame.
        """
        problem = f"no rows can be picked by {condition!r}"
        try:
            met = self.frame.eval(condition, level=1)
        except (NameError, SyntaxError, TypeError, ValueError) as error:
            reason = f"{error}; expected a condition on {list(self.frame.columns)}"
            raise InputError([reason], problem) from error
        if not (isinstance(met, pd.Series) and met.dtype == bool):
            got = met.dtype if isinstance(met, pd.Series) else type(met).__name__
            raise InputError([f"it gives {got}; expected True or False for each row"], problem)
        return replace(self, given=self.rows[np.flatnonzero(met)])

    def _headline(self) -> str:
        kind = "Sweep" if self.method == MEASURED else f"Attribution ({self.method})"
        numbers = self.rows.numbers
        rows = "rows of each prompt" if "prompt" in numbers else "rows"
        errors = ", without standard errors: its metric is one number of all prompts"
        n_exact = int(numbers.get("exact", np.zeros(1)).sum())
        repaired = f", {n_exact} of them exact patches" * (n_exact > 0)
        if n_exact and self.expected_pearson:
            expected = ", ".join(
                f"{kind} {'unknown' if value is None else format(value, '.3g')}"
                for kind, value in self.expected_pearson.items()
            )
            repaired += f" (expected correlation with patching: {expected})"
        missing = bool(np.isnan(numbers.get(SPREAD[0], np.zeros(1))).any())
        return (
            f"{kind} of {self.model}: {self.part}, {self.direction}, {len(self)} {rows}"
            f"{repaired}, "
            f"{self.n_prompts} prompts{errors * missing}; {self.metric} is {self.clean_value:.4g} "
            f"clean, {self.corrupted_value:.4g} corrupted"
        )
