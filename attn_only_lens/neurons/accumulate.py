"""Accumulate the largest entries and histograms of many neurons or heads over batches.

The results are exact, and do not depend on how a corpus is split into batches.

Largest entries. Among equal entries, the earliest are kept. `topk` may return any of the equal
entries, so those at the threshold are selected again in corpus order. Most batches have no new
largest entry for most neurons; a comparison with the smallest kept entry skips these neurons.

Histograms. A neuron's range is 2^e, the smallest power of 2 that bounds its values so far. On each
side of 0, |x| is counted in BINS bins (i, i + 1] · 2^e / BINS; 0 is in the first bin. When the
range doubles, pairs of bins are merged. The result is the same as with a larger range from the
start.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attn_only_lens.devices import float32_if_half
from attn_only_lens.neurons.corpus import Batch

End = Literal["largest", "smallest"]
ENDS: tuple[End, ...] = ("largest", "smallest")
QUADRANTS = ("++", "+-", "-+", "--")
"""The signs of x W_gate and x W_in in a gated MLP; 0 counts as positive."""
IN_QUADRANT = 3
"""Examples of each quadrant."""
State: TypeAlias = dict[str, Tensor]
"""Tensors by name, each with an axis of neurons, or of attention heads, first."""
BINS = 64
JOINT = 16
QUANTITIES = ("z", "gate", "value")
_LEAST = -40  # smallest exponent e; smaller values are in the first bin


# The largest entries


def no_examples(
    n: int, k: int, width: int, like: Tensor, numbers: Sequence[str], windows: Sequence[str]
) -> State:
    """Return the initial state of `add_examples` for one end, without examples."""
    whole = dict.fromkeys(("text", "at", "position"), (k,)) | {"tokens": (k, width)}
    state = {name: like.new_full((n, *s), -1, dtype=torch.long) for name, s in whole.items()}
    state |= {name: like.new_zeros(n, k) for name in numbers}
    state |= {name: like.new_zeros(n, k, width) for name in windows}
    state["found"] = like.new_zeros(n, k, dtype=torch.bool)
    return state


def add_examples(
    state: State,
    end: str,
    numbers: dict[str, Float[Tensor, "neuron place"]],
    windows: dict[str, Tensor],
    batch: Batch,
    before: int,
) -> None:
    """Update each neuron's largest entries with a batch, whose rows of tokens are concatenated.

    Args:
        state: the examples found so far.
        end: one of `ENDS`; the largest entries for any other name.
        numbers: quantities with one number per token. Entries are ranked by "score"; -∞ excludes a
            token.
        windows: quantities to store for all tokens of a window, as [neuron, place], or as [neuron,
            place, pos] if they depend on the entry.
        batch: the tokens.
        before: the number of tokens in a window before the entry.
    """
    counted = batch.counted
    sign = -1.0 if end == "smallest" else 1.0
    ranked = numbers["score"][:, counted] * sign
    least = torch.where(state["found"], state["score"] * sign, -torch.inf)
    rows = (ranked.amax(dim=1) > least[:, -1]).nonzero()[:, 0]
    if not len(rows):
        return
    chosen = _first_of_largest(ranked[rows], state["score"].shape[1])
    places = counted[chosen]
    new = _windows(windows, batch, rows, places, before, state["tokens"].shape[-1])
    new |= {name: x[rows].gather(1, places) for name, x in numbers.items()}
    new["found"] = new["score"].isfinite()
    both = torch.cat([least[rows], ranked[rows].gather(1, chosen)], dim=1)
    # The sort is stable: among equal entries, those from earlier batches stay first.
    order = both.sort(dim=1, descending=True, stable=True).indices[:, : least.shape[1]]
    for name, kept in state.items():
        joined = torch.cat([kept[rows], new[name].to(kept.dtype)], dim=1)
        positions = order.view(*order.shape, *[1] * (joined.ndim - 2)).expand(
            -1, -1, *joined.shape[2:]
        )
        kept[rows] = joined.gather(1, positions)


def quadrants(
    q: Float[Tensor, "neuron place"], value: Float[Tensor, "neuron place"]
) -> Int[Tensor, "neuron place"]:
    """Return each token's quadrant from q = x W_gate and the head's value q · (x W_in)."""
    negative = q < 0
    return negative.to(torch.uint8) * 2 + ((value < 0) ^ negative)


def _first_of_largest(x: Float[Tensor, "row place"], k: int) -> Int[Tensor, "row k"]:
    """Return the sorted indices of each row's k largest entries; ties are broken by position."""
    k = min(k, x.shape[1])
    least = x.topk(k, dim=1).values[:, -1:]
    larger, equal = x > least, x == least
    wanted = larger | (equal & (equal.cumsum(1) <= k - larger.sum(1, keepdim=True)))
    return wanted.nonzero()[:, 1].view(-1, k)


def _windows(
    windows: dict[str, Tensor],
    batch: Batch,
    rows: Int[Tensor, "row"],
    places: Int[Tensor, "row k"],
    before: int,
    width: int,
) -> State:
    n_pos = batch.tokens.shape[1]
    row, position = places // n_pos, places % n_pos
    first = (position - before).clamp(min=0)
    within = first[..., None] + torch.arange(width, device=places.device)
    length = torch.minimum(batch.lengths[row], position + width - before)[..., None]
    flat = row[..., None] * n_pos + within.clamp(max=n_pos - 1)
    here: Bool[Tensor, "row k window"] = within < length
    tokens = torch.where(here, batch.tokens.flatten()[flat], -1)
    of_tokens = {}
    for name, x in windows.items():
        if x.ndim == 3:
            numbers = x[rows[:, None], places].gather(2, within.clamp(max=n_pos - 1))
        else:
            numbers = x[rows].gather(1, flat.flatten(1)).view_as(flat)
        of_tokens[name] = torch.where(here, numbers, 0.0)
    return {
        "text": batch.text[row],
        "at": batch.first[row] + position,
        "position": position - first,
        "tokens": tokens,
        **of_tokens,
    }


# Histograms


def no_counts(n: int, device: torch.device) -> State:
    """Return the initial state of `add_counts`, with all counts zero."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(n, *shape, dtype=torch.long, device=device)

    state = {"joint": zeros(2 * JOINT, 2 * JOINT), "zeros": zeros(), "signs": zeros(4)}
    for name in QUANTITIES:
        state[f"{name}.counts"] = zeros(2, BINS)
        state[f"{name}.exponent"] = zeros() + _LEAST
    return state


def add_counts(
    state: State,
    z: Float[Tensor, "neuron token"],
    gate: Float[Tensor, "neuron token"],
    value: Float[Tensor, "neuron token"],
) -> None:
    """Count the tokens of a batch in the bins of each neuron's z, gate and value.

    Gates (rows) and values (columns) are also counted jointly, in `JOINT` bins on each side of 0.
    Exact zeros of z are also counted separately, because the bin of 0 contains other values too.
    """
    bins = {}
    state["zeros"] += (z == 0).sum(dim=1)
    for name, x in (("z", z), ("gate", gate), ("value", value)):
        size = float32_if_half(x).abs()
        mantissa, exponent = torch.frexp(size.amax(dim=1))
        held = state[f"{name}.exponent"]
        now = torch.maximum(held, exponent - (mantissa == 0.5).long())
        now = torch.where(mantissa == 0, held, now)
        state[f"{name}.counts"] = _halved(state[f"{name}.counts"], now - held)
        if name != "z":
            wide = state["joint"].unflatten(1, (2, JOINT)).unflatten(3, (2, JOINT))
            wide = wide.movedim(2, -1) if name == "gate" else wide
            wide = _halved(wide, now - held)
            wide = wide.movedim(-1, 2) if name == "gate" else wide
            state["joint"] = wide.flatten(3).flatten(1, 2)
        state[f"{name}.exponent"] = now
        scale = BINS * torch.exp2(-now.to(size.dtype))[:, None]
        # This line takes most of the time of a pass, so it works in place and in 32 bits.
        bins[name] = size.mul_(scale).ceil_().int().sub_(1).clamp_(min=0, max=BINS - 1)
        side = (x < 0).logical_not().int()  # 0 counts as positive
        _count(state[f"{name}.counts"], side * BINS + bins[name])
        bins[name] = side * JOINT + bins[name] // (BINS // JOINT)
    _count(state["joint"], bins["gate"] * 2 * JOINT + bins["value"])


def _halved(
    counts: Int[Tensor, "neuron *any bin"], times: Int[Tensor, "neuron"]
) -> Int[Tensor, "neuron *any bin"]:
    """Return the counts of histograms whose bins are 2^times as wide."""
    bins = torch.arange(counts.shape[-1], device=counts.device)
    into = bins >> times.clamp(max=30)[:, None]
    into = into.view(len(into), *[1] * (counts.ndim - 2), -1).expand_as(counts)
    return torch.zeros_like(counts).scatter_add_(-1, into, counts)


def _count(counts: Int[Tensor, "neuron *bin"], bins: Int[Tensor, "neuron token"]) -> None:
    n, size = len(counts), counts[0].numel()
    places = bins + torch.arange(n, dtype=bins.dtype, device=bins.device)[:, None] * size
    counts += torch.bincount(places.flatten(), minlength=n * size).view_as(counts)
