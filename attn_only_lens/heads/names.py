"""The one place that maps a head's name to its block, index and hook, and back.

`L5H3` is attention head 3 of source layer 5; `L5N1234` is the neuron-head of neuron 1234 of the
MLP of source layer 5. In the two-block layout source layer l becomes block 2l (its attention
heads) and block 2l + 1 (its neuron-heads). Analysis code speaks in names, never in block numbers.
"""

import re
from dataclasses import dataclass
from typing import Literal

from attn_only_lens.errors import UnknownHeadError

__all__ = ["HeadKind", "HeadName", "block_kind", "block_layer", "heads_block", "neurons_block"]

HeadKind = Literal["attention", "neuron"]

_LETTER: dict[HeadKind, str] = {"attention": "H", "neuron": "N"}
_KIND: dict[str, HeadKind] = {letter: kind for kind, letter in _LETTER.items()}
_NAME = re.compile(r"L(0|[1-9]\d*)([HN])(0|[1-9]\d*)")


@dataclass(frozen=True, order=True)
class HeadName:
    """A head of a converted model, by source layer.

    Attributes:
        layer: the source layer, counted from 0 (not the block).
        kind: "attention" for an original head, "neuron" for a neuron-head.
        index: the head in its attention layer, or the neuron in its MLP.

    Example:
        >>> from attn_only_lens import HeadName
        >>> name = HeadName.parse("L5N1234")
        >>> name.block, name.index, name.hook("pattern"), str(name)
        (11, 1234, 'blocks.11.attn.hook_pattern', 'L5N1234')
        >>> HeadName.at(block=10, index=3)
        HeadName(layer=5, kind='attention', index=3)
    """

    layer: int
    kind: HeadKind
    index: int

    @classmethod
    def parse(cls, text: str) -> "HeadName":
        """Read `L5H3` or `L5N1234`.

        Raises:
            UnknownHeadError: the text has another form.
        """
        match = _NAME.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UnknownHeadError(
                f"got {text!r}; expected 'L5H3' (attention head 3 of source layer 5) or "
                "'L5N1234' (neuron 1234 of source layer 5)"
            )
        layer, letter, index = match.groups()
        return cls(int(layer), _KIND[letter], int(index))

    @classmethod
    def at(cls, block: int, index: int) -> "HeadName":
        """The name of head `index` of block `block` of a converted model."""
        return cls(block_layer(block), block_kind(block), index)

    @property
    def block(self) -> int:
        """The block that holds this head."""
        of = heads_block if self.kind == "attention" else neurons_block
        return of(self.layer)

    def hook(self, activation: str) -> str:
        """The full name of a hook point of this head's block: `hook("z")`, `hook("pattern")`."""
        return f"blocks.{self.block}.attn.hook_{activation}"

    def __str__(self) -> str:
        return f"L{self.layer}{_LETTER[self.kind]}{self.index}"


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
