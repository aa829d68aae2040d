"""The choice of gates for a model's MLP neurons (`Gating`), and generalized SiLU activations.

A generalized SiLU is α(q) = a_1 SiLU(a_2 q) = a_1 a_2 q · σ(a_2 q). One head computes α(q) exactly
(Theorem 3 of the paper cited in `GeneralizedSiLU`), because the bias token's score, -a_2 q, is
linear in the neuron's pre-activation q. In this package, the token's own value is a_1 a_2 q. The
paper instead multiplies W_Q and W_V by a_2, and W_O by a_1.
"""

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import as_plain
from attn_only_lens.errors import InputError
from attn_only_lens.gates.bilinear import BilinearGate, bilinear_gate
from attn_only_lens.gates.exact import GATES, Gate, linear_gate

# Almost all of float32's range, because attention weights are computed in float32.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
_SIZE = "with an absolute value from 2^-126 to 2^127"


@dataclass(frozen=True)
class GeneralizedSiLU:
    """The activation a_1 SiLU(a_2 x), for use in `convert(model, gate=GeneralizedSiLU(a_1, a_2))`.

    `convert` checks that the MLPs of the model compute this activation. One head represents each
    neuron exactly, with attention weight σ(a_2 q) on its own token, the value a_1 a_2 q (times u in
    a gated MLP), and the output vector W_out[i]. The coefficients are a_1 = a_2 = 1 for SiLU, a_1 =
    1/β and a_2 = β for Swish with β, and a_1 = 1/1.702 and a_2 = 1.702 for quick_gelu, which
    `convert` also recognises without a `gate` argument.

    A generalized SiLU only approximates gelu or relu; for these, use `Bilinear(slope=…)`.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", section 2 and
    Theorem 3.

    Attributes:
        a_1: the factor outside SiLU; it is not 0.
        a_2: the factor inside SiLU; it is not 0 and may be negative.

    Raises:
        InputError: the absolute value of a coefficient, or of their product, is not a number from
            2^-126 to 2^127.

    Example:
        >>> import torch
        >>> from attn_only_lens import GeneralizedSiLU, convert, load, pretrained
        >>> model, tokens = load("modular-addition"), pretrained.modular_addition_tokens()[:7]
        >>> swish = GeneralizedSiLU(a_1=0.5, a_2=2.0)
        >>> for block in model.blocks:
        ...     block.mlp.act_fn = swish
        >>> attn_only = convert(model, gate=swish)
        >>> torch.equal(attn_only(tokens), model(tokens))
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
                reasons.append(f"got {name}={value!r}; expected a number {_SIZE}")
        if not reasons and not _is_coefficient(self.a_1 * self.a_2):
            product = f"a_1 · a_2 = {self.a_1 * self.a_2!r}"
            reasons = [f"got {product}; expected a number {_SIZE}"]
        InputError.raise_if(reasons, "GeneralizedSiLU cannot use these values")

    def __call__(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return a_1 SiLU(a_2 x)."""
        return self.a_1 * F.silu(self.a_2 * x)

    @property
    def gate(self) -> Gate:
        """The exact gate of this activation, cached: equal coefficients give the same object."""
        return _silu_gate(float(self.a_1), float(self.a_2))


def _is_coefficient(value: object) -> bool:
    return type(value) in (int, float) and _SMALLEST <= abs(value) <= _LARGEST  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _silu_gate(a_1: float, a_2: float) -> Gate:
    return linear_gate(f"{a_1:g} SiLU({a_2:g} x)", a_2, a_1 * a_2)


@dataclass(frozen=True)
class Gating:
    """The choice of gates that turn a model's MLP neurons into attention heads.

    Attributes:
        kind: "exact", where each neuron becomes one head whose attention pattern is computed from
            the activation; or "bilinear", where patterns are softmaxes over bilinear scores.
        heads: the number of heads that replace one neuron; 1 for exact gates.
        slope: for plain MLPs with one bilinear head, the slope that the user chose.
        ranges: for gated MLPs with bilinear gates, the largest |gate pre-activation| to cover in
            each original layer.
        silu: for exact gates, the activation if it is a generalized SiLU; otherwise None.
    """

    kind: Literal["exact", "bilinear"] = "exact"
    heads: int = 1
    slope: float | None = None
    ranges: tuple[float, ...] | None = None
    silu: GeneralizedSiLU | None = None

    def __post_init__(self) -> None:
        bilinear_fields = self.heads, self.slope, self.ranges
        if self.kind == "exact" and bilinear_fields != (1, None, None):
            raise ValueError(f"got {self}; expected one head, no slope and no ranges if exact")
        if self.kind == "bilinear" and self.silu is not None:
            raise ValueError(f"got {self}; expected kind='exact' for a generalized SiLU")

    def require_fit(self, act_fn: str, gated: bool, n_layers: int) -> None:
        """Raise ValueError if these gates cannot replace this activation in a model's MLPs."""
        ranged = gated and self.kind == "bilinear"
        if (None if self.ranges is None else len(self.ranges)) != (n_layers if ranged else None):
            expected = "a range for each layer" if ranged else "no ranges"
            raise ValueError(f"got {self}; expected {expected}")
        for layer in range(n_layers):
            if self.kind == "exact":
                self.activation(act_fn)
            else:
                self.bilinear(act_fn, layer)

    def bilinear(self, act_fn: str, layer: int) -> BilinearGate:
        """Return the bilinear gate of an original layer; raise ValueError if none exists."""
        limit = None if self.ranges is None else self.ranges[layer]
        return _bilinear_gate(act_fn, self.heads, self.slope, limit)

    def n_heads(self, d_mlp: int) -> int:
        """Return the number of heads that represent the neurons of an MLP."""
        return d_mlp * self.heads

    def activation(self, act_fn: str) -> Gate:
        """Return the exact gate of an activation; raise ValueError for unknown activations."""
        if self.silu is not None:
            return self.silu.gate
        if act_fn not in GATES:
            raise ValueError(f"no exact gate for {act_fn!r}; expected one of {', '.join(GATES)}")
        return GATES[act_fn]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Gating":
        """Rebuild a `Gating` from JSON data; raise TypeError or ValueError for invalid data."""
        ranges, silu = data["ranges"], data["silu"]
        ranges = None if ranges is None else tuple(ranges)  # JSON has no tuples
        silu = None if silu is None else GeneralizedSiLU(**silu)
        return cls(**data | {"ranges": ranges, "silu": silu})


EXACT = Gating()


@lru_cache(maxsize=1024)
def _bilinear_gate(
    act_fn: str, heads: int, slope: float | None, limit: float | None
) -> BilinearGate:
    return bilinear_gate(act_fn, heads, slope=slope, limit=limit)
