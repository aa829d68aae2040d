"""The gates of all neuron-heads of a model."""

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from attn_only_lens.gates import GATES, BilinearGate, Gate, GeneralizedSiLU, bilinear_gate

AnyGate = Gate | BilinearGate


@dataclass(frozen=True)
class Gating:
    """The choice of gates that turns the neurons of a model into heads.

    Attributes:
        kind: "exact", one head a neuron with the activation's own pattern; or "bilinear", softmax
            over bilinear scores only.
        heads_per_neuron: heads that share a neuron; 1 for exact gates.
        slope: for plain MLPs with one bilinear head, its slope if the user can choose it.
        ranges: for gated MLPs with bilinear gates, the largest |gate pre-activation| to cover in
            each source layer.
        silu: for exact gates, the activation if it is a generalized SiLU.
    """

    kind: Literal["exact", "bilinear"] = "exact"
    heads_per_neuron: int = 1
    slope: float | None = None
    ranges: tuple[float, ...] | None = None
    silu: GeneralizedSiLU | None = None

    def __post_init__(self) -> None:
        bilinear_fields = self.heads_per_neuron, self.slope, self.ranges
        if self.kind == "exact" and bilinear_fields != (1, None, None):
            raise ValueError(f"got {self}; expected exact gates to have one head and nothing else")
        if self.kind == "bilinear" and self.silu is not None:
            raise ValueError(f"got {self}; a generalized SiLU has exact gates")

    def require_fit(self, act_fn: str, gated: bool, n_layers: int) -> None:
        """Require that these gates fit the MLPs of a model.

        Raises:
            ValueError: bilinear gates of gated MLPs lack a range for each layer, other gates have
                ranges, or no gate exists for the activation.
        """
        ranged = gated and self.kind == "bilinear"
        if (None if self.ranges is None else len(self.ranges)) != (n_layers if ranged else None):
            expected = "a range for each layer" if ranged else "no ranges"
            raise ValueError(f"got {self}; expected {expected}")
        for layer in range(n_layers):
            self.gate(act_fn, layer)

    def gate(self, act_fn: str, layer: int) -> AnyGate:
        """Return the gate of the neurons of a source layer; raise ValueError if there is none."""
        if self.kind == "exact":
            return self.activation(act_fn)
        limit = None if self.ranges is None else self.ranges[layer]
        return _bilinear_gate(act_fn, self.heads_per_neuron, self.slope, limit)

    def activation(self, act_fn: str) -> Gate:
        """Return the exact gate of the activation; raise ValueError if there is none."""
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
        """Return the gating that `to_json` wrote; raise TypeError or ValueError if it is none."""
        ranges, silu = data["ranges"], data["silu"]
        ranges = None if ranges is None else tuple(ranges)  # JSON has made a list of it
        silu = None if silu is None else GeneralizedSiLU(**silu)
        return cls(**data | {"ranges": ranges, "silu": silu})


EXACT = Gating()


@lru_cache(maxsize=1024)
def _bilinear_gate(
    act_fn: str, heads: int, slope: float | None, limit: float | None
) -> BilinearGate:
    return bilinear_gate(act_fn, heads, slope=slope, limit=limit)
