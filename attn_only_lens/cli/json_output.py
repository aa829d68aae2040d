"""What `explain`, `patch` and `evaluate` print with --json, for programs that read it.

Each command prints one JSON object to standard output; progress and warnings go to standard error.
`docs/json.schema.json` is the JSON schema of the three objects, which `schema` returns. `version`
changes whenever a key is removed or changes its meaning; new keys may be added. Numbers that are
not finite are null: pydantic writes them so.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from attn_only_lens.engine.directions import ABLATIONS
from attn_only_lens.patching.columns import site_ids

if TYPE_CHECKING:
    from attn_only_lens.circuits._evaluate import Evaluation
    from attn_only_lens.circuits.circuit import Circuit
    from attn_only_lens.explanation.explanation import Explanation
    from attn_only_lens.patching.results import Sweep


class _Output(BaseModel):
    """An object that a command prints."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    version: Literal[1] = 1


class Patched(BaseModel):
    """A site, and what a patch of this site alone does."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    """The site, such as "L3H3@5"; "@all" if all positions are patched together."""
    score: float | None
    """0 for the corrupted run's metric (for an ablation, a metric of 0), 1 for the clean run's."""
    effect: float | None
    """The score minus the score without a patch, which is 0 for denoise and 1 otherwise."""


class Explained(BaseModel):
    """A row of an explanation's table; see `Explanation.table`."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    group: str
    """"circuit", "not needed" or "against"."""
    id: str
    token: str
    does: str
    share: float | None
    by_pattern: float | None
    by_value: float | None
    denoise: float | None
    noise: float | None
    disputed: bool


class CircuitSize(BaseModel):
    """A circuit's size, and how much of the difference it keeps."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    n_sites: int
    n_candidates: int
    faithfulness: float | None
    completeness: float | None
    """The faithfulness of all other sites."""


class Kept(BaseModel):
    """What a circuit keeps on some prompts; see `Evaluation`."""

    faithfulness: float | None
    completeness: float | None
    whole: float | None
    nothing: float | None
    standard_error: float | None
    error: float | None
    accuracy: float | None
    whole_accuracy: float | None
    nothing_accuracy: float | None
    n_prompts: int


class ExplainOutput(_Output):
    """What `explain --json` prints."""

    command: Literal["explain"] = "explain"
    title: str
    warnings: list[str]
    metric: str
    clean_value: float | None
    corrupted_value: float | None
    circuit: CircuitSize
    held_out: Kept | None
    """On the pairs that --held-out sets aside."""
    on_other_halves: float | None
    """What circuits for random halves of the prompts keep on the other halves (--resamples)."""
    sites: list[Explained]
    """All sites of the circuit's graph, and all other strong sites."""
    files: list[str]
    """The files that the command wrote."""


class PatchOutput(_Output):
    """What `patch --json` prints."""

    command: Literal["patch"] = "patch"
    metric: str
    part: str
    direction: str
    clean_value: float | None
    corrupted_value: float | None
    """Null for an ablation, which has no corrupted run."""
    n_sites: int
    sites: list[Patched]
    """The --top sites with the largest |effect|; the file has all sites."""
    files: list[str]


class EvaluateOutput(_Output):
    """What `evaluate --json` prints."""

    command: Literal["evaluate"] = "evaluate"
    metric: str
    circuit: CircuitSize
    """On the prompts for which the circuit was found."""
    kept: Kept
    """On the prompts of this command."""
    sites: list[Patched]
    """The first --top sites of the circuit, each patched alone."""


AnyOutput = ExplainOutput | PatchOutput | EvaluateOutput


def schema() -> dict[str, Any]:
    """Return the JSON schema of the three objects."""
    return TypeAdapter(AnyOutput).json_schema(mode="serialization")


def explained(why: "Explanation", files: Iterable[Path | None]) -> ExplainOutput:
    """Return what `explain --json` prints."""
    return ExplainOutput(
        title=why.title,
        warnings=why.warnings,
        metric=why.attribution.metric,
        clean_value=why.attribution.clean_value,
        corrupted_value=why.attribution.corrupted_value,
        circuit=_circuit(why.circuit),
        held_out=None if why.held_out is None else Kept(**vars(why.held_out)),
        on_other_halves=why.on_other_halves,
        sites=[Explained.model_validate(row) for row in why.table().to_dict("records")],
        files=[str(file) for file in files if file is not None],
    )


def patched(sweep: "Sweep", top: int, files: Iterable[Path]) -> PatchOutput:
    """Return what `patch --json` prints."""
    return PatchOutput(
        metric=sweep.metric,
        part=sweep.part,
        direction=str(sweep.direction),
        clean_value=sweep.clean_value,
        corrupted_value=None if sweep.direction in ABLATIONS else sweep.corrupted_value,
        n_sites=len(sweep),
        sites=_patched(sweep, top),
        files=[str(file) for file in files],
    )


def evaluated(circuit: "Circuit", kept: "Evaluation", alone: "Sweep") -> EvaluateOutput:
    """Return what `evaluate --json` prints."""
    return EvaluateOutput(
        metric=alone.metric,
        circuit=_circuit(circuit),
        kept=Kept(**vars(kept)),
        sites=_patched(alone, max(1, len(alone))),
    )


def _patched(sweep: "Sweep", top: int) -> list[Patched]:
    rows = sweep.top(top)
    frame = sweep.frame.loc[rows.index]
    ids = site_ids(frame)
    effects = frame["score"] - sweep.baseline
    return [
        Patched(id=site, score=score, effect=effect)
        for site, score, effect in zip(ids, frame["score"], effects, strict=True)
    ]


def _circuit(circuit: "Circuit") -> CircuitSize:
    return CircuitSize(
        n_sites=len(circuit),
        n_candidates=circuit.n_sites,
        faithfulness=circuit.faithfulness,
        completeness=circuit.completeness,
    )
