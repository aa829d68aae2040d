"""Theorem 3.1: add neurons to MLPs.

The MLP output Σ_i act(x · W_in[:, i] + b_in[i]) W_out[i] + b_out is a sum over neurons. Neurons
whose rows of W_out are zero therefore add nothing to the output (equations 6 to 10), whatever their
activations are. The theorem requires an activation function that acts on each neuron separately;
SoLU does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from attn_only_lens.growth.expansion.expansion import (
    Expansion,
    Plan,
    layers_of,
    reasons_against_count,
)
from attn_only_lens.growth.expansion.provenance import IndexMap
from attn_only_lens.growth.expansion.weights import Axis, Stack, Weights, block_name


@dataclass(frozen=True)
class AddNeurons(Expansion):
    """Grow d_mlp: Definition and Theorem 3.1.

    The new rows of W_out are zero. The new columns of W_in, W_gate and b_in can have any values.

    Attributes:
        n: how many neurons to add to each layer.
        layers: the layers that get new neurons; None for all.
        stack: "encoder" or "decoder", in which `layers` count from 0; None for both.

    Example:
        >>> from attn_only_lens import grow, growth, load
        >>> grow(load("modular-addition"), growth.AddNeurons(3)).provenance.new_neurons
        ('L0N512', 'L0N513', 'L0N514')
    """

    n: int
    layers: Sequence[int] | None = None
    stack: Stack | None = None

    def reasons_against(self, weights: Weights) -> list[str]:
        """Return every reason why the MLPs cannot get new neurons."""
        reasons = reasons_against_count(self.n, self.layers, weights, self.stack)
        known = set(weights.in_layers("mlp.W_out"))
        layers = layers_of(self.layers, weights, self.stack) if not reasons else []
        if without := [layer for layer in layers if layer not in known]:
            reasons.append(f"layers {without} have no MLP, so they cannot get new neurons")
        if weights.constants.pointwise is False:
            reasons.append(
                "the activation function mixes neurons: new neurons would change the activations "
                "of old neurons"
            )
        return reasons

    def plan(self, weights: Weights) -> Plan:
        """Return the plan for adding neurons to the MLPs."""
        layers = layers_of(self.layers, weights, self.stack)
        sizes = weights.sizes
        written = frozenset(block_name(layer, "mlp.W_out") for layer in layers)
        return Plan(
            axes={
                Axis("d_mlp", layer): IndexMap.append(sizes[Axis("d_mlp", layer)], self.n)
                for layer in layers
            },
            zero=written,
            cancel=written,
            share=written,
        )
