"""The components that sum to the residual stream before a block of a converted model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.names import HeadName
from attn_only_lens.models.norms import NO_NORM, known_norm
from attn_only_lens.models.two_blocks.config import block_kind, block_layer


@dataclass(frozen=True, eq=False)
class OutputNorm:
    """The norm that a block applies to its own output, with its scales in one forward pass.

    For fixed scales, a norm is a linear map. If the norm is applied to each head's output, the
    results therefore sum to the block's output (OLMo 2, Gemma 2, Gemma 3).
    """

    norm: Any
    scale: Tensor | None

    @classmethod
    def of(cls, cache: ActivationCache, block: int, positions: Slice) -> "OutputNorm":
        """Return a block's output norm, or the identity if the block has none."""
        cfg, name = cache.model.cfg, None
        if cfg.use_normalization_before_and_after:
            name = "ln1_post"
        elif cfg.original_architecture in POST_NORM_ARCHITECTURES:
            name = "ln1"
        if name is None or cfg.normalization_type is None:
            return cls(NO_NORM, None)
        norm: Any = getattr(cache.model.blocks[block], name)
        scale = cache[f"blocks.{block}.{name}.hook_scale"]
        return cls(known_norm(norm), positions.apply(scale, dim=-2))

    def rescale(self, written: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """Apply the norm without its scale: centre the outputs, and multiply them by the gain."""
        return self.norm.after(written)

    def divide(self, amounts: Tensor) -> Tensor:
        """Divide activations [..., pos, any] by the norm's scale at each position."""
        return amounts if self.scale is None else amounts / self.scale

    def bias(self, b_O: Float[Tensor, "d_model"]) -> Float[Tensor, "... d_model"]:
        """Return what the biases of the block and of the norm add to the residual stream."""
        written = self.divide(self.rescale(b_O))
        return written if self.norm.bias is None else written + self.norm.bias


@dataclass(frozen=True, eq=False)
class Components:
    """Some labelled components of the residual stream, one per row."""

    labels: list[str]
    rows: Float[Tensor, "row ..."]

    def returned(self, with_labels: bool) -> Any:
        """Return the rows, as TransformerLens does: with their labels only if requested."""
        return (self.rows, self.labels) if with_labels else self.rows


@dataclass(frozen=True, eq=False)
class StreamBefore:
    """The residual stream before a block, at some positions, and how its components are shown.

    Components are projected before they are divided by the norm's scale s, because LN(x) @ P = x @
    (P - mean of P over d_model) / s for a projection P.

    Attributes:
        cache: the activations.
        end: the index of the block; the number of blocks stands for the unembedding.
        positions: which positions are shown.
        apply_ln: whether the norm at the block's input is applied.
        onto: the vector or matrix onto which components are projected, or None.
    """

    cache: ActivationCache
    end: int
    positions: Slice
    apply_ln: bool
    onto: Tensor | None = None

    @classmethod
    def of(
        cls,
        cache: ActivationCache,
        layer: int | None,
        pos_slice: Any,
        apply_ln: bool,
        onto: Tensor | None = None,
    ) -> "StreamBefore":
        """Return the residual stream before block `layer`."""
        end = block_index(cache.model.cfg, layer)
        return cls(cache, end, as_slice(pos_slice), apply_ln, onto)

    @cached_property
    def _columns(self) -> Float[Tensor, "d_model column"] | None:
        """The projection as a matrix, centred if the norm centres its input."""
        if self.onto is None:
            return None
        columns = self.onto[:, None] if self.onto.ndim == 1 else self.onto
        if self.apply_ln and self.cache.model.cfg.normalization_type in ("LN", "LNPre"):
            columns = columns - columns.mean(dim=0, keepdim=True)
        return columns

    def at_positions(self, activation: Tensor) -> Tensor:
        """Return an activation [..., pos, any] at the shown positions."""
        return self.positions.apply(activation, dim=-2)

    def component(self, label: str, written: Float[Tensor, "... d_model"]) -> Components:
        """Return one component, which is written at the shown positions."""
        return Components([label], self._project(written[None]))

    def heads(self, block: int) -> Components:
        """Return what each head of a block writes."""
        results = self.positions.apply(head_results(self.cache, block), dim=-3).movedim(-2, 0)
        norm, model = OutputNorm.of(self.cache, block, self.positions), cast(Any, self.cache.model)
        rows = self._project(norm.divide(norm.rescale(results)))
        return Components(model.head_labels(block), rows)

    def neurons(self, block: int, wanted: Any = None) -> Components:
        """Return what each neuron of a block writes, or what the wanted neurons write."""
        layer, blocks = block_layer(block), cast(Any, self.cache.model.blocks)
        every = torch.arange(blocks[block].cfg.n_heads, device="cpu")
        chosen = as_slice(wanted).apply(every, dim=0).reshape(-1)  # an integer removes the axis
        results = neuron_results(self.cache, block, chosen, self.positions, self._columns)
        labels = [str(HeadName(layer, "neuron", neuron)) for neuron in chosen.tolist()]
        return Components(labels, results.movedim(-2, 0))

    def biases(self, blocks: Iterable[int]) -> Components:
        """Return what the biases of some blocks write together."""
        bias = torch.zeros_like(self.at_positions(self.cache["resid_pre", 0]))
        for block in blocks:
            attn: Any = self.cache.model.blocks[block].attn
            bias = bias + OutputNorm.of(self.cache, block, self.positions).bias(attn.b_O)
        return self.component("bias", bias)

    def joined(self, parts: Sequence[Components], incl_remainder: bool = False) -> Components:
        """Join components; if requested, add what they leave out, and apply the norm."""
        cache, end = self.cache, self.end
        stream = cache["resid_post", end - 1] if end else cache["resid_pre", 0]
        stream = self._project(self.at_positions(stream))
        labels = [label for part in parts for label in part.labels]
        rows = torch.cat([stream.new_zeros((0, *stream.shape)), *(part.rows for part in parts)])
        if incl_remainder:
            rows = torch.cat([rows, (stream - rows.sum(dim=0))[None]])
            labels.append("remainder")
        if self.apply_ln and self.onto is None:
            rows = cache.apply_ln_to_stack(rows, end, pos_slice=self.positions)
        elif self.apply_ln and cache.model.cfg.normalization_type is not None:
            require_norm(cache.model.cfg, end)
            rows = rows / cache._get_cached_ln_scale(end, False, self.positions)
        if self.onto is not None and self.onto.ndim == 1:
            rows = rows.squeeze(-1)
        return Components(labels, rows)

    def _project(self, components: Tensor) -> Tensor:
        return components if self._columns is None else components @ self._columns


def head_results(
    cache: ActivationCache, block: int
) -> Float[Tensor, "*batch pos head_index d_model"]:
    """Return what each head of a block writes, before the block's output norm."""
    cached = cache.cache_dict.get(f"blocks.{block}.attn.hook_result")
    if cached is None:
        attn: Any = cache.model.blocks[block].attn
        cached = (cache["z", block].unsqueeze(-1) * attn.W_O).sum(dim=-2)
    return cached


def neuron_results(
    cache: ActivationCache, block: int, neurons: Any, positions: Any, onto: Tensor | None
) -> Tensor:
    """Return what each neuron of a block writes: z · W_O, after the output norm (if any)."""
    norm = OutputNorm.of(cache, block, as_slice(positions))
    attn: Any = cache.model.blocks[block].attn
    acts = as_slice(positions).apply(cache["z", block].squeeze(-1), dim=-2)
    acts = as_slice(neurons).apply(norm.divide(acts), dim=-1)
    W_O = norm.rescale(as_slice(neurons).apply(attn.W_O.squeeze(-2), dim=0))
    if onto is None:
        return acts[..., None] * W_O
    # Projecting first avoids a tensor of shape [..., d_mlp, d_model].
    projected = W_O @ onto
    return acts * projected if projected.ndim == 1 else acts[..., None] * projected


def block_index(cfg: Any, layer: int | None) -> int:
    """Return the index of a block; None and -1 stand for the input of the unembedding."""
    end = cfg.n_layers if layer is None or layer == -1 else layer
    if not 0 <= end <= cfg.n_layers:
        raise UnsupportedCallError(
            f"got layer={layer}; expected a block from 0 to {cfg.n_layers} (source layer l is "
            "blocks 2l and 2l + 1), or -1 for the input of the unembedding"
        )
    return int(end)


def require_norm(cfg: Any, block: int) -> None:
    """Raise an error if a block does not normalise its own input."""
    if block == cfg.n_layers or cfg.normalization_type is None:
        return
    if cfg.original_architecture in POST_NORM_ARCHITECTURES:
        raise UnsupportedCallError(
            f"apply_ln at block {block}: this model normalises the output of a block, not the "
            "input. Use apply_ln=False, or layer=-1 for the final norm"
        )
    if cfg.parallel_attn_mlp and block_kind(block) == "neuron":
        raise UnsupportedCallError(
            f"apply_ln at block {block}: attention and MLP of this model run in parallel, so "
            f"its norm applies to the input of block {block - 1}. Use layer={block - 1}"
        )


def as_slice(wanted: Any) -> Slice:
    """Convert `wanted` to a TransformerLens `Slice`; an integer removes the sliced axis."""
    return wanted if isinstance(wanted, Slice) else Slice(wanted)
