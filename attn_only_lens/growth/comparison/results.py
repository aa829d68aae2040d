"""The result of comparing two models: one row per component, both circuits, and their overlap."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from typing_extensions import TypedDict

from attn_only_lens.errors import CheckpointError
from attn_only_lens.storage import (
    Document,
    FileDigest,
    atomic_folder,
    check_files,
    file_digests,
    open_folder,
    require_replaceable,
)
from attn_only_lens.storage.atomic import AnyPath
from attn_only_lens.storage.tables import TableFields, read_table, write_table

_FRAMES = ("heads", "neurons", "new", "silent", "circuits", "parts", "nodes", "edges")
COMPARISON = "comparison.json"
_FILES = frozenset(f"{name}.csv{end}" for name in _FRAMES for end in ("", ".json"))
_OURS = (COMPARISON, *_FILES, "report.html", "circuit.html")  # and pages of the command `compare`
OLD_JOINED, NEW_LAYERS = "old, but only in the grown model's circuit", "in new layers"
JOINED = {
    OLD_JOINED: ("old site", "old sites"),
    "new neurons": ("new neuron", "new neurons"),
    "new heads": ("new head", "new heads"),
    NEW_LAYERS: ("site in new layers", "sites in new layers"),
}
"""Groups of sites that joined the original's circuit, in singular and plural."""


class _Manifest(TypedDict):
    tokens: list[str]
    about: dict[str, Any]
    files: dict[str, FileDigest]


_DOCUMENT = Document("attn_only_lens.Comparison", 6, _Manifest)
_FRAME_DOCUMENT = Document("attn_only_lens.ComparisonFrame", 1, TableFields)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The comparison of a model and its grown model, component by component. Made by `compare`.

    `heads` and `neurons` have one row per component of the original model. Their columns are:

        name, grown_name, kind, layer, grown_layer
        divergence, divergence_se     Jensen–Shannon divergence of its patterns, in bits, 0 to 1
        cosine, norm_ratio            of its outputs (missing if an output is always zero)
        drop, grown_drop, drop_change, drop_change_se
                                      how much the metric falls if the component's output is
                                      replaced by its output on the corrupted prompt, in units of
                                      the metric, on the first batch; and the standard error of the
                                      mean change over prompts (missing for one prompt)
        exact                         whether these drops were patched, or are estimates
        null_…                        the same between the grown and the null model, if there is one

    Attributes:
        heads: the original's attention heads.
        neurons: the original's neurons, without silent neurons.
        new: a frame with one row per component that only the grown model has: `grown_name`,
            `kind`, `grown_layer`, `norm` (root mean square of its output at a token), `drop`,
            `drop_se`, `share` (of the metric's range, clean minus corrupted), `exact`; and
            `null_drop` and `null_share`, of the null model's component with the same name.
        silent: neurons whose output never exceeds the rounding error of their layer's output in
            either model (`comparison/statistics.py`), so that their patterns are noise: `name`,
            `grown_name`, `kind`, `layer`, `grown_layer`. The other frames omit them.
        circuits: the overlap of the circuits of two models, the first and the second of `pair`:
            "original and grown" or "grown and null". Each pair has one row for "nodes" and for each
            kind of "edges": the sizes `first` and `second`, the counts `kept`, `lost`, `gained`,
            `jaccard` and `rank_correlation`, and for nodes the interval from `jaccard_low` to
            `jaccard_high` (missing without `resamples`; see `comparison/circuits.py`).
        parts: what became of the original's circuit: one row per group of sites, such as "in both
            circuits" or "new neurons", with `n_sites`, and its joint `drop` and `share` in the
            original, and `grown_drop` and `grown_share` in the grown model, all exact.
        nodes: nodes in either circuit, with the grown model's names: `id`, `kind`, `layer`, `name`,
            `position`, `original_name` (missing if new), `status`, and `share` and `grown_share`,
            the node's shares of what the circuits keep or, without edges, its effects in the
            ranking.
        edges: edges in either circuit: `source`, `target`, `kind`, `status`, `weight`,
            `grown_weight`.
        tokens: the tokens of the first batch's first prompt, as strings; or the roles, or "all
            positions", if these are the positions of the nodes.
        about: models, settings, the metric and its values, faithfulness of the circuits.
    """

    heads: pd.DataFrame
    neurons: pd.DataFrame
    new: pd.DataFrame
    silent: pd.DataFrame
    circuits: pd.DataFrame
    parts: pd.DataFrame
    nodes: pd.DataFrame
    edges: pd.DataFrame
    tokens: tuple[str, ...]
    about: Mapping[str, Any]

    @property
    def title(self) -> str:
        """What became of the circuit: "17 of the circuit's 25 sites are the same; joined: …"."""
        nodes = self.circuits.iloc[0]
        same = f"{nodes['kept']:.0f} of the circuit's {nodes['first']:.0f} sites are the same"
        rows = self.parts.set_index("part")[["n_sites", "grown_share"]]
        joined = [
            f"{n:.0f} {JOINED[part][n > 1]} ({share:.0%})"
            for part, n, share in rows[rows.index.isin(JOINED)].itertuples()
        ]
        return same + f"; joined: {', '.join(joined)}" * bool(joined)

    def summary(self) -> pd.DataFrame:
        """Summarize the changes for each layer of the original and each kind of component.

        Returns:
            A frame with one row for each kind of component in each layer: `layer`, `kind`, the
            number of `components`, the number of further `silent` components, and the means of
            `divergence`, `cosine`, `norm_ratio` and |`drop_change`|, without missing
            values. With a null model, `null_…` columns have the same means for that model.
        """
        frame = pd.concat([self.heads, self.neurons], ignore_index=True)
        prefixes = ("", "null_") if "null_divergence" in frame else ("",)
        changes = [f"{prefix}drop_change" for prefix in prefixes]
        frame[changes] = frame[changes].abs()
        measures = ("divergence", "cosine", "norm_ratio", "drop_change")
        columns = [f"{prefix}{measure}" for measure in measures for prefix in prefixes]
        groups, silent = (rows.groupby(["layer", "kind"]) for rows in (frame, self.silent))
        sizes = {"components": groups.size(), "silent": silent.size()}
        counts = pd.DataFrame(sizes).fillna(0).astype(int)  # NaN if all neurons are silent
        return counts.join(groups[columns].mean()).reset_index()

    @staticmethod
    def check_folder(folder: str | Path) -> Path:
        """Return a folder's resolved path; raise CheckpointError if `save` would refuse it."""
        return require_replaceable(folder, _OURS, COMPARISON)

    def save(self, folder: str | Path) -> Path:
        """Write `comparison.json` and each frame as a CSV file, completely or not at all.

        Args:
            folder: path of a new folder, or of an earlier comparison's, which is replaced with its
                pages `report.html` and `circuit.html`.

        Returns:
            The folder.

        Raises:
            CheckpointError: the path is a file, or a folder with other files; or the folder cannot
                be written.
        """
        about = _finite(dict(self.about))
        with atomic_folder(folder, _OURS, COMPARISON) as new:
            for name in _FRAMES:
                write_table(new / f"{name}.csv", getattr(self, name), _FRAME_DOCUMENT)
            files = file_digests(new, _FILES)
            _DOCUMENT.write(new / COMPARISON, tokens=self.tokens, about=about, files=files)
        return Path(folder)

    def __repr__(self) -> str:
        return (
            f"Comparison of {self.about['model']} with its grown model, on "
            f"{self.about['n_prompts']} prompts: {len(self.heads)} heads, {len(self.neurons)} "
            f"neurons ({len(self.silent)} more are silent), {len(self.new)} new. {self.title}"
        )


def read_comparison(folder: AnyPath) -> Comparison:
    """Read a folder that `save` wrote; values in `about` that were not finite become None.

    Raises:
        CheckpointError: the folder is missing, damaged, or has another format version.
    """
    there = open_folder(folder)
    manifest = _DOCUMENT.read(there / COMPARISON)
    if manifest["files"].keys() != _FILES:
        got, expected = sorted(manifest["files"]), sorted(_FILES)
        raise CheckpointError(f"{there} has files {got}; expected {expected}")
    check_files(there, manifest["files"])
    frames = {name: read_table(there / f"{name}.csv", _FRAME_DOCUMENT)[0] for name in _FRAMES}
    for frame in frames.values():  # in CSV, missing names are empty strings
        texts = frame.select_dtypes(exclude="number")
        frame[texts.columns] = texts.where(texts != "")
        if "exact" in frame:
            frame["exact"] = frame["exact"].astype(str) == "True"
    return Comparison(**frames, tokens=tuple(manifest["tokens"]), about=manifest["about"])


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not support, with None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
