"""Find a model's activations in the activations of its grown, larger version.

Each entry of an old activation moves to the new index of its head, neuron or coordinate. Most
entries keep their values. Growth multiplies some entries by known factors
(`Provenance.activation_scales`): for example keys if d_head grows, and `hook_normalized` if d_model
grows. If growth centred the residual stream for LayerNorm, residual-stream activations and sublayer
outputs have mean zero in the grown model. If `init.splits` split a head or neuron, several heads or
neurons of the grown model share its old output. Then `activation_map` raises a KeyError.
"""

import re
from dataclasses import dataclass

from torch import Tensor

from attn_only_lens.growth.expansion.provenance import IndexMap, Provenance
from attn_only_lens.growth.expansion.weights import Axis, block_name, in_layer, tail

# For each hook point, the labels of its axes after batch and pos; None for axes that never grow.
_STREAM = (
    *("hook_embed", "hook_pos_embed", "hook_resid_pre", "hook_resid_mid", "hook_resid_post"),
    *("hook_attn_out", "hook_mlp_out", "hook_mlp_in", "hook_resid_mid2", "hook_cross_attn_out"),
)
_NORMS = ("ln1", "ln2", "ln3", "ln1_post", "ln2_post", "ln_final")
# The names of hook points in the blocks of an encoder-decoder model.
_IN_STACK = re.compile(r"((encoder|decoder)_blocks\.)(\d+)(\.(?:self_(?=attn\.))?(.+))")
_AXES: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(_STREAM, ("d_model",)),
    **{f"{norm}.hook_scale": (None,) for norm in _NORMS},
    **{f"{norm}.hook_normalized": ("d_model",) for norm in _NORMS},
    "attn.hook_q": ("head", "d_query"),
    "attn.hook_rot_q": ("head", "d_query"),
    "attn.hook_k": ("kv_head", "d_query"),
    "attn.hook_rot_k": ("kv_head", "d_query"),
    "attn.hook_v": ("kv_head", "d_value"),
    "attn.hook_z": ("head", "d_value"),
    "attn.hook_result": ("head", "d_model"),
    "attn.hook_attn_scores": ("head", None, None),
    "attn.hook_pattern": ("head", None, None),
    "hook_attn_in": ("head", "d_model"),
    "hook_q_input": ("head", "d_model"),
    "hook_k_input": ("kv_head", "d_model"),
    "hook_v_input": ("kv_head", "d_model"),
    "mlp.hook_pre": ("d_mlp",),
    "mlp.hook_pre_linear": ("d_mlp",),
    "mlp.hook_post": ("d_mlp",),
    "unembed.hook_in": ("d_model",),
    "unembed.hook_out": (None,),
}
_BEFORE_HEADS = ("attn.hook_attn_scores", "attn.hook_pattern")  # [batch, head, query_pos, key_pos]
_IN_THE_STREAM = {*_STREAM, "attn.hook_result"} | {f"hook_{x}_input" for x in "qkv"}
_IN_THE_STREAM |= {"hook_attn_in"}
# For each axis label, the hook points whose activations change if units on this axis are split.
_WRITTEN = {
    "head": {"attn.hook_result"},
    "d_query": {"attn.hook_k", "attn.hook_rot_k"},
    "d_model": _IN_THE_STREAM | {"unembed.hook_in"},
}


@dataclass(frozen=True)
class ActivationMap:
    """A map from the indices of an old activation to the indices of the grown model's activation.

    Attributes:
        name: the hook point's new name.
        axes: the index map of each axis after the batch; None for an axis that does not grow.
        scale: the factor by which growth multiplied the old entries.
        centred: whether growth subtracted the old entries' mean over d_model, the last axis.
    """

    name: str
    axes: tuple[IndexMap | None, ...]
    scale: float = 1.0
    centred: bool = False

    def old_part(self, grown: Tensor) -> Tensor:
        """Return the grown activation's entries that the old model also has, divided by `scale`."""
        sizes = [None if axis is None else axis.size for axis in self.axes]
        if len(sizes) != grown.ndim - 1 or any(
            size not in (None, got) for size, got in zip(sizes, grown.shape[1:], strict=True)
        ):
            raise ValueError(
                f"got shape {tuple(grown.shape)} for {self.name}; expected a batch axis, then "
                f"axes of sizes {sizes} (None: any size)"
            )
        for dim, axis in enumerate(self.axes, 1):
            if axis is not None:
                grown = axis.select_old(grown, dim)
        return grown / self.scale

    def expected(self, old: Tensor) -> Tensor:
        """Return what `old_part` must equal: the old activation, minus its mean if `centred`."""
        return old - old.mean(-1, keepdim=True) if self.centred else old


def activation_map(provenance: Provenance, hook: str) -> ActivationMap:
    """Return the map from an activation of the old model to the grown model's activation.

    Args:
        provenance: the provenance of the grown model.
        hook: the hook point's name in the old model, e.g. `blocks.0.attn.hook_pattern`.

    Raises:
        KeyError: the axes of this hook point are unknown (norms of queries and keys merge heads and
            batch into one axis), or copies share the old activation (`init.splits`).

    Example:
        >>> import torch
        >>> from attn_only_lens import grow, growth, load, pretrained
        >>> from attn_only_lens.growth.expansion.activations import activation_map
        >>> model = load("modular-addition")
        >>> grown = grow(model, [growth.InsertLayer(0), growth.AddHeads(1)])
        >>> there = activation_map(grown.provenance, "blocks.0.attn.hook_pattern")
        >>> there.name
        'blocks.1.attn.hook_pattern'
        >>> tokens = pretrained.modular_addition_tokens()[:5]
        >>> (_, old), (_, new) = model.run_with_cache(tokens), grown.model.run_with_cache(tokens)
        >>> part = there.old_part(new[there.name])
        >>> torch.allclose(part, old["blocks.0.attn.hook_pattern"], atol=1e-5)
        True
    """
    # Names in a stack become names in `Weights`, where layers of both stacks have one numbering.
    constants, name = provenance.constants, hook
    if stack := _IN_STACK.fullmatch(hook):
        index, first = int(stack[3]), constants.n_encoder_layers * (stack[2] == "decoder")
        name = block_name(first + index, stack[5])
    of, layer, scale = tail(name), in_layer(name), provenance.activation_scales.get(name, 1.0)
    name, of = provenance.name(name), of.removeprefix("cross_")
    now = in_layer(name)
    if stack and now is not None:
        index = now - provenance.n_encoder_layers * (stack[2] == "decoder")
        name = f"{stack[1]}{index}{stack[4]}"
    for axis in (share.axis for share in provenance.shares):
        if axis.layer in (None, now) and of in _WRITTEN.get(axis.label, ()):
            raise KeyError(
                f"{hook} has no map: units along {axis.label} were split, so that copies share the "
                "outputs of old units"
            )
    if of == "hook_pos_embed" and constants.positions == "relative":
        raise KeyError(f"{hook} has no map: it holds the scores that relative positions add")
    labels = _AXES[of]
    if constants.grouped_by_head:
        labels = tuple("head" if label == "kv_head" else label for label in labels)
    if of not in _BEFORE_HEADS:
        labels = (None, *labels)  # pos
    axes = (
        None
        if label is None
        else provenance.axes[Axis(label, None if label == "d_model" else layer)]
        for label in labels
    )
    outside = constants.positions == "shortformer" and of == "hook_pos_embed"
    return ActivationMap(
        name=name,
        axes=tuple(axes),
        scale=scale,
        centred=provenance.centred and of in _IN_THE_STREAM and not outside,
    )
