"""LayerNorm as RMSNorm: a residual stream of mean zero.

LayerNorm subtracts the mean of its input over d_model. If every reader of the stream does that
first, nothing sees what the writers add along the constant vector; subtracting its mean over
d_model from every writing weight changes nothing downstream, and then LayerNorm subtracts zero: it
is RMSNorm with a bias. TransformerLens does the same in `center_writing_weights`.

An unembedding that is the embedding itself reads what the embedding writes, and must not be
centred: the two are untied, and the embedding alone is centred.

This fails if something else reads the stream: RMSNorm at the end (`final_rms`). It also fails if
LayerNorm writes to the stream, after a sublayer or on the stream itself (BERT). LayerNorm writes
g ⊙ u + b. The mean of that over d_model depends on u, so it differs from token to token. Only the
matrix (1 - 11ᵀ/d_model) diag(g) subtracts this mean, but the gain of a norm is a diagonal matrix.
If such a stream has mean m, new coordinates of zero change the mean that the next norm computes to
m h/ĥ, and change its deviation too. (If the width is multiplied by a whole number, copies of all
coordinates keep both: `analyses/studies/layernorm_gap.py`. None of the six expansions makes such
copies.)
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.devices import to_float64_device
from attn_only_lens.expansion.expansion import Expansion, Plan
from attn_only_lens.expansion.initialise import Initialiser
from attn_only_lens.expansion.provenance import Provenance
from attn_only_lens.expansion.weights import WRITERS, Weights, tail


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
                "it is post-norm: its LayerNorms write to the residual stream, whose mean over "
                "d_model differs from token to token. So no weight can subtract the mean, and new "
                "coordinates of zero would change the mean and the deviation that the next "
                "LayerNorm computes; add neurons or heads, or widen d_head, instead"
            )
        elif constants.norm_place != "before":
            reasons.append("LayerNorm after a sublayer writes to the stream, with a mean")
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan: the embeddings come untied."""
        return Plan(constants={"tied": False})

    def expand(self, weights: Weights, init: Initialiser, seed: int) -> tuple[Weights, Provenance]:
        """Centre all weights that write to the stream; no index changes."""
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
