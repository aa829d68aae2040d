"""Generalized SiLU functions: the activations for which Theorem 3 holds exactly.

α(q) = a_1 SiLU(a_2 q) is q times the weight σ(a_2 q) times the number a_1 a_2: the score of the
bias token is -a_2 q, linear in q, and the token's value is a_1 a_2 q. The paper's W_Q = W_V =
a_2 V_1 and W_O = a_1 V_2 split the same product into other factors.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import as_plain
from attn_only_lens.errors import InputError
from attn_only_lens.gates.exact import Gate, linear_gate

_SMALLEST, _LARGEST = 2.0**-126, 2.0**127  # within float32, in which weights are computed
_SIZE = "from 2^-126 to 2^127 in size"


@dataclass(frozen=True)
class GeneralizedSiLU:
    """The activation a_1 SiLU(a_2 x) of a model: `convert(model, gate=GeneralizedSiLU(a_1, a_2))`.

    The name of a model's activation does not give its coefficients, so pass them here; they are
    compared with the activations that the model computes. Each neuron is then exactly one head,
    with the attention σ(a_2 q) to its own token, the value a_1 a_2 q (times u in a gated MLP), and
    the output W_out[i]. SiLU has a_1 = a_2 = 1; Swish with β has a_1 = 1/β and a_2 = β; quick_gelu,
    which the package also knows by name, has 1/1.702 and 1.702.

    For a model with a gelu or relu, a generalized SiLU is an approximation: `Bilinear(slope=…)`.

    The object is callable: it computes the activation. A saved and loaded model calls it.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", section 2 and
    Theorem 3.

    Attributes:
        a_1: the factor outside, not 0.
        a_2: the factor inside, not 0; may be negative.

    Raises:
        InputError: a coefficient, or their product, is not a number from 2^-126 to 2^127 in size.

    Example:
        >>> import torch
        >>> from attn_only_lens import GeneralizedSiLU, convert, pretrained
        >>> model, tokens = pretrained.modular_addition(), pretrained.modular_addition_tokens()[:7]
        >>> swish = GeneralizedSiLU(a_1=0.5, a_2=2.0)
        >>> for block in model.blocks:
        ...     block.mlp.act_fn = swish
        >>> attn_only = convert(model, gate=swish)
        >>> torch.equal(attn_only(tokens), model(tokens))
        True
        >>> _, cache = attn_only.run_with_cache(tokens)
        >>> self_weight = cache["pattern", 1][..., 0].transpose(1, 2)
        >>> torch.allclose(self_weight, torch.sigmoid(2.0 * cache["q", 1][..., 0]))
        True
    """

    a_1: float
    a_2: float

    def __post_init__(self) -> None:
        reasons = []
        for name in ("a_1", "a_2"):
            value = as_plain(getattr(self, name))
            object.__setattr__(self, name, value)
            if not _is_coefficient(value):
                reasons.append(f"got {name}={value!r}; expected a number other than 0, {_SIZE}")
        if not reasons and not _is_coefficient(self.a_1 * self.a_2):
            product = f"a_1 · a_2 = {self.a_1 * self.a_2!r}"
            reasons = [f"got {product}; expected a number other than 0, {_SIZE}"]
        InputError.raise_if(reasons, "there is no such generalized SiLU")

    def __call__(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return a_1 SiLU(a_2 x)."""
        return self.a_1 * F.silu(self.a_2 * x)

    @property
    def gate(self) -> Gate:
        """The exact gate: one object for each pair of coefficients."""
        return _gate(float(self.a_1), float(self.a_2))


def _is_coefficient(value: object) -> bool:
    return type(value) in (int, float) and _SMALLEST <= abs(value) <= _LARGEST  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _gate(a_1: float, a_2: float) -> Gate:
    return linear_gate(f"{a_1:g} SiLU({a_2:g} x)", a_2, a_1 * a_2)
