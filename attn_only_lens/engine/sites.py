"""Sites: the heads to patch, selected by name or by kind, and the part of each head to patch."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.errors import InputError, UnknownHeadError
from attn_only_lens.heads import HeadName, host_of, reasons_without_heads
from attn_only_lens.heads.host import HEAD_KINDS, HEAD_PLURALS, WIDE_KINDS, HeadKind
from attn_only_lens.heads.names import head_counts, unreadable_name

Part = Literal["z", "pattern", "value", "q", "k"]
PARTS: tuple[str, ...] = get_args(Part)
SHARED_PARTS: tuple[Part, ...] = ("value", "k")
"""The parts that several attention heads share in models with grouped queries."""
_HEAD_AND_POSITION = re.compile(r"([^@]*)(?:@(?:(0|-?[1-9]\d*)|([^\W\d][^@]*)))?")
_POINTS: dict[Part, str] = {"z": "z", "pattern": "pattern", "value": "v", "q": "q", "k": "k"}
_SELECTIONS = {
    "heads": "heads()",
    "neurons": "neuron_heads()",
    "features": "features()",
    "all": "all_heads()",
}
"""The functions that select what the command line selects by these words."""
_PROBLEM = "these heads cannot be selected"


@dataclass(frozen=True)
class Selection:
    """A selection of all heads of the given kinds in the given layers, for any model.

    Attributes:
        kinds: one or more of "attention", "neuron", "feature", "skip" and "error".
        layers: layers of the original model; None for all layers.
    """

    kinds: tuple[HeadKind, ...]
    layers: tuple[int, ...] | None = None


Sites: TypeAlias = Selection | str | HeadName | Sequence[str | HeadName]


@dataclass(frozen=True, eq=False)
class LayerSites:
    """Sites of one kind in one layer of the original model, sorted by `index`.

    Attributes:
        layer: the layer in the original model.
        kind: "attention", "neuron", "feature", "skip" or "error".
        names: `L5H3`, `L5N1234`, ….
        index: the index of the attention head, neuron or feature; 0 for skip and error nodes.
    """

    layer: int
    kind: HeadKind
    names: tuple[str, ...]
    index: Int[Tensor, "site"]

    @classmethod
    def of(cls, heads: Iterable[HeadName]) -> "LayerSites":
        """Return the sites for one or more heads of one kind in one layer."""
        heads = list(heads)
        index = torch.tensor([head.index for head in heads], device="cpu")
        return cls(heads[0].layer, heads[0].kind, tuple(map(str, heads)), index)


def neuron_heads(layers: int | Iterable[int] | None = None) -> Selection:
    """Select every neuron of some or all layers.

    Args:
        layers: layers of the original model, counted from 0; None for all.

    Raises:
        InputError: `layers` contains values that are not numbers, are negative, or are repeated.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.neuron_heads(layers=[8, 9])
        Selection(kinds=('neuron',), layers=(8, 9))
    """
    return _selection(("neuron",), layers)


def heads(layers: int | Iterable[int] | None = None) -> Selection:
    """Select every attention head of some or all layers.

    Args:
        layers: layers of the original model, counted from 0; None for all.

    Raises:
        InputError: `layers` contains values that are not numbers, are negative, or are repeated.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.heads()
        Selection(kinds=('attention',), layers=None)
    """
    return _selection(("attention",), layers)


def features(layers: int | Iterable[int] | None = None) -> Selection:
    """Select every feature of the transcoders in some or all layers.

    Args:
        layers: layers of the original model, from 0; None for all layers with a transcoder.

    Raises:
        InputError: `layers` contains values that are not numbers, are negative, or are repeated.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.features(layers=2)
        Selection(kinds=('feature',), layers=(2,))
    """
    return _selection(("feature",), layers)


def error_nodes(layers: int | Iterable[int] | None = None) -> Selection:
    """Select the error nodes of the transcoders in some or all layers.

    Args:
        layers: layers of the original model, from 0; None for all layers with an error node.

    Raises:
        InputError: `layers` contains values that are not numbers, are negative, or are repeated.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.error_nodes()
        Selection(kinds=('error',), layers=None)
    """
    return _selection(("error",), layers)


def all_heads(layers: int | Iterable[int] | None = None) -> Selection:
    """Select all attention heads, neurons and transcoder nodes in some or all layers.

    Args:
        layers: layers of the original model, counted from 0; None for all.

    Raises:
        InputError: `layers` contains values that are not numbers, are negative, or are repeated.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.all_heads(layers=3)
        Selection(kinds=('attention', 'neuron', 'feature', 'skip', 'error'), layers=(3,))
    """
    return _selection(HEAD_KINDS, layers)


def _selection(kinds: tuple[HeadKind, ...], layers: object) -> Selection:
    if layers is None:
        return Selection(kinds)
    chosen = as_plain(layers)
    wanted = list(map(as_plain, chosen)) if isinstance(chosen, Iterable) else [chosen]
    expected = "expected source layers, counted from 0"
    reasons = [f"got layer {layer!r}; {expected}" for layer in wanted if not is_count(layer)]
    repeated = sorted({str(layer) for layer in wanted if wanted.count(layer) > 1})
    reasons += [f"got layer {layer} more than once; expected each layer once" for layer in repeated]
    reasons += [f"got no layers; {expected}, or None for all"] * (not wanted)
    InputError.raise_if(reasons, "these layers cannot be selected")
    return Selection(kinds, tuple(wanted))


def hook_name(model: Any, layer: int, part: Part, kind: HeadKind = "attention") -> str:
    """Return the name of the hook point at which the given part of a layer's heads is patched."""
    return host_of(model).hook_name(layer, kind, _POINTS[part])


def resolve_sites(model: Any, sites: Sites) -> tuple[LayerSites, ...]:
    """Return the sites of a model that a selection, or a list of names, refers to."""
    InputError.raise_if(reasons_without_heads(model) or host_of(model).reasons(), _PROBLEM)
    if isinstance(sites, Selection):
        counts = head_counts(model)
        layers = range(len(counts)) if sites.layers is None else sorted(sites.layers)
        expected = f"expected source layers from 0 to {len(counts) - 1}"
        unknown = [f"got layer {layer}; {expected}" for layer in layers if layer >= len(counts)]
        InputError.raise_if(unknown, _PROBLEM)
        selected = tuple(
            _all_heads(layer, kind, counts[layer][kind])
            for layer in layers
            for kind in counts[layer]
            if kind in sites.kinds
        )
        if not selected:
            kinds = " or ".join(sites.kinds)
            raise InputError([f"got heads of kind {kinds}; these layers have none"], _PROBLEM)
        return selected
    names, reasons = _names(model, sites)
    InputError.raise_if(reasons, _PROBLEM)
    groups = groupby(sorted(names, key=_order), lambda name: (name.layer, name.kind))
    return tuple(LayerSites.of(heads) for _, heads in groups)


def without_wide(sites: Sites) -> Sites:
    """Return a selection without skip and error nodes, which have no gates or head matrices.

    A list of names is returned unchanged; `wide_reasons` refuses names of these nodes.
    """
    if not isinstance(sites, Selection):
        return sites
    kinds = tuple(kind for kind in sites.kinds if kind not in WIDE_KINDS)
    return replace(sites, kinds=kinds or sites.kinds)


def wide_reasons(sites: Iterable[LayerSites]) -> list[str]:
    """Return an error message for each skip node and error node."""
    return [
        f"got {site.names[0]}, one of the {HEAD_PLURALS[site.kind]}, whose z is a vector of "
        "d_model numbers; expected attention heads, neurons or features"
        for site in sites
        if site.kind in WIDE_KINDS
    ]


def split_positions(sites: Sites) -> list[tuple[str, int | str | None]] | None:
    """Split names such as `L3N7@13` or `L3N7@subject` into a head's name and a position or role.

    Return None if no name has a position.
    """
    chosen = as_plain(sites)
    names = [chosen] if isinstance(chosen, str | HeadName) else chosen
    if not isinstance(names, list | tuple) or not any("@" in str(name) for name in names):
        return None
    parsed: list[tuple[str, int | str | None]] = []
    reasons: list[str] = []
    for name in map(str, names):
        if match := _HEAD_AND_POSITION.fullmatch(name):
            head, number, role = match.groups()
            parsed.append((head, role if number is None else int(number)))
        else:
            reasons.append(
                f"got {name!r}; expected a position after @, such as 'L3N7@13', or a role, such as "
                "'L3N7@subject'"
            )
    InputError.raise_if(reasons, _PROBLEM)
    return parsed


def _order(name: HeadName) -> tuple[int, str, int]:
    return name.layer, name.kind, name.index


def _all_heads(layer: int, kind: HeadKind, count: int) -> LayerSites:
    index = torch.arange(count, device="cpu")
    names = _all_names(layer, kind, count)
    return LayerSites(layer, kind, names, index)


@lru_cache(maxsize=1024)  # without a cache, names would slow attribution noticeably
def _all_names(layer: int, kind: HeadKind, count: int) -> tuple[str, ...]:
    first = str(HeadName(layer, kind, 0))
    if kind in WIDE_KINDS:
        return (first,)
    stem = first.removesuffix("0")
    return tuple(f"{stem}{index}" for index in range(count))


def _names(model: Any, sites: object) -> tuple[list[HeadName], list[str]]:
    """Return the parsed names, and an error message for each name that is not in the model."""
    if isinstance(sites, str) and sites in _SELECTIONS:
        return [], [f"got {sites!r}; expected the selection patching.{_SELECTIONS[sites]}"]
    chosen = [sites] if isinstance(sites, str | HeadName) else as_plain(sites)
    if not isinstance(chosen, list | tuple) or not chosen:
        got = "an empty list" if isinstance(chosen, list | tuple) else type(chosen).__name__
        return [], [
            f"got {got}; expected neuron_heads(), heads(), all_heads(), with transcoders also "
            "features() or error_nodes(), or a list of names such as 'L5H3' and 'L5N1234'"
        ]
    names, reasons, layers = list[HeadName](), list[str](), head_counts(model)
    transcoders = any("feature" in kinds for kinds in layers)
    for site in chosen:
        try:
            name = site if isinstance(site, HeadName) else HeadName.parse(site)
        except UnknownHeadError:
            reasons.append(unreadable_name(site, transcoders))
            continue
        try:
            name.require_among(layers)
        except UnknownHeadError as error:
            reasons.append(str(error))
        else:
            names.append(name)
    repeated = [str(name) for name, count in Counter(names).items() if count > 1]
    reasons += [f"got {name} more than once; expected each name once" for name in repeated]
    return names, reasons
