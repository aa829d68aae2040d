"""Update the top examples and the histograms of many neurons or heads, batch by batch.

Results are exact: they do not depend on how a corpus is split into batches.

Largest entries. If several entries are equal, those that come first in the corpus are kept. Torch's
`topk` may return any of several equal entries, so those that equal the k-th largest are selected
again, in corpus order. A batch updates only the neurons whose k largest entries change: in most
batches, few neurons.

Histograms. The bins of a neuron cover the range from -2^e to 2^e, where 2^e is the smallest power
of 2 that bounds all values of the neuron so far. Each side of 0 has BINS bins of equal width: bin i
counts the values x with i < |x| · BINS / 2^e ≤ i + 1, and x = 0 is in bin 0. When a new value
doubles the range, neighbouring bins are merged in pairs. The result is the same as if the larger
range had been used from the start.
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
"""The maximum number of examples per quadrant."""
State: TypeAlias = dict[str, Tensor]
"""Tensors by name; the first axis of each is over neurons, or over attention heads."""
BINS = 64
JOINT = 16
QUANTITIES = ("z", "gate", "value")
_PLACES = ("text", "at", "position")
_LEAST = -40  # the smallest exponent e of a histogram's range, -2^e to 2^e


# The largest entries


def no_examples(
    n: int, k: int, width: int, like: Tensor, numbers: Sequence[str], windows: Sequence[str]
) -> State:
    """Return an empty state, to which `add_examples` adds the largest or the smallest examples."""
    state = {name: like.new_full((n, k), -1, dtype=torch.long) for name in _PLACES}
    state["tokens"] = like.new_full((n, k, width), -1, dtype=torch.int32)  # most of all integers
    state |= {name: like.new_zeros(n, k) for name in numbers}
    state |= {name: like.new_zeros(n, k, width) for name in windows}
    state["found"] = like.new_zeros(n, k, dtype=torch.bool)
    return state


def rows_with_new(
    state: State, end: str, score: Float[Tensor, "neuron token"]
) -> Int[Tensor, "row"]:
    """Return the neurons for which a new score ranks before the k-th example so far."""
    largest = score.amin(1).neg() if end == "smallest" else score.amax(1)
    return (largest > _least(state, end)[:, -1]).nonzero()[:, 0]


def _least(state: State, end: str) -> Float[Tensor, "neuron k"]:
    score = state["score"].neg() if end == "smallest" else state["score"]
    return torch.where(state["found"], score, -torch.inf)


def add_examples(
    state: State,
    end: str,
    rows: Int[Tensor, "row"],
    numbers: dict[str, Float[Tensor, "row token"]],
    windows: dict[str, Tensor],
    batch: Batch,
    before: int,
) -> None:
    """Update, in place, each neuron's k largest (or smallest) entries with those of a batch.

    Args:
        state: the largest entries so far.
        end: one of `ENDS`; the largest entries for any other name.
        rows: the neurons to which entries are added.
        numbers: values of each counted token; entries are ranked by "score", and a score of -∞ is
            no entry.
        windows: values of the tokens in a window, padding included: [neuron, batch * pos], or, if
            they depend on the entry, [neuron, batch * pos, pos].
        batch: the tokens.
        before: the number of tokens in a window before the entry.
    """
    kept, k = _least(state, end)[rows], state["score"].shape[1]
    ranked = numbers["score"].neg() if end == "smallest" else numbers["score"]
    chosen = _first_of_largest(ranked, k)
    both = torch.cat([kept, ranked.gather(1, chosen)], dim=1)
    order = both.sort(dim=1, descending=True, stable=True).indices[:, :k]
    row, rank = (order >= k).nonzero().unbind(1)  # only new entries need windows
    entry = chosen[row, order[row, rank] - k]
    new = _windows(
        windows, batch, rows[row], batch.counted[entry], before, state["tokens"].shape[-1]
    )
    new |= {name: x[row, entry] for name, x in numbers.items()}
    new["found"] = new["score"].isfinite()
    for name, held in state.items():
        entries = new[name].to(held.dtype)
        if len(row) < order.numel():
            moved = held[rows[:, None], order.clamp(max=k - 1)]
            moved[row, rank] = entries
        else:
            moved = entries.view(*order.shape, *held.shape[2:])
        held[rows] = moved


def quadrants(
    q: Float[Tensor, "neuron token"], up: Float[Tensor, "neuron token"]
) -> Int[Tensor, "neuron token"]:
    """Return each token's index in `QUADRANTS`, from q = x W_gate and u = x W_in."""
    return (q < 0).to(torch.uint8) * 2 + (up < 0)


def _first_of_largest(x: Float[Tensor, "row token"], k: int) -> Int[Tensor, "row k"]:
    """Return the sorted indices of each row's k largest entries; of equal entries, the first."""
    k = min(k, x.shape[1])
    largest = x.topk(min(k + 1, x.shape[1]), dim=1)
    indices = largest.indices[:, :k].sort(dim=1).values
    least = largest.values[:, k - 1]
    rows = ((largest.values[:, -1] == least) & least.isfinite()).nonzero()[:, 0]
    if len(rows) and largest.values.shape[1] > k:
        some, bound = x[rows], least[rows, None]
        larger, equal = some > bound, some == bound
        wanted = larger | (equal & (equal.cumsum(1) <= k - larger.sum(1, keepdim=True)))
        indices[rows] = wanted.nonzero()[:, 1].view(-1, k)
    return indices


def _windows(
    windows: dict[str, Tensor],
    batch: Batch,
    heads: Int[Tensor, "entry"],
    places: Int[Tensor, "entry"],
    before: int,
    width: int,
) -> State:
    n_pos = batch.tokens.shape[1]
    row, position = places // n_pos, places % n_pos
    first = (position - before).clamp(min=0)
    within = first[:, None] + torch.arange(width, device=places.device)
    length = torch.minimum(batch.lengths[row], position + width - before)[:, None]
    here: Bool[Tensor, "entry window"] = within < length
    within = within.clamp(max=n_pos - 1)
    flat = row[:, None] * n_pos + within
    of_tokens = {}
    for name, x in windows.items():
        numbers = x[heads[:, None], flat] if x.ndim == 2 else x[heads, places].gather(1, within)
        of_tokens[name] = torch.where(here, numbers, 0.0)
    return {
        "text": batch.text[row],
        "at": batch.first[row] + position,
        "position": position - first,
        "tokens": torch.where(here, batch.tokens.flatten()[flat], -1),
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
    """Add a batch's tokens, in place, to the histograms of each neuron's z, gate and value.

    A joint histogram counts pairs of a gate (row) and a value (column), in `JOINT` bins on each
    side of 0. `zeros` counts the tokens at which z is exactly 0, because the bin of 0 also counts
    small positive values.
    """
    bins = {}
    state["zeros"] += (z.shape[1] - z.count_nonzero(dim=1)).long()
    for name, x in (("z", z), ("gate", gate), ("value", value)):
        size = float32_if_half(x).abs()
        mantissa, exponent = torch.frexp(size.amax(dim=1))
        held = state[f"{name}.exponent"]
        now = torch.maximum(held, exponent - (mantissa == 0.5).long())
        now = torch.where(mantissa == 0, held, now)
        counts = state[f"{name}.counts"]
        # Most batches widen no range. (On a GPU, to find out would wait for the device.)
        if x.device.type != "cpu" or not torch.equal(now, held):
            counts.copy_(_halved(counts, now - held))
            if name != "z":
                joint = state["joint"].mT if name == "gate" else state["joint"]
                joint.copy_(_halved(joint.unflatten(2, (2, JOINT)), now - held).flatten(2))
            held.copy_(now)
        scale = BINS * torch.exp2(-now.to(size.dtype))[:, None]
        # This step takes much of the time of a pass, so it works in place, with 8-bit bin numbers.
        bins[name] = size.mul_(scale).ceil_().sub_(1).clamp_(min=0, max=BINS - 1).to(torch.uint8)
        bins[name].add_(x >= 0, alpha=BINS)  # x = 0 counts as positive
        add_histogram(counts, bins[name].int())
    per_joint = (BINS // JOINT).bit_length() - 1
    rows, columns = (bins[name].bitwise_right_shift(per_joint) for name in ("gate", "value"))
    add_histogram(state["joint"], rows.int().mul_(2 * JOINT).add_(columns))


def _halved(
    counts: Int[Tensor, "neuron *any bin"], times: Int[Tensor, "neuron"]
) -> Int[Tensor, "neuron *any bin"]:
    """Merge neighbouring bins so that each is 2^times as wide, and return the new counts."""
    bins = torch.arange(counts.shape[-1], device=counts.device)
    into = bins >> times.clamp(max=30)[:, None]
    into = into.view(len(into), *[1] * (counts.ndim - 2), -1).expand_as(counts)
    return torch.zeros_like(counts).scatter_add_(-1, into, counts)


def add_histogram(counts: Int[Tensor, "neuron *bin"], bins: Int[Tensor, "neuron token"]) -> None:
    """Add each token to its histogram bin; overwrite `bins`, the int32 bin of each token."""
    n, size = len(counts), counts[0].numel()
    bins += torch.arange(n, dtype=bins.dtype, device=bins.device)[:, None] * size
    counts += torch.bincount(bins.flatten(), minlength=n * size).view_as(counts)
