"""Tabulate a model's top tokens and the ranks of a metric's answers, on pairs of prompts."""

from typing import Any

import pandas as pd
import torch

from attn_only_lens.axes import Logits
from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.answers import SAME, WRONG, answer_tokens, preference
from attn_only_lens.engine.metrics import AnyMetric, as_metric
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import token_text

_RUNS = ("clean", "corrupted")
_FAR = 1000  # `answer_warnings` calls answers of this rank or worse very improbable
_ROLES = {2: ("correct", "wrong"), 1: ("answer",), 0: ()}


def model_answers(
    model: Any, pair: PromptPair, metric: AnyMetric, clean: Logits, corrupted: Logits
) -> pd.DataFrame:
    """Return the frame `Explanation.answers`, with one row per run and prompt."""
    of_roles, rows = tokens_of_answers(model, pair, metric), []
    for run, logits in zip(_RUNS, (clean, corrupted), strict=True):
        prompts = torch.arange(len(logits), device=logits.device)
        chosen = logits[prompts, pair.last.to(logits.device)]
        for prompt, last in enumerate(float32_if_half(chosen).cpu()):
            probabilities, top = last.double().softmax(dim=-1), int(last.argmax())
            row = {"run": run, "prompt": prompt, "top": token_text(model, top)}
            row["top_probability"] = float(probabilities[top])
            for role, of_prompts in of_roles.items():
                tokens = list(of_prompts[prompt])
                row[role] = " /".join(token_text(model, token) for token in tokens)
                row[f"{role}_rank"] = 1 + int((last > last[tokens].max()).sum())
                row[f"{role}_probability"] = float(probabilities[tokens].sum())
            rows.append(row)
    return pd.DataFrame(rows)


def tokens_of_answers(
    model: Any, pair: PromptPair, metric: AnyMetric
) -> dict[str, list[tuple[int, ...]]]:
    """Return the tokens of the metric's answers to each prompt, by role."""
    answers = as_metric(metric).answers
    named = dict(zip(_ROLES[len(answers)], answers, strict=True))
    return answer_tokens(model, pair, named, None, several=True)


def answer_cells(answers: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Return, for each run, table cells with the top token, and each answer's rank."""
    cells: dict[str, dict[str, str]] = {}
    for run, rows in answers.groupby("run"):
        most, n = rows["top"].mode()[0], len(rows)  # the first in the alphabet of several
        top = (
            f"on {(rows['top'] == most).sum()} of {n}"
            if n > 1
            else f"{rows['top_probability'].iloc[0]:.1%}"
        )
        first, of_roles = f"{most!r} {top}", dict[str, str]()
        tops = []
        for role in [name for name in ("correct", "wrong", "answer") if name in rows]:
            texts, ranks = rows[role].unique(), rows[f"{role}_rank"]
            probability = rows[f"{role}_probability"].mean()
            share = f"{probability:.1%}" if probability >= 0.001 else "< 0.1%"
            name = repr(texts[0]) if len(texts) == 1 else role
            tops.append(f"{name} on {(ranks == 1).sum()} of {n}")
            of_roles[name] = f"{'median ' * (n > 1)}rank {ranks.median():.0f}, {share}"
        cells[str(run)] = {"top token": ", ".join(tops) if n > 1 and tops else first, **of_roles}
    return cells


def answer_warnings(answers: pd.DataFrame, shown: int) -> list[str]:
    """Return warnings about prompts for which the metric does not reflect the model's answer.

    An example is the prompt `shown`, if the warning is about it, and does not depend on the order
    of prompts otherwise.
    """
    roles = [role for role in ("correct", "wrong", "answer") if role in answers]
    warnings = _other_answers(answers[answers["run"] == "clean"], roles, shown) if roles else []
    if "wrong" not in answers:
        return warnings
    prefers = answers["correct_probability"] > answers["wrong_probability"]
    clean, corrupted = (prefers[answers["run"] == run].to_numpy() for run in _RUNS)
    n = len(clean)
    return warnings + [
        f"Warning: {preference(what, f'for {pairs.sum()} of {n} pairs, ' * (n > 1))}."
        for what, pairs in ((SAME, clean == corrupted), (WRONG, ~clean))
        if pairs.any()
    ]


def _other_answers(clean: pd.DataFrame, roles: list[str], shown: int) -> list[str]:
    """Return a list with one warning if the model's top token is not an answer of the metric."""
    ranks = clean[[f"{role}_rank" for role in roles]]
    missed = (ranks > 1).all(axis=1)
    if not missed.any():
        return []
    examples = clean[missed].assign(is_other=clean["prompt"] != shown)
    row = examples.sort_values(["is_other", "top_probability"], ascending=[True, False]).iloc[0]
    answers = " or ".join(f"{row[role]!r} (rank {row[f'{role}_rank']:,})" for role in roles)
    scope = "on the clean prompt"
    if len(clean) > 1:
        scope = f"on {missed.sum()} of {len(clean)} clean prompts, such as prompt {row['prompt']}"
    warning = (
        f"Warning: {scope}, the model answers {row['top']!r} ({row['top_probability']:.0%}), not "
        f"{answers}."
    )
    if (ranks.loc[missed].min(axis=1) >= _FAR).any():
        warning += (
            f" Answers with ranks of {_FAR:,} or more are very improbable: check their spelling, "
            "including the leading space, and choose prompts that the model can answer."
        )
    return [warning]
