"""Where an old activation is among those of the grown model, at TransformerLens' hook points.

Old entries stand where their heads, neurons and coordinates went. Most are what they were; some
differ by a factor that is known (`Provenance.rescaled`): the scale of a norm and what it gives
before its gain, and keys, where scores are divided by a larger √d_head. And where LayerNorm made
growth centre the residual stream, what is written to it and stands there lost its mean.
"""

from dataclasses import dataclass

from torch import Tensor

from attn_only_lens.expansion.placement import Place
from attn_only_lens.expansion.provenance import Provenance
from attn_only_lens.expansion.weights import Axis, in_layer, tail

__all__ = ["MovedActivation", "moved_activation"]

# Labels of the axes after batch and pos; None for axes that do not grow.
_STREAM = (
    *("hook_embed", "hook_pos_embed", "hook_resid_pre", "hook_resid_mid", "hook_resid_post"),
    *("hook_attn_out", "hook_mlp_out", "hook_mlp_in"),
)
_NORMS = ("ln1", "ln2", "ln1_post", "ln2_post", "ln_final")
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


@dataclass(frozen=True)
class MovedActivation:
    """Where the entries of an old activation are in the grown model.

    Attributes:
        name: the hook point's name now.
        places: by axis, from the second (an activation's first is the batch); None where an axis
            does not grow.
        scale: what old entries are multiplied by.
        centred: whether they lost their mean over d_model, the last axis.
    """

    name: str
    places: tuple[Place | None, ...]
    scale: float = 1.0
    centred: bool = False

    def old_part(self, grown: Tensor) -> Tensor:
        """The old entries of a grown activation, in the old model's scale.

        Raises:
            ValueError: it has other axes (norms before `use_split_qkv_input` see heads apart).
        """
        sizes = [None if place is None else place.size for place in self.places]
        if len(sizes) != grown.ndim - 1 or any(
            size not in (None, got) for size, got in zip(sizes, grown.shape[1:], strict=True)
        ):
            raise ValueError(f"got {tuple(grown.shape)} for {self.name}; expected batch, {sizes}")
        for dim, place in enumerate(self.places, 1):
            if place is not None:
                grown = place.picked(grown, dim)
        return grown / self.scale

    def expected(self, old: Tensor) -> Tensor:
        """What `old_part` is to equal: the old activation, centred where growth centred it."""
        return old - old.mean(-1, keepdim=True) if self.centred else old


def moved_activation(provenance: Provenance, hook: str) -> MovedActivation:
    """Where an old activation went.

    Args:
        provenance: of the growth.
        hook: the hook point's name in the old model, `blocks.0.attn.hook_pattern`.

    Raises:
        KeyError: what this hook point sees is not known to growth (the norms of queries and keys
            see heads and batch as one axis).

    Example:
        >>> import torch
        >>> from attn_only_lens import expansion as ex, grow, pretrained
        >>> model = pretrained.modular_addition()
        >>> grown = grow(model, ex.compose(ex.InsertLayer(0), ex.AddHeads(1)))
        >>> moved = ex.moved_activation(grown.provenance, "blocks.0.attn.hook_pattern")
        >>> moved.name
        'blocks.1.attn.hook_pattern'
        >>> tokens = pretrained.modular_addition_tokens()[:5]
        >>> (_, old), (_, new) = model.run_with_cache(tokens), grown.model.run_with_cache(tokens)
        >>> part = moved.old_part(new[moved.name])
        >>> torch.allclose(part, old["blocks.0.attn.hook_pattern"], atol=1e-5)
        True
    """
    of, layer, constants = tail(hook), in_layer(hook), provenance.constants
    labels = _AXES[of]
    if constants.grouped_by_head:
        labels = tuple("head" if label == "kv_head" else label for label in labels)
    if of not in _BEFORE_HEADS:
        labels = (None, *labels)  # pos
    places = (
        None
        if label is None
        else provenance.axes[Axis(label, None if label == "d_model" else layer)]
        for label in labels
    )
    beside = constants.positions == "shortformer" and of == "hook_pos_embed"
    return MovedActivation(
        name=provenance.name(hook),
        places=tuple(places),
        scale=provenance.rescaled.get(hook, 1.0),
        centred=provenance.centred and of in _IN_THE_STREAM and not beside,
    )
