"""Blocks of the two-block layout by source layer, and back: layer l is blocks 2l and 2l + 1.

Where the heads of a model are, in blocks of their own or beside its MLPs, and their hooks.
"""

from typing import Any, ClassVar, Literal, get_args

from attn_only_lens.heads.computation import NeuronHeads

__all__ = [
    "HEAD_KINDS",
    "POINTS",
    "HeadKind",
    "Layout",
    "WithNeuronHeads",
    "attention_heads",
    "block_kind",
    "block_layer",
    "block_of",
    "heads_block",
    "layout_of",
    "neuron_heads",
    "neurons_block",
    "point_name",
]

HeadKind = Literal["attention", "neuron"]
HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)


def heads_block(layer: int) -> int:
    """The block of the attention heads of a source layer."""
    return 2 * layer


def neurons_block(layer: int) -> int:
    """The block of the neuron-heads of a source layer."""
    return 2 * layer + 1


def block_layer(block: int) -> int:
    """The source layer of a block."""
    return block // 2


def block_kind(block: int) -> HeadKind:
    """What kind of heads a block holds."""
    return "neuron" if block % 2 else "attention"


Layout = Literal["two blocks a layer", "in place"]

# In place, no name may be one that a filter for attention's hook points selects: those ask whether
# a name ends in z, q, k, v, pattern, scores or result, or whether it holds z, attn, pattern, score,
# hook_q or result.
POINTS = {
    "q": "hook_neuron_query",
    "k": "hook_neuron_key",
    "v": "hook_neuron_value",
    "attn_scores": "hook_neuron_logits",
    "pattern": "hook_neuron_probs",
    "z": "hook_neuron_act",
    "result": "hook_neuron_write",
}
"""What is computed on the way through a head, and what neuron-heads in place call its hook point.

Where heads are a block's attention, it is `hook_q`, `hook_k` and so on, as in TransformerLens.
"""


class WithNeuronHeads:
    """What models of either layout have in common."""

    _layout: ClassVar[Layout]

    def _heads_by_layer(self) -> list[NeuronHeads]:
        """The neuron-heads of each source layer."""
        raise NotImplementedError


def layout_of(model: Any) -> Layout | None:
    """The layout of a model with neuron-heads; none for any other object."""
    return model._layout if isinstance(model, WithNeuronHeads) else None


def neuron_heads(model: Any) -> list[NeuronHeads]:
    """The neuron-heads of each source layer, in either layout; none where there are none."""
    return model._heads_by_layer() if isinstance(model, WithNeuronHeads) else []


def attention_heads(model: Any) -> list[int]:
    """How many attention heads each source layer of a model with neuron-heads has."""
    n_layers = len(neuron_heads(model))
    if layout_of(model) == "in place":
        return [model.cfg.n_heads] * n_layers
    return [model.blocks[heads_block(layer)].cfg.n_heads for layer in range(n_layers)]


def block_of(model: Any, layer: int, kind: HeadKind) -> int:
    """The block that runs the attention heads, or the neurons, of a source layer."""
    if layout_of(model) != "two blocks a layer":
        return layer
    return heads_block(layer) if kind == "attention" else neurons_block(layer)


def point_name(model: Any, layer: int, kind: HeadKind, point: str) -> str:
    """The full name of a hook point, a key of `POINTS`, of the heads of a source layer.

    Args:
        model: any; of one that is not converted, attention heads are where TransformerLens has
            them.
        layer: the source layer. That the model has it is for the caller to know.
        kind: of the heads.
        point: what is computed there.
    """
    block = block_of(model, layer, kind)
    if kind == "neuron" and layout_of(model) == "in place":
        return f"blocks.{block}.mlp.{POINTS[point]}"
    return f"blocks.{block}.attn.hook_{point}"
