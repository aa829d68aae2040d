"""How a stack of residual-stream components is shown: where, normed for which block, projected."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.utilities import Slice

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.two_blocks.stream import require_norm_of_stream

if TYPE_CHECKING:
    from attn_only_lens.two_blocks.cache import AttentionOnlyCache

__all__ = ["View", "as_slice", "neurons_of"]


@dataclass(frozen=True)
class View:
    """How a stack of components is shown: at which positions, normed for a block, projected.

    With both a norm and a projection P nothing of size d_model is normed: at a fixed scale s,
    LN(x) @ P = x @ (P - mean of P over d_model) / s, since centring is its own transpose.
    """

    cache: "AttentionOnlyCache"
    end: int
    pos_slice: Any
    apply_ln: bool
    onto: Tensor | None

    @property
    def columns(self) -> Float[Tensor, "d_model out"] | None:
        """The projection to apply to components, centred where a LayerNorm follows."""
        if self.onto is None:
            return None
        columns = self.onto[:, None] if self.onto.ndim == 1 else self.onto
        if self.apply_ln and self.cache.model.cfg.normalization_type in ("LN", "LNPre"):
            columns = columns - columns.mean(dim=0, keepdim=True)
        return columns

    def at_pos(self, activation: Tensor) -> Tensor:
        """An activation at the wanted positions."""
        return as_slice(self.pos_slice).apply(activation, dim=-2)

    def project(self, components: Tensor) -> Tensor:
        """Components onto the wanted directions."""
        return components if self.columns is None else components @ self.columns

    def finish(
        self, parts: list[Tensor], labels: list[str], incl_remainder: bool, return_labels: bool
    ) -> Any:
        """Join the parts, add what they leave of the stream, norm them."""
        cache, end = self.cache, self.end
        stream = self.at_pos(cache["resid_post", end - 1] if end else cache["resid_pre", 0])
        stream = self.project(stream)
        components = torch.cat([stream.new_zeros((0, *stream.shape)), *parts])
        if incl_remainder:
            components = torch.cat([components, (stream - components.sum(dim=0))[None]])
            labels = [*labels, "remainder"]
        if self.apply_ln and self.onto is None:
            components = cache.apply_ln_to_stack(components, end, pos_slice=self.pos_slice)
        elif self.apply_ln and cache.model.cfg.normalization_type is not None:
            require_norm_of_stream(cache.model.cfg, end)
            components = components / cache._get_cached_ln_scale(
                end, False, as_slice(self.pos_slice)
            )
        if self.onto is not None and self.onto.ndim == 1:
            components = components.squeeze(-1)
        return (components, labels) if return_labels else components


def as_slice(wanted: Any) -> Slice:
    """A TransformerLens `Slice`; an integer removes its axis, as in `ActivationCache`."""
    return wanted if isinstance(wanted, Slice) else Slice(wanted)


def neurons_of(wanted: Any, layer: int, d_mlp: int) -> Int[Tensor, "neuron"]:
    """The neurons of a source layer that a slice takes; an integer takes one.

    Raises:
        UnsupportedCallError: the layer has not got one of them.
    """
    try:
        return as_slice(wanted).apply(torch.arange(d_mlp, device="cpu"), dim=0).reshape(-1)
    except IndexError as error:
        raise UnsupportedCallError(
            f"got neuron_slice={wanted!r}; source layer {layer} has neurons 0 to {d_mlp - 1}. Use "
            "get_neuron_results(2 * l + 1, …) for one source layer l"
        ) from error
