"""Theorem 3.6: insert layers at any depth.

A block adds the outputs of its attention and its MLP to the residual stream. If W_O, b_O, W_out and
b_out are zero, the block adds nothing (equation 40). A norm that follows a sublayer maps zero to
zero if it has no bias and ε > 0. At zero, such a norm has the slope gain/√ε. The first training
steps therefore change the logits about ten times as much as a step of the old model (OLMo 2, Gemma
2). Use a warm-up. Post-norm models such as BERT compute norm(x + f(x)), which differs from x even
if f(x) is 0, whatever the norm's gain and bias are. They cannot get new layers.

The indices of all layers after the new layer increase by one. If the model divides the attention
scores of layer l by l + 1 (`scale_attn_by_inverse_layer_idx`), the keys of a layer whose index
changes are scaled to preserve its scores. A new layer may start as a copy of another layer with its
output weights set to zero, as in Wu et al., "LLaMA Pro" (2024).
"""

from dataclasses import dataclass

from attn_only_lens.growth.expansion.expansion import (
    Expansion,
    Plan,
    is_index,
    reasons_against_stack,
)
from attn_only_lens.growth.expansion.provenance import IndexMap
from attn_only_lens.growth.expansion.weights import Stack, Weights, block_name

_ZERO = {"attn.W_O", "attn.b_O", "cross_attn.W_O", "mlp.W_out", "mlp.b_out"}
_ZERO |= {"ln1_post.b", "ln2_post.b"}
_AFTER = {"ln1.b", "ln2.b"}  # biases of norms that follow sublayers


@dataclass(frozen=True)
class InsertLayer(Expansion):
    """Grow n_layers by one: Definition and Theorem 3.6.

    The new layer's output weights W_O, b_O, W_out and b_out are zero. All other weights of the new
    layer can have any values.

    Attributes:
        at: the new layer's index; layers with this index or a larger index move up. `at=n_layers`
            puts the layer last.
        like: the layer from which the new layer takes its shapes and its kind of attention; by
            default, the preceding layer.
        copy: whether the free entries are copied from layer `like` instead of drawn by the
            initialiser.
        stack: "encoder" or "decoder", in which layers count from 0; None if there is one stack.

    Example:
        >>> from attn_only_lens import grow, growth, load
        >>> grown = grow(load("modular-addition"), growth.InsertLayer(at=0))
        >>> grown.provenance["L0H3"], grown.provenance.new_layers
        ('L1H3', ('L0',))
    """

    at: int
    like: int | None = None
    copy: bool = False
    stack: Stack | None = None

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why the layer cannot be inserted."""
        constants = weights.constants
        reasons = reasons_against_stack(self.stack, weights, needed=True)
        n_layers = len(constants.layers_in(self.stack))
        if not is_index(self.at, n_layers + 1):
            reasons.append(f"got at={self.at!r}; expected 0 … {n_layers}")
        if self.like is not None and not is_index(self.like, n_layers):
            reasons.append(f"got like={self.like!r}; expected 0 … {n_layers - 1}")
        if type(self.copy) is not bool:
            reasons.append(f"got copy={self.copy!r}; expected True or False")
        if constants.norm_place == "stream":
            reasons.append(
                "the model is post-norm: a new layer with zero outputs would apply LayerNorm to "
                "the residual stream x, and LayerNorm(x) is not x. The mean and deviation of x "
                "over d_model differ from token to token, so no gain and bias turn LayerNorm(x) "
                "back into x; add neurons or heads, or widen d_head, instead"
            )
        elif constants.norm_place != "before" and not constants.eps > 0:
            reasons.append("the norms after sublayers have eps=0 and would divide 0 by 0")
        if constants.scale_by_layer and constants.clip_qkv is not None and self.at < n_layers:
            reasons.append(
                "scores are divided by layer + 1, so the keys of moved layers must be scaled, but "
                "clip_qkv bounds keys; put the new layer last"
            )
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for inserting the layer."""
        constants, n_layers = weights.constants, weights.constants.n_layers
        first = constants.layers_in(self.stack).start
        layer_index = first + self.at
        like = first + (max(self.at - 1, 0) if self.like is None else self.like)
        scales: dict[str, float] = {}
        activation_scales: dict[str, float] = {}
        copied: dict[str, float] = {}
        if constants.scale_by_layer:
            factors = {layer: (layer + 2) / (layer + 1) for layer in range(layer_index, n_layers)}
            by_gain = constants.qk_norm is not None
            through = ("attn.k_norm.w",) if by_gain else ("attn.W_K", "attn.b_K")
            copied = dict.fromkeys(through, (layer_index + 1) / (like + 1))
            seen = ("attn.hook_rot_k",) if by_gain else ("attn.hook_k", "attn.hook_rot_k")
            scales, activation_scales = (
                {block_name(layer, of): factor for layer, factor in factors.items() for of in tails}
                for tails in (through, seen)
            )
        types = constants.attn_types
        may_cancel = set()
        if constants.norm_place == "before" and not self.copy:
            # Under ALiBi and relative positions, the biases of a pair's heads differ.
            may_cancel = {"mlp.W_out", "cross_attn.W_O"}
            may_cancel |= set() if constants.positions in ("alibi", "relative") else {"attn.W_O"}
        return Plan(
            layers=IndexMap(
                tuple(layer + (layer >= layer_index) for layer in range(n_layers)), n_layers + 1
            ),
            like={layer_index: like},
            zero_in_new=frozenset(_ZERO) | (_AFTER if constants.norm_place == "after" else set()),
            copied=copied if self.copy else None,
            cancel=frozenset(may_cancel),
            scales={name: factor for name, factor in scales.items() if name in weights.tensors},
            activation_scales=activation_scales,
            constants={
                "n_layers": n_layers + 1,
                "n_encoder_layers": constants.n_encoder_layers + (self.stack == "encoder"),
                "attn_types": types and (*types[:layer_index], types[like], *types[layer_index:]),
            },
        )
