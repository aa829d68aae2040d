"""The activation cache of a converted model, with every component under its right name.

`layer` means a block throughout, as in the rest of TransformerLens' API on a converted model, and
labels speak of source layers: the output of block 2l + 1 is `5_mlp_out` for l = 5, its neuron-heads
are `L5N0 …`.

What a block reads from the residual stream, and under which norm.

How what a head computes reaches the residual stream: through a norm, in some models.

Where a block's output is normed before it is added (OLMo 2; Gemma 2 and 3), head results do not sum
to what the block writes. At the scale that the norm had in the run it is a linear map, the same
for every head of the block, and applied to each head's result it makes them sum again.

How a stack of residual-stream components is shown: where, normed for which block, projected.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice, get_act_name
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.host import block_kind, block_layer, neurons_block
from attn_only_lens.heads.names import neuron_labels
from attn_only_lens.models.two_blocks.config import AttentionOnlyConfig

__all__ = [
    "AttentionOnlyCache",
    "View",
    "Writing",
    "as_slice",
    "embeddings_in_stream",
    "neurons_of",
    "refuse_mlp_input",
    "require_labels",
    "require_norm_of_stream",
]


def refuse_mlp_input(mlp_input: bool) -> None:
    """A converted model has no input half-way through a block."""
    if mlp_input:
        raise UnsupportedCallError(
            "mlp_input on a converted model: a block has one input. The input of the neurons of "
            "source layer l is that of block 2l + 1: pass layer=2 * l + 1 and no mlp_input"
        )


def require_labels(cache: "AttentionOnlyCache", name: str, return_labels: bool) -> None:
    """Rows without names would be taken for those of other heads, by counting them."""
    if not return_labels:
        raise UnsupportedCallError(
            f"{name} on a converted model without labels: attention heads and neuron-heads are in "
            "blocks of their own and of unequal numbers, so the stack does not come apart into "
            f"cfg.n_layers = {cache.model.cfg.n_layers} equal parts, as "
            '"(layer head) … -> layer head …" would have it. Pass return_labels=True, and select '
            'rows by their labels: those of attention heads hold an "H", those of neurons an "N"'
        )


def require_norm_of_stream(cfg: AttentionOnlyConfig, block: int) -> None:
    """Refuse to apply a block's norm to the stream where the model does not either."""
    if block == cfg.n_layers or cfg.normalization_type is None:
        return
    if cfg.original_architecture in POST_NORM_ARCHITECTURES:
        raise UnsupportedCallError(
            f"apply_ln at block {block}: this model normalises what a block writes, not what "
            "it reads. Use apply_ln=False, or layer=-1 for the final norm"
        )
    if cfg.parallel_attn_mlp and block_kind(block) == "neuron":
        raise UnsupportedCallError(
            f"apply_ln at block {block}: attention and MLP of this model run in parallel, so "
            f"its norm applies to the input of block {block - 1}. Use layer={block - 1}"
        )


def embeddings_in_stream(cache: "AttentionOnlyCache") -> list[str]:
    """The embeddings that are in the stream (shortformer adds positions to q and k only)."""
    kind = cache.model.cfg.positional_embedding_type
    positions = cache.has_pos_embed and kind != "shortformer"
    return ["embed"] * cache.has_embed + ["pos_embed"] * positions


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


if TYPE_CHECKING:
    from attn_only_lens.models.two_blocks.model import AttentionOnlyTransformer


class AttentionOnlyCache(ActivationCache):
    """An `ActivationCache` that knows a converted model's blocks.

    Example:
        >>> from attn_only_lens import convert, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> cache.decompose_resid(return_labels=True)[1]
        ['embed', 'pos_embed', '0_attn_out', '0_mlp_out']
    """

    model: "AttentionOnlyTransformer"

    def __getitem__(self, key: Any) -> Tensor:
        """As in TransformerLens: `cache["pattern", 11]`; the names of an MLP raise."""
        if key in self.cache_dict:
            found: Tensor = self.cache_dict[key]
            return found
        parts = (key,) if isinstance(key, str) else tuple(key)
        if len(parts) > 1 and isinstance(parts[1], int) and parts[1] < 0:
            parts = (parts[0], self.model.cfg.n_layers + parts[1], *parts[2:])
        hook = get_act_name(*parts)
        gone = (".mlp.", ".ln2", "hook_mlp_in", "hook_mlp_out", "hook_resid_mid")
        if any(part in hook for part in gone):
            raise UnsupportedCallError(
                f"{hook} on a converted model: the MLP of source layer l is block 2l + 1. Use "
                'cache["attn_out", 2l+1] for mlp_out, cache["resid_pre", 2l+1] for resid_mid '
                'and mlp_in, cache["q", 2l+1] for pre, cache["z", 2l+1] for post (with bilinear '
                "gates, these are of heads: model.blocks[2l+1].attn.neuron_outputs(z) sums those "
                "of each neuron)"
            )
        return self.cache_dict[hook]

    def _end(self, layer: int | None) -> int:
        n_blocks = self.model.cfg.n_layers
        end = n_blocks if layer is None or layer == -1 else layer
        if not 0 <= end <= n_blocks:
            raise UnsupportedCallError(
                f"got layer={layer}; expected a block from 0 to {n_blocks} (source layer l is "
                "blocks 2l and 2l + 1), or -1 for the input of the unembedding"
            )
        return end

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Any = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """The residual stream before each source layer, up to block `layer`.

        With `incl_mid`, before the neurons of each layer too (`3_mid`). Ends with the input of
        block `layer` itself. Values and labels are those of the source model.
        """
        refuse_mlp_input(mlp_input)
        end = self._end(layer)
        n_blocks = self.model.cfg.n_layers
        stack, labels = [], []
        for block in range(end + 1):
            middle = block_kind(block) == "neuron" and block < n_blocks
            if middle and not incl_mid and block != end:
                continue
            last = block == n_blocks
            stack.append(self["resid_post", block - 1] if last else self["resid_pre", block])
            point = f"{block_layer(block)}_{'mid' if middle else 'pre'}"
            labels.append("final_post" if last else point)
        components = torch.stack([as_slice(pos_slice).apply(part, dim=-2) for part in stack])
        if apply_ln:
            components = self.apply_ln_to_stack(
                components,
                end,
                pos_slice=pos_slice,
                has_batch_dim=self.has_batch_dim,
                recompute_ln=end == n_blocks,
            )
        return (components, labels) if return_labels else components

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: str = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """The outputs of the blocks before block `layer`, neuron blocks as the MLP part."""
        refuse_mlp_input(mlp_input)
        if mode not in ("all", "attn", "mlp"):
            raise ValueError(f"got mode={mode!r}; expected 'all', 'attn' or 'mlp'")
        end = self._end(layer)
        labels = embeddings_in_stream(self) if incl_embeds else []
        stack = [self[f"hook_{name}"] for name in labels]
        for block in range(end):
            part = "mlp" if block_kind(block) == "neuron" else "attn"
            if mode in ("all", part):
                stack.append(self["attn_out", block])
                labels.append(f"{block_layer(block)}_{part}_out")
        components = torch.stack([as_slice(pos_slice).apply(part, dim=-2) for part in stack])
        if apply_ln:
            components = self.apply_ln_to_stack(components, end, pos_slice=pos_slice)
        return (components, labels) if return_labels else components

    def stack_head_results(
        self,
        layer: int = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Any = None,
        apply_ln: bool = False,
    ) -> Any:
        """What every head before block `layer` writes, attention and neuron-heads, block by block.

        Large: d_mlp vectors of d_model a token for each neuron block. `stack_neuron_results` with
        `project_output_onto` needs far less. Without `return_labels=True` it raises.
        """
        require_labels(self, "stack_head_results", return_labels)
        end = self._end(layer)
        parts = [self._heads(block, pos_slice) for block in range(end)]
        labels = [label for block in range(end) for label in self.model.head_labels(block)]
        view = View(self, end, pos_slice, apply_ln, None)
        return view.finish(parts, labels, incl_remainder, return_labels)

    def compute_head_results(self) -> None:
        """Add `hook_result` of every block to the cache, where it is missing."""
        for block in range(self.model.cfg.n_layers):
            self.cache_dict[f"blocks.{block}.attn.hook_result"] = self._results(block)

    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Any = None,
        pos_slice: Any = None,
        project_output_onto: Tensor | None = None,
    ) -> Tensor:
        """What each neuron-head of block `layer` writes to the stream: z · W_out, and its norm."""
        if not 0 <= layer < self.model.cfg.n_layers or block_kind(layer) != "neuron":
            raise UnsupportedCallError(
                f"got layer={layer}; expected a neuron block, 2 * l + 1 for source layer l "
                f"({neurons_block(0)} to {self.model.cfg.n_layers - 1})"
            )
        writing = Writing(self, layer)
        attn: Any = self.model.blocks[layer].attn
        acts = as_slice(pos_slice).apply(attn.neuron_outputs(self["z", layer].squeeze(-1)), dim=-2)
        acts = writing.at_scale(acts, as_slice(pos_slice))
        acts = as_slice(neuron_slice).apply(acts, dim=-1)
        W_out = writing.directions(as_slice(neuron_slice).apply(attn.W_out, dim=0))
        if project_output_onto is None:
            return acts[..., None] * W_out
        # Project first: the [..., d_mlp, d_model] intermediate is never made.
        projected = W_out @ project_output_onto
        return acts * projected if projected.ndim == 1 else acts[..., None] * projected

    def stack_neuron_results(
        self,
        layer: int,
        pos_slice: Any = None,
        neuron_slice: Any = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Any:
        """What every neuron-head before block `layer` writes, with labels: `L0N0`, `L0N1`, …"""
        require_labels(self, "stack_neuron_results", return_labels)
        end = self._end(layer)
        view = View(self, end, pos_slice, apply_ln, project_output_onto)
        parts, labels = [], []
        for block in range(neurons_block(0), end, 2):
            sizes = self.model.cfg.layer_sizes[block_layer(block)]
            wanted = neurons_of(neuron_slice, block_layer(block), sizes.d_mlp)
            found = self.get_neuron_results(block, wanted, pos_slice, view.columns)
            parts.append(found.movedim(-2, 0))
            labels += neuron_labels(block, wanted.tolist())
        return view.finish(parts, labels, incl_remainder, return_labels)

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Any = None,
        return_labels: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Any:
        """Attention heads, then neuron-heads (or whole neuron blocks), embeddings, summed biases.

        The order, values and labels of the source model's own decomposition.
        """
        refuse_mlp_input(mlp_input)
        end = self._end(layer)
        view = View(self, end, pos_slice, apply_ln, project_output_onto)
        parts, labels = [], []
        for block in range(0, end, 2):
            parts.append(view.project(self._heads(block, pos_slice)))
            labels += self.model.head_labels(block)
        for block in range(neurons_block(0), end, 2):
            if expand_neurons:
                neurons = self.get_neuron_results(block, None, pos_slice, view.columns)
                parts.append(neurons.movedim(-2, 0))
                labels += neuron_labels(block, range(len(parts[-1])))
            else:
                parts.append(view.project(view.at_pos(self["attn_out", block])[None]))
                labels.append(f"{block_layer(block)}_mlp_out")
        for name in embeddings_in_stream(self):
            parts.append(view.project(view.at_pos(self[f"hook_{name}"])[None]))
            labels.append(name)
        bias = torch.zeros_like(view.at_pos(self["resid_pre", 0]))
        for block in range(0, end, 1 if expand_neurons else 2):
            bias = bias + Writing(self, block).bias(as_slice(pos_slice))
        parts.append(view.project(bias[None]))
        labels.append("bias")
        return view.finish(parts, labels, False, return_labels)

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: str | None = None
    ) -> Tensor:
        """Stack an activation over blocks, where blocks of both kinds have it in one shape."""
        found = [self[activation_name, block, sublayer_type] for block in range(self._end(layer))]
        shapes = sorted({tuple(activation.shape) for activation in found})
        if len(shapes) > 1:
            raise UnsupportedCallError(
                f"stack_activation({activation_name!r}): its shapes in the blocks are {shapes}. "
                "Stack one kind, where source layers are of one size: "
                f"torch.stack([cache[{activation_name!r}, 2 * l + 1] for l in range(n_layers)])"
            )
        return torch.stack(found)

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Tensor:
        """As in TransformerLens, for the norm at the entry of block `layer`."""
        refuse_mlp_input(mlp_input)
        end = self._end(layer)
        require_norm_of_stream(self.model.cfg, end)
        normalised: Tensor = super().apply_ln_to_stack(
            residual_stack, end, False, pos_slice, batch_slice, has_batch_dim, recompute_ln
        )
        return normalised

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "AttentionOnlyCache":
        """As in TransformerLens; the result is again a cache of a converted model."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return AttentionOnlyCache(sliced.cache_dict, self.model, sliced.has_batch_dim)

    def _heads(self, block: int, pos_slice: Any) -> Float[Tensor, "head_index *batch pos d_model"]:
        """What the heads of a block write to the stream."""
        results = as_slice(pos_slice).apply(self._results(block), dim=-3).movedim(-2, 0)
        writing = Writing(self, block)
        return writing.at_scale(writing.directions(results), as_slice(pos_slice))

    def _results(self, block: int) -> Float[Tensor, "*batch pos head_index d_model"]:
        cached = self.cache_dict.get(f"blocks.{block}.attn.hook_result")
        if cached is None:
            W_O = self.model.blocks[block].attn.W_O
            cached = (self["z", block].unsqueeze(-1) * W_O).sum(dim=-2)
        return cached
