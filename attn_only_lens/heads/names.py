"""Parse names of heads, and find their blocks, indices and hook points.

`L5H3` is attention head 3 in layer 5 of the original model; `L5N1234` is the neuron-head of neuron
1234 in this layer. In a layer with a transcoder, `L5F1024` is feature 1024, `L5E` is the error node
(the part of the MLP's output that the transcoder misses), and `L5S` is the skip node (the input of
the transcoder's linear map W_skip). In a mixture of experts, `L5E3N1234` is neuron 1234 of expert
3, `L5N7` is neuron 7 of the shared experts, and `L5R` is the router, whose output is the routing
weights. Analyses refer to heads by name, never by block number.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

from torch import nn

from attn_only_lens.arguments import NAME, a_type
from attn_only_lens.errors import InputError, UnsupportedCallError
from attn_only_lens.heads.host import (
    HEAD_PLURALS,
    POINTS,
    WIDE_KINDS,
    HeadKind,
    has_neuron_heads,
    host_of,
)

_LETTER: dict[HeadKind, str] = {
    "attention": "H",
    "neuron": "N",
    "feature": "F",
    "skip": "S",
    "error": "E",
    "router": "R",
}
_KIND: dict[str, HeadKind] = {letter: kind for kind, letter in _LETTER.items()}
HeadCounts: TypeAlias = dict[HeadKind, int]
"""The number of heads of each kind in a layer."""
NO_HEAD = "there is no such head"
_PLURAL = {**HEAD_PLURALS, "attention": "attention heads"}


@dataclass(frozen=True)
class HeadName:
    """The name of an attention head, neuron-head or transcoder node.

    Attributes:
        layer: the layer in the original model (not the block), counted from 0.
        kind: "attention" for a head of the original model, "neuron" for a neuron-head, "feature"
            for a feature of a transcoder, "skip" for its skip node, "error" for its error node,
            "router" for the router of a mixture of experts.
        index: the index of the head in its attention layer, of the neuron in its MLP or expert, or
            of the feature in its transcoder; 0 for routers, skip and error nodes. `place` returns
            the index on the axis `head_index`.
        expert: the index of the neuron's expert in a mixture; None for other heads.

    Example:
        >>> from attn_only_lens import HeadName
        >>> name = HeadName.parse("L5N1234")
        >>> name.layer, name.kind, name.index, str(name)
        (5, 'neuron', 1234, 'L5N1234')
    """

    layer: int
    kind: HeadKind
    index: int
    expert: int | None = None

    @classmethod
    def at(cls, model: Any, layer: int, kind: HeadKind, place: int) -> "HeadName":
        """Return the name of the head at an index on the axis `head_index` of its layer.

        Raises:
            InputError: the layer has no such index.
        """
        count = host_of(model).count(layer, kind)
        if not 0 <= place < count:
            reason = f"got place {place}; layer {layer} has {count} heads of the kind {kind!r}"
            raise InputError([reason], NO_HEAD)
        return _named(layer, kind, place, *host_of(model).experts(layer, kind))

    @classmethod
    def parse(cls, text: str) -> "HeadName":
        """Parse names such as `L5H3` and `L5N1234`; raise InputError for other strings."""
        match = NAME.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InputError([unreadable_name(text)], NO_HEAD)
        layer, wide, expert, letter, index = match.groups()
        kind = _KIND[wide or letter]
        return cls(int(layer), kind, int(index or 0), None if expert is None else int(expert))

    def place(self, model: Any) -> int:
        """Return the head's index on the axis `head_index` of its layer's activations.

        The neurons of expert 0 come first, then those of expert 1, and so on; the neurons of shared
        experts come last.

        Raises:
            InputError: the model has no such head.
        """
        self.require_in(model)
        return place_of(self, model)

    def block(self, model: Any) -> int:
        """Return the index of the block that runs this head; raise the same errors as `hook`."""
        self.require_in(model)
        if has_neuron_heads(model):
            return host_of(model).block(self.layer, self.kind)
        return self.layer

    def hook(self, point: str, model: Any) -> str:
        """Return the full name of a hook point; all heads of this kind in the layer share it.

        Args:
            point: "q", "k", "v", "attn_scores", "pattern", "z" or "result"; for routers, skip nodes
                and error nodes, "z".
            model: a model with neuron-heads, converted or exposed; for an attention head, also a
                model without neuron-heads.

        Raises:
            InputError: the model has no such head, or heads have no such hook point.
            UnsupportedCallError: `model` is not a model, or was returned by `to_stock`; or the
                model has no neuron-heads, or no such hook point.

        Example:
            >>> from attn_only_lens import HeadName, convert, expose_neuron_heads, load
            >>> name, model = HeadName.parse("L0N7"), load("modular-addition")
            >>> name.hook("z", convert(model))
            'blocks.1.attn.hook_z'
            >>> name.hook("z", expose_neuron_heads(model).model)
            'blocks.0.mlp.hook_neuron_act'
            >>> HeadName.parse("L0H3").hook("z", model)
            'blocks.0.attn.hook_z'
        """
        if point not in POINTS:
            raise InputError([f"got point={point!r}; expected one of {', '.join(POINTS)}"], NO_HEAD)
        if self.kind in WIDE_KINDS and point != "z":
            kinds = _PLURAL[self.kind]
            reason = f"got {str(self)!r} with point={point!r}; {kinds} have only the point 'z'"
            raise InputError([reason], NO_HEAD)
        self.require_in(model)
        if has_neuron_heads(model):
            name = host_of(model).hook_name(self.layer, self.kind, point)
        else:
            name = f"blocks.{self.layer}.attn.hook_{point}"
        if name not in model.hook_dict:
            raise UnsupportedCallError(
                f"the attention of layer {self.layer} of this {type(model).__name__} has no hook "
                f"point {name}; model.hook_dict lists all hook points"
            )
        return name

    def original_neuron(self, model: Any) -> "HeadName":
        """Return the original model's neuron that this neuron of a bilinear gate belongs to.

        With `Bilinear(heads=m)`, neuron k of the model is one of the m heads of neuron k // m of
        the original. To get one number for each neuron of the original from quantities that add up,
        such as attributions, sum them over equal names. With exact gates, and for other heads than
        neurons, the name stays the same.

        Args:
            model: a model that `convert` returned, or a model with exposed neuron-heads.

        Raises:
            InputError: the model has no such head.
            UnsupportedCallError: the model has no neuron-heads.

        Example:
            >>> from attn_only_lens import Bilinear, HeadName, expose_neuron_heads, load
            >>> bridge = load("small-english")
            >>> gate = Bilinear.calibrated(bridge, "The keys near the cabinet are old.", heads=4)
            >>> model = expose_neuron_heads(bridge, copy=True, gate=gate).model
            >>> names = map(HeadName.parse, ("L1N27", "L1N28", "L1N31", "L1H2"))
            >>> [str(name.original_neuron(model)) for name in names]
            ['L1N6', 'L1N7', 'L1N7', 'L1H2']
        """
        self.require_in(model)
        if self.kind != "neuron":
            return self
        heads = host_of(model).neurons[self.layer]
        return replace(self, index=self.index // (heads.n_neurons // len(heads.W_out)))

    def require_in(self, model: Any) -> None:
        """Raise the same errors as `hook` if a model does not have this head."""
        if has_neuron_heads(model):
            self.require_among(head_counts(model), expert_counts(model))
            return
        _require_plain(model, self)
        self.require_among([{"attention": model.cfg.n_heads}] * len(model.blocks))

    def require_among(
        self, layers: Sequence[HeadCounts], experts: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Raise InputError if this head is not among the given head counts and experts."""
        if not 0 <= self.layer < len(layers):
            raise InputError(
                [f"got {str(self)!r}; the model has layers 0 to {len(layers) - 1}"], NO_HEAD
            )
        counts = layers[self.layer]
        n_experts, size = experts[self.layer] if experts else (0, 0)
        if n_experts:
            counts = {**counts, "neuron": counts["neuron"] - n_experts * size}
        n_heads = counts.get(self.kind, 0)
        if self.expert is not None:
            n_heads = size if self.expert < n_experts else 0
        if not 0 <= self.index < n_heads:
            kinds = [self.kind] if counts.get(self.kind) and self.expert is None else counts
            shared = " of the shared experts" * (n_experts > 0)
            has = [
                "a router"
                if kind == "router"
                else f"{_PLURAL[kind]} 0 to {counts[kind] - 1}" + shared * (kind == "neuron")
                for kind in kinds
                if counts[kind]
            ]
            if n_experts and self.kind == "neuron":
                has.append(f"neurons 0 to {size - 1} of each of the experts 0 to {n_experts - 1}")
            reason = f"got {str(self)!r}; layer {self.layer} has {' and '.join(has)}"
            raise InputError([reason], NO_HEAD)

    def __str__(self) -> str:
        index = "" if self.kind in WIDE_KINDS else self.index
        expert = "" if self.expert is None else f"E{self.expert}"
        return f"L{self.layer}{expert}{_LETTER[self.kind]}{index}"


def place_of(head: HeadName, model: Any) -> int:
    """Return the place of a head that the model is known to have; see `HeadName.place`."""
    n_experts, size = host_of(model).experts(head.layer, head.kind)
    return head.index + size * (n_experts if head.expert is None else head.expert)


def _named(layer: int, kind: HeadKind, place: int, n_experts: int, size: int) -> HeadName:
    """Return a head's name, given the number and the size of its layer's experts."""
    if place < n_experts * size:
        return HeadName(layer, kind, place % size, place // size)
    return HeadName(layer, kind, place - n_experts * size)


def unreadable_name(text: object, transcoders: bool = False) -> str:
    """Return an error message for a string that is not a head's name."""
    if isinstance(text, str) and NAME.fullmatch(upper := text.strip().upper()):
        return f"got {text!r}; names are upper case, without spaces: did you mean {upper!r}?"
    others = (
        ", 'L5F1024' (feature 1024 of its transcoder), 'L5E' (its error node) or 'L5S' (its node "
        "of W_skip)"
    )
    return (
        f"got {text!r}; expected 'L5H3' (attention head 3 of source layer 5) or 'L5N1234' (neuron "
        f"1234 of source layer 5){others * transcoders}; in a mixture of experts, 'L5E3N1234' is a "
        "neuron of expert 3, and 'L5R' the router"
    )


def _require_plain(model: Any, name: HeadName) -> None:
    """Raise UnsupportedCallError for a head that models without neuron-heads cannot have."""
    if not isinstance(getattr(model, "blocks", None), nn.ModuleList):
        raise UnsupportedCallError(
            f"got {a_type(model)}; expected a model with blocks, from TransformerLens or "
            "this package"
        )
    if name.kind != "attention":
        raise UnsupportedCallError(
            f"got {str(name)!r} and {a_type(model)} without neuron-heads; expected a "
            "model that convert or expose_neuron_heads returned"
        )
    # A model from to_stock has two layers for each layer of the original model.
    if getattr(model.cfg, "attn_only", False) and model.cfg.window_size == 1:
        raise UnsupportedCallError(
            f"got {str(name)!r} and a model from to_stock, whose heads have no such names: the "
            "heads of source layer l are in blocks.{2l}.attn, its neurons in blocks.{2l+1}.attn"
        )


def head_counts(model: Any) -> list[HeadCounts]:
    """Return the head counts of each layer of the original model."""
    host = host_of(model)
    return [
        {kind: host.count(layer, kind) for kind in host.kinds(layer)}
        for layer in range(host.n_layers)
    ]


def expert_counts(model: Any) -> list[tuple[int, int]]:
    """Return the number of experts in each layer, and the number of neurons of each expert."""
    host = host_of(model)
    return [host.experts(layer, "neuron") for layer in range(host.n_layers)]


@lru_cache(maxsize=1024)  # without a cache, names would slow attribution noticeably
def head_labels(
    layer: int, kind: HeadKind, n_heads: int, n_experts: int = 0, size: int = 0
) -> tuple[str, ...]:
    """Return the names of all heads of one kind in a layer, sorted by head_index."""
    return tuple(str(_named(layer, kind, place, n_experts, size)) for place in range(n_heads))


def count_kinds(kinds: Iterable[str]) -> str:
    """Return a text that counts heads of each kind, such as "4 heads and 512 neurons"."""
    counts = Counter(kinds)
    words = [
        f"{counts[kind]:,} {plural.removesuffix('s') if counts[kind] == 1 else plural}"
        for kind, plural in HEAD_PLURALS.items()
        if counts[kind]
    ]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
