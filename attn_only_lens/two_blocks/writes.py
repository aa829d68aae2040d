"""How what a head computes reaches the residual stream: through a norm, in some models.

Where a block's output is normed before it is added (OLMo 2; Gemma 2 and 3), head results do not sum
to what the block writes. At the scale that the norm had in the run it is a linear map, the same
for every head of the block, and applied to each head's result it makes them sum again.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

if TYPE_CHECKING:
    from attn_only_lens.two_blocks.cache import AttentionOnlyCache

__all__ = ["Writing"]


@dataclass(frozen=True)
class Writing:
    """The norm between the heads of one block and the stream, at the scales of one run.

    Attributes:
        cache: of the run.
        block: the block.
    """

    cache: "AttentionOnlyCache"
    block: int

    @property
    def _name(self) -> str | None:
        cfg = self.cache.model.cfg
        if cfg.normalization_type is None:
            return None
        if cfg.use_normalization_before_and_after:
            return "ln1_post"
        return "ln1" if cfg.original_architecture in POST_NORM_ARCHITECTURES else None

    def directions(self, written: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """Directions after the norm's centring and gain, which are the same at every position."""
        if self._name is None:
            return written
        if self.cache.model.cfg.normalization_type in ("LN", "LNPre"):
            written = written - written.mean(dim=-1, keepdim=True)
        gain = getattr(self._norm, "w", None)
        return written if gain is None else written * gain

    def at_scale(self, amounts: Tensor, pos_slice: Any) -> Tensor:
        """Amounts [..., pos, any] over the norm's scale at each position."""
        if self._name is None:
            return amounts
        scale = self.cache[f"blocks.{self.block}.{self._name}.hook_scale"]
        return amounts / pos_slice.apply(scale, dim=-2)

    def bias(self, pos_slice: Any) -> Float[Tensor, "... d_model"]:
        """What the block's output bias, and the norm's own, write to the stream."""
        output: Tensor = self.cache.model.blocks[self.block].attn.b_O
        if self._name is None:
            return output
        written = self.at_scale(self.directions(output), pos_slice)
        own = getattr(self._norm, "b", None)
        return written if own is None else written + own

    @property
    def _norm(self) -> torch.nn.Module:
        assert self._name is not None
        norm: torch.nn.Module = getattr(self.cache.model.blocks[self.block], self._name)
        return norm
