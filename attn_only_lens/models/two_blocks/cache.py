"""The activation cache of a converted model.

As in TransformerLens, the argument `layer` is the index of a block. Labels contain the index of the
original layer (`5_mlp_out` for block 11, `L5N0`). TransformerLens' methods that stack heads and
neurons are replaced: they assume that all layers have equally many heads, they stop only after
whole layers, and they ignore norms that follow blocks (OLMo 2, Gemma 2, Gemma 3), so that the
components would not sum to the residual stream.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.utilities import get_act_name

from attn_only_lens.arguments import a_type
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.models.two_blocks.components import (
    Components,
    StreamBefore,
    block_index,
    head_results,
    neuron_results,
    require_norm,
)
from attn_only_lens.models.two_blocks.config import block_kind, block_layer, neurons_block
from attn_only_lens.models.two_blocks.head_rows import HeadRows

_MLP_POINTS = (".mlp.", ".ln2", "hook_mlp_in", "hook_mlp_out", "hook_resid_mid")
# What to call instead of TransformerLens' sweeps, which read a cache under full hook names.
_SWEEPS = {
    f"hook_{name}": f"call transformer_lens.patching.get_act_patch_{instead}(model, "
    f"corrupted_tokens, clean_cache, metric): row 2l + 1 is {name} of source layer l\n"
    for name, instead in {"mlp_out": "attn_out", "resid_mid": "resid_pre"}.items()
}


def refuse_mlp_input(mlp_input: bool) -> None:
    """Raise an error if `mlp_input` is set, because converted models' blocks have one input."""
    if mlp_input:
        raise UnsupportedCallError(
            "mlp_input is not available on a converted model: a block has one input. The input "
            "of the neurons of source layer l is that of block 2l + 1: pass layer=2 * l + 1 and "
            "no mlp_input"
        )


class AttentionOnlyCache(ActivationCache):
    """An `ActivationCache` for converted models, which have two blocks per original layer.

    Example:
        >>> from attn_only_lens import convert, load, pretrained
        >>> model = convert(load("modular-addition"))
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
        end = block_index(self.model.cfg, layer)
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
        end = block_index(self.model.cfg, layer)
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
        stream = StreamBefore.of(self, layer, pos_slice, apply_ln)
        blocks = [x for x in range(stream.end) if neurons or block_kind(x) == "attention"]
        stack = stream.joined([stream.heads(block) for block in blocks], incl_remainder)
        return self._head_rows(stack).returned(return_labels)

    def compute_head_results(self) -> None:
        """Add each block's `hook_result` activations to the cache, if they are missing."""
        for block in range(self.model.cfg.n_layers):
            self.cache_dict[f"blocks.{block}.attn.hook_result"] = head_results(self, block)

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
        return neuron_results(self, layer, neuron_slice, pos_slice, project_output_onto)

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
        stream = StreamBefore.of(self, layer, pos_slice, apply_ln, project_output_onto)
        blocks = range(neurons_block(0), stream.end, 2)
        parts = [stream.neurons(block, neuron_slice) for block in blocks]
        stack = stream.joined(parts, incl_remainder)
        return self._head_rows(stack).returned(return_labels)

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
        stream = StreamBefore.of(self, layer, pos_slice, apply_ln, project_output_onto)
        parts = [stream.heads(block) for block in range(0, stream.end, 2)]
        others = {}
        for block in range(neurons_block(0), stream.end, 2):
            if expand_neurons:
                parts.append(stream.neurons(block))
            else:
                others[f"{block_layer(block)}_mlp_out"] = self["attn_out", block]
        others |= {"embed": self["hook_embed"]} if self.has_embed else {}
        others |= {"pos_embed": self["hook_pos_embed"]} if self.has_pos_embed else {}
        parts += [stream.component(name, stream.at_positions(x)) for name, x in others.items()]
        parts.append(stream.biases(range(0, stream.end, 1 if expand_neurons else 2)))
        return stream.joined(parts).returned(return_labels)

    def stack_activation(
        self, activation_name: str, layer: int = -1, sublayer_type: str | None = None
    ) -> Tensor:
        """Stack an activation over the blocks before block `layer`.

        Raises:
            UnsupportedCallError: the activation has different shapes in these blocks, or is not in
                the cache.
        """
        blocks = range(block_index(self.model.cfg, layer))
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
        end = block_index(self.model.cfg, layer)
        require_norm(self.model.cfg, end)
        return super().apply_ln_to_stack(
            residual_stack, end, False, pos_slice, batch_slice, has_batch_dim, recompute_ln
        )

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "AttentionOnlyCache":
        """Slice the batch as TransformerLens does, but return an `AttentionOnlyCache`."""
        sliced = super().apply_slice_to_batch_dim(batch_slice)
        return AttentionOnlyCache(sliced.cache_dict, self.model, sliced.has_batch_dim)

    def _head_rows(self, stack: Components) -> Components:
        return replace(stack, rows=HeadRows.of(stack.rows, self.model.cfg.n_layers))
