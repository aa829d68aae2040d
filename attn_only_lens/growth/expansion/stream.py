"""Theorem 3.5, with extensions: widen the residual stream from h to ĥ coordinates.

No component adds to the new coordinates (equations 33 to 38), so they stay zero. All components
that read the residual stream get the old values. Norms are an exception, because they average over
all coordinates: the mean square over ĥ entries is h/ĥ times the old mean square. With s = √(h/ĥ),

    x / √(Σx²/ĥ + ε̂) = (1/s) x / √(Σx²/h + ε)      for ε̂ = s² ε.

Growth therefore multiplies gains by s (equation 24) and ε by s² (the paper has no ε). Extensions:

LayerNorm           equals RMSNorm on a stream of mean zero; `centre.py` centres the stream first.
folded gains        (LNPre, RMSPre): the old rows of the weights that read the stream are multiplied
                    by s instead. Positions added after the norm (shortformer) are divided by s.
norms of q and k    have the same ε, so queries and keys are multiplied by s to keep their output.
scaled embeddings   (Gemma's factor √h becomes √ĥ): W_E is multiplied by s. If the unembedding is
                    W_E too, the last norm's gain corrects both.
divided logits      (T5's factor 1/√h becomes 1/√ĥ): the last norm's gain keeps its values, because
                    the factors s and 1/s of its scale cancel.
a norm after        a sublayer: RMSNorm's gain is multiplied by s; without a gain, the model is
                    refused. LayerNorm after a sublayer is refused, because its output has a
                    nonzero mean; so is LayerNorm on the stream itself.
tied embeddings     are untied under LayerNorm (only one is centred) and under folded gains.
"""

import math
from dataclasses import dataclass

from attn_only_lens.growth.expansion.centre import CentreStream, is_layer_norm
from attn_only_lens.growth.expansion.expansion import Expansion, Plan, reasons_against_count
from attn_only_lens.growth.expansion.initialise import Initialiser
from attn_only_lens.growth.expansion.provenance import IndexMap, Provenance
from attn_only_lens.growth.expansion.weights import (
    WRITERS,
    Axis,
    Constants,
    Weights,
    block_name,
    tail,
)

_BLOCK_READERS = {"attn.W_Q", "attn.W_K", "attn.W_V", "mlp.W_in", "mlp.W_gate"}
_QUERIES_AND_KEYS = {"attn.W_Q", "attn.b_Q", "attn.W_K", "attn.b_K"}
_BLOCK_NORMS = ("ln1", "ln2", "ln3", "ln1_post", "ln2_post")
_NORMS = {*_BLOCK_NORMS, "encoder_ln_final", "ln_final"}


@dataclass(frozen=True)
class WidenStream(Expansion):
    """Grow d_model: Definition and Theorem 3.5, extended to norms with ε and to LayerNorm.

    The new columns of W_E, W_pos, W_O, b_O, W_out and b_out are zero, and so are the new entries of
    the norms' biases. Gains are scaled by √(h/ĥ), and ε by h/ĥ. The new rows of the weights that
    read the stream (W_Q, W_K, W_V, W_in, W_gate, W_U) and new gains can have any values.

    Attributes:
        n: how many coordinates to add to the residual stream.

    Example:
        >>> from attn_only_lens import grow, growth, load
        >>> grown = grow(load("modular-addition"), growth.WidenStream(8))
        >>> grown.model.cfg.d_model, grown.provenance.coordinates[-1]
        (136, 127)
    """

    n: int

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why the residual stream cannot be widened."""
        constants = weights.constants
        reasons = reasons_against_count(self.n, None, weights)
        if is_layer_norm(weights):
            reasons += CentreStream().reasons_against(weights)
        if constants.norm in ("LNPre", "RMSPre") and constants.norm_place != "before":
            reasons.append("the norms after sublayers have no gain to scale for a wider stream")
        if constants.qk_norm is not None and constants.clip_qkv is not None:
            reasons.append("clip_qkv bounds queries and keys, which must be scaled for their norm")
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for widening the stream; LayerNorm models must be centred already."""
        constants = weights.constants
        axis = Axis("d_model")
        size = weights.sizes[axis]
        s = math.sqrt(size / (size + self.n))
        has_norm = constants.norm is not None or constants.final_norm is not None
        zero = WRITERS | {f"{norm}.b" for norm in _NORMS}
        tied = _stays_tied(constants)
        written = frozenset(
            name
            for name in weights.tensors
            if tail(name) in zero or (tied and name == "unembed.W_U")
        )
        unseen = written if not has_norm and not tied else frozenset()
        return Plan(
            axes={axis: IndexMap.append(size, self.n)},
            zero=written,
            cancel=unseen,
            share=unseen,
            scales=self._scales(weights, s) if has_norm else {},
            activation_scales=_activation_scales(weights, s) if has_norm else {},
            constants={"tied": tied} | ({"eps": constants.eps * s**2} if has_norm else {}),
        )

    def expand(self, weights: Weights, init: Initialiser, seed: int) -> tuple[Weights, Provenance]:
        """Apply the plan. If the model uses LayerNorm, its weights are centred first."""
        if not is_layer_norm(weights):
            return super().expand(weights, init, seed)
        centred, before = CentreStream().expand(weights, init, seed)
        grown, provenance = super().expand(centred, init, seed)
        return grown, before.then(provenance)

    def _scales(self, weights: Weights, s: float) -> dict[str, float]:
        """Return each tensor's factor, which compensates for factors 1/s of norms and √d_model."""
        constants = weights.constants
        twice = _scaled_twice(constants)
        through: set[str] = {f"{norm}.w" for norm in _NORMS}
        if twice or constants.unembed_scaled:
            through.remove("ln_final.w")
        if constants.embed_scaled:
            through |= {"embed.W_E", "unembed.W_U"} if twice else {"embed.W_E"}
        if constants.norm in ("LNPre", "RMSPre"):
            through |= _BLOCK_READERS
        if constants.final_norm in ("LNPre", "RMSPre"):
            through.add("unembed.W_U")
        factors = {}
        for name in weights.tensors:
            of = tail(name)
            factor = s if of in through else 1.0
            if constants.qk_norm is not None and of in _QUERIES_AND_KEYS:
                factor *= s
            if _after_folded_norm(weights) and of == "pos_embed.W_pos":
                factor /= s
            if factor != 1.0:
                factors[name] = factor
        return factors


def _stays_tied(constants: Constants) -> bool:
    """Return True if embedding and unembedding share one matrix before and after growth."""
    return constants.tied and constants.final_norm not in ("LNPre", "RMSPre")


def _scaled_twice(constants: Constants) -> bool:
    """Return True if W_E, which growth scales, is also the unembedding, which gets its factor."""
    return constants.embed_scaled and _stays_tied(constants)


def _after_folded_norm(weights: Weights) -> bool:
    """Return True if the model adds position embeddings after a norm that has no gain."""
    constants = weights.constants
    return constants.positions == "shortformer" and constants.norm in ("LNPre", "RMSPre")


def _activation_scales(weights: Weights, s: float) -> dict[str, float]:
    """Return, for each hook point, the factor by which growth multiplies the activation."""
    constants, seen = weights.constants, {}
    layers = range(constants.n_layers if constants.norm is not None else 0)
    norms = [block_name(layer, norm) for layer in layers for norm in _BLOCK_NORMS]
    for norm in (*norms, "ln_final"):
        seen[f"{norm}.hook_scale"], seen[f"{norm}.hook_normalized"] = s, 1 / s
    if constants.qk_norm is not None:
        for layer in range(constants.n_layers):
            seen[block_name(layer, "attn.hook_q")] = seen[block_name(layer, "attn.hook_k")] = s
    if constants.final_norm in ("LNPre", "RMSPre") or _scaled_twice(constants):
        seen["unembed.hook_in"] = 1 / s
    if _after_folded_norm(weights):
        seen["hook_pos_embed"] = 1 / s
    return seen
