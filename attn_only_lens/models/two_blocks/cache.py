"""The activation cache of a converted model.

As in TransformerLens, the argument `layer` is the index of a block. Labels contain the index of the
original layer (`5_mlp_out` for block 11, `L5N0`). TransformerLens' methods that stack heads and
neurons are replaced: they assume that all layers have equally many heads, they stop only after
whole layers, and they ignore norms that follow blocks (OLMo 2, Gemma 2, Gemma 3), so that the
components would not sum to the residual stream.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import Slice, get_act_name
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.arguments import a_type
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.heads.names import HeadName
from attn_only_lens.models.norms import NO_NORM, known_norm
from attn_only_lens.models.two_blocks.config import block_kind, block_layer, neurons_block

_MLP_POINTS = (".mlp.", ".ln2", "hook_mlp_in", "hook_mlp_out", "hook_resid_mid")
# What to call instead of TransformerLens' sweeps, which read a cache under full hook names.
_SWEEPS = {
    f"hook_{name}": f"call transformer_lens.patching.get_act_patch_{instead}(model, "
    f"corrupted_tokens, clean_cache, metric): row 2l + 1 is {name} of source layer l\n"
    for name, instead in {"mlp_out": "attn_out", "resid_mid": "resid_pre"}.items()
}
_RESHAPES = ("reshape", "reshape_as", "unflatten", "view", "view_as")


def refuse_mlp_input(mlp_input: bool) -> None:
    """Raise an error if `mlp_input` is set, because converted models' blocks have one input."""
    if mlp_input:
        raise UnsupportedCallError(
            "mlp_input is not available on a converted model: a block has one input. The input "
            "of the neurons of source layer l is that of block 2l + 1: pass layer=2 * l + 1 and "
            "no mlp_input"
        )


class HeadRows(Tensor):
    """A tensor with one row per head of a converted model, ordered as in the original model.

    Code for stock models splits head rows into `cfg.n_layers` layers. In a converted model, which
    has two blocks per layer, each part would hold only half the heads of a layer. Splitting the
    rows into `cfg.n_layers` parts therefore raises UnsupportedCallError; use `cfg.n_layers // 2`
    parts instead. Operations that change the length of the first axis return plain tensors.

    Example:
        >>> from attn_only_lens import convert, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> stack, labels = cache.stack_head_results(pos_slice=-1, return_labels=True)
        >>> labels
        ['L0H0', 'L0H1', 'L0H2', 'L0H3']
        >>> stack.unflatten(0, (model.cfg.n_layers // 2, -1)).shape  # source layer, head, ...
        torch.Size([1, 4, 5, 128])
    """

    n_blocks: int

    @classmethod
    def of(cls, stack: Tensor, n_blocks: int) -> "HeadRows":
        """Convert a stack of head outputs to `HeadRows`, for a model with `n_blocks` blocks."""
        rows = stack.as_subclass(cls)
        rows.n_blocks = n_blocks
        return rows

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the rows as a plain tensor, which torch.load accepts."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadRows":
        return self.of(copy.deepcopy(self.as_subclass(Tensor), memo), self.n_blocks)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a torch operation; raise an error if it splits the rows into `cfg.n_layers` parts."""
        values = (*args, *(kwargs or {}).values())
        rows = next((value for value in values if isinstance(value, HeadRows)), None)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            kept = isinstance(result, Tensor) and result.ndim and rows is not None and rows.ndim
            # An in-place operation returns `rows` itself, which must remain an autograd leaf.
            if rows is None or not kept or result is rows or func is Tensor.as_subclass:
                return result
            split = rows.n_blocks, len(rows) // rows.n_blocks, *rows.shape[1:]
            if func.__name__ in _RESHAPES and result.shape == split:
                raise UnsupportedCallError(
                    f"a stack of {len(rows)} heads was split into cfg.n_layers = {rows.n_blocks} "
                    "rows: a converted model has two blocks for each source layer, so a row would "
                    f"hold half the heads of a layer. Split it into {rows.n_blocks // 2} "
                    "layers: layer=model.cfg.n_layers // 2"
                )
            return cls.of(result, rows.n_blocks) if len(result) == len(rows) else result


class AttentionOnlyCache(ActivationCache):
    """An `ActivationCache` for converted models, which have two blocks per original layer.

    Example:
        >>> from attn_only_lens import convert, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:5])
        >>> cache.decompose_resid(return_labels=True)[1]
        ['embed', 'pos_embed', '0_attn_out', '0_mlp_out']
    """

    model: Any

    def __init__(self, cache_dict: dict[str, Tensor], model: Any, has_batch_dim: bool = True):
        if not has_neuron_heads(model) or host_of(model).in_place:
            raise UnsupportedCallError(
                f"got a cache of {a_type(model)}; expected one of a converted model: for "
                "other models, use transformer_lens' ActivationCache"
            )
        super().__init__(cache_dict, model, has_batch_dim)
        if model.cfg.positional_embedding_type == "shortformer":
            self.has_pos_embed = False  # position embeddings are added to queries and keys instead

    def __getitem__(self, key: Any) -> Tensor:
        """Return an activation, as in `cache["pattern", 11]`; raise an error for names in MLPs."""
        if key not in self.cache_dict:
            call = _SWEEPS.get(key.split(".")[-1], "") if str(key).startswith("blocks.") else ""
            path = (key,) if isinstance(key, str) else tuple(key)
            if len(path) > 1 and isinstance(path[1], int) and path[1] < 0:
                path = (path[0], self.model.cfg.n_layers + path[1], *path[2:])
            key = get_act_name(*path)
            if any(name in key for name in _MLP_POINTS):
                raise UnsupportedCallError(
                    f"{call}a converted model has no {key}: the MLP of source layer l is block "
                    '2l + 1. Use cache["attn_out", 2l+1] for mlp_out, cache["resid_pre", 2l+1] for '
                    'resid_mid and mlp_in, cache["q", 2l+1] for pre, cache["z", 2l+1] for post'
                )
        return self.cache_dict[key]

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Any = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """Return the residual stream before each original layer, up to block `layer` (included).

        With `incl_mid`, also return the residual stream before each layer's neurons (`3_mid`).
        """
        refuse_mlp_input(mlp_input)
        end = self._end(layer)
        stack: Any = super().accumulated_resid(end, apply_ln=apply_ln, pos_slice=pos_slice)
        labels = {}
        for block in range(end + 1):
            middle = block_kind(block) == "neuron"
            if incl_mid or not middle or block == end:
                labels[block] = f"{block_layer(block)}_{'mid' if middle else 'pre'}"
        if end == self.model.cfg.n_layers:
            labels[end] = "final_post"
        components = stack[list(labels)]
        return (components, list(labels.values())) if return_labels else components

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
        """Return the outputs of the blocks before block `layer`; neuron blocks count as MLPs."""
        refuse_mlp_input(mlp_input)
        if mode not in ("all", "attn", "mlp"):
            raise ValueError(f"got mode={mode!r}; expected 'all', 'attn' or 'mlp'")
        end = self._end(layer)
        stack, names = super().decompose_resid(
            end, apply_ln=apply_ln, pos_slice=pos_slice, incl_embeds=incl_embeds, return_labels=True
        )
        n_embeds = len(names) - end
        labels = dict(enumerate(names[:n_embeds]))
        for block in range(end):
            sublayer = "mlp" if block_kind(block) == "neuron" else "attn"
            if mode in ("all", sublayer):
                labels[n_embeds + block] = f"{block_layer(block)}_{sublayer}_out"
        components = stack[list(labels)]
        return (components, list(labels.values())) if return_labels else components

    def stack_head_results(
        self,
        layer: int = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Any = None,
        apply_ln: bool = False,
        neurons: bool = False,
    ) -> Any:
        """Stack the outputs of the attention heads before block `layer`.

        Rows and labels are the same as for the original model: `L0H0`, `L0H1`, … Split by layer
        with `einops.rearrange(stack, "(layer head) ... -> ...", layer=model.cfg.n_layers // 2)`.

        Args:
            layer: the index of a block; -1 stacks the heads of all blocks.
            return_labels: whether to return the names of the heads, too.
            incl_remainder: whether to add a row with the residual stream minus the sum of all rows.
            pos_slice: positions; all by default.
            apply_ln: whether to apply the norm at the input of block `layer`.
            neurons: whether to add neuron-heads, block by block. This stores d_mlp vectors of size
                d_model per token and layer; `stack_neuron_results` with `project_output_onto` takes
                far less memory.
        """
        stack = _Stack(self, layer, pos_slice, apply_ln)
        for block in range(stack.end):
            if neurons or block_kind(block) == "attention":
                stack.add_heads(block)
        return stack.finish_rows(incl_remainder, return_labels)

    def compute_head_results(self) -> None:
        """Add each block's `hook_result` activations to the cache, if they are missing."""
        for block in range(self.model.cfg.n_layers):
            self.cache_dict[f"blocks.{block}.attn.hook_result"] = self._results(block)

    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Any = None,
        pos_slice: Any = None,
        project_output_onto: Tensor | None = None,
    ) -> Tensor:
        """Return the output z · W_O of each neuron in a block, after the output norm (if any)."""
        if not 0 <= layer < self.model.cfg.n_layers or block_kind(layer) != "neuron":
            raise UnsupportedCallError(
                f"got layer={layer}; expected a neuron block, 2 * l + 1 for source layer l "
                f"({neurons_block(0)} to {self.model.cfg.n_layers - 1})"
            )
        norm = _OutputNorm(self, layer, _slice(pos_slice))
        attn: Any = self.model.blocks[layer].attn
        acts = _slice(pos_slice).apply(self["z", layer].squeeze(-1), dim=-2)
        acts = _slice(neuron_slice).apply(norm.divide(acts), dim=-1)
        W_O = norm.rescale(_slice(neuron_slice).apply(attn.W_O.squeeze(-2), dim=0))
        if project_output_onto is None:
            return acts[..., None] * W_O
        # Projecting first avoids a tensor of shape [..., d_mlp, d_model].
        projected = W_O @ project_output_onto
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
        """Stack the outputs of all neurons before block `layer`, labelled `L0N0`, `L0N1`, …"""
        stack = _Stack(self, layer, pos_slice, apply_ln, project_output_onto)
        for block in range(neurons_block(0), stack.end, 2):
            stack.add_neurons(block, neuron_slice)
        return stack.finish_rows(incl_remainder, return_labels)

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
        """Return the outputs of heads and neurons (or neuron blocks), embeddings and biases."""
        refuse_mlp_input(mlp_input)
        stack = _Stack(self, layer, pos_slice, apply_ln, project_output_onto)
        for block in range(0, stack.end, 2):
            stack.add_heads(block)
        for block in range(neurons_block(0), stack.end, 2):
            if expand_neurons:
                stack.add_neurons(block)
            else:
                stack.add_activation(f"{block_layer(block)}_mlp_out", self["attn_out", block])
        for name, present in (("embed", self.has_embed), ("pos_embed", self.has_pos_embed)):
            if present:
                stack.add_activation(name, self[f"hook_{name}"])
        bias = torch.zeros_like(stack.at_positions(self["resid_pre", 0]))
        for block in range(0, stack.end, 1 if expand_neurons else 2):
            bias = bias + _OutputNorm(self, block, stack.positions).bias()
        stack.add(["bias"], bias[None])
        return stack.finish(False, return_labels)

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: str | None = None
    ) -> Tensor:
        """Stack an activation over the blocks before block `layer`.

        Raises:
            UnsupportedCallError: the activation has different shapes in these blocks, or is not in
                the cache.
        """
        blocks = range(self._end(layer))
        try:
            values = [self[activation_name, block, sublayer_type] for block in blocks]
        except KeyError as error:
            raise UnsupportedCallError(
                f"this cache has no {error.args[0]}; expected an activation that run_with_cache "
                "kept in every block: its names_filter chooses names, and hook_result needs "
                "model.set_use_attn_result(True)"
            ) from error
        shapes = [tuple(value.shape) for value in values]
        if len(set(shapes)) > 1:
            other = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
            raise UnsupportedCallError(
                f"{activation_name} has shape {list(shapes[0])} in block 0 and "
                f"{list(shapes[other])} in block {other}, because blocks 2l hold attention heads "
                f"and blocks 2l + 1 neurons: stack blocks of equal shape, as in torch.stack("
                f"[cache[{activation_name!r}, block] for block in range(0, {len(blocks)}, 2)])"
            )
        return torch.stack(values)

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
        """Apply the norm at the input of block `layer` to a stack, as TransformerLens does."""
        refuse_mlp_input(mlp_input)
        end = self._end(layer)
        self._require_norm(end)
        return super().apply_ln_to_stack(
            residual_stack, end, False, pos_slice, batch_slice, has_batch_dim, recompute_ln
        )

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "AttentionOnlyCache":
        """Slice the batch as TransformerLens does, but return an `AttentionOnlyCache`."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return AttentionOnlyCache(sliced.cache_dict, self.model, sliced.has_batch_dim)

    def _results(self, block: int) -> Float[Tensor, "*batch pos head_index d_model"]:
        cached = self.cache_dict.get(f"blocks.{block}.attn.hook_result")
        if cached is None:
            W_O = self.model.blocks[block].attn.W_O
            cached = (self["z", block].unsqueeze(-1) * W_O).sum(dim=-2)
        return cached

    def _end(self, layer: int | None) -> int:
        n_blocks = self.model.cfg.n_layers
        end = n_blocks if layer is None or layer == -1 else layer
        if not 0 <= end <= n_blocks:
            raise UnsupportedCallError(
                f"got layer={layer}; expected a block from 0 to {n_blocks} (source layer l is "
                "blocks 2l and 2l + 1), or -1 for the input of the unembedding"
            )
        return end

    def _require_norm(self, block: int) -> None:
        """Raise an error if a block does not normalise its own input."""
        cfg = self.model.cfg
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


class _OutputNorm:
    """The norm that a block applies to its own output, with its scales in one forward pass.

    For fixed scales, a norm is a linear map. If the norm is applied to each head's output, the
    results therefore sum to the block's output (OLMo 2, Gemma 2, Gemma 3).
    """

    def __init__(self, cache: AttentionOnlyCache, block: int, positions: Slice) -> None:
        cfg, self.block = cache.model.cfg, cache.model.blocks[block]
        name = None
        if cfg.use_normalization_before_and_after:
            name = "ln1_post"
        elif cfg.original_architecture in POST_NORM_ARCHITECTURES:
            name = "ln1"
        self.norm, self.scale = NO_NORM, None
        if name is not None and cfg.normalization_type is not None:
            self.norm = known_norm(getattr(self.block, name))
            scale = cache[f"blocks.{block}.{name}.hook_scale"]
            self.scale = positions.apply(scale, dim=-2)

    def rescale(self, written: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """Apply the norm without its scale: centre the outputs, and multiply them by the gain."""
        return self.norm.after(written)

    def divide(self, amounts: Tensor) -> Tensor:
        """Divide activations [..., pos, any] by the norm's scale at each position."""
        return amounts if self.scale is None else amounts / self.scale

    def bias(self) -> Float[Tensor, "... d_model"]:
        """Return what the biases of the block and its output norm add to the residual stream."""
        output: Any = self.block.attn
        written = self.divide(self.rescale(output.b_O))
        return written if self.norm.bias is None else written + self.norm.bias


class _Stack:
    """The components that sum to the residual stream before a block, at given positions.

    Components are projected before they are divided by the norm's scale s, because LN(x) @ P = x @
    (P - mean of P over d_model) / s for a projection P.
    """

    def __init__(
        self,
        cache: AttentionOnlyCache,
        layer: int | None,
        pos_slice: Any,
        apply_ln: bool,
        onto: Tensor | None = None,
    ) -> None:
        self.cache, self.end, self.positions = cache, cache._end(layer), _slice(pos_slice)
        self.apply_ln, self.onto, self.columns = apply_ln, onto, onto
        if onto is not None:
            columns = onto[:, None] if onto.ndim == 1 else onto
            if apply_ln and cache.model.cfg.normalization_type in ("LN", "LNPre"):
                columns = columns - columns.mean(dim=0, keepdim=True)
            self.columns = columns
        self.components: list[Tensor] = []
        self.labels: list[str] = []

    def at_positions(self, activation: Tensor) -> Tensor:
        return self.positions.apply(activation, dim=-2)

    def _project(self, components: Tensor) -> Tensor:
        return components if self.columns is None else components @ self.columns

    def add(self, labels: Sequence[str], rows: Float[Tensor, "row ... d_model"]) -> None:
        self.components.append(self._project(rows))
        self.labels += labels

    def add_activation(self, label: str, activation: Tensor) -> None:
        self.add([label], self.at_positions(activation)[None])

    def add_heads(self, block: int) -> None:
        results = self.positions.apply(self.cache._results(block), dim=-3).movedim(-2, 0)
        norm = _OutputNorm(self.cache, block, self.positions)
        self.add(self.cache.model.head_labels(block), norm.divide(norm.rescale(results)))

    def add_neurons(self, block: int, wanted: Any = None) -> None:
        layer = block_layer(block)
        every = torch.arange(self.cache.model.blocks[block].cfg.n_heads, device="cpu")
        neurons = _slice(wanted).apply(every, dim=0).reshape(-1)  # an integer removes the axis
        results = self.cache.get_neuron_results(block, neurons, self.positions, self.columns)
        self.components.append(results.movedim(-2, 0))
        self.labels += [str(HeadName(layer, "neuron", neuron)) for neuron in neurons.tolist()]

    def finish_rows(self, incl_remainder: bool, return_labels: bool) -> Any:
        """Like `finish`, but return `HeadRows`."""
        components, labels = self.finish(incl_remainder, return_labels=True)
        rows = HeadRows.of(components, self.cache.model.cfg.n_layers)
        return (rows, labels) if return_labels else rows

    def finish(self, incl_remainder: bool, return_labels: bool) -> Any:
        """Concatenate the components; if requested, add the remainder and apply the norm."""
        cache, end = self.cache, self.end
        stream = cache["resid_post", end - 1] if end else cache["resid_pre", 0]
        stream = self._project(self.at_positions(stream))
        components = torch.cat([stream.new_zeros((0, *stream.shape)), *self.components])
        if incl_remainder:
            components = torch.cat([components, (stream - components.sum(dim=0))[None]])
            self.labels.append("remainder")
        if self.apply_ln and self.onto is None:
            components = cache.apply_ln_to_stack(components, end, pos_slice=self.positions)
        elif self.apply_ln and cache.model.cfg.normalization_type is not None:
            cache._require_norm(end)
            components = components / cache._get_cached_ln_scale(end, False, self.positions)
        if self.onto is not None and self.onto.ndim == 1:
            components = components.squeeze(-1)
        return (components, self.labels) if return_labels else components


def _slice(wanted: Any) -> Slice:
    """Convert `wanted` to a TransformerLens `Slice`; an integer removes the sliced axis."""
    return wanted if isinstance(wanted, Slice) else Slice(wanted)
