"""A grown model as a folder, with its provenance.

    config.json, model.safetensors, …    as transformers or `source_folder` reads them
    provenance.json                      the provenance, and digests of the other files

It does not hold the tensors that growth overwrote, which `Grown.shrink` needs.
"""

import os
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from attn_only_lens.errors import CheckpointError, GrowthError
from attn_only_lens.expansion import Axis, Provenance
from attn_only_lens.expansion.provenance import IndexMap, Shares, TiedEntries, ZeroEntries
from attn_only_lens.expansion.weights import Constants, Identity
from attn_only_lens.growth.growable import PROBLEM, Growable
from attn_only_lens.models.source_folder import GROWN, PROVENANCE, GrownFields
from attn_only_lens.storage import (
    atomic_folder,
    file_digests,
    listed_files,
    open_folder,
    path_inside,
)

_Runs = list[tuple[int, int]]
_LONGEST = 10**8


class _IndexMap(TypedDict):
    new_of: _Runs
    size: int


class _Shares(TypedDict):
    axis: tuple[str, int | None]
    new: _Runs
    of: _Runs
    share: list[float]
    written: list[str]


class _Provenance(TypedDict):
    layers: _IndexMap
    axes: list[tuple[str, int | None, _IndexMap]]
    sizes: list[tuple[str, int | None, int]]
    constants: Constants
    like: list[tuple[int, int]]
    scales: dict[str, float]
    activation_scales: dict[str, float]
    zeros: list[tuple[str, list[_Runs], int]]
    ties: list[tuple[str, list[_Runs], int, _Runs, float, int]]
    shares: list[_Shares]
    centred: bool
    source: Identity | None


class _Fields(GrownFields):
    provenance: _Provenance


_DOCUMENT = replace(GROWN, fields=_Fields)


def save_pretrained(
    growable: Growable, provenance: Provenance, folder: str | os.PathLike[str]
) -> Path:
    """Write a grown model and its provenance to a folder, all of it or nothing."""
    there = open_folder(folder)
    reasons = growable.reasons_against() or growable.reasons_against_saving()
    GrowthError.raise_if(reasons, PROBLEM)
    names = {PROVENANCE, *(Path(name).parts[0] for name in listed_files(there / PROVENANCE))}
    with atomic_folder(there, sorted(names), PROVENANCE, listed_files) as new:
        growable.save_pretrained(new)
        _DOCUMENT.write(new / PROVENANCE, provenance=_to_json(provenance), files=file_digests(new))
    return there


def read_provenance(folder: str | os.PathLike[str]) -> Provenance:
    """Read the provenance from a folder that `Grown.save_pretrained` or the command `grow` wrote.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = path_inside(open_folder(folder), PROVENANCE)
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing: this model has no provenance; expected a folder that "
            "`grown.save_pretrained` or `attn-only-lens grow` wrote (for a model trained since and "
            "saved elsewhere, `attn-only-lens compare … --provenance` takes that folder)"
        )
    provenance = _DOCUMENT.read(path)["provenance"]
    if _length(provenance) > _LONGEST:
        raise CheckpointError(f"{path} lists more than {_LONGEST} indices")
    try:
        return _from_json(provenance)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no readable provenance: {error}") from error


def _length(value: Any) -> int:
    """The number of indices in all runs of a provenance."""
    if isinstance(value, list) and [type(entry) for entry in value] == [int, int]:
        return max(0, value[1] - value[0])
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_length, inner))


def _to_json(provenance: Provenance) -> dict[str, Any]:
    return {
        "layers": _map_to_json(provenance.layers),
        "axes": [[*axis, _map_to_json(item)] for axis, item in provenance.axes.items()],
        "sizes": [[*axis, size] for axis, size in provenance.sizes.items()],
        "constants": asdict(provenance.constants),
        "like": list(provenance.like.items()),
        "scales": dict(provenance.scales),
        "activation_scales": dict(provenance.activation_scales),
        "zeros": [
            [zero.name, list(map(_runs, zero.indices)), zero.since] for zero in provenance.zeros
        ],
        "ties": [
            [x.name, list(map(_runs, x.indices)), x.dim, _runs(x.of), x.factor, x.since]
            for x in provenance.ties
        ],
        "shares": [
            vars(x) | {"new": _runs(x.new), "of": _runs(x.of), "written": sorted(x.written)}
            for x in provenance.shares
        ],
        "centred": provenance.centred,
        "source": None if provenance.source is None else asdict(provenance.source),
    }


def _from_json(data: dict[str, Any]) -> Provenance:
    constants = data["constants"]
    types, source = constants["attn_types"], data["source"]
    marks = {name: tuple(mark) for name, mark in source["marks"].items()} if source else {}
    constants |= {"attn_types": types and tuple(types), "init": tuple(constants["init"])}
    return Provenance(
        layers=_index_map(data["layers"]),
        axes={Axis(label, layer): _index_map(item) for label, layer, item in data["axes"]},
        sizes={Axis(label, layer): size for label, layer, size in data["sizes"]},
        constants=Constants(**constants),
        like=dict(data["like"]),
        scales=data["scales"],
        activation_scales=data["activation_scales"],
        zeros=tuple(
            ZeroEntries(name, tuple(map(_indices, runs)), since=since)
            for name, runs, since in data["zeros"]
        ),
        ties=tuple(
            TiedEntries(name, tuple(map(_indices, runs)), dim, _indices(of), factor, since=since)
            for name, runs, dim, of, factor, since in data["ties"]
        ),
        shares=tuple(
            Shares(
                Axis(*item["axis"]),
                *(_indices(item["new"]), _indices(item["of"])),
                *(tuple(item["share"]), frozenset(item["written"])),
            )
            for item in data["shares"]
        ),
        centred=data["centred"],
        source=source and Identity(marks, source["precision"]),
    )


def _map_to_json(indices: IndexMap) -> dict[str, Any]:
    return {"new_of": _runs(indices.new_of), "size": indices.size}


def _index_map(data: dict[str, Any]) -> IndexMap:
    return IndexMap(_indices(data["new_of"]), data["size"])


def _runs(indices: tuple[int, ...]) -> list[tuple[int, int]]:
    """Runs of successive indices, as start and stop: mostly one."""
    runs = (list(run) for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]))
    return [(run[0][1], run[-1][1] + 1) for run in runs]


def _indices(runs: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(index for start, stop in runs for index in range(start, stop))
