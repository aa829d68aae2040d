"""Who sets a pattern: an attention score, or a pre-activation, as an exact sum over writers.

The stream that a head reads is a sum of what was written before (`engine/writes.py`). With the
scales of norms held at those of the run, all that lies between it and a score is linear on either
side:

    score = Σ_u Σ_w q_u B k_w        u writes at the query's position, w at the key's
    q_u = u N W_Q / s,  k_w = w N W_K / s'

B is the head's bilinear form at these two positions: 1/√d_head, rotations, norms of queries and
keys with their scales held. It is computed from the model's own code, as the second derivative of
the score at queries and keys of 0 (or of the logarithm of the pattern, if a model shows no scores).
What a score has besides (ALiBi, a bias of a norm of queries) belongs to the head's own biases. The
score is that before the softmax and before a soft cap. For a neuron,

    q = Σ_w w N W_in[:, i] / s + b                    W_gate in a gated MLP

(Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", for the terms of a score.)
Cost for a head: a forward pass, 2 d_model d_head flops a writer and side, and 2 d_head a pair.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.engine.gradients import silent_scale_edits
from attn_only_lens.engine.largest import LargestScores
from attn_only_lens.engine.metrics import no_gradient_reasons
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_weights import in_float32
from attn_only_lens.engine.prompts import Prompts, single_prompts
from attn_only_lens.engine.recording import Hooks, run
from attn_only_lens.engine.sites import all_heads, resolve_sites
from attn_only_lens.engine.writes import Decomposition, decompose
from attn_only_lens.errors import InputError, UnknownHeadError, UnsupportedModelError
from attn_only_lens.heads import HeadName, host_of, reasons_without_heads
from attn_only_lens.precision import full_precision
from attn_only_lens.tolerances import LOGIT_TOLERANCE

_MOST_PAIRS = 4_000_000
_BLOCK = 2**22  # pairs at once
_REST = "rest"
_OWN = "own bias"
_PROBLEM = "this score has no sources"
_NOT_A_SUM = "this score is not a sum over what was written before"


@in_float32
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
    """Split an attention score, or a neuron's pre-activation, into shares of all writers.

    The shares add up to the score, to rounding; so they say who sets a pattern, exactly, for norm
    scales as they are in this run.

    Args:
        model: converted, or with exposed neuron-heads. A model in half precision is run in
            float32 during the call, with the same weights.
        prompt: a text, or tokens [pos] or [1, pos].
        name: `L5H3`, or a neuron, `L5N1234`.
        query: the position that asks; of a neuron, its position. -1 is the last.
        key: the position that is asked; None for a neuron, which asks none.
        top: how many rows of largest |share| to keep; all others are summed in a last row, "rest".
            None for all rows, up to 4,000,000.

    Returns:
        For a neuron, a row for each writer before it, by falling |share|: `name`, `position`,
        `share`. For an attention head, a row for each pair of writers: `writer_q`, `position_q`,
        `writer_k`, `position_k`, `share`. Writers are "embed" (token and position), heads by name,
        the biases of sublayers ("L0.b_O", "L0.b_out"), and "own bias": those of the head itself and
        of the norm that it reads through. `attrs["score"]` is the score in the run, before the
        softmax and any soft cap.

    Raises:
        InputError: with every reason: positions that are not there, a key after its query, more
            than one prompt, too many pairs, unknown norms or matrices.
        UnknownHeadError: the model has no such head.
        UnsupportedModelError: the shares do not add up, as where queries are clipped.

    Example:
        >>> import torch
        >>> from attn_only_lens import circuits, convert, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> tokens = torch.tensor([3, 4, 113])
        >>> shares = circuits.score_sources(model, tokens, "L0H2", query=2, key=0)
        >>> shares["writer_q"].unique().tolist()
        ['embed', 'own bias']
        >>> neuron = circuits.score_sources(model, tokens, "L0N5", top=3)
        >>> bool(abs(neuron["share"].sum() - neuron.attrs["score"]) < 1e-5)
        True
    """
    reasons = [*reasons_without_heads(model), *reasons_not_to_run(model)]
    if top is not None and not is_count(top, 1):
        reasons.append(f"got top={top!r}; expected 1 or more, or None")
    reasons += no_gradient_reasons()
    InputError.raise_if(reasons, _PROBLEM)
    head = name if isinstance(name, HeadName) else HeadName.parse(name)
    head.require_in(model)
    if head.member is not None:
        raise UnknownHeadError(f"got {head}, one head of a neuron; expected the neuron")
    pair = single_prompts(model, prompt)
    asked_positions, asked = _positions(pair.clean, head, query, key)
    if head.kind == "neuron":
        return _of_neuron(model, pair.clean, head, asked_positions, top)
    return _of_attention(model, pair.clean, head, asked_positions, asked, top)


def _positions(tokens: Tensor, head: HeadName, query: object, key: object) -> tuple[int, int]:
    """The two positions, counted from 0."""
    reasons = []
    n_prompts, n_pos = tokens.shape
    if n_prompts > 1:
        reasons.append(f"got {n_prompts} prompts; expected one")
    wanted = {"query": query} | ({"key": key} if head.kind == "attention" else {})
    for label, position in wanted.items():
        if not is_count(position, -n_pos, n_pos - 1):
            reasons.append(
                f"got {label}={position!r}; expected a position from {-n_pos} to {n_pos - 1}"
            )
    if head.kind == "neuron" and key is not None:
        reasons.append(f"got key={key!r} for {head}: a neuron-head's keys do not depend on tokens")
    InputError.raise_if(reasons, _PROBLEM)
    positions = [int(as_plain(position)) % n_pos for position in wanted.values()]
    return positions[0], positions[-1]


def _written(
    parts: Decomposition, head: HeadName, at: int, model: Any
) -> Iterator[tuple[list[str], Tensor]]:
    """What each writer before a head wrote at a position, one sublayer after another."""
    yield ["embed"], parts.embedding[:, at]
    one_position = slice(at, at + 1)
    for writes in parts.before(head.layer, head.kind):
        kinds = {sites.kind: sites for sites in resolve_sites(model, all_heads(writes.layer))}
        sites = kinds[writes.kind]
        yield list(sites.names), writes.written(sites, one_position)[:, 0, 0]
        bias = writes.bias[:, at]
        if bias.any():
            yield [f"L{writes.layer}.{'b_O' if writes.kind == 'attention' else 'b_out'}"], bias


def _reads(
    parts: Decomposition, head: HeadName, at: int, model: Any, W: Float[Tensor, "d_model n"]
) -> tuple[list[str], Float[Tensor, "writer n"]]:
    """What a head reads, by a matrix, of each writer at a position."""
    reads = parts.of(head.layer, head.kind).reads.at(slice(at, at + 1))
    names, rows = list[str](), list[Tensor]()
    for some, written in _written(parts, head, at, model):
        names += some
        rows.append(reads.change(written[:, None, None])[:, 0, 0] @ W)
    return names, torch.cat(rows)


@torch.no_grad()
def _of_neuron(
    model: Any, tokens: Tensor, head: HeadName, at: int, top: int | None
) -> pd.DataFrame:
    parts = decompose(model, tokens, None)
    heads = host_of(model).neurons[head.layer]
    mlp = heads.module
    gate = getattr(mlp, "W_gate", None)
    W = (mlp.W_in if gate is None else gate)[:, [head.index]].detach()
    this = parts.of(head.layer, "neuron")
    names, shares = _reads(parts, head, at, model, W)
    names.append(_OWN)
    bias_only = heads.projections(torch.zeros_like(this.entered))[0][0, at, [head.index]]
    bias_only = bias_only if this.reads.norm.bias is None else bias_only + this.reads.norm.bias @ W
    shares = torch.cat([shares[:, 0], bias_only])
    score = heads.projections(this.entered)[0][0, at, head.index]
    _require_sum(shares.sum(), score, shares.abs().sum())
    frame = pd.DataFrame({"name": names, "position": at, "share": shares.cpu().double().numpy()})
    order = frame["share"].abs().sort_values(ascending=False, kind="stable").index
    kept = frame.loc[order if top is None else order[:top]]
    if top is not None and top < len(frame):
        rest = pd.DataFrame(
            {"name": [_REST], "position": [at], "share": [frame["share"][order[top:]].sum()]}
        )
        kept = pd.concat([kept, rest])
    kept = kept.reset_index(drop=True)
    kept.attrs["score"] = float(score)
    return kept


def _of_attention(
    model: Any, tokens: Tensor, head: HeadName, query: int, key: int, top: int | None
) -> pd.DataFrame:
    host = host_of(model)
    points = ("q", "k", "attn_scores", "pattern")
    q_name, k_name, seen_at, pattern_at = (
        host.hook_name(head.layer, "attention", point) for point in points
    )
    scales = _own_scales(host.attention(head.layer))
    parts = decompose(model, tokens, None, names=(q_name, k_name, seen_at, pattern_at, *scales))
    seen, pattern = (
        parts.recording.hooked[seen_position][0, head.index, query]
        for seen_position in (seen_at, pattern_at)
    )
    # Some bridges show the pattern where the scores should be: there its logarithm takes their
    # place, which is the score less a constant of the query.
    hidden = torch.equal(seen, pattern)
    seen = pattern.log() if hidden else seen
    if seen[key] <= torch.finfo(seen.dtype).min / 2:
        raise InputError(
            [f"position {query} does not attend to position {key}: its score is masked"], _PROBLEM
        )
    names = q_name, k_name, seen_at
    form = _bilinear_form(model, parts, head, query, key, names, scales, hidden=hidden)
    q_names, q = _side(model, parts, head, "Q", query, parts.recording.hooked[q_name])
    k_names, k = _side(model, parts, head, "K", key, parts.recording.hooked[k_name])
    left = q @ form
    score = left.sum(0) @ k.sum(0)
    size = (left.abs().sum(0) * k.abs().sum(0)).sum()
    if hidden:  # a difference of two scores is that of the logarithms
        other_key = int(pattern.index_fill(0, torch.tensor(key, device=pattern.device), 0).argmax())
        form = _bilinear_form(model, parts, head, query, other_key, names, scales, hidden=hidden)
        _, other_side = _side(model, parts, head, "K", other_key, parts.recording.hooked[k_name])
        _require_score(
            model, [score, (q @ form).sum(0) @ other_side.sum(0)], seen[[key, other_key]], size
        )
    else:
        _require_score(model, [score], seen[[key]], size)
    return _pairs((q_names, left, query), (k_names, k, key), float(score), top)


def _side(
    model: Any, parts: Decomposition, head: HeadName, side: str, at: int, recorded: Tensor
) -> tuple[list[str], Float[Tensor, "writer d_head+1"]]:
    """The query, or the key, of each writer; the last coordinate is 1 for the head's own bias."""
    attn, n_heads = host_of(model).attention(head.layer), host_of(model).n_heads[head.layer]

    def own(of_heads: Tensor) -> Tensor:
        return of_heads[head.index * len(of_heads) // n_heads].detach()

    with torch.no_grad():
        W = own(getattr(attn, f"W_{side}"))
        names, vectors = _reads(parts, head, at, model, W)
        b = getattr(attn, f"b_{side}", None)
        bias = W.new_zeros(W.shape[1]) if b is None else own(b)
        norm = parts.of(head.layer, "attention").reads.norm
        bias = bias if norm.bias is None else bias + norm.bias @ W
        vectors = torch.cat([vectors, bias[None]])
        expected = recorded[0, at, head.index * recorded.shape[2] // n_heads]
        _require_sum(vectors.sum(0), expected, vectors.abs().sum(0).max())
        ones = torch.zeros_like(vectors[:, :1])
        ones[-1] = 1.0
        return [*names, _OWN], torch.cat([vectors, ones], dim=1)


def _own_scales(attention: Any) -> tuple[str, ...]:
    """The hook points of the scales of the norms of queries and keys."""
    points = [m for m in attention.modules() if isinstance(m, HookPoint)]
    return tuple(sorted({str(m.name) for m in points if str(m.name).endswith("hook_scale")}))


class _Stop(Exception):
    """Stops a forward pass that is no longer needed."""


def _bilinear_form(
    model: Any,
    parts: Decomposition,
    head: HeadName,
    query: int,
    key: int,
    names: tuple[str, str, str],
    scales: tuple[str, ...],
    *,
    hidden: bool,
) -> Float[Tensor, "d_head+1 d_head+1"]:
    """The score as a function of one query and one key, both with a 1 appended."""
    recorded, n_heads = parts.recording.hooked, host_of(model).n_heads[head.layer]
    leaves = [torch.zeros_like(recorded[name]).requires_grad_() for name in names[:2]]
    scores: list[Tensor] = []

    def put(value: Tensor) -> Callable[[Tensor, Any], Tensor]:
        return lambda old, hook: value

    def keep(value: Tensor, hook: Any) -> None:
        scores.append(value[0, head.index, query, key])
        raise _Stop

    hooks: Hooks = [
        *((name, put(leaf)) for name, leaf in zip(names, leaves, strict=False)),
        *((name, put(recorded[name])) for name in scales),
        (names[2], keep),
    ]
    with torch.enable_grad(), suppress(_Stop), silent_scale_edits():
        run(model, parts.recording.tokens, parts.recording.mask, hooks)
    places = [
        (0, axis, head.index * leaf.shape[2] // n_heads)
        for axis, leaf in zip((query, key), leaves, strict=True)
    ]
    if not hidden:
        return _taylor(scores[0], leaves, places)
    alone = 1 - float(scores[0].detach())
    if not alone > 0:
        raise UnsupportedModelError(
            [
                f"position {query} attends to position {key} alone, and {names[2]} of this model "
                "shows the pattern: there is no score to be seen"
            ],
            _NOT_A_SUM,
        )
    form = _taylor(scores[0].log(), leaves, places) / alone
    form[-1, -1] = 0.0  # of the constant
    return form


def _taylor(
    score: Tensor, leaves: list[Tensor], at: list[tuple[int, int, int]]
) -> Float[Tensor, "d_head+1 d_head+1"]:
    """Value, first derivatives and mixed second derivatives at 0."""
    by_q, by_k = torch.autograd.grad(score, leaves, create_graph=True)
    by_q, by_k = by_q[at[0]], by_k[at[1]]
    n, m = len(by_q), len(by_k)
    form = score.new_zeros(n + 1, m + 1)
    for row in range(n):
        (second,) = torch.autograd.grad(by_q[row], leaves[1], retain_graph=True)
        form[row, :m] = second[at[1]]
    form[:n, m], form[n, :m], form[n, m] = by_q.detach(), by_k.detach(), score.detach()
    return form


def _require_score(model: Any, scores: list[Tensor], seen: Tensor, size: Tensor) -> None:
    """Hold sums against scores in the run, before or after a soft cap; or their difference."""
    cap = float(getattr(model.cfg, "attn_scores_soft_cap", None) or 0.0)
    total = torch.stack(scores)
    capped = cap * torch.tanh(total / cap) if cap > 0 else total
    if len(scores) == 2:
        total, capped, seen = (logits.diff() for logits in (total, capped, seen))
    if (capped - seen).abs() <= _allowed(seen) * size:
        return
    _require_sum(total, seen, size)


def _require_sum(total: Tensor, expected: Tensor, size: Tensor) -> None:
    error = (total - expected).abs().max()
    if not error <= _allowed(expected) * size:
        raise UnsupportedModelError(
            [
                f"the sum of all shares differs by {float(error):.2g} from what the run shows "
                f"(shares: {float(size):.2g} in all): something between is not linear, such as "
                "queries that are clipped, or another cap"
            ],
            _NOT_A_SUM,
        )


def _allowed(x: Tensor) -> float:
    # Many bridged norms compute in float32, in whatever dtype the model is.
    return max(LOGIT_TOLERANCE[x.dtype], LOGIT_TOLERANCE[torch.float32])


def _pairs(
    queries: tuple[list[str], Tensor, int],
    keys: tuple[list[str], Tensor, int],
    score: float,
    top: int | None,
) -> pd.DataFrame:
    """A frame of pairs of writers, with their shares."""
    (q_names, left, query), (k_names, right, key) = queries, keys
    n, m = len(q_names), len(k_names)
    if top is None and n * m > _MOST_PAIRS:
        raise InputError(
            [f"got {n * m:,} pairs of writers; expected at most {_MOST_PAIRS:,}: pass top=1000"],
            "these shares would not fit a table",
        )
    wanted = n * m if top is None else min(top, n * m)
    largest, step = LargestScores(wanted, by_size=True), max(1, _BLOCK // m)
    for first in range(0, n, step):
        largest.add(left[first : first + step] @ right.T, (first, 0))
    i, j = largest.pairs.T
    share = largest.values.cpu().double().numpy()
    frame = pd.DataFrame(
        {
            "writer_q": np.array(q_names, dtype=object)[i.cpu().numpy()],
            "position_q": query,
            "writer_k": np.array(k_names, dtype=object)[j.cpu().numpy()],
            "position_k": key,
            "share": share,
        }
    )
    if wanted < n * m:
        frame.loc[len(frame)] = [_REST, query, _REST, key, score - share.sum()]
    frame.attrs["score"] = score
    return frame
