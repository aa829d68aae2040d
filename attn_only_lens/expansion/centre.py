"""LayerNorm as RMSNorm: a residual stream of mean zero.

LayerNorm subtracts the mean of its input over d_model. If every reader of the stream does that
first, nothing sees what the writers add along the constant vector; subtracting its mean over
d_model from every writing weight changes nothing downstream, and then LayerNorm subtracts zero: it
is RMSNorm with a bias. TransformerLens does the same in `center_writing_weights`.

An unembedding that is the embedding itself reads what the embedding writes, and must not be
centred: the two are untied, and the embedding alone is centred.

This fails if something else reads the stream: RMSNorm at the end (`final_rms`); or if LayerNorm
writes, after a sublayer or on the stream (BERT). It writes g ⊙ u + b, whose mean over d_model
differs from token to token with u; to subtract it takes the matrix (1 - 11ᵀ/d_model) diag(g), and a
gain is diagonal. On such a stream, of mean m, new coordinates of zero change the mean to m h/ĥ and
the deviation with it, for the next norm. (Copies of all coordinates, at whole multiples of the
width, would not: `analyses/layernorm_gap.py`. That is none of the six expansions.)
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.expansion.expansion import Expansion, Plan
from attn_only_lens.expansion.initialise import Initialiser
from attn_only_lens.expansion.provenance import Provenance
from attn_only_lens.expansion.weights import WRITERS, Weights, tail
from attn_only_lens.numerics import to_float64_device


def is_layer_norm(weights: Weights) -> bool:
    """Return True if the norms in the blocks subtract a mean."""
    return weights.constants.norm in ("LN", "LNPre")


@dataclass(frozen=True)
class CentreStream(Expansion):
    """Take the mean over d_model from everything that writes to the stream, for LayerNorm.

    `WidenStream` does this by itself; no size changes.

    Example:
        >>> from attn_only_lens.expansion.centre import CentreStream
        >>> from attn_only_lens.growth import read
        >>> from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig
        >>> cfg = HookedTransformerConfig(
        ...     n_layers=1, d_model=6, n_ctx=5, d_head=3, d_vocab=7, attn_only=True, device="cpu"
        ... )
        >>> weights, provenance = CentreStream()(read(HookedTransformer(cfg)))
        >>> bool(weights.tensors["embed.W_E"].mean(1).abs().max() < 1e-7), provenance.centred
        (True, True)
    """

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why these weights cannot be centred."""
        constants, reasons = weights.constants, []
        if not is_layer_norm(weights):
            return [f"its norm is {constants.norm}, which sees the mean of the stream"]
        if constants.final_norm not in ("LN", "LNPre"):
            reasons.append(
                f"its last norm is {constants.final_norm}, which sees the mean of the stream that "
                "LayerNorm in the blocks does not"
            )
        if constants.norm_place == "stream":
            reasons.append(
                "its norms stand on the residual stream (post-norm) and write to it: the mean of "
                "the stream over d_model differs from token to token, so no weight can take it "
                "off, and new coordinates of zero would change the mean and deviation that the "
                "next LayerNorm takes; neurons, heads and d_head can grow"
            )
        elif constants.norm_place != "before":
            reasons.append("LayerNorm after a sublayer writes to the stream, with a mean")
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan: the embeddings come untied."""
        return Plan(constants={"tied": False})

    def expand(self, weights: Weights, init: Initialiser, seed: int) -> tuple[Weights, Provenance]:
        """Centre everything that writes; all indices stay."""
        same, provenance = super().expand(weights, init, seed)
        writers = WRITERS - (
            {"pos_embed.W_pos"} if weights.constants.positions == "shortformer" else set()
        )
        tensors = {
            name: _centred(tensor) if tail(name) in writers else tensor
            for name, tensor in same.tensors.items()
        }
        return replace(same, tensors=tensors), replace(provenance, centred=True)


def _centred(tensor: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
    """Subtract the mean over d_model, unless it is only rounding."""
    if tensor.device.type == "meta":  # a sketch has shapes only
        return tensor
    exact = to_float64_device(tensor).double()
    mean = exact.mean(-1, keepdim=True)
    rounding = torch.finfo(tensor.dtype).eps * exact.abs().amax(-1, keepdim=True)
    return tensor if (mean.abs() <= rounding).all() else (exact - mean).to(tensor)
