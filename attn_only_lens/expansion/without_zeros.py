"""New units without zeros: pairs that cancel, and old units shared out.

The theorems put zeros where new units write, so at first these zeros alone see a gradient. (The
growth paper, section 5, leaves other definitions open.) Along an axis that grows, what a sublayer
writes, or a score, is Σ_i f(r_i; x) w_i, with r_i what unit i reads with and w_i what it writes
with, and one function f of each unit alone.

Pairs.  New units j, j' have r_j = r_j' and w_j = -w_j', so they add 0. Gradients by r are opposite:
    they part at the first step.
Shares. A new unit j has r_j = r_i of an old one; w_i becomes α w_i - n, and w_j is (1 - α) w_i + n.
    (Net2Net: Chen, Goodfellow, Shlens, 2016; with unequal outputs, LEMON: Wang et al., 2023.)
    Without the noise n, Adam's first step would be the same for both.

    axis                 reads with                                writes with
    neurons (3.1)        W_in, W_gate, b_in, b_gate                W_out
    heads (3.2)          W_Q, W_K, W_V, and biases, sinks, gains   W_O
    values (3.3)         W_V, b_V                                  W_O
    queries, keys (3.4)  W_Q, b_Q                                  W_K, b_K
    stream (3.5)         W_Q, W_K, W_V, W_in, W_gate, W_U          W_E, W_pos, W_O, W_out and biases
    a new layer (3.6)    pairs of its heads and of its neurons; b_O and b_out are zero

Heads that share a key and a value are shared out, or paired, as groups. Zeros stay where neither
keeps the function:

- the last of an odd number of units to pair;
- where a norm sees new units, which change its mean square: in the stream (unless there is no norm)
  and in normed queries and keys;
- queries and keys under rotary positions that turn whole heads (where they turn the first
  coordinates only, new ones are not turned and may cancel, but cannot be shared out);
- keys that `clip_qkv` bounds are not shared out, nor values and keys that grow in some heads only;
- heads beside ALiBi, whose slopes make a pair two functions;
- a new layer that is a copy, or whose norms after sublayers would divide roundings by √ε.

In exact arithmetic the function is the same; sums of what cancels round. Under dropout, pairs
cancel on average.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.expansion.new_entries import (
    Initialiser,
    Made,
    New,
    Own,
    Units,
    WithoutZeros,
    deviation,
    generator,
    normal_numbers,
    own_std,
)
from attn_only_lens.expansion.weights import Axis


@dataclass(frozen=True)
class _Cancelling(WithoutZeros):
    std: float | None
    may: ClassVar[Literal["cancel", "share"]] = "cancel"

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        if self.std is None:
            return Own()(new, seed)
        return float(new.is_gain) + self.std * normal_numbers(new, seed)

    def together(self, new: New, units: Units, seed: int, *, writes: bool) -> Made:
        positions = range(len(units.added))
        like, sign = list(positions), [0.0] * len(positions)
        for run in units.blocks(positions):
            for first, second in zip(run[::2], run[1::2], strict=False):
                for one, second_unit in zip(first, second, strict=True):
                    like[second_unit], sign[one], sign[second_unit] = one, 1.0, -1.0
        made = self(new, seed).index_select(units.dim, _index(like))
        if writes:
            made = made * _along(sign, units.dim, made.ndim)
        added = units.added
        return Made(
            made,
            tied=tuple((added[j], added[i]) for j, i in enumerate(like) if i != j),
            factor=-1.0 if writes else 1.0,
            zero=tuple(added[j] for j in positions if sign[j] == 0.0) if writes else (),
        )


@dataclass(frozen=True)
class _Splits(WithoutZeros):
    share: float
    noise: float
    may: ClassVar[Literal["cancel", "share"]] = "share"

    def __call__(self, new: New, seed: int) -> Float[Tensor, "..."]:
        return Own()(new, seed)

    def together(self, new: New, units: Units, seed: int, *, writes: bool) -> Made:
        sources = self._sources(new, units, seed)
        old = new.old.detach().cpu().double()
        copies, dim = old.index_select(units.dim, _index(sources)), units.dim
        pairs = [(j, units.old[i]) for j, i in zip(units.added, sources, strict=True)]
        n_copies = [sources.count(i) for i in range(len(units.old))]
        shares = [(1 - self.share) / n_copies[i] for i in sources]
        shared = tuple((*pair, share) for pair, share in zip(pairs, shares, strict=True))
        if not writes:
            return Made(copies, tied=tuple(pairs), shares=shared)
        kept = [self.share if n else 1.0 for n in n_copies]
        std = deviation(old)
        if std == 0 and new.is_matrix:
            std = own_std(new)
        noise = self.noise * std * normal_numbers(new, seed)
        return Made(
            copies * _along(shares, dim, old.ndim) + noise,
            old=(old * _along(kept, dim, old.ndim)).index_add(dim, _index(sources), -noise),
            shares=shared,
        )

    def _sources(self, new: New, units: Units, seed: int) -> list[int]:
        """For each new unit, the position of the old one that it shares: each once, then again."""
        assert new.axis is not None  # in a new layer there is none
        axis = Axis(new.axis.label.removeprefix("kv_"), new.axis.layer)
        n_blocks = units.old_blocks
        key = generator(seed, "splits", axis, n_blocks, new.constants.n_layers)
        counts = [0] * len(units.added)
        olds, news = units.blocks(range(len(units.old))), units.blocks(range(len(units.added)))
        for of_old, of_new in zip(olds, news, strict=True):
            order = torch.randperm(n_blocks, generator=key, device="cpu").tolist()
            for unit, block in enumerate(of_new):
                for j, i in zip(block, of_old[order[unit % n_blocks]], strict=True):
                    counts[j] = i
        return counts


def _index(positions: list[int]) -> Tensor:
    return torch.tensor(positions, dtype=torch.long, device="cpu")


def _along(factors: list[float], dim: int, ndim: int) -> Float[Tensor, "..."]:
    """Factors by position along a dimension, to multiply a tensor with."""
    shape = [-1 if axis == dim else 1 for axis in range(ndim)]
    return torch.tensor(factors, dtype=torch.float64, device="cpu").reshape(shape)


def cancelling(std: float | None = None) -> Initialiser:
    """Draw new units in pairs that read the same and write the opposite.

    So all their entries see a gradient from the first step. The last of an odd number writes zeros,
    and so do units that cannot cancel (coordinates of a stream that is normed, of queries and keys
    that are normed or turn as a whole; `without_zeros.py` has the list and the proofs).

    Args:
        std: of what is drawn; by default as the model draws its own weights.

    Raises:
        ValueError: the standard deviation is not positive.

    Example:
        >>> from attn_only_lens import expansion as ex, grow, pretrained
        >>> model, tokens = pretrained.modular_addition(), pretrained.modular_addition_tokens()[:7]
        >>> grown = grow(model, d_mlp=516, init=ex.init.cancelling(), seed=0)
        >>> W_in, W_out = grown.model.W_in[0], grown.model.W_out[0]
        >>> W_in[:, 512].equal(W_in[:, 513]), W_out[512].equal(-W_out[513])
        (True, True)
        >>> bool((grown.model(tokens) - model(tokens)).abs().max() < 1e-3)
        True
    """
    if std is not None and not 0 < std < math.inf:
        raise ValueError(f"got std={std}; expected more than 0: with zeros new units are dead")
    return _Cancelling(std)


def splits(share: float = 0.5, noise: float = 0.1) -> Initialiser:
    """Make new units copies of old ones, drawn at random, which share what these write.

    Each old unit is shared out once before any is a second time. Where that cannot be
    (`without_zeros.py` says where), new units are drawn as the model's own, and write zeros.

    Args:
        share: what the old unit keeps; its copies have the rest in equal parts.
        noise: that copies write more, and the old unit less, in units of the tensor's deviation.

    Raises:
        ValueError: the share is not between 0 and 1, or there is no noise.

    Example:
        >>> from attn_only_lens import expansion as ex, grow, pretrained
        >>> model, tokens = pretrained.modular_addition(), pretrained.modular_addition_tokens()[:7]
        >>> grown = grow(model, n_heads=8, init=ex.init.splits(), seed=0)
        >>> bool((grown.model(tokens) - model(tokens)).abs().max() < 1e-3)
        True
    """
    if not 0 < share < 1:
        raise ValueError(f"got share={share}; expected more than 0 and less than 1")
    if not 0 < noise < math.inf:
        raise ValueError(f"got noise={noise}; expected more than 0: equal units stay equal")
    return _Splits(share, noise)
