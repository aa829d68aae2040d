"""Blocks of the two-block layout by source layer, and back: layer l is blocks 2l and 2l + 1."""

from typing import Literal, get_args

__all__ = ["HEAD_KINDS", "HeadKind", "block_kind", "block_layer", "heads_block", "neurons_block"]

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
