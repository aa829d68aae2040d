"""Sites: the heads to patch and where, selected by name or by kind, and the part of each head."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.arguments import a_type, as_plain, is_count
from attn_only_lens.engine.positions import Positions
from attn_only_lens.errors import InputError
from attn_only_lens.heads import HeadName, host_of, reasons_without_heads
from attn_only_lens.heads.host import HEAD_KINDS, HEAD_PLURALS, WIDE_KINDS, HeadKind
from attn_only_lens.heads.names import (
    expert_counts,
    head_counts,
    head_labels,
    place_of,
    unreadable_name,
)

Part = Literal["z", "pattern", "value", "q", "k"]
PARTS: tuple[str, ...] = get_args(Part)
SHARED_PARTS: tuple[Part, ...] = ("value", "k")
"""The parts that several attention heads share in models with grouped queries."""
_HEAD_AND_POSITION = re.compile(r"([^@]*)(?:@(?:(0|-?[1-9]\d*)|([^\W\d][^@]*)))?")
_POINTS: dict[Part, str] = {"z": "z", "pattern": "pattern", "value": "v", "q": "q", "k": "k"}
_PROBLEM = "these heads cannot be selected"
KINDS: dict[str, tuple[HeadKind, ...]] = {
    "all": tuple(kind for kind in HEAD_KINDS if kind != "router"),
    "heads": ("attention",),
    "neurons": ("neuron",),
    "features": ("feature",),
    "skips": ("skip",),
    "errors": ("error",),
    "routers": ("router",),
}
"""The words that select heads by kind.

A router is not among "all", because its output changes only through the neurons of its experts.
"""
_WORDS = ", ".join(map(repr, KINDS))

Heads: TypeAlias = str | HeadName | Sequence[str | HeadName]


@dataclass(frozen=True)
class Sites:
    """A selection of heads at some positions, for any model and prompts.

    A function's argument `sites` is a `Sites`, or its first field alone: `sites="neurons"`.

    Attributes:
        heads: "all"; "heads", for attention heads; "neurons"; with transcoders also "features",
            "skips" and "errors" (skip nodes and error nodes); in a mixture of experts also
            "routers"; several of these words; or a list of
            names such as "L5H3" and "L5N1234". A name can include a position or a role:
            "L5H3@13", "L5H3@subject".
        positions: "each" in turn, "all" at once, a number (-1 is each prompt's last token), "roles"
            for every role of the contrast in turn, the name of a role, or a list of numbers or of
            roles. If prompts differ in length, "each" is all roles, and numbers from 0 are an
            error, unless each row is about one prompt (`per_prompt`).
        layers: layers of the original model, counted from 0; None for all. Not for names.

    Raises:
        InputError: `layers` contains values that are not numbers, are negative or are repeated, or
            is given with names.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.Sites("neurons", layers=[8, 9], positions=-1)
        Sites(heads=('neurons',), positions=-1, layers=(8, 9))
        >>> p.Sites(["L5H3", "L5N1234"], "end")
        Sites(heads=('L5H3', 'L5N1234'), positions='end', layers=None)
    """

    heads: Heads = "all"
    positions: Positions = "each"
    layers: int | Iterable[int] | None = None

    def __post_init__(self) -> None:
        heads = as_plain(self.heads)
        heads = (heads,) if isinstance(heads, str | HeadName) else heads
        positions = as_plain(self.positions)
        positions = tuple(positions) if isinstance(positions, list | range) else positions
        object.__setattr__(self, "heads", tuple(heads) if isinstance(heads, list) else heads)
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "layers", self._checked_layers())

    def _checked_layers(self) -> tuple[int, ...] | None:
        if self.layers is None:
            return None
        chosen = as_plain(self.layers)
        wanted = list(map(as_plain, chosen)) if isinstance(chosen, Iterable) else [chosen]
        expected = "expected source layers, counted from 0"
        reasons = [f"got layer {layer!r}; {expected}" for layer in wanted if not is_count(layer)]
        repeated = sorted({str(layer) for layer in wanted if wanted.count(layer) > 1})
        reasons += [
            f"got layer {layer} more than once; expected each layer once" for layer in repeated
        ]
        reasons += [f"got no layers; {expected}, or None for all"] * (not wanted)
        if not self.kinds:
            heads = self.heads if isinstance(self.heads, tuple) else ()
            words = [repr(word) for word in heads if str(word).isalpha() and word not in KINDS]
            reasons.append(
                f"got {', '.join(words)}; expected words ({_WORDS}), or no layers with names"
                if words
                else "got layers and names of heads; give only one of the two"
            )
        InputError.raise_if(reasons, "these layers cannot be selected")
        return tuple(wanted)

    @classmethod
    def of(cls, sites: object) -> "Sites":
        """Return sites unchanged; convert heads alone to sites at each position."""
        return sites if isinstance(sites, Sites) else cls(sites)  # type: ignore[arg-type]

    @classmethod
    def of_kinds(cls, kinds: Iterable[HeadKind], layers: Iterable[int] | None = None) -> "Sites":
        """Select all heads of these kinds."""
        words = {kind: word for word, (kind, *others) in KINDS.items() if not others}
        return cls([words[kind] for kind in kinds], layers=layers)

    @property
    def kinds(self) -> tuple[HeadKind, ...]:
        """The kinds of heads that are selected, or () if heads are selected by name."""
        words = [str(word) for word in self.heads] if isinstance(self.heads, tuple) else []
        if not words or any(word not in KINDS for word in words):
            return ()
        return tuple(kind for kind in HEAD_KINDS if any(kind in KINDS[word] for word in words))

    def without(self, *kinds: HeadKind) -> "Sites":
        """Leave out heads of these kinds if heads are selected by kind and others remain."""
        kept = tuple(kind for kind in self.kinds if kind not in kinds)
        if len(kept) in (0, len(self.kinds)):
            return self
        return replace(Sites.of_kinds(kept), positions=self.positions, layers=self.layers)

    def split(self) -> list[tuple[str, int | str | None]] | None:
        """Split names such as `L3N7@13` into a head's name and a position or role.

        Return None if no name has a position.
        """
        if not isinstance(self.heads, tuple) or not any("@" in str(name) for name in self.heads):
            return None
        parsed: list[tuple[str, int | str | None]] = []
        reasons: list[str] = []
        for name in map(str, self.heads):
            if match := _HEAD_AND_POSITION.fullmatch(name):
                head, number, role = match.groups()
                parsed.append((head, role if number is None else int(number)))
            else:
                reasons.append(
                    f"got {name!r}; expected a position after @, such as 'L3N7@13', or a role, "
                    "such as 'L3N7@subject'"
                )
        InputError.raise_if(reasons, _PROBLEM)
        return parsed


SomeSites: TypeAlias = Sites | Heads
"""What functions take as sites: heads alone are sites at each position."""


@dataclass(frozen=True, eq=False)
class LayerSites:
    """Sites of one kind in one layer of the original model, sorted by `index`.

    Attributes:
        layer: the layer in the original model.
        kind: "attention", "neuron", "feature", "skip", "error" or "router".
        names: `L5H3`, `L5N1234`, ….
        index: the index of each head on the axis `head_index`; 0 for skip, error and router nodes.
    """

    layer: int
    kind: HeadKind
    names: tuple[str, ...]
    index: Int[Tensor, "site"]

    @classmethod
    def of(cls, model: Any, heads: Iterable[HeadName]) -> "LayerSites":
        """Return the sites for one or more heads of one kind in one layer of a model."""
        heads = list(heads)
        index = torch.tensor([place_of(head, model) for head in heads], device="cpu")
        return cls(heads[0].layer, heads[0].kind, tuple(map(str, heads)), index)


def hook_name(model: Any, layer: int, part: Part, kind: HeadKind = "attention") -> str:
    """Return the name of the hook point at which the given part of a layer's heads is patched."""
    return host_of(model).hook_name(layer, kind, _POINTS[part])


def resolve_sites(model: Any, sites: SomeSites) -> tuple[LayerSites, ...]:
    """Return the heads of a model that a selection, or a list of names, refers to."""
    InputError.raise_if(reasons_without_heads(model) or host_of(model).reasons(), _PROBLEM)
    sites = Sites.of(sites)
    if sites.kinds:
        counts, chosen = head_counts(model), cast("tuple[int, ...] | None", sites.layers)
        layers = range(len(counts)) if chosen is None else sorted(chosen)
        expected = f"expected source layers from 0 to {len(counts) - 1}"
        unknown = [f"got layer {layer}; {expected}" for layer in layers if layer >= len(counts)]
        InputError.raise_if(unknown, _PROBLEM)
        selected = tuple(
            _all_heads(model, layer, kind)
            for layer in layers
            for kind in counts[layer]
            if kind in sites.kinds
        )
        if not selected:
            kinds = " or ".join(sites.kinds)
            raise InputError([f"got heads of kind {kinds}; these layers have none"], _PROBLEM)
        return selected
    names, reasons = _names(model, sites.heads)
    InputError.raise_if(reasons, _PROBLEM)
    groups = groupby(sorted(names, key=_order), lambda name: (name.layer, name.kind))
    return tuple(LayerSites.of(model, heads) for _, heads in groups)


def sites_of_rows(model: Any, rows: pd.DataFrame) -> tuple[LayerSites, ...]:
    """Return the heads in a frame with columns `layer`, `kind`, `index` and `name`.

    This is `resolve_sites` for names, without reading every name.
    """
    InputError.raise_if(reasons_without_heads(model) or host_of(model).reasons(), _PROBLEM)
    counts, groups = head_counts(model), list[LayerSites]()
    for key, some in rows.groupby(["layer", "kind"], observed=True)["index"]:
        layer, kind = cast("tuple[int, HeadKind]", key)
        index = np.unique(some.to_numpy())
        n_heads = counts[layer].get(kind, 0) if 0 <= layer < len(counts) else 0
        if index[0] < 0 or index[-1] >= n_heads:
            return resolve_sites(model, list(rows["name"].unique()))  # raises an error
        names = names_of(model, layer, kind)
        chosen = tuple(names[i] for i in index.tolist())
        groups.append(LayerSites(layer, kind, chosen, torch.from_numpy(index)))
    return tuple(groups)


def wide_reasons(sites: Iterable[LayerSites]) -> list[str]:
    """Return an error message for each skip node and error node."""
    return [
        f"got {site.names[0]}, one of the {HEAD_PLURALS[site.kind]}, whose z is a vector of "
        "d_model numbers; expected attention heads, neurons or features"
        for site in sites
        if site.kind in WIDE_KINDS
    ]


def whole_head_reasons(sites: Sites) -> list[str]:
    """Return an error message if sites have positions, for functions that have no use for them."""
    if sites.positions == "each":
        return []
    return [f"got positions={sites.positions!r}; expected heads without positions"]


def _order(name: HeadName) -> tuple[int, str, float, int]:
    """Return a key that sorts neurons of shared experts after those of other experts."""
    expert = math.inf if name.expert is None else name.expert
    return name.layer, name.kind, expert, name.index


def _all_heads(model: Any, layer: int, kind: HeadKind) -> LayerSites:
    names = names_of(model, layer, kind)
    return LayerSites(layer, kind, names, torch.arange(len(names), device="cpu"))


def names_of(model: Any, layer: int, kind: HeadKind) -> tuple[str, ...]:
    """Return the names of all heads of one kind in a layer, sorted by head_index."""
    host = host_of(model)
    return head_labels(layer, kind, host.count(layer, kind), *host.experts(layer, kind))


def _names(model: Any, sites: object) -> tuple[list[HeadName], list[str]]:
    """Return the parsed names, and an error message for each name that is not in the model."""
    expected = f"expected only words ({_WORDS}), or only names such as 'L5H3' and 'L5N1234'"
    if not isinstance(sites, tuple) or not sites:
        got = "an empty list" if isinstance(sites, tuple) else a_type(sites)
        return [], [f"got {got}; {expected}"]
    names, reasons, layers = list[HeadName](), list[str](), head_counts(model)
    experts = expert_counts(model)
    transcoders = any("feature" in kinds for kinds in layers)
    for site in sites:
        try:
            name = site if isinstance(site, HeadName) else HeadName.parse(site)
        except InputError:
            is_word = str(site).isalpha()
            reasons.append(
                f"got {site!r}; {expected}" if is_word else unreadable_name(site, transcoders)
            )
            continue
        try:
            name.require_among(layers, experts)
        except InputError as error:
            reasons += error.reasons
        else:
            names.append(name)
    repeated = [str(name) for name, count in Counter(names).items() if count > 1]
    reasons += [f"got {name} more than once; expected each name once" for name in repeated]
    return names, reasons
