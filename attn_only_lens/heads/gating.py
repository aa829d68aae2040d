"""Which gates a converted model's neuron-heads have: one choice for the whole model."""

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from attn_only_lens.gates import GATES, BilinearGate, Gate, RangeGate, bilinear_gate, range_gate

__all__ = ["EXACT", "AnyGate", "Gating"]

AnyGate = Gate | BilinearGate | RangeGate


@dataclass(frozen=True)
class Gating:
    """How neurons become heads.

    Attributes:
        kind: "exact", one head a neuron whose pattern is the activation's own; or "bilinear",
            softmax over bilinear scores and nothing else.
        heads_per_neuron: heads that share a neuron; 1 for exact gates.
        tolerance: for relu with bilinear gates, the activation error that sets the slope.
        ranges: for gated MLPs with bilinear gates, the largest |gate pre-activation| of each
            source layer that the heads must serve.
    """

    kind: Literal["exact", "bilinear"] = "exact"
    heads_per_neuron: int = 1
    tolerance: float | None = None
    ranges: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind == "exact" and (self.heads_per_neuron, self.tolerance, self.ranges) != (
            1,
            None,
            None,
        ):
            raise ValueError(f"got {self}; expected exact gates to have one head and nothing else")

    def gate(self, act_fn: str, layer: int) -> AnyGate:
        """The gate of the neurons of a source layer.

        Raises:
            ValueError: there is none for this activation with so many heads, or for that range.
        """
        limit = None if self.ranges is None else self.ranges[layer]
        return _gate(self.kind, act_fn, self.heads_per_neuron, self.tolerance, limit)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Gating":
        """From what `to_json` returned, after JSON made a list of the tuple.

        Raises:
            TypeError: the data has other fields.
        """
        ranges = data["ranges"]
        return cls(**data | {"ranges": None if ranges is None else tuple(ranges)})


EXACT = Gating()


@lru_cache(maxsize=1024)
def _gate(
    kind: str, act_fn: str, heads: int, tolerance: float | None, limit: float | None
) -> AnyGate:
    if kind == "exact":
        return GATES[act_fn]
    if limit is not None:
        return range_gate(act_fn, heads, limit)
    return bilinear_gate(act_fn, heads, tolerance)
