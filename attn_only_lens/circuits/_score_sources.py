"""Split an attention score, or a neuron's pre-activation, into parts from earlier components.

A head reads the residual stream, the sum of the outputs of earlier components. With norm scales
held fixed, a score is linear in each of the residual streams at the query and the key position:

    score = Σ_u Σ_w q_u B k_w        u, w: outputs added at the query and at the key position
    q_u = u N W_Q / s,  k_w = w N W_K / s'      N: the norm's gain; s, s': its scales

B is the matrix of a bilinear form: for a query q and a key k at these two positions, the head's
score is q B k. B includes 1/√d_head, rotary embeddings, and query and key norms with scales held
fixed. B is computed with the model's own code, as the mixed second derivative of the score at q = k
= 0. In models whose hook point for scores receives the pattern, B is computed from the pattern's
logarithm. Other terms of a score (ALiBi, the bias of a query norm) are counted as the head's own
biases. The score is taken before the softmax and any soft cap. For neuron i, the pre-activation is

    q = Σ_w w N W_in[:, i] / s + b                    W_gate in a gated MLP

The split is from Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from attn_only_lens.arguments import POSITIVE, as_plain, is_count
from attn_only_lens.devices import added
from attn_only_lens.engine.gradients import silent_scale_edits
from attn_only_lens.engine.held_run import HeldPass, HeldRun
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.metrics import no_gradient_reasons
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.prompts import Prompts, single_prompts
from attn_only_lens.engine.recording import Hooks, StopForward, float32_runs, run_blocks
from attn_only_lens.engine.sites import Sites, resolve_sites
from attn_only_lens.engine.writes import Decomposition
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import HeadName, host_of, reasons_without_heads
from attn_only_lens.heads.host import HEAD_PLURALS, NEURON_KINDS, WIDE_KINDS
from attn_only_lens.heads.names import place_of
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE, disagreement

_MOST_PAIRS = 4_000_000
_BLOCK = 2**22  # the number of writer pairs processed at once
_PROBLEM = "this score has no sources"
_NOT_A_SUM = "this score is not a sum over earlier writes"


@one_thread_per_model
@full_precision()
def score_sources(
    model: Any,
    prompt: Prompts,
    name: str | HeadName,
    query: int = -1,
    key: int | None = None,
    *,
    top: int | None = None,
) -> pd.DataFrame:
    """Split an attention score or a neuron's pre-activation into earlier components' contributions.

    With norm scales held at their values in the run, the shares add up to the score.

    Args:
        model: a model from `convert`, or one with exposed neuron-heads. A half-precision
            model is run in float32.
        prompt: a text, or tokens [pos] or [1, pos].
        name: `L5H3`; a neuron, `L5N1234`; or a feature of a transcoder, `L5F1234`.
        query: the query position, or the neuron's position. -1 is the last.
        key: the key position; None for a neuron.
        top: how many rows with the largest |share| to keep; the others are summed into a last row,
            "rest". None keeps all rows, up to 4,000,000.

    Returns:
        A frame sorted by decreasing |share|. For a neuron, it has one row per earlier writer, with
        columns `name`, `position` and `share`. For an attention head, it has one row per pair of
        writers, with columns `writer_q`, `position_q`, `writer_k`, `position_k` and `share`.
        Writers are "embed" (token and position), heads, skip nodes and error nodes by name, the
        biases of sublayers ("L0.b_O", "L0.b_out", or "L0.b_dec" for a transcoder), and "own bias":
        the biases of the head itself and of the norm before it.
        `attrs["score"]` is the score in the run, before the softmax and any soft cap.

    Raises:
        InputError: with every reason: invalid positions, a key after its query, more than one
            prompt, too many pairs, unsupported norms or matrices; a name that is not a head's of
            this model, or is one of a skip node or an error node.
        UnsupportedModelError: the shares do not add up.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, load
        >>> model = convert(load("modular-addition"))
        >>> tokens = torch.tensor([3, 4, 113])
        >>> shares = circuits.score_sources(model, tokens, "L0H2", query=2, key=0)
        >>> shares["writer_q"].unique().tolist()
        ['embed', 'own bias']
        >>> neuron = circuits.score_sources(model, tokens, "L0N5", top=3)
        >>> bool(abs(neuron["share"].sum() - neuron.attrs["score"]) < 1e-5)
        True
    """
    reasons = [*reasons_without_heads(model), *reasons_not_to_run(model)]
    reasons += POSITIVE.or_none.reasons(top=top)
    reasons += no_gradient_reasons()
    InputError.raise_if(reasons, _PROBLEM)
    head = name if isinstance(name, HeadName) else HeadName.parse(name)
    head.require_in(model)
    if head.kind in WIDE_KINDS:
        reason = (
            f"got {head}, one of the {HEAD_PLURALS[head.kind]}, which have no score; expected an "
            "attention head, a neuron or a feature"
        )
        raise InputError([reason], _PROBLEM)
    pair = single_prompts(model, prompt)
    n_prompts, n_pos = pair.clean.shape
    if n_prompts > 1:
        reasons.append(f"got {n_prompts} prompts; expected one")
    wanted = {"query": query} | ({"key": key} if head.kind == "attention" else {})
    reasons += [
        f"got {label}={position!r}; expected a position from {-n_pos} to {n_pos - 1}"
        for label, position in wanted.items()
        if not is_count(position, -n_pos, n_pos - 1)
    ]
    if head.kind in NEURON_KINDS and key is not None:
        reasons.append(
            f"got key={key!r} for {head}; leave key out: a neuron-head's keys do not depend on "
            "tokens"
        )
    InputError.raise_if(reasons, _PROBLEM)
    positions = [as_plain(position) % n_pos for position in wanted.values()]
    with float32_runs(model, pair):
        if head.kind in NEURON_KINDS:
            return _of_neuron(model, pair.clean, head, positions[0], top)
        return _of_attention(model, pair.clean, head, positions[0], positions[1], top)


def _sources(
    run: HeldRun, head: HeadName, position: int, choose: Callable[[HeldPass], Tensor]
) -> tuple[list[str], Float[Tensor, "writer n"]]:
    """Return the sources, and each source's part of the chosen numbers; "own bias" is last.

    The numbers are functions of the residual stream at this position.
    """
    here, parts = slice(position, position + 1), run.run
    derivative, own_bias, expected = run.projection(head.layer, head.kind, choose)
    names, rows = ["embed"], [parts.embedding[:, position]]
    before = parts.before(head.layer, head.kind)
    for writes in before:
        (sites,) = resolve_sites(run.model, Sites.of_kinds([writes.kind], [writes.layer]))
        names += sites.names
        some = parts.parts_before(writes, len(before))
        rows.append(added(x.written(sites, here)[:, 0, 0] for x in some))
        bias = writes.bias[:, position]
        if bias.any():
            bias_name = {"attention": "b_O", "feature": "b_dec"}.get(writes.kind, "b_out")
            names.append(f"L{writes.layer}.{bias_name}")
            rows.append(bias)
    written = torch.cat([row.to(derivative) for row in rows])
    shares = torch.cat([written @ derivative[:, position].T, own_bias[None]])
    _require_sum(shares.sum(0), expected, shares.abs().sum(0).max())
    return [*names, "own bias"], shares


@torch.no_grad()
def _of_neuron(
    model: Any, tokens: Tensor, head: HeadName, position: int, top: int | None
) -> pd.DataFrame:
    heads: Any = host_of(model).neurons[head.layer]

    def preactivation(held: HeldPass) -> Tensor:
        return held.steps.projections[heads][0][0, position, [place_of(head, model)]]

    run = HeldRun.record(model, tokens, None)
    _require_visit(run, heads, head, position)
    names, shares = _sources(run, head, position, preactivation)
    score = run.steps.projections[heads][0][0, position, place_of(head, model)]
    ends = [("name", "position", names, position)]
    return _largest(ends, shares, torch.ones_like(shares[:1]), float(score), top)


def _require_visit(run: HeldRun, heads: Any, head: HeadName, position: int) -> None:
    """Raise an error if a token does not visit the expert of a neuron."""
    if head.expert is None or run.steps.routing[heads][1][0, position, head.expert] != 0:
        return
    reason = f"the token at position {position} does not visit the expert of {head}"
    raise InputError([reason], _PROBLEM)


def _of_attention(
    model: Any, tokens: Tensor, head: HeadName, query: int, key: int, top: int | None
) -> pd.DataFrame:
    host = host_of(model)
    q_name, k_name, score_name, pattern_name = names = tuple(
        host.hook_name(head.layer, "attention", point)
        for point in ("q", "k", "attn_scores", "pattern")
    )
    # the hook points for the scales of query norms and key norms
    points = [m for m in host.attention(head.layer).modules() if isinstance(m, HookPoint)]
    scales = sorted({str(m.name) for m in points if str(m.name).endswith("hook_scale")})
    run = HeldRun.record(model, tokens, None, names=(*names, *scales))
    parts = run.run
    scores, pattern = (
        parts.recording.hooked[name][0, head.index, query] for name in (score_name, pattern_name)
    )
    # In some bridges, the hook point for scores receives the pattern. The logarithm of the pattern
    # equals the score minus a constant that depends only on the query.
    hidden = torch.equal(scores, pattern)
    scores = pattern.log() if hidden else scores
    if scores[key] <= torch.finfo(scores.dtype).min / 2:
        reason = f"position {query} does not attend to position {key}: the score is masked"
        raise InputError([reason], _PROBLEM)
    q_names, q = _side(run, head, q_name, query)

    def factors(key: int) -> tuple[Tensor, list[str], Tensor]:
        form = _bilinear_form(
            *(model, parts, head, query, key, (q_name, k_name, score_name), scales), hidden=hidden
        )
        return q @ form, *_side(run, head, k_name, key)

    left, k_names, k = factors(key)
    score = left.sum(0) @ k.sum(0)
    size = (left.abs().sum(0) * k.abs().sum(0)).sum()
    totals, keys = [score], [key]
    if hidden:  # the unknown constant cancels in a difference of two keys' scores
        keys.append(
            int(pattern.index_fill(0, torch.tensor(key, device=pattern.device), 0).argmax())
        )
        other_left, _, other_k = factors(keys[1])
        totals.append(other_left.sum(0) @ other_k.sum(0))
    _require_score(model, torch.stack(totals), scores[keys], size)
    ends = [
        ("writer_q", "position_q", q_names, query),
        ("writer_k", "position_k", k_names, key),
    ]
    return _largest(ends, left, k, float(score), top)


@torch.no_grad()
def _side(
    run: HeldRun, head: HeadName, name: str, position: int
) -> tuple[list[str], Float[Tensor, "writer d_head+1"]]:
    """Return each source's part of the query or key; append 1 for "own bias", 0 for others."""
    n_heads = host_of(run.model).n_heads[head.layer]

    def vector(held: HeldPass) -> Tensor:
        of_heads = held.nodes[name][0, position]
        return of_heads[head.index * len(of_heads) // n_heads]

    names, vectors = _sources(run, head, position, vector)
    ones = torch.zeros_like(vectors[:, :1])
    ones[-1] = 1.0
    return names, torch.cat([vectors, ones], dim=1)


def _bilinear_form(
    model: Any,
    parts: Decomposition,
    head: HeadName,
    query: int,
    key: int,
    names: tuple[str, str, str],
    scales: Sequence[str],
    *,
    hidden: bool,
) -> Float[Tensor, "d_head+1 d_head+1"]:
    """Return the matrix F for which [q, 1] F [k, 1]ᵀ is the score of a query q and a key k."""
    recorded, n_heads = parts.recording.hooked, host_of(model).n_heads[head.layer]
    leaves = [torch.zeros_like(recorded[name]).requires_grad_() for name in names[:2]]
    scores: list[Tensor] = []

    def put(value: Tensor) -> Callable[[Tensor, Any], Tensor]:
        return lambda old, hook: value

    def keep(value: Tensor, hook: Any) -> None:
        scores.append(value[0, head.index, query, key])
        raise StopForward

    hooks: Hooks = [
        *((name, put(leaf)) for name, leaf in zip(names, leaves, strict=False)),
        *((name, put(recorded[name])) for name in scales),
        (names[2], keep),
    ]
    with torch.enable_grad(), silent_scale_edits():
        run_blocks(model, parts.recording.tokens, parts.recording.mask, hooks)
    places = [
        (0, position, head.index * leaf.shape[2] // n_heads)
        for position, leaf in zip((query, key), leaves, strict=True)
    ]
    if not hidden:
        return _taylor(scores[0], leaves, places)
    alone = 1 - float(scores[0].detach())
    if not alone > 0:
        reason = (
            f"position {query} attends only to position {key}, and the hook point {names[2]} of "
            "this model receives the pattern instead of the scores, so the score is unknown"
        )
        raise UnsupportedModelError([reason], _NOT_A_SUM)
    form = _taylor(scores[0].log(), leaves, places) / alone
    form[-1, -1] = 0.0  # the constant is unknown
    return form


def _taylor(
    score: Tensor, leaves: list[Tensor], places: list[tuple[int, int, int]]
) -> Float[Tensor, "d_head+1 d_head+1"]:
    """Return a matrix of the score's mixed second derivatives, gradients and value at q = k = 0."""
    by_q, by_k = torch.autograd.grad(score, leaves, create_graph=True)
    by_q, by_k = by_q[places[0]], by_k[places[1]]
    n, m = len(by_q), len(by_k)
    form = score.new_zeros(n + 1, m + 1)
    for row in range(n):
        (second,) = torch.autograd.grad(by_q[row], leaves[1], retain_graph=True)
        form[row, :m] = second[places[1]]
    form[:n, m], form[n, :m], form[n, m] = by_q.detach(), by_k.detach(), score.detach()
    return form


def _require_score(
    model: Any, total: Float[Tensor, "key"], expected: Float[Tensor, "key"], size: Tensor
) -> None:
    """Raise an error unless `total` equals the score in the run (for two keys, the difference)."""
    cap = float(getattr(model.cfg, "attn_scores_soft_cap", None) or 0.0)
    capped = cap * torch.tanh(total / cap) if cap > 0 else total
    if len(total) == 2:
        total, capped, expected = (logits.diff() for logits in (total, capped, expected))
    if disagreement(capped, expected, _tolerance(expected), size=size):
        _require_sum(total, expected, size)


def _require_sum(total: Tensor, expected: Tensor, size: Tensor) -> None:
    if off := disagreement(total, expected, _tolerance(expected), size=size):
        reason = (
            f"the shares do not add up to the value in the run, {expected.tolist()} ({off}): a "
            "step between the residual stream and this value is not linear"
        )
        raise UnsupportedModelError([reason], _NOT_A_SUM)


def _tolerance(x: Tensor) -> float:
    # Many normalization layers of bridged models compute in float32, whatever the model's dtype.
    return max(LOGIT_TOLERANCE[x.dtype], LOGIT_TOLERANCE[torch.float32])


def _largest(
    ends: Sequence[tuple[str, str, list[str], int]],
    left: Float[Tensor, "writer n"],
    right: Float[Tensor, "writer_2 n"],
    score: float,
    top: int | None,
) -> pd.DataFrame:
    """Return a frame of the largest shares, with a name and a position for each writer."""
    n, m = len(left), len(right)
    if top is None and n * m > _MOST_PAIRS:
        raise InputError(
            [
                f"got {n * m:,} pairs of writers; expected at most {_MOST_PAIRS:,}: pass top=1000 "
                "to keep only the largest shares"
            ],
            "these shares need too large a table",
        )
    wanted = n * m if top is None else min(top, n * m)
    largest, step = LargestScores(wanted, by_size=True), max(1, _BLOCK // m)
    for first in range(0, n, step):
        largest.add(left[first : first + step] @ right.T, (first, 0))
    frame = pd.DataFrame(index=range(wanted))
    for (label, place, names, position), rows in zip(ends, largest.pairs.cpu().T, strict=False):
        frame[label] = np.array(names, dtype=object)[rows.numpy()]
        frame[place] = position
    frame["share"] = largest.values.cpu().double().numpy()
    if wanted < n * m:
        rest = [x for *_, position in ends for x in ("rest", position)]
        frame.loc[wanted] = [*rest, score - frame["share"].sum()]
    frame.attrs["score"] = score
    return frame
