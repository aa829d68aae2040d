"""Which heads to patch, by name or by kind, as the indices that a sweep works with."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.errors import PatchingError, UnknownHeadError
from attn_only_lens.heads import HeadName
from attn_only_lens.heads.host import HeadKind, host_of, reasons_without_heads
from attn_only_lens.numerics import as_plain, is_count

__all__ = [
    "WHOLE",
    "LayerSites",
    "Selection",
    "Sites",
    "all_heads",
    "heads",
    "neuron_heads",
    "resolve",
]

WHOLE = -1
"""In `LayerSites.member`: all heads of the neuron together."""


@dataclass(frozen=True)
class Selection:
    """Every head of some kinds in some layers, of whatever model it is given to.

    Attributes:
        kinds: "attention", "neuron".
        layers: source layers; None for all.
    """

    kinds: tuple[HeadKind, ...]
    layers: tuple[int, ...] | None = None


Sites: TypeAlias = Selection | str | HeadName | Sequence[str | HeadName]


@dataclass(frozen=True, eq=False)
class LayerSites:
    """Sites of one kind in one source layer, in the order of `index` and `member`.

    Attributes:
        layer: the source layer.
        kind: "attention" or "neuron".
        names: `L5H3`, `L5N1234`, or `L5N1234.2` for one of several heads that share a neuron.
        index: the attention head, or the neuron.
        member: which head of the neuron; `WHOLE` (-1) where all are meant, and for attention.
    """

    layer: int
    kind: HeadKind
    names: tuple[str, ...]
    index: Int[Tensor, "site"]
    member: Int[Tensor, "site"]


def neuron_heads(layers: int | Iterable[int] | None = None) -> Selection:
    """Every neuron of some source layers, each with all of its heads together.

    Args:
        layers: source layers, counted from 0; None for all.

    Returns:
        The selection, for any model.

    Raises:
        PatchingError: layers that are no numbers, negative or repeated.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.neuron_heads(layers=[8, 9])
        Selection(kinds=('neuron',), layers=(8, 9))
    """
    return _selection(("neuron",), layers)


def heads(layers: int | Iterable[int] | None = None) -> Selection:
    """Every attention head of some source layers.

    Args:
        layers: source layers, counted from 0; None for all.

    Returns:
        The selection, for any model.

    Raises:
        PatchingError: layers that are no numbers, negative or repeated.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.heads()
        Selection(kinds=('attention',), layers=None)
    """
    return _selection(("attention",), layers)


def all_heads(layers: int | Iterable[int] | None = None) -> Selection:
    """Every attention head and every neuron of some source layers.

    Args:
        layers: source layers, counted from 0; None for all.

    Returns:
        The selection, for any model.

    Raises:
        PatchingError: layers that are no numbers, negative or repeated.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.all_heads(layers=3)
        Selection(kinds=('attention', 'neuron'), layers=(3,))
    """
    return _selection(("attention", "neuron"), layers)


def _selection(kinds: tuple[HeadKind, ...], layers: object) -> Selection:
    if layers is None:
        return Selection(kinds)
    given = as_plain(layers)
    wanted = list(map(as_plain, given)) if isinstance(given, Iterable) else [given]
    expected = "expected source layers, counted from 0"
    reasons = [f"got layer {layer!r}; {expected}" for layer in wanted if not is_count(layer)]
    repeated = sorted({str(layer) for layer in wanted if wanted.count(layer) > 1})
    reasons += [f"got layer {layer} more than once; expected each once" for layer in repeated]
    reasons += [f"got no layers; {expected}, or None for all"] * (not wanted)
    if reasons:
        raise PatchingError(reasons, "these layers cannot be selected")
    return Selection(kinds, tuple(wanted))


def resolve(model: Any, sites: Sites) -> tuple[LayerSites, ...]:
    """The heads of a model that a selection or a list of names means.

    Args:
        model: converted, or with exposed neuron-heads.
        sites: `neuron_heads()`, `heads()`, `all_heads()`, a name, or a list of names.

    Returns:
        An entry for each kind of head in each source layer that has any: by layer, attention
        heads before neurons.

    Raises:
        PatchingError: with every reason: a model without neuron-heads, names that are unknown or
            repeated, layers that the model has not.

    Example:
        >>> from attn_only_lens import convert, patching as p, pretrained
        >>> model = convert(pretrained.modular_addition())
        >>> [(each.kind, len(each.names)) for each in p.resolve(model, p.all_heads())]
        [('attention', 4), ('neuron', 512)]
        >>> p.resolve(model, ["L0N7", "L0N5"])[0].index
        tensor([5, 7])
    """
    problem = "these sites cannot be patched"
    if reasons := reasons_without_heads(model):
        raise PatchingError(reasons, problem)
    host = host_of(model)
    in_layer = host.neurons
    counts: list[dict[HeadKind, int]] = [
        {"attention": n_heads, "neuron": each.n_neurons}
        for n_heads, each in zip(host.n_heads, in_layer, strict=True)
    ]
    if isinstance(sites, Selection):
        layers = range(len(counts)) if sites.layers is None else sorted(sites.layers)
        reasons = [_no_layer(layer, counts) for layer in layers if layer >= len(counts)]
        if reasons:
            raise PatchingError(reasons, problem)
        pairs = [(layer, kind) for layer in layers for kind in sites.kinds]
        return tuple(_all_of(layer, kind, counts[layer][kind]) for layer, kind in pairs)
    shared = [each.heads_per_neuron for each in in_layer]
    names, reasons = _named(sites, counts, shared)
    if reasons:
        raise PatchingError(reasons, problem)
    groups: dict[tuple[int, HeadKind], list[HeadName]] = {}
    for name in sorted(names, key=_order):
        groups.setdefault((name.layer, name.kind), []).append(name)
    return tuple(_some_of(layer, kind, group) for (layer, kind), group in groups.items())


def _order(name: HeadName) -> tuple[int, str, int, int]:
    return name.layer, name.kind, name.index, _member(name)


def _member(name: HeadName) -> int:
    return WHOLE if name.member is None else name.member


def _all_of(layer: int, kind: HeadKind, count: int) -> LayerSites:
    stem = str(HeadName(layer, kind, 0)).removesuffix("0")
    names = tuple(f"{stem}{index}" for index in range(count))
    index = torch.arange(count, device="cpu")
    return LayerSites(layer, kind, names, index, torch.full_like(index, WHOLE))


def _some_of(layer: int, kind: HeadKind, group: list[HeadName]) -> LayerSites:
    index = torch.tensor([name.index for name in group], device="cpu")
    member = torch.tensor([_member(name) for name in group], device="cpu")
    return LayerSites(layer, kind, tuple(map(str, group)), index, member)


def _no_layer(layer: int, counts: Sequence[object]) -> str:
    return f"got layer {layer}; expected source layers from 0 to {len(counts) - 1}"


def _named(
    sites: object, counts: list[dict[HeadKind, int]], shared: list[int]
) -> tuple[list[HeadName], list[str]]:
    """The names, and every reason why some are none of the model's."""
    listed = [sites] if isinstance(sites, str | HeadName) else as_plain(sites)
    if not isinstance(listed, list | tuple) or not listed:
        got = "an empty list" if isinstance(listed, list | tuple) else type(listed).__name__
        return [], [
            f"got {got}; expected neuron_heads(), heads(), all_heads(), or a list of names such as "
            "'L5H3' and 'L5N1234'"
        ]
    names: list[HeadName] = []
    reasons: list[str] = []
    for each in listed:
        try:
            name = each if isinstance(each, HeadName) else HeadName.parse(each)
            reason = _reason(name, counts, shared)
        except UnknownHeadError as error:
            reasons.append(str(error))
            continue
        names.append(name)
        if reason is not None:
            reasons.append(reason)
    repeated = [str(name) for name, count in Counter(names).items() if count > 1]
    reasons += [f"got {name} more than once; expected each name once" for name in repeated]
    return names, reasons


def _reason(name: HeadName, counts: list[dict[HeadKind, int]], shared: list[int]) -> str | None:
    """Why the model has no such head, if it has none.

    Raises:
        UnknownHeadError: the name says which head of a neuron, and there is none such.
    """
    if name.layer >= len(counts):
        return f"{name}: {_no_layer(name.layer, counts)}"
    count = counts[name.layer][name.kind]
    if name.index >= count:
        many = "attention heads" if name.kind == "attention" else "neurons"
        return f"got {name}; layer {name.layer} has {many} 0 to {count - 1}"
    if name.member is not None:
        name.head_index(shared[name.layer])
    return None
