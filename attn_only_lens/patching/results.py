"""Results of sweeps and of path patching, as frames with one row per site or path.

    score = (value - corrupted) / (clean - corrupted)

The score is 0 for the corrupted run and 1 for the clean run. Denoising raises the score from 0, and
noising lowers the score from 1. Values are means over prompts. For a single prompt whose value
before the patch is `unpatched`, the score is baseline + (value - unpatched) / (clean - corrupted).
The mean of these scores over prompts equals the score of the mean value.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from scipy import stats
from typing_extensions import TypedDict

from attn_only_lens.arguments import POSITIVE, a_type, as_plain, is_count, is_number
from attn_only_lens.engine.input_warnings import shortened
from attn_only_lens.engine.metrics import require_distinct
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import joined
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.columns import (
    PARTS,
    PATH_COLUMNS,
    PROBLEM,
    SWEEP_COLUMNS,
    Column,
    finite_reasons,
    read_columns,
    texts,
)
from attn_only_lens.patching.over_prompts import SPREAD, OverPrompts
from attn_only_lens.patching.prompt_tokens import PromptTokens
from attn_only_lens.patching.site_groups import SiteGroup, site_rows
from attn_only_lens.storage import Document
from attn_only_lens.storage.atomic import AnyPath
from attn_only_lens.storage.tables import TableFields, read_table, write_table

BASELINE = {"denoise": 0.0, "noise": 1.0, "zero": 1.0, "mean": 1.0, "resample": 1.0, "bias": 1.0}
"""The score of the target run, for each direction. Ablations patch into the clean run."""
MEASURED = "patching"
"""The method name of a sweep in which every patch was run."""
TOP = 20
"""How many rows `top` returns by default; `attribution` checks as many by exact patches."""

_SHOWN_ROWS = 10
_FEWEST_PROMPTS = 8  # the fewest prompts for p-values
_SAME_RUN = 0.01  # a tolerance relative to |clean - corrupted|, above rounding errors in any dtype
_ROUNDING = 1e-5  # a smaller effect, as a share of the difference, may be a rounding error
# `top` returns these columns, and the first tuple of `_DETAILS` whose columns all exist.
_ALWAYS_ON_TOP = (
    *("name", "sender", "receiver", "position", "token", "part", "score", "effect", "exact"),
    "before_switch",
)
_DETAILS: tuple[tuple[str, ...], ...] = (
    ("score_standard_error",),
    ("value", "prompt"),
    ("estimate",),
    PARTS,
    ("value",),
)
_METRIC_NAMES = {
    "logit_diff": "Logit difference",
    "probability_diff": "Probability difference",
    "log_probability": "Log probability",
    "kl": "KL divergence",
}
_Results = TypeVar("_Results", bound="ScoredFrame")


@dataclass(frozen=True, eq=False, repr=False)
class ScoredFrame:
    """A frame of results with a column `score`, and the settings that produced them.

    Each subclass names its file format, its version, and the columns that its frame may have. Files
    store all other fields as settings.
    """

    _format: ClassVar[tuple[str, int]]
    _columns: ClassVar[tuple[Column, ...]]

    frame: pd.DataFrame
    part: str
    direction: str
    metric: str
    clean_value: float
    corrupted_value: float
    n_prompts: int
    model: str
    tokens: PromptTokens | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        InputError.raise_if(self._setting_reasons(), PROBLEM)
        frame = read_columns(self.frame, self._columns)
        if "part" not in frame:
            place = [column.name for column in self._columns].index("part")
            part = pd.Series(self.part, index=frame.index, name="part", dtype=object)
            frame.insert(place, "part", pd.Series(texts(part), index=frame.index))
        InputError.raise_if(self._row_reasons(frame), PROBLEM)
        frame.insert(list(frame).index("value") + 1, "score", self._scores(frame))
        object.__setattr__(self, "frame", frame)

    def _row_reasons(self, frame: pd.DataFrame) -> list[str]:
        """Return every reason why the rows contradict the settings or each other."""
        parts = sorted({*map(str, frame["part"].unique())} - {self.part})
        reasons = [f"got parts {parts}; expected only {self.part!r}"] * bool(parts)
        return reasons + finite_reasons(frame, self._columns)

    def _setting_reasons(self) -> list[str]:
        """Return every reason why the settings are invalid."""
        reasons = [
            f"got {name}={getattr(self, name)!r}; expected a text"
            for name in ("part", "metric", "model")
            if not isinstance(getattr(self, name), str)
        ]
        if self.direction not in list(BASELINE):  # a list, because `direction` may be unhashable
            reasons.append(f"got direction={self.direction!r}; expected one of {list(BASELINE)}")
        ends = as_plain(self.clean_value), as_plain(self.corrupted_value)
        if not all(map(is_number, ends)) or ends[0] == ends[1]:
            reasons.append(
                f"the metric is {ends[0]!r} on the clean run and {ends[1]!r} on the corrupted run; "
                "expected two finite numbers that differ"
            )
        reasons += POSITIVE.reasons(n_prompts=self.n_prompts)
        if not isinstance(self.tokens, PromptTokens | None):
            got = type(self.tokens).__name__
            reasons.append(f"got tokens of type {got}; expected PromptTokens, or None")
        elif self.tokens is not None and len(self.tokens.clean) != self.n_prompts:
            got = f"tokens of {len(self.tokens.clean)} prompts"
            reasons.append(f"got {got} and n_prompts={self.n_prompts}; expected the same number")
        return reasons

    def to_frame(self) -> pd.DataFrame:
        """Return a copy of the frame."""
        return self.frame.copy()

    @property
    def clean_and_corrupted(self) -> str:
        """The metric in both runs as a string: "Logit difference 7.57 (clean), …"."""
        kind = self.metric.partition("(")[0].partition(" of ")[0]
        name = _METRIC_NAMES.get(kind, kind[:1].upper() + kind[1:])
        return f"{name} {self.clean_value:.3g} (clean), {self.corrupted_value:.3g} (corrupted)"

    @property
    def baseline(self) -> float:
        """The score of the target run, which is also the score of a patch without effect."""
        return BASELINE[self.direction]

    @property
    def effect(self) -> "pd.Series[float]":
        """Each patch's score minus `baseline`, the score without a patch."""
        return pd.Series(self.frame["score"].to_numpy() - self.baseline, name="score")

    def _scores(self, frame: pd.DataFrame) -> Float[np.ndarray, "row"]:
        value, span = frame["value"].to_numpy(), self.clean_value - self.corrupted_value
        if "unpatched" in frame:
            return self.baseline + (value - frame["unpatched"].to_numpy()) / span
        return (value - self.corrupted_value) / span

    def __len__(self) -> int:
        return len(self.frame)

    def top(self, k: int = TOP) -> pd.DataFrame:
        """Return the k rows with the largest |effect|, largest first; ties keep their order.

        If the score without a patch is 1 (all directions but "denoise"), the column `effect` has
        the score minus 1: a site with a score near 0 matters most.
        In an attribution, column `exact` says which rows are exact patches; the others are
        estimates. With `per_prompt`, a site can appear once for each prompt. The result has only
        columns that fit into 80 characters; `frame` has all columns. The column `token` has the
        clean prompt's token at the position, or an empty text if prompts have different tokens.
        """
        InputError.raise_if(POSITIVE.reasons(k=k), "no rows can be picked")
        rows = self.frame.iloc[self.effect.abs().nlargest(k).index]
        if self.baseline:
            rows = rows.assign(effect=rows["score"] - self.baseline)
        if self.tokens is not None:
            token = self.tokens.clean_text
            texts = [token(position, prompts) for position, prompts in self._positions_of(rows)]
            rows = rows.assign(token=texts) if any(texts) else rows
        details = next(group for group in _DETAILS if set(group) <= set(rows))
        return rows[[name for name in (*_ALWAYS_ON_TOP, *details) if name in rows]]

    def _positions_of(self, rows: pd.DataFrame) -> list[tuple[int | str, Iterable[int]]]:
        """Return each row's position, and the prompts over which its value was averaged."""
        every = range(self.n_prompts)
        prompts = [[i] for i in rows["prompt"]] if "prompt" in rows else [every] * len(rows)
        return list(zip(rows["position"], prompts, strict=True))

    def save(self, path: str | Path) -> None:
        """Write a .parquet file, or a .csv file with a .csv.json file next to it."""
        settings = {name: getattr(self, name) for name in self._settings()}
        settings["tokens"] = None if self.tokens is None else vars(self.tokens)
        write_table(path, self.frame, self._document(), **settings)

    @classmethod
    def read(cls: "type[_Results]", path: AnyPath) -> "_Results":
        frame, document = read_table(path, cls._document())
        settings = {name: document[name] for name in cls._settings()}
        if settings["tokens"] is not None:
            settings["tokens"] = PromptTokens(**settings["tokens"])
        return cls(frame, **settings)

    @classmethod
    def _settings(cls) -> dict[str, Any]:
        """Return the types of the settings, by name."""
        hints = get_type_hints(cls)
        return {f.name: hints[f.name] for f in fields(cls) if f.name != "frame"}

    @classmethod
    def _document(cls) -> Document:
        document_fields: Any = TypedDict  # mypy expects literal fields
        stored = get_type_hints(TableFields) | cls._settings()
        return Document(*cls._format, document_fields(cls.__name__, stored))

    @abstractmethod
    def _kind_and_rows(self) -> tuple[str, str]:
        """Return two strings: what kind of results these are, and how many rows they have."""

    def _headline(self) -> str:
        """Return a one-line description of these results."""
        kind, rows = self._kind_and_rows()
        missing = SPREAD[0] in self.frame and bool(self.frame[SPREAD[0]].isna().any())
        errors = ", without standard errors: the metric has one value for all prompts" * missing
        return (
            f"{kind} of {self.model}: {self.part}, {self.direction}, {rows}, {self.n_prompts} "
            f"prompts{errors}; {self.metric} is {self.clean_value:.4g} clean, "
            f"{self.corrupted_value:.4g} corrupted"
        )

    def _shown(self, as_text: Callable[..., str]) -> str:
        """Return the top rows as text, with the tokens at each row's position."""
        top = self.top(_SHOWN_ROWS)
        if self.tokens is not None:
            texts = [self.tokens.text(*pair) for pair in self._positions_of(top)]
            top = top.drop(columns="token", errors="ignore")
            top.insert(list(top.columns).index("position") + 1, "token", texts)
        return as_text(top, index=False) if len(top) else "no rows"

    def _prompts(self) -> list[str]:
        """Return the text of each prompt that has rows of its own in `_shown`."""
        if self.tokens is None or "prompt" not in self.frame:
            return []
        shown = sorted({*self.top(_SHOWN_ROWS)["prompt"]})
        return [f"prompt {i}: {shortened(joined(self.tokens.clean[i]))}" for i in shown]

    def __repr__(self) -> str:
        return "\n".join([self._headline(), self._shown(pd.DataFrame.to_string), *self._prompts()])

    def _repr_html_(self) -> str:
        prompts = "<br>".join(map(escape, self._prompts()))
        shown = self._shown(pd.DataFrame.to_html)
        return f"<p>{escape(self._headline())}</p>\n{shown}{prompts}"


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(ScoredFrame):
    """The results of a sweep, with its settings.

    Attributes:
        frame: one row per site and position. Columns: `layer`, `kind`, `index`, `name`, `position`
            (a number, "all", or a role), `part`, `value` (the metric after the patch), `score`. For
            several prompts, there are also `value_standard_error` and `score_standard_error` (see
            `over_prompts.py`), which are missing if the metric has one value for all prompts. With
            `per_prompt` there is instead one row per site and prompt, with columns `prompt`
            (counted from 0) and `unpatched` (the prompt's metric before the patch). A split
            attribution has `by_pattern` and `by_value`, which add up to the effect on the score. An
            attribution has `exact` (False for estimates) and, if the runs differ by a switch (see
            `attribution`), `before_switch`. A frame passed to the constructor needs no `part` and
            `score`.
        part: the part of each head that was patched: "z", "pattern", "value", "q" or "k".
        direction: "denoise" (clean into corrupted), "noise" (corrupted into clean), or the ablation
            of z in the clean run: "zero", "mean", "resample" or "bias".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: the number of prompt pairs; values are means over them, unless `per_prompt`.
        model: the model's name.
        method: "patching" if every patch was run, or the method of `attribution`.
        expected_pearson: for an attribution with exact patches, the expected correlation with
            patching over attention heads ("attention") and neuron-heads ("neuron"). The expected
            correlation is not a bound. It is None if it is unknown.
        unknown: for each kind of head whose expected correlation is None, the reason.
        forwards: the cost of these exact patches, in forward passes (counted in flops).
        tokens: the texts of the prompts' tokens, which pictures show at positions, or None.

    Raises:
        InputError: columns are missing or unknown, a value is not finite, a site occurs twice,
            positions mix numbers and strings, a name stands for two heads, or the clean value
            equals the corrupted value.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> from attn_only_lens.patching.results import Sweep
        >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
        ...                        "name": ["L0N5", "L0N7"], "position": -1, "value": [2.0, -1.0]})
        >>> sweep = Sweep(values, part="z", direction="denoise", metric="logit_diff(7, 8)",
        ...                 clean_value=3.0, corrupted_value=-1.0, n_prompts=1, model="adder")
        >>> sweep.to_frame()["score"].tolist(), sweep.top(1)["name"].tolist()
        ([0.75, 0.0], ['L0N5'])
    """

    _format = ("attn_only_lens.Sweep", 5)
    _columns = SWEEP_COLUMNS

    method: str = MEASURED
    expected_pearson: dict[HeadKind, float | None] = field(default_factory=dict)
    unknown: dict[HeadKind, str] = field(default_factory=dict)
    forwards: float = 0.0

    def _row_reasons(self, frame: pd.DataFrame) -> list[str]:
        reasons, names = super()._row_reasons(frame), frame["name"]
        heads = frame[["name", "layer", "kind", "index"]].drop_duplicates()
        n_values = heads.groupby("name", observed=True, sort=False).nunique()
        for column in n_values:
            wrong = n_values.index[n_values[column] > 1]
            reasons += [f"rows for {name} have different {column} values" for name in wrong[:1]]
        again = _site_index(frame).duplicated(keep="last")
        if again.any():
            reasons.append(f"{again.sum()} rows repeat a site, such as {names[again.argmax()]}")
        return reasons

    @classmethod
    def of_prompts(
        cls,
        model: Any,
        pair: PromptPair,
        groups: Sequence[SiteGroup],
        totals: OverPrompts,
        part: str,
        method: str = MEASURED,
        *,
        exact: Bool[np.ndarray, "row"] | None = None,
        before_switch: Bool[np.ndarray, "row"] | None = None,
        by_pattern: Float[np.ndarray, "row"] | None = None,
        **fields: Any,
    ) -> "Sweep":
        """Return the results of a sweep over all prompts.

        `exact` marks rows with exact values, and `before_switch` sites before a switch (see
        `attribution`). `by_pattern` is how much each patch changes the metric through patterns.
        """
        clean_value, corrupted_value = totals.ends
        require_distinct(clean_value, corrupted_value, next(model.parameters()).dtype)
        columns: dict[str, Any] = totals.columns()
        rows = np.repeat(np.arange(totals.n_rows), len(columns["value"]) // totals.n_rows)
        if exact is not None:
            columns["exact"] = exact[rows]
        if before_switch is not None:
            columns["before_switch"] = before_switch[rows]
        if by_pattern is not None:
            span = clean_value - corrupted_value
            unpatched = corrupted_value if totals.direction == "denoise" else clean_value
            columns["by_pattern"] = by_pattern / span
            columns["by_value"] = (columns["value"] - unpatched - by_pattern) / span
        return cls(
            site_rows(groups).iloc[rows].reset_index(drop=True).assign(**columns),
            method=method,
            **run_settings(model, pair, groups, totals, part),
            **fields,
        )

    @property
    def has_prompts(self) -> bool:
        """Whether the frame has separate rows for several prompts."""
        return "prompt" in self.frame and self.frame["prompt"].nunique() > 1

    def agreement(self, other: "Sweep", k: int = TOP) -> pd.DataFrame:
        """Compare each site's effect in this sweep and in another, whose row order may differ.

        Args:
            other: a sweep with the same sites, positions, part, direction, metric and prompts.
            k: how many rows with the largest |effect| to compare; ties keep the order of this
                sweep.

        Returns:
            A one-row frame. Columns: `pearson`, `spearman` (ties share their mean rank), `top_k`
            (the share of the k largest effects in one sweep that are among the k largest in the
            other), `k`, `n` (the number of rows).

        Raises:
            InputError: with every reason: sites that only one sweep has; different parts,
                directions, metrics or metric values of the runs; constant scores; k not from 1 to
                n.

        Example:
            >>> import pandas as pd
            >>> from attn_only_lens.patching.results import Sweep
            >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [2, 5, 7],
            ...                        "name": ["L0N2", "L0N5", "L0N7"], "position": -1,
            ...                        "value": [1.0, 2.0, -1.0]})
            >>> run = {"part": "z", "direction": "denoise", "metric": "logit_diff(7, 8)",
            ...        "clean_value": 3.0, "corrupted_value": -1.0, "n_prompts": 1, "model": "m"}
            >>> exact, estimated = Sweep(values, **run), Sweep(values[::-1], **run)
            >>> exact.agreement(estimated, k=2).round(6).to_dict("records")
            [{'pearson': 1.0, 'spearman': 1.0, 'top_k': 1.0, 'k': 2, 'n': 3}]
        """
        problem = "these sweeps cannot be compared"
        if not isinstance(other, Sweep):
            raise InputError([f"got {a_type(other)}; expected another sweep"], problem)
        if ("prompt" in self.frame) != ("prompt" in other.frame):
            reason = (
                "one sweep has rows for single prompts and the other means over prompts; expected "
                "the same `per_prompt` for both"
            )
            raise InputError([reason], problem)
        # -1 for missing sites
        order = _site_index(other.frame).get_indexer(_site_index(self.frame))
        reasons = _differences(self, other) + _site_reasons(self, other, order)
        for label, sweep in (("this sweep", self), ("the other sweep", other)):
            if not np.ptp(sweep.effect) > 0:
                reasons.append(f"all scores of {label} are equal; expected scores that differ")
        if not is_count(k, 1, len(self)):
            reasons.append(f"got k={k!r}; expected 1 to {len(self)}, the number of rows")
        InputError.raise_if(reasons, problem)
        effects = self.effect, other.effect.iloc[order].reset_index(drop=True)
        top = [effect.abs().nlargest(k).index for effect in effects]
        row = {
            "pearson": stats.pearsonr(*effects).statistic,
            "spearman": stats.spearmanr(*effects).statistic,
            "top_k": len(top[0].intersection(top[1])) / k,
            "k": k,
            "n": len(self),
        }
        return pd.DataFrame([row])

    def significance(self) -> pd.DataFrame:
        """Return each site's mean effect with a p-value and a false-discovery rate.

        The null hypothesis of a site is that its mean effect is 0 over the prompts from which these
        were drawn. `p` is the two-sided p-value of a one-sample t-test, because the t-test is about
        the mean, as scores are. (A signed-rank test of 8 prompts has no p-value below 1/128, too
        large for thousands of sites.) `q` is the smallest false-discovery rate, over all rows, at
        which the site is a discovery, by the procedure of Benjamini and Yekutieli (2001). All
        effects come from the same prompts, and one site acts through another, so their dependence
        is unknown; the procedure of Benjamini and Hochberg needs independence or positive
        dependence. A small p does not mean a large effect. Effects below 1e-5, which may be
        rounding errors in float32, have p = 1; in half precision, larger effects may be, too.

        Returns:
            One row per site, in the order of `frame`, with columns `effect` (the score minus
            `baseline`), `standard_error`, `p` and `q`. For a choice of sites, use `query` first,
            with a condition that does not depend on the results.

        Raises:
            InputError: there are fewer than 8 prompts, rows of single prompts, a metric with one
                value for all prompts, or the same pair of prompts twice, also in reverse: the
                prompts must be independent.

        Example:
            >>> import pandas as pd
            >>> from attn_only_lens import patching as p
            >>> from attn_only_lens.patching.results import Sweep
            >>> values = pd.DataFrame({"layer": 0, "kind": "neuron", "index": [5, 7],
            ...                        "name": ["L0N5", "L0N7"], "position": -1,
            ...                        "value": [2.0, -0.8], "value_standard_error": 0.4,
            ...                        "score_standard_error": 0.1})
            >>> sweep = Sweep(values, part="z", direction="denoise", metric="logit_diff(7, 8)",
            ...                 clean_value=3.0, corrupted_value=-1.0, n_prompts=8, model="adder")
            >>> sweep.significance()[["name", "effect", "p", "q"]].round(4).to_numpy().tolist()
            [['L0N5', 0.75, 0.0001, 0.0004], ['L0N7', 0.05, 0.6324, 0.9486]]
        """
        frame, n, reasons = self.frame, self.n_prompts, list[str]()
        if n < _FEWEST_PROMPTS:
            reasons.append(f"got {n} prompts; expected {_FEWEST_PROMPTS} or more")
        if "prompt" in frame:
            reasons.append("got one row per site and prompt; expected means, without per_prompt")
        elif n > 1 and (SPREAD[1] not in frame or frame[SPREAD[1]].isna().any()):
            reasons.append("got rows without standard errors; expected one number per prompt")
        if self.tokens is not None:
            pairs = list(
                zip(self.tokens.clean, self.tokens.corrupted or self.tokens.clean, strict=True)
            )
            again = [i for i, pair in enumerate(pairs) if pair in pairs[:i]]
            reasons += [f"got prompts {again} twice; expected different prompts"] * bool(again)
            turned = [
                i
                for i, (clean, corrupted) in enumerate(pairs)
                if clean != corrupted and (corrupted, clean) in pairs[:i]
            ]
            expected = "expected different prompts"
            reasons += [f"got the reverse of prompts {turned}, too; {expected}"] * bool(turned)
        InputError.raise_if(reasons, "these effects have no p-values")
        effect, error = self.effect.to_numpy(), frame[SPREAD[1]].to_numpy()
        t = np.divide(abs(effect), error, out=np.full(len(error), np.inf), where=error > 0)
        p = np.where(abs(effect) < _ROUNDING, 1.0, 2 * stats.t.sf(t, n - 1))
        q = stats.false_discovery_control(p, method="by") if len(p) else p
        sites = ("layer", "kind", "index", "name", "position", "part", "exact")
        kept = frame[[name for name in sites if name in frame]]
        return kept.assign(effect=effect, standard_error=error, p=p, q=q)

    def query(self, condition: str) -> "Sweep":
        """Return the rows that satisfy a condition such as `layer == 3 and kind == 'neuron'`.

        As in `DataFrame.query`, `name in @names` uses the caller's variable `names`.

        Raises:
            InputError: `condition` is not a condition on columns of the frame.
        """
        problem = f"no rows can be selected by {condition!r}"
        try:
            mask = self.frame.eval(condition, level=1)
        except (NameError, SyntaxError, TypeError, ValueError) as error:
            reason = f"{error}; expected a condition on {list(self.frame.columns)}"
            raise InputError([reason], problem) from error
        if not (isinstance(mask, pd.Series) and mask.dtype == bool):
            got = mask.dtype if isinstance(mask, pd.Series) else type(mask).__name__
            reason = f"the result is {got}; expected True or False for each row"
            raise InputError([reason], problem)
        return replace(self, frame=self.frame[mask])

    def _kind_and_rows(self) -> tuple[str, str]:
        kind = "Sweep" if self.method == MEASURED else f"Attribution ({self.method})"
        rows = f"{len(self)} rows" + ", one per site and prompt" * ("prompt" in self.frame)
        if self.method == MEASURED or "exact" not in self.frame:
            return kind, rows
        rows += f", {int(self.frame['exact'].sum())} of them exact patches"
        if self.expected_pearson:
            expected = ", ".join(
                f"{kind} unknown ({self.unknown.get(kind)})"
                if value is None
                else f"{kind} {value:.3g}"
                for kind, value in self.expected_pearson.items()
            )
            rows += f" (expected correlation with patching: {expected})"
        top = self.effect.abs().nlargest(TOP)
        n_estimates = int((~self.frame["exact"])[top[top > 0].index].sum())
        rows += f"; {n_estimates} of the top {TOP} rows are estimates" * (n_estimates > 0)
        return kind, rows


def run_settings(
    model: Any, pair: PromptPair, groups: Sequence[SiteGroup], totals: OverPrompts, part: str
) -> dict[str, Any]:
    """Return the settings that `Sweep` and `Paths` share."""
    return {
        "part": part,
        "direction": totals.direction,
        "metric": totals.name,
        "clean_value": totals.ends[0],
        "corrupted_value": totals.ends[1],
        "n_prompts": totals.n_prompts,
        "model": str(getattr(model.cfg, "model_name", "")),
        "tokens": PromptTokens.of_groups(model, pair, groups),
    }


def _site_index(frame: pd.DataFrame) -> pd.MultiIndex:
    """Return an index (name, position, prompt) with which rows of two sweeps are matched."""
    columns = [name for name in ("name", "position", "prompt") if name in frame]
    return pd.MultiIndex.from_frame(frame[columns])


def _differences(sweep: Sweep, other: Sweep) -> list[str]:
    reasons = [
        f"this sweep has {name} {getattr(sweep, name)!r}, the other {getattr(other, name)!r}"
        for name in ("direction", "metric", "part")
        if getattr(sweep, name) != getattr(other, name)
    ]
    span = abs(sweep.clean_value - sweep.corrupted_value)
    for name in ("clean_value", "corrupted_value"):
        values = getattr(sweep, name), getattr(other, name)
        if not abs(values[0] - values[1]) <= _SAME_RUN * span:
            reasons.append(
                f"{name} is {values[0]:.4g} in this sweep and {values[1]:.4g} in the other; "
                "expected the same prompts and model"
            )
    return reasons


def _site_reasons(sweep: Sweep, other: Sweep, order: Int[np.ndarray, "row"]) -> list[str]:
    """Return an error message if the sites of two sweeps differ."""
    only_here, only_there = sweep.frame[order < 0], other.frame[~other.frame.index.isin(order)]
    if only_here.empty and only_there.empty:
        return []
    row = (only_there if only_here.empty else only_here).iloc[0]
    example = f"{row['name']} at {row['position']}"
    example += f", prompt {row['prompt']}" if "prompt" in row else ""
    return [
        f"{len(only_here)} of {len(sweep)} rows are only in this sweep, and {len(only_there)} of "
        f"{len(other)} only in the other, such as {example}; expected the same names and positions"
    ]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Paths(ScoredFrame):
    """The results of path patching, with its settings.

    Attributes:
        frame: one row per path. Columns: `sender`, `receiver` (with its position, as in `L5N7@3`,
            unless it reads at every position), `part`, `position` (the sender's position: a number,
            a role, or "all"), `value` (the metric after the patch) and `score`.
            For several prompts, there are also the columns of a `Sweep`: standard errors of means,
            or `prompt` and `unpatched` for single prompts. With `top`, there is also `estimate`,
            the score estimated from gradients (a mean over prompts).
        part: the receiver inputs that were changed: "q", "k", "value", "pattern" or "z".
        scale: whether the norms before receivers are "held" or computed "anew".
        direction: "denoise" or "noise".
        metric: the metric's name.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
        n_prompts: the number of prompt pairs; values are means over them, unless `per_prompt`.
        n_paths: the number of all paths; it exceeds the number of rows if only the top paths were
            patched.
        model: the model's name.
        tokens: the texts of the prompts' tokens, or None.

    Raises:
        InputError: a column is missing, or a value is not a finite number.

    Example:
        >>> import pandas as pd
        >>> from attn_only_lens import patching as p
        >>> from attn_only_lens.patching.results import Paths
        >>> values = pd.DataFrame({"sender": "L0H1", "receiver": ["L0N5", "logits"],
        ...                        "position": 2, "value": [2.0, -1.0]})
        >>> paths = Paths(values, part="z", scale="held", direction="denoise",
        ...                 metric="logit_diff(7, 8)", clean_value=3.0, corrupted_value=-1.0,
        ...                 n_prompts=1, n_paths=2, model="adder")
        >>> paths.to_frame()["score"].tolist(), paths.top(1)["receiver"].tolist()
        ([0.75, 0.0], ['L0N5'])
    """

    _format = ("attn_only_lens.Paths", 2)
    _columns = PATH_COLUMNS

    scale: str
    n_paths: int

    def _kind_and_rows(self) -> tuple[str, str]:
        out_of = "" if self.n_paths == len(self.frame) else f" of {self.n_paths:,}"
        return "Paths", f"{len(self.frame)}{out_of} rows"
