"""The gates of all neuron-heads of a model."""

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from attn_only_lens.gates import GATES, BilinearGate, Gate, GeneralizedSiLU, bilinear_gate

AnyGate = Gate | BilinearGate


@dataclass(frozen=True)
class Gating:
    """Turn the neurons of a model into heads.

    Attributes:
        kind: "exact", one head a neuron whose pattern is the activation's own; or "bilinear",
            softmax over bilinear scores and nothing else.
        heads_per_neuron: heads that share a neuron; 1 for exact gates.
        slope: for plain MLPs with one bilinear head, its slope, if it can be chosen.
        ranges: for gated MLPs with bilinear gates, the largest |gate pre-activation| of each
            source layer that the heads must serve.
        silu: for exact gates, the activation itself, where it is a generalized SiLU.
    """

    kind: Literal["exact", "bilinear"] = "exact"
    heads_per_neuron: int = 1
    slope: float | None = None
    ranges: tuple[float, ...] | None = None
    silu: GeneralizedSiLU | None = None

    def __post_init__(self) -> None:
        others = self.heads_per_neuron, self.slope, self.ranges
        if self.kind == "exact" and others != (1, None, None):
            raise ValueError(f"got {self}; expected exact gates to have one head and nothing else")
        if self.kind == "bilinear" and self.silu is not None:
            raise ValueError(f"got {self}; a generalized SiLU has exact gates")

    def require_fit(self, act_fn: str, gated: bool, n_layers: int) -> None:
        """Require that these gates are for the MLPs of a model.

        Raises:
            ValueError: bilinear gates of gated MLPs lack a range for each layer, others have
                ranges, or no gate exists for the activation.
        """
        ranged = gated and self.kind == "bilinear"
        if (None if self.ranges is None else len(self.ranges)) != (n_layers if ranged else None):
            expected = "a range for each layer" if ranged else "no ranges"
            raise ValueError(f"got {self}; expected {expected}")
        for layer in range(n_layers):
            self.gate(act_fn, layer)

    def gate(self, act_fn: str, layer: int) -> AnyGate:
        """Return the gate of the neurons of a source layer.

        Raises:
            ValueError: no gate exists for this activation with so many heads, or for that range.
        """
        if self.kind == "exact":
            return self.activation(act_fn)
        limit = None if self.ranges is None else self.ranges[layer]
        return _bilinear_gate(act_fn, self.heads_per_neuron, self.slope, limit)

    def activation(self, act_fn: str) -> Gate:
        """Return the exact gate of the activation that the MLPs have.

        Raises:
            ValueError: no gate has this name.
        """
        if self.silu is not None:
            return self.silu.gate
        if act_fn not in GATES:
            raise ValueError(f"no exact gate of {act_fn!r}; expected one of {', '.join(GATES)}")
        return GATES[act_fn]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Gating":
        """Return the gating that `to_json` wrote; JSON has made a list of the ranges.

        Raises:
            TypeError: the data has other fields.
            ValueError: they do not go together.
        """
        ranges, silu = data["ranges"], data["silu"]
        ranges = None if ranges is None else tuple(ranges)
        silu = None if silu is None else GeneralizedSiLU(**silu)
        return cls(**data | {"ranges": ranges, "silu": silu})


EXACT = Gating()


@lru_cache(maxsize=1024)
def _bilinear_gate(
    act_fn: str, heads: int, slope: float | None, limit: float | None
) -> BilinearGate:
    return bilinear_gate(act_fn, heads, slope=slope, limit=limit)
