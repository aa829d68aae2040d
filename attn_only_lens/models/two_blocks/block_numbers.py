"""Blocks by source layer, and back, where layer l is blocks 2l and 2l + 1."""

from attn_only_lens.heads.host import HeadKind


def heads_block(layer: int) -> int:
    """The block of the attention heads of a source layer, where a layer has two blocks."""
    return 2 * layer


def neurons_block(layer: int) -> int:
    """The block of the neuron-heads of a source layer, where a layer has two blocks."""
    return 2 * layer + 1


def block_layer(block: int) -> int:
    """The source layer of one of two blocks."""
    return block // 2


def block_kind(block: int) -> HeadKind:
    """The kind of heads that one of two blocks holds."""
    return "neuron" if block % 2 else "attention"
