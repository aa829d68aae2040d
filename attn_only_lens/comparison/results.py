"""What a comparison found: frames by component, the two circuits, and what they have in common."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pandas as pd

from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage import Document, FileDigest, check_files, file_digests, open_folder
from attn_only_lens.storage.tables import TableFields, read_table, write_table

__all__ = ["Comparison"]

_FRAMES = ("heads", "neurons", "new", "silent", "circuits", "nodes", "edges")
_SAID = "comparison.json"


class _Comparison(TypedDict):
    tokens: list[str]
    about: dict[str, Any]
    files: dict[str, FileDigest]


_DOCUMENT = Document("attn_only_lens.Comparison", 3, _Comparison)
_FRAME_DOCUMENT = Document("attn_only_lens.ComparisonFrame", 1, TableFields)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """A model and one grown from it, component by component. Made by `compare`.

    Columns of `heads` and `neurons`, a row for each component of the original:

        name, grown_name, kind, layer, grown_layer
        divergence, divergence_se     of its pattern: Jensen–Shannon, in bits, from 0 to 1
        cosine, norm_ratio            of what it writes (missing where either writes nothing)
        attribution, grown_attribution, attribution_change, attribution_change_se
                                      what the metric loses by another prompt's activation, an
                                      estimate, in units of the metric; and the mean's error
        patching, grown_patching, patching_change
                                      the same, measured, on the first batch (missing where a
                                      component is not among the largest)
        null_…                        the same between the grown model and the null, if there is one

    Attributes:
        heads: attention heads of the original.
        neurons: its neurons, but for silent ones.
        new: a row for each component that the original has not: `grown_name`, `kind`,
            `grown_layer`, `attribution`, `attribution_se`, `share` (of the clean run's metric less
            the other run's), `norm` (root mean square of what it writes at a token), `patching`;
            and `null_share`, of the component of that name in the null.
        silent: the original's neurons that are in none of the above: in neither model did they put
            out more than roundings of what their layer does, on any token, so that their patterns
            are noise (`comparison/streaming.py`). `name`, `grown_name`, `kind`, `layer`,
            `grown_layer`.
        circuits: what the circuits have in common, a row for "nodes" and for each kind of "edges",
            of the pair "grown" (with the original) and "null model" (with the null): how many the
            `original` and the `grown` circuit have (of a null: the grown and the null's), `kept`,
            `lost`, `gained`, `jaccard` and `rank_correlation`, each with `_low` and `_high`.
        nodes: of either circuit, by names of the grown model: `id`, `kind`, `layer`, `name`,
            `position`, `original_name` (missing where new), `status`, `effect`, `grown_effect`.
        edges: of either: `source`, `target`, `kind`, `status`, `weight`, `grown_weight`.
        tokens: of the first prompt of the first batch, as texts.
        about: what was compared: models, the metric and its values, faithfulness of the circuits.
    """

    heads: pd.DataFrame
    neurons: pd.DataFrame
    new: pd.DataFrame
    silent: pd.DataFrame
    circuits: pd.DataFrame
    nodes: pd.DataFrame
    edges: pd.DataFrame
    tokens: tuple[str, ...]
    about: Mapping[str, Any]

    def summary(self) -> pd.DataFrame:
        """What changed, by layer of the original and kind; with a null, beside it.

        Returns:
            A row for each kind of component in each layer: `layer`, `kind`, `components`, how many
            more are `silent`, and the means of `divergence`, `cosine`, `norm_ratio`,
            |`attribution_change`| over the components (of cosine and norm ratio: over those that
            write); the same of the null, as `null_…`.
        """
        every = pd.concat([self.heads, self.neurons], ignore_index=True)
        prefixes = ("", "null_") if "null_divergence" in every else ("",)
        for prefix in prefixes:
            every[f"{prefix}attribution_change"] = every[f"{prefix}attribution_change"].abs()
        measures = ("divergence", "cosine", "norm_ratio", "attribution_change")
        columns = [f"{prefix}{measure}" for measure in measures for prefix in prefixes]
        groups, silent = (each.groupby(["layer", "kind"]) for each in (every, self.silent))
        sizes = {"components": groups.size(), "silent": silent.size()}
        counts = pd.DataFrame(sizes).fillna(0).astype(int)  # a layer may be silent throughout
        return counts.join(groups[columns].mean()).reset_index()

    def save(self, folder: str | Path) -> Path:
        """Write every frame as CSV, each with a JSON beside it, and `comparison.json`.

        Args:
            folder: where to; it is made, and files of an earlier comparison there are replaced.

        Returns:
            The folder.

        Raises:
            CheckpointError: there is a file in its place, or it cannot be written.
        """
        there = open_folder(folder)
        for name in _FRAMES:
            write_table(there / f"{name}.csv", getattr(self, name), _FRAME_DOCUMENT)
        # Last: until then the folder is that of the earlier comparison, and damaged.
        files = file_digests(there, _files())
        about = _finite(dict(self.about))
        _DOCUMENT.write(there / _SAID, tokens=self.tokens, about=about, files=files)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "Comparison":
        """Read what `save` wrote; numbers in `about` that were not finite are None.

        Raises:
            CheckpointError: it is missing, damaged, or of another version.
        """
        there = open_folder(folder)
        said = _DOCUMENT.read(there / _SAID)
        if said["files"].keys() != _files():
            raise CheckpointError(f"{there} has files {sorted(said['files'])}; expected {_files()}")
        check_files(there, said["files"])
        frames = {name: read_table(there / f"{name}.csv", _FRAME_DOCUMENT)[0] for name in _FRAMES}
        for frame in frames.values():  # no name is empty: it is missing
            texts = frame.select_dtypes(exclude="number")
            frame[texts.columns] = texts.where(texts != "")
        return cls(**frames, tokens=tuple(said["tokens"]), about=said["about"])

    def __repr__(self) -> str:
        nodes = self.circuits.iloc[0]
        return (
            f"Comparison of {self.about['model']} with what it grew into, on "
            f"{self.about['n_prompts']} prompts: {len(self.heads)} heads, {len(self.neurons)} "
            f"neurons ({len(self.silent)} more are silent), {len(self.new)} new; of the circuits' "
            f"nodes {nodes['kept']:.0f} are kept, {nodes['lost']:.0f} lost, {nodes['gained']:.0f} "
            "gained"
        )


def _files() -> set[str]:
    return {f"{name}.csv{end}" for name in _FRAMES for end in ("", ".json")}


def _finite(value: Any) -> Any:
    """The same as JSON has it, with None for numbers that JSON has not."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
