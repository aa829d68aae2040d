"""Circuits, and their JSON files. A file stores each table as one list per column:

{"format": "attn_only_lens.Circuit", "format_version": 1, "sha256": …,
 "circuit": {"n_sites": …, …, "frame": {"name": ["L3H3", …], "position": [5, …], …}, …}}
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import pandas as pd
from jaxtyping import Bool
from typing_extensions import TypedDict

from attn_only_lens.arguments import as_plain, one_of
from attn_only_lens.circuits.ablated_model import Ablation
from attn_only_lens.circuits.mib import write_mib_circuit
from attn_only_lens.circuits.stability import INCLUSION, MEASURES, Stability
from attn_only_lens.engine.sites import Sites
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.heads import HeadName
from attn_only_lens.storage import Document
from attn_only_lens.storage.atomic import AnyPath

SITE = ["layer", "kind", "index", "name", "position"]
SITE_KEY = ["name", "position"]
MISSING = (
    "A site that is missing here may carry the same effect as a site of the circuit. To find such "
    "sites, patch sites one by one from the clean into the corrupted run: with activation_patch, "
    "or with `attn-only-lens patch` in a shell."
)
_SHOWN = 20
_Format: TypeAlias = Literal["attn_only_lens", "mib"]


_Table: TypeAlias = dict[str, list[int | float | str | None]]


class _Stability(TypedDict):
    sites: _Table
    resamples: _Table
    held_out: _Table
    core_faithfulness: tuple[float, float]
    jaccard: float
    by_size: _Table | None


class _Sites(TypedDict):
    heads: list[str]
    positions: str | int | list[int | str]
    layers: list[int] | None


class CircuitBody(TypedDict):
    """A circuit in a JSON file."""

    frame: _Table
    n_sites: int
    n_pos: int
    start: int
    faithfulness: float
    completeness: float
    random: list[float]
    wanted: float | None
    tried: _Table
    ablation: Ablation
    method: str
    metric: str
    candidates: _Sites
    whole: float
    nothing: float
    stability: _Stability | None


class _Body(TypedDict):
    circuit: CircuitBody


_DOCUMENT = Document("attn_only_lens.Circuit", 1, _Body)


@dataclass(frozen=True, eq=False)
class Circuit:
    """A set of sites that is nearly as faithful as the whole model. Made by `discover`.

    A site outside the circuit can still matter. If two sites carry the same effect, the circuit may
    contain only one of them. `activation_patch(…, direction="denoise")` finds both sites, because
    it patches each site alone into the corrupted run. A completeness far above 0 also shows that
    sites outside the circuit matter.

    Attributes:
        frame: one row per site, the highest ranked first. Columns: `layer`, `kind`, `index`,
            `name`, `position`, and the site's `effect` in the ranking. If prompts were resampled,
            also `inclusion`, `inclusion_low`, `inclusion_high` and `class` (see `Stability`). A
            site that is in no resampled circuit has an inclusion of 0.
        n_sites: how many sites were ranked.
        n_pos: the number of tokens in a prompt, without padding.
        start: the position of a prompt's first token, which is after padding if it is not 0.
        faithfulness: the faithfulness of the circuit.
        completeness: the faithfulness of all other sites; it is near 0 if nothing was missed.
        random: the faithfulness of random circuits of the same size.
        wanted: the requested faithfulness; None if the number of sites was requested.
        tried: one row per evaluated circuit, in order. Columns: the `step` of the search
            ("magnitude", "signed", "start", "worth", "pruning", "prefix"), `n_sites`,
            `faithfulness`. If a circuit is a prefix that was chosen by its held-out error, only
            this prefix; see `Stability.by_size`.
        ablation: how all other sites are ablated.
        method: the method of the ranking.
        metric: the metric's name.
        candidates: the sites that were ranked; by role, their positions are the names of the roles.
        whole: the metric of the whole model.
        nothing: the metric with every site ablated.
        stability: how the circuit changes with the prompts, if `discover` resampled them.
    """

    frame: pd.DataFrame
    n_sites: int
    n_pos: int
    start: int
    faithfulness: float
    completeness: float
    random: tuple[float, ...]
    wanted: float | None
    tried: pd.DataFrame
    ablation: Ablation
    method: str
    metric: str
    candidates: Sites
    whole: float
    nothing: float
    stability: Stability | None = None

    def __len__(self) -> int:
        return len(self.frame)

    def __repr__(self) -> str:
        title = (
            f"{len(self):,} of {self.n_sites:,} sites keep {self.faithfulness:.0%} of the effect"
        )
        random = f", random circuits of this size {max(self.random):.0%}" if self.random else ""
        title += f", all others {self.completeness:.0%}{random}"
        columns = [*SITE_KEY, "effect", *INCLUSION]
        rows = self.frame[[name for name in columns if name in self.frame]].head(_SHOWN)
        with pd.option_context("display.precision", 4):
            table = rows.to_string(index=False) if len(rows) else "no sites"
        more = f"\n… {len(self) - _SHOWN:,} more sites in `frame`" * (len(self) > _SHOWN)
        return f"{title}\n{table}{more}\n{fill(MISSING, 80)}"

    @property
    def sites(self) -> list[str]:
        """The names of the circuit's sites, such as "L3H3@5", for the argument `sites=`."""
        frame = self.frame
        if (frame["position"] == "all").any():
            return frame["name"].astype(str).tolist()
        return [f"{name}@{position}" for name, position in frame[SITE_KEY].to_numpy()]

    def to_frame(self) -> pd.DataFrame:
        """Return the circuit's sites; if prompts were resampled, the sites of all circuits."""
        if self.stability is None:
            return self.frame.copy()
        sites = self.stability.sites
        return sites.assign(in_circuit=self.contains(sites))

    def contains(self, sites: pd.DataFrame) -> Bool[np.ndarray, "row"]:
        """Return, for each row of `sites`, whether the circuit has its `name` and `position`."""
        return are_among(sites, self.frame)

    def core(self) -> "Circuit":
        """Return a circuit of all sites that are in at least 90 % of the resampled circuits.

        Raises:
            InputError: the prompts were not resampled.
        """
        if self.stability is None:
            expected = "expected discover(…, search=Search(resamples=20))"
            reason = f"got a circuit without resamples; {expected}"
            raise InputError([reason], "this circuit has no core")
        sites = self.stability.sites
        faithful, complete = self.stability.core_faithfulness
        return replace(
            self,
            frame=sites[sites["class"] == "core"].reset_index(drop=True),
            faithfulness=faithful,
            completeness=complete,
            random=(),
        )

    def save(
        self, path: str | Path, *, format: _Format = "attn_only_lens", model: Any = None
    ) -> None:
        """Write the circuit to a JSON file atomically.

        Args:
            path: the file.
            format: "attn_only_lens", which `load` reads back exactly; or "mib", for the evaluation
                of the MIB benchmark (`circuits/mib.py`).
            model: for MIB, the model of the circuit; only its sizes are checked.

        Raises:
            CheckpointError: the file cannot be written.
            InputError: an option is wrong, or MIB has no place for some sites of the circuit.

        Example:
            >>> import tempfile, torch
            >>> from attn_only_lens import Contrast, circuits, convert, load, patching as p
            >>> sums = Contrast(torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]),
            ...                 p.logit_diff(correct=7, wrong=8))
            >>> circuit = circuits.discover(convert(load("modular-addition")), sums)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     circuit.save(f"{folder}/circuit.json")
            ...     again = load(f"{folder}/circuit.json")
            >>> again.frame["effect"].equals(circuit.frame["effect"])
            True
        """
        reasons = one_of(*get_args(_Format)).reasons(format=format)
        if format != "mib" and model is not None:
            reasons.append(f"got a model with format={format!r}; expected 'mib'")
        InputError.raise_if(reasons, "this circuit cannot be written")
        if format == "mib":
            write_mib_circuit(path, self.frame, model)
        else:
            _DOCUMENT.write(path, circuit=self.body())

    def body(self) -> CircuitBody:
        """Return the circuit's attributes as lists, dicts and numbers that JSON can store."""
        return cast(CircuitBody, _plain(vars(self)))

    @classmethod
    def of_body(cls, body: CircuitBody) -> "Circuit":
        """Return a circuit from the attributes that `body` returned."""
        frames = {"frame": pd.DataFrame(body["frame"]), "tried": pd.DataFrame(body["tried"])}
        if missing := [name for name in (*SITE, "effect") if name not in frames["frame"]]:
            raise ValueError(f"its frame has no {', '.join(missing)}")
        changed: dict[str, Any] = {"random": tuple(body["random"])}
        changed["candidates"] = Sites(**body["candidates"])
        if (stability := body["stability"]) is not None:
            tables: dict[str, Any] = {
                "sites": pd.DataFrame(stability["sites"]),
                "resamples": pd.DataFrame(stability["resamples"]),
                "held_out": pd.DataFrame(stability["held_out"]).set_axis(MEASURES),
                "core_faithfulness": tuple(stability["core_faithfulness"]),
            }
            by_size = stability["by_size"]
            tables["by_size"] = None if by_size is None else pd.DataFrame(by_size)
            changed["stability"] = Stability(**{**stability, **tables})
        return cls(**{**body, **frames, **changed})


def are_among(sites: pd.DataFrame, some: pd.DataFrame) -> Bool[np.ndarray, "row"]:
    """Return, for each row of `sites`, whether `some` has a row of its name and position."""
    inside = some[SITE_KEY].drop_duplicates().assign(inside=True)
    return sites[SITE_KEY].merge(inside, how="left")["inside"].notna().to_numpy()


def read_circuit(path: AnyPath) -> Circuit:
    """Read a circuit from a file; raise CheckpointError if it holds none, or is damaged."""
    try:
        return Circuit.of_body(_DOCUMENT.read(path)["circuit"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no circuit: {error}") from error


def _plain(value: Any) -> Any:
    """Convert an attribute of a circuit to lists, dicts and numbers that JSON can store."""
    if isinstance(value, pd.DataFrame):
        plain = value.astype(object).where(value.notna(), None)
        return {str(name): column.tolist() for name, column in plain.items()}
    if isinstance(value, Stability | Sites):
        return _plain(vars(value))
    if isinstance(value, HeadName):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    value = as_plain(value)
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value
