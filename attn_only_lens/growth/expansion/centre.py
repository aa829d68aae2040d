"""Centre the residual stream, so that LayerNorm equals RMSNorm with a bias.

LayerNorm subtracts the mean of its input over d_model. If every sublayer reads the residual stream
through a LayerNorm, the stream's component along the vector (1, …, 1) has no effect on the output.
Subtracting the mean over d_model from every weight that writes to the stream therefore does not
change the output. LayerNorm then subtracts zero, so it equals RMSNorm with a bias. TransformerLens'
`center_writing_weights` subtracts the same mean.

The embedding is centred, because it writes to the residual stream. The unembedding is not. If
embedding and unembedding share one matrix, they first get separate matrices.

Centring fails if the last norm is an RMSNorm (`final_rms`), because RMSNorm does not subtract the
mean. Centring also fails if a LayerNorm's output is added to the residual stream (norms after
sublayers), or is the residual stream itself (BERT). A LayerNorm's output is g ⊙ u + b, where g is
the gain, b the bias and u the normalized input. Its mean over d_model depends on u, so it differs
from token to token. To subtract this mean, the gain would have to be the matrix (1 - 11ᵀ/d_model)
diag(g), which is not diagonal. Without centring, new coordinates of zero would change the residual
stream's mean from m to m h/ĥ, where h is the old width and ĥ the new width. The standard deviation
would change, too. (If ĥ is a multiple of h, copies of all coordinates would preserve both, see
`analyses/studies/layernorm_gap.py`. None of the six expansions copies coordinates in this way.)
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.devices import to_float64_device
from attn_only_lens.growth.expansion.expansion import Expansion, Plan
from attn_only_lens.growth.expansion.initialise import Initialiser
from attn_only_lens.growth.expansion.provenance import Provenance
from attn_only_lens.growth.expansion.weights import WRITERS, Weights, tail


def is_layer_norm(weights: Weights) -> bool:
    """Return True if the norms in the blocks subtract the mean, as LayerNorm does."""
    return weights.constants.norm in ("LN", "LNPre")


@dataclass(frozen=True)
class CentreStream(Expansion):
    """Subtract the mean over d_model from all weights that write to the residual stream.

    `WidenStream` applies this step to LayerNorm models. No size changes.

    Example:
        >>> from attn_only_lens.growth.expansion.centre import CentreStream
        >>> from attn_only_lens.growth.models._grow import read
        >>> from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig
        >>> cfg = HookedTransformerConfig(
        ...     n_layers=1, d_model=6, n_ctx=5, d_head=3, d_vocab=7, attn_only=True, device="cpu"
        ... )
        >>> weights, provenance = CentreStream()(read(HookedTransformer(cfg)))
        >>> bool(weights.tensors["embed.W_E"].mean(1).abs().max() < 1e-7), provenance.centred
        (True, True)
    """

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why the given weights cannot be centred."""
        constants, reasons = weights.constants, []
        if not is_layer_norm(weights):
            return [
                f"the blocks' norm is {constants.norm}, which does not remove the mean of the "
                "stream; expected LayerNorm"
            ]
        if constants.final_norm not in ("LN", "LNPre"):
            reasons.append(
                f"the last norm is {constants.final_norm}, which does not remove the mean of the "
                "stream, unlike the LayerNorms in the blocks"
            )
        if constants.norm_place == "stream":
            reasons.append(
                "the model is post-norm: LayerNorms write to the residual stream, whose mean over "
                "d_model differs from token to token. So no weight can subtract the mean, and new "
                "coordinates of zero would change the mean and the deviation that the next "
                "LayerNorm computes; add neurons or heads, or widen d_head, instead"
            )
        elif constants.norm_place != "before":
            reasons.append("the LayerNorm after a sublayer writes outputs with a nonzero mean")
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for giving embedding and unembedding separate matrices."""
        return Plan(constants={"tied": False})

    def expand(self, weights: Weights, init: Initialiser, seed: int) -> tuple[Weights, Provenance]:
        """Centre all weights that write to the residual stream. Indices do not change."""
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
    """Subtract a tensor's mean over d_model, unless this mean is only a rounding error."""
    if tensor.device.type == "meta":  # meta tensors have no values
        return tensor
    exact = to_float64_device(tensor).double()
    mean = exact.mean(-1, keepdim=True)
    rounding = torch.finfo(tensor.dtype).eps * exact.abs().amax(-1, keepdim=True)
    return tensor if (mean.abs() <= rounding).all() else (exact - mean).to(tensor)
