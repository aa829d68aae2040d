"""The result of a comparison: frames by component, both circuits, and their overlap."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from typing_extensions import TypedDict

from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage import Document, FileDigest, check_files, file_digests, open_folder
from attn_only_lens.storage.tables import TableFields, read_table, write_table

_FRAMES = ("heads", "neurons", "new", "silent", "circuits", "nodes", "edges")
_MANIFEST = "comparison.json"


class _Manifest(TypedDict):
    tokens: list[str]
    about: dict[str, Any]
    files: dict[str, FileDigest]


_DOCUMENT = Document("attn_only_lens.Comparison", 3, _Manifest)
_FRAME_DOCUMENT = Document("attn_only_lens.ComparisonFrame", 1, TableFields)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """A model and one grown from it, component by component. Made by `compare`.

    Columns of `heads` and `neurons`, a row for each component of the original:

        name, grown_name, kind, layer, grown_layer
        divergence, divergence_se     of its pattern: Jensen–Shannon, in bits, from 0 to 1
        cosine, norm_ratio            of its output (missing if it writes nothing in either)
        attribution, grown_attribution, attribution_change, attribution_change_se
                                      estimate of how much of the metric is lost with another
                                      prompt's activation, and the standard error of the mean
        patching, grown_patching, patching_change
                                      the same, measured, on the first batch (missing if a
                                      component is not among the largest)
        null_…                        the same between the grown model and the null, if there is one

    Attributes:
        heads: attention heads of the original.
        neurons: its neurons, without silent ones.
        new: a row for each component of the grown model alone: `grown_name`, `kind`,
            `grown_layer`, `attribution`, `attribution_se`, `share` (of the clean run's metric less
            the corrupted run's), `norm` (root mean square of its output at a token), `patching`;
            and `null_share`, of the component of that name in the null.
        silent: neurons whose output is never larger than a rounding of their layer's output in
            either model (`comparison/statistics.py`), so that their patterns are noise: `name`,
            `grown_name`, `kind`, `layer`, `grown_layer`. The other frames omit them.
        circuits: the overlap of circuits, a row for "nodes" and for each kind of "edges", for the
            pairs "grown" (original, grown model) and "null model" (grown model, null): the sizes
            `original` and `grown` of the two, `kept`, `lost`, `gained`, `jaccard` and
            `rank_correlation`, each of these with `_low` and `_high`.
        nodes: of either circuit, by names of the grown model: `id`, `kind`, `layer`, `name`,
            `position`, `original_name` (missing if new), `status`, `effect`, `grown_effect`.
        edges: of either circuit: `source`, `target`, `kind`, `status`, `weight`, `grown_weight`.
        tokens: of the first prompt of the first batch, as texts.
        about: models, settings, the metric and its values, faithfulness of the circuits.
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
        """Summarize the changes by layer of the original and kind.

        Returns:
            A row for each kind of component in each layer: `layer`, `kind`, `components`, how many
            more are `silent`, and the means of `divergence`, `cosine`, `norm_ratio` and
            |`attribution_change`|, without missing values; for the null, if there is one, `null_…`.
        """
        frame = pd.concat([self.heads, self.neurons], ignore_index=True)
        prefixes = ("", "null_") if "null_divergence" in frame else ("",)
        changes = [f"{prefix}attribution_change" for prefix in prefixes]
        frame[changes] = frame[changes].abs()
        measures = ("divergence", "cosine", "norm_ratio", "attribution_change")
        columns = [f"{prefix}{measure}" for measure in measures for prefix in prefixes]
        groups, silent = (rows.groupby(["layer", "kind"]) for rows in (frame, self.silent))
        sizes = {"components": groups.size(), "silent": silent.size()}
        counts = pd.DataFrame(sizes).fillna(0).astype(int)  # a layer may be silent throughout
        return counts.join(groups[columns].mean()).reset_index()

    def save(self, folder: str | Path) -> Path:
        """Write every frame as CSV with a JSON document next to it, and `comparison.json`.

        Args:
            folder: created if necessary; files of an earlier comparison there are replaced.

        Returns:
            The folder.

        Raises:
            CheckpointError: a file has that name, or the folder cannot be written.
        """
        there = open_folder(folder)
        for name in _FRAMES:
            write_table(there / f"{name}.csv", getattr(self, name), _FRAME_DOCUMENT)
        # Last: until then the folder is the earlier comparison's, and damaged.
        files = file_digests(there, _files())
        about = _finite(dict(self.about))
        _DOCUMENT.write(there / _MANIFEST, tokens=self.tokens, about=about, files=files)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> "Comparison":
        """Load what `save` wrote; numbers in `about` that were not finite are None.

        Raises:
            CheckpointError: it is missing, damaged, or of another version.
        """
        there = open_folder(folder)
        manifest = _DOCUMENT.read(there / _MANIFEST)
        if manifest["files"].keys() != _files():
            got, expected = sorted(manifest["files"]), sorted(_files())
            raise CheckpointError(f"{there} has files {got}; expected {expected}")
        check_files(there, manifest["files"])
        frames = {name: read_table(there / f"{name}.csv", _FRAME_DOCUMENT)[0] for name in _FRAMES}
        for frame in frames.values():  # an empty name is a missing one
            texts = frame.select_dtypes(exclude="number")
            frame[texts.columns] = texts.where(texts != "")
        return cls(**frames, tokens=tuple(manifest["tokens"]), about=manifest["about"])

    def __repr__(self) -> str:
        nodes = self.circuits.iloc[0]
        return (
            f"Comparison of {self.about['model']} with the model that it grew into, on "
            f"{self.about['n_prompts']} prompts: {len(self.heads)} heads, {len(self.neurons)} "
            f"neurons ({len(self.silent)} more are silent), {len(self.new)} new; of the circuits' "
            f"nodes {nodes['kept']:.0f} are kept, {nodes['lost']:.0f} lost, {nodes['gained']:.0f} "
            "gained"
        )


def _files() -> set[str]:
    return {f"{name}.csv{end}" for name in _FRAMES for end in ("", ".json")}


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
