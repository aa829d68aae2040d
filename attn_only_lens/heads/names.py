"""The one place that maps a head's name to its block, index and hook, and back.

`L5H3` is attention head 3 of source layer 5; `L5N1234` is the neuron-head of neuron 1234 of the
MLP of source layer 5; where several heads share a neuron (bilinear gates), they are `L5N1234.0`,
`L5N1234.1`, … and `L5N1234` is the neuron that they make up. In the two-block layout source layer l
becomes block 2l (its attention heads) and block 2l + 1 (its neuron-heads). In place, both are in
block l: attention heads under `attn`, neuron-heads under `mlp`. Analysis code speaks in names,
never in block numbers.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from attn_only_lens.errors import UnknownHeadError

__all__ = [
    "HeadKind",
    "HeadName",
    "Layout",
    "block_kind",
    "block_layer",
    "heads_block",
    "neuron_labels",
    "neurons_block",
]

HeadKind = Literal["attention", "neuron"]
Layout = Literal["two blocks a layer", "in place"]

_LETTER: dict[HeadKind, str] = {"attention": "H", "neuron": "N"}
_KIND: dict[str, HeadKind] = {letter: kind for kind, letter in _LETTER.items()}
_NUMBER = r"(0|[1-9]\d*)"
_NAME = re.compile(rf"L{_NUMBER}([HN]){_NUMBER}(?:\.{_NUMBER})?")


@dataclass(frozen=True)
class HeadName:
    """A head of a converted model, by source layer.

    Attributes:
        layer: the source layer, counted from 0 (not the block).
        kind: "attention" for an original head, "neuron" for a neuron-head.
        index: the head in its attention layer, or the neuron in its MLP.
        member: which of the heads that share the neuron; None where it has one, or all are meant.

    Example:
        >>> from attn_only_lens import HeadName
        >>> name = HeadName.parse("L5N1234")
        >>> name.block, name.index, name.hook("pattern"), str(name)
        (11, 1234, 'blocks.11.attn.hook_pattern', 'L5N1234')
        >>> HeadName.at(block=10, index=3)
        HeadName(layer=5, kind='attention', index=3, member=None)
        >>> str(HeadName.at(block=11, index=4938, heads_per_neuron=4))
        'L5N1234.2'
    """

    layer: int
    kind: HeadKind
    index: int
    member: int | None = None

    @classmethod
    def parse(cls, text: str) -> "HeadName":
        """Read `L5H3` or `L5N1234`.

        Raises:
            UnknownHeadError: the text has another form.
        """
        match = _NAME.fullmatch(text) if isinstance(text, str) else None
        if match is None or (match[2] == "H" and match[4] is not None):
            raise UnknownHeadError(
                f"got {text!r}; expected 'L5H3' (attention head 3 of source layer 5) or "
                "'L5N1234' (neuron 1234 of source layer 5)"
            )
        layer, letter, index, member = match.groups()
        return cls(int(layer), _KIND[letter], int(index), None if member is None else int(member))

    @classmethod
    def at(cls, block: int, index: int, heads_per_neuron: int = 1) -> "HeadName":
        """The name of head `index` of block `block` of a converted model."""
        layer, kind = block_layer(block), block_kind(block)
        if kind == "attention" or heads_per_neuron == 1:
            return cls(layer, kind, index)
        return cls(layer, kind, *divmod(index, heads_per_neuron))

    def head_index(self, heads_per_neuron: int = 1) -> int:
        """Where this head stands among the heads of its block.

        Raises:
            UnknownHeadError: several heads share the neuron and the name does not say which, or
                it says one that there is not.
        """
        if self.kind == "attention" or (heads_per_neuron == 1 and self.member is None):
            return self.index
        if self.member is None or not self.member < heads_per_neuron or heads_per_neuron == 1:
            neuron = f"L{self.layer}N{self.index}"
            names = (
                f"the {heads_per_neuron} heads {neuron}.0 … {neuron}.{heads_per_neuron - 1}"
                if heads_per_neuron > 1
                else f"one head, {neuron}"
            )
            raise UnknownHeadError(f"got {str(self)!r}; the neuron has {names}")
        return self.index * heads_per_neuron + self.member

    def heads(self, heads_per_neuron: int = 1) -> slice:
        """Where all heads of this neuron, or this one head, stand among those of the block.

        Example:
            >>> from attn_only_lens import HeadName
            >>> HeadName.parse("L5N10").heads(heads_per_neuron=4)
            slice(40, 44, None)
        """
        if self.kind == "neuron" and self.member is None:
            return slice(self.index * heads_per_neuron, (self.index + 1) * heads_per_neuron)
        index = self.head_index(heads_per_neuron)
        return slice(index, index + 1)

    @property
    def block(self) -> int:
        """The block that holds this head."""
        of = heads_block if self.kind == "attention" else neurons_block
        return of(self.layer)

    def hook(self, activation: str, layout: Layout = "two blocks a layer") -> str:
        """The full name of a hook point of this head's block: `hook("z")`, `hook("pattern")`."""
        if layout == "in place":
            part = "attn" if self.kind == "attention" else "mlp"
            return f"blocks.{self.layer}.{part}.hook_{activation}"
        return f"blocks.{self.block}.attn.hook_{activation}"

    def __str__(self) -> str:
        member = "" if self.member is None else f".{self.member}"
        return f"L{self.layer}{_LETTER[self.kind]}{self.index}{member}"


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


def neuron_labels(block: int, indices: Iterable[int]) -> list[str]:
    """The names of neurons of a block, whole, whatever number of heads each has."""
    return [str(HeadName(block_layer(block), "neuron", index)) for index in indices]
