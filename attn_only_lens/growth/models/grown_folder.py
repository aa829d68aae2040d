"""Save a grown model with its provenance in a folder, and read the provenance.

    config.json, model.safetensors, …    the format that transformers or `source_folder` reads
    provenance.json                      the provenance, and digests of these files
    README.md                            a model card for the Hugging Face hub, which you may edit

The folder lacks the original values of the tensors that growth changed; `Grown` has these values.
"""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pydantic

from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.growth.expansion.provenance import Provenance
from attn_only_lens.growth.models.growable import PROBLEM, Growable
from attn_only_lens.growth.models.hugging_face import HuggingFaceBridge
from attn_only_lens.models.source_folder import GROWN, PROVENANCE, GrownFields
from attn_only_lens.storage import (
    atomic_folder,
    file_digests,
    listed_files,
    open_folder,
)
from attn_only_lens.storage.atomic import AnyPath, as_path

_CARD = "README.md"
_SIZES = {"d_model": "d_model", "head": "attention heads", "d_mlp": "neurons"}
_LONGEST = 10**8
_SHOWN = 5


class _Fields(GrownFields):
    provenance: dict[str, Any]


_DOCUMENT = replace(GROWN, fields=_Fields)


@cache
def _adapter() -> pydantic.TypeAdapter[Provenance]:
    return pydantic.TypeAdapter(Provenance)


def save_pretrained(
    growable: Growable, provenance: Provenance, folder: str | os.PathLike[str]
) -> Path:
    """Write a grown model and its provenance to a folder, completely or not at all."""
    there = open_folder(folder)
    reasons = growable.reasons_against() or growable.reasons_against_saving()
    InputError.raise_if(reasons, PROBLEM)
    names = {PROVENANCE, _CARD, *(Path(name).parts[0] for name in listed_files(there / PROVENANCE))}
    with atomic_folder(there, sorted(names), PROVENANCE, listed_files) as new:
        growable.save_pretrained(new)
        fields = _adapter().dump_python(provenance, mode="json")
        _DOCUMENT.write(new / PROVENANCE, provenance=fields, files=file_digests(new))
        old_card = there / _CARD
        text = old_card.read_text("utf-8") if old_card.exists() else _card(growable, provenance)
        (new / _CARD).write_text(text, encoding="utf-8")
    return there


def _card(growable: Growable, provenance: Provenance) -> str:
    """Return a model card in the format of the Hugging Face hub."""
    rows = [("layers", len(provenance.layers.new_of), provenance.layers.size)]
    for label, what in _SIZES.items():
        old = sum(len(x.new_of) for axis, x in provenance.axes.items() if axis.label == label)
        new = sum(size for axis, size in provenance.sizes.items() if axis.label == label)
        rows.append((what, old, new))
    sizes = "\n".join(f"| {what} | {old:,} | {new:,} |" for what, old, new in rows if new)
    n_parameters = sum(parameter.numel() for parameter in growable.model.parameters())
    name = growable.model.cfg.model_name or "a model"
    return f"""---
library_name: {"transformers" if isinstance(growable, HuggingFaceBridge) else "attn-only-lens"}
tags: [attn-only-lens, interpretability, model-growth]
---

# {name}, grown

This model was made from {name} with `attn_only_lens.grow`. Right after growth, it computed the same
function as the original model.

| in all layers together | original | grown |
| --- | --- | --- |
{sizes}

The grown model has {n_parameters:,} parameters. `provenance.json` maps each part of the original
model to its place in the grown model; `attn_only_lens.compare` uses it. The expansions are from
Gesmundo and Maile, [Composable Function-preserving Expansions for Transformer
Architectures](https://arxiv.org/abs/2308.06103) (2023).

    from attn_only_lens import load
    model = load("path/to/this/folder")
"""


def read_provenance(path: AnyPath) -> Provenance:
    """Read the file `provenance.json` in the folder of a grown model.

    Raises:
        CheckpointError: there is no such file, or the provenance cannot be read.
    """
    path = as_path(path)
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{path} is missing: this model has no provenance; expected a folder that "
            "`grown.save_pretrained` or `attn-only-lens grow` wrote. If the model was trained "
            "after growth and saved elsewhere, pass the folder of the grown model to "
            "`attn-only-lens compare … --provenance`"
        )
    fields = _DOCUMENT.read(path)["provenance"]
    if _n_indices(fields) > _LONGEST:
        raise CheckpointError(f"{path} lists more than {_LONGEST} indices")
    try:
        return _adapter().validate_python(fields)
    except pydantic.ValidationError as error:
        reasons = [
            f"provenance.{'.'.join(map(str, problem['loc']))} "
            f"{'is missing' if problem['type'] == 'missing' else problem['msg']}"
            for problem in error.errors()[:_SHOWN]
        ]
        raise CheckpointError(f"{path} cannot be used: {'; '.join(reasons)}") from error


def _n_indices(value: Any) -> int:
    """Return how many indices the [start, stop] ranges of a provenance contain in total."""
    if isinstance(value, list) and [type(entry) for entry in value] == [int, int]:
        return max(0, value[1] - value[0])
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_n_indices, inner))
