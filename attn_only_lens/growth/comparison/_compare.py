"""Compare a model with its grown model: heads and neurons on a dataset, circuits on one batch.

    alignment.py     matches the components of both models, by provenance
    batches.py       cuts prompts into batches; the first one has corrupted prompts
    clean_runs.py    records patterns and outputs on a batch
    statistics.py    adds every batch to sums, and makes frames from the sums
    drops.py         patches components on the first batch
    circuits.py      compares the two models' circuits on the first batch
    parts.py         says what became of the original's circuit
    options.py       holds how large batches and circuits are, and how much is patched
    results.py       holds, saves and loads the result

Memory does not grow with the number of batches. Besides the models, memory holds tensors of one
batch: for each model and token, 3 values per neuron and d_head + pos values per head. For the first
batch, memory also holds what attribution and the circuit search need. The sums over the dataset
take 11 float64 values per component.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from tqdm.auto import tqdm

from attn_only_lens.arguments import a_type, as_plain
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.input_warnings import warn, warned_once
from attn_only_lens.engine.metrics import as_metric, no_gradient_reasons
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.model_state import unchanged
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.engine.tokens import token_texts
from attn_only_lens.errors import ComparisonError
from attn_only_lens.growth.comparison.alignment import Alignment, align
from attn_only_lens.growth.comparison.batches import batches
from attn_only_lens.growth.comparison.circuits import (
    compare_circuits,
    find_circuits,
    positions_of_sites,
)
from attn_only_lens.growth.comparison.clean_runs import MODELS
from attn_only_lens.growth.comparison.drops import measure_drops
from attn_only_lens.growth.comparison.options import ComparisonSizes
from attn_only_lens.growth.comparison.parts import compare_parts
from attn_only_lens.growth.comparison.results import Comparison
from attn_only_lens.growth.comparison.statistics import Statistics
from attn_only_lens.growth.expansion.provenance import Provenance
from attn_only_lens.growth.models._grow import Grown, identity
from attn_only_lens.heads import has_neuron_heads
from attn_only_lens.heads.host import transcoder_reasons
from attn_only_lens.models.expose import expose_neuron_heads
from attn_only_lens.work import Work, work_reasons

_PROBLEM = "these cannot be compared"
_KEPT = 0.5  # `compare` warns if a model keeps less than this share of the metric's range


@one_thread_per_model
@warned_once()
def compare(
    original: Any,
    grown: Any,
    contrast: Contrast | Iterable[Contrast],
    *,
    provenance: Provenance | None = None,
    null: Any = None,
    sizes: ComparisonSizes = ComparisonSizes(),
    work: Work = Work(),
) -> Comparison:
    """Compare every component of a model with the same component of its grown model.

    Patterns and outputs are compared on all prompts. The metric is used on the first batch: for the
    *drop* of a component, which is how much the metric falls when the component's output is
    replaced by its output on the corrupted prompt, at all positions; and for a circuit in every
    model, from `circuits.discover`. If the contrast has no corrupted prompts, the next text is used
    instead (`comparison/batches.py`). In that case, the metric must depend on the prompt's tokens,
    as `loss` does. Prompts may have different lengths.

    Growth is from Gesmundo and Maile, "Composable Function-preserving Expansions for Transformer
    Architectures", 2023.

    Args:
        original: the model, with the weights that it had when it grew, in any dtype and of any
            kind: a HookedTransformer, a TransformerBridge, or a converted model. If its
            neuron-heads are not exposed, they are exposed during the call.
        grown: the result of `grow`, perhaps trained afterwards; or a model, with `provenance`. For
            training without growth, train `grow(model, []).model`, a copy.
        contrast: the prompts and the metric, with a gradient. A contrast is cut into batches. Or an
            iterable of contrasts, each of which is a batch of any size; they are read once.
        provenance: which part of `grown` comes from which part of `model`. It is needed if `grown`
            is a model; if `grown` is a result of `grow`, which has a provenance, this one is used
            instead. It contains a digest of the original's weights; other models are refused.
        null: like `grown`, but trained with another seed after the same growth. `grown` is
            compared with this null model too, which shows how much two training runs differ.
        sizes: how large the batches and the circuits are, and how many components are patched.
        work: whether to show a bar for each stage; the other options are not used.

    Returns:
        A `Comparison`, with frames for the components and for both circuits.

    Warns:
        InputWarning: the metric of `grown` or `null` differs between clean and corrupted prompts
            by less than half as much as the original's.

    Raises:
        ComparisonError: models or provenance do not match, or prompts have an unknown type; the
            error lists every reason. An error in a batch after the first is raised as a
            ComparisonError, whose `so_far` is the comparison on earlier batches.
        InputError: a model cannot run on the prompts; or the metric does not fit them, has zero
            gradient, or does not differ between the runs.
        UnsupportedModelError: neuron-heads cannot be exposed, or the model has an operation without
            a secant rule (`engine/secants.py`).

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, compare, grow, growth, load, patching
        >>> model = load("modular-addition")
        >>> grown = grow(model, d_mlp=517, seed=0)
        >>> sums = Contrast(torch.tensor([[3, 4, 113], [3, 5, 113]]), None,
        ...                 patching.logit_diff([7, 8], [8, 7]))
        >>> found = compare(model, grown, sums, sizes=growth.ComparisonSizes(n_patched=5))
        >>> len(found.neurons), len(found.new), bool(found.neurons["divergence"].max() < 1e-6)
        (512, 5, True)
        >>> found.circuits["jaccard"].tolist()[0]
        1.0
    """
    # Check
    if provenance is None and isinstance(grown, Grown):
        provenance = grown.provenance
    compared = [original, grown] if null is None else [original, grown, null]
    _require_valid(compared, provenance, work)
    assert provenance is not None
    models = [item.model if isinstance(item, Grown) else item for item in compared]
    progress = bool(work.progress)
    with ExitStack() as stack:
        _expose(models, stack)
        alignment = align(models[0], models[1], provenance)
        _require_source(models[0], provenance)
        # Compare circuits on the first batch before other batches are run, so that unsupported
        # models fail early.
        some = batches(models[0], contrast, sizes.batch_size)
        with ExitStack() as frozen:
            for model in models:
                frozen.enter_context(unchanged(model))
            first = _first_batch(models, alignment, provenance, some.first, sizes, progress)
        # Run all batches
        statistics = Statistics(models, alignment)
        total = None if some.n is None else some.n * statistics.n_steps
        with tqdm(total=total, unit="step", disable=not progress) as bar:
            try:
                for number, prompts in enumerate(some.prompts, start=1):
                    statistics.add(prompts, f"batch {number}" + f" of {some.n}" * bool(some.n), bar)
            except Exception as error:  # the new error contains the results so far
                if not statistics.n_prompts:
                    raise
                raise _stopped(error, _result(statistics, first)) from error
    comparison = _result(statistics, first)
    _warn_if_lost(comparison.about["values"])
    return comparison


def _first_batch(
    models: Sequence[Any],
    alignment: Alignment,
    provenance: Provenance,
    contrast: Contrast,
    sizes: ComparisonSizes,
    progress: bool,
) -> dict[str, Any]:
    """Return what is measured on the first batch: circuits, drops, and their settings."""
    positions = positions_of_sites(models[0], contrast)
    found = find_circuits(models, contrast, alignment, sizes, progress)
    frames = compare_circuits(models, contrast, alignment, found, sizes, progress)
    parts = compare_parts(models, contrast, provenance, found, frames["nodes"])
    drops, values = measure_drops(models, contrast, alignment, sizes.n_patched, progress)
    circuits = [one.circuit for one in found]
    about = {
        "model": str(getattr(models[0].cfg, "model_name", "")),
        "metric": as_metric(contrast.metric).name,
        "values": dict(zip(("original", "grown", "null"), values, strict=False)),
        "circuit_sizes": [len(circuit) for circuit in circuits],
        "n_sites": [circuit.n_sites for circuit in circuits],
        "faithfulness": [circuit.faithfulness for circuit in circuits],
        "completeness": [circuit.completeness for circuit in circuits],
        "random_faithfulness": [list(circuit.random) for circuit in circuits],
        "n_prompts_of_circuits": len(contrast),
        "settings": {name: as_plain(value) for name, value in asdict(sizes).items()},
    }
    places = {"all": ("all positions",), "roles": tuple(contrast.roles)}.get(positions)
    texts = places or tuple(token_texts(models[0], contrast.pair(models[0]).clean[0]))
    return {**frames, "parts": parts, "drops": drops, "tokens": texts, "about": about}


def _result(statistics: Statistics, first: Mapping[str, Any]) -> Comparison:
    """Join the statistics of all batches with what was measured on the first one."""
    old, new, silent = statistics.frames()
    drops = first["drops"]
    of_new = {"grown_drop": "drop", "grown_drop_se": "drop_se"}
    old = old.join(
        drops.drop(columns=["grown_drop_se", "share", "null_share"], errors="ignore"), "grown_name"
    )
    null = [name for name in ("null_drop", "null_share") if name in drops]
    new = new.join(drops[[*of_new, "share", *null, "exact"]].rename(columns=of_new), "grown_name")
    frames = {name: first[name] for name in ("circuits", "parts", "nodes", "edges", "tokens")}
    counts = {"n_prompts": statistics.n_prompts, "n_tokens": statistics.n_tokens}
    return Comparison(
        heads=old[old["kind"] == "attention"].reset_index(drop=True),
        neurons=old[old["kind"] == "neuron"].reset_index(drop=True),
        new=new,
        silent=silent,
        about=counts | first["about"],
        **frames,
    )


def _warn_if_lost(values: dict[str, dict[str, float]]) -> None:
    """Warn if a model's metric range (clean minus corrupted) is below half the original's range."""
    spans = {label: value["clean"] - value["corrupted"] for label, value in values.items()}
    whole = spans.pop("original")
    cases = {
        label: f"{label} model: {span:.3g}; original: {whole:.3g}"
        for label, span in spans.items()
        if span / whole < _KEPT
    }
    warn(cases, "the grown model no longer does this task: clean minus corrupted metric")


def _stopped(error: Exception, so_far: Comparison) -> ComparisonError:
    reasons = [
        f"{type(error).__name__}: {error}",
        f"`error.so_far` contains the comparison on the {so_far.about['n_prompts']} prompts "
        "before the error",
    ]
    stopped = ComparisonError(reasons, "the comparison stopped")
    stopped.so_far = so_far
    return stopped


def _require_valid(compared: Sequence[Any], provenance: object, work: Work) -> None:
    """Raise ComparisonError for unused options, and for models that do not match."""
    reasons = work_reasons(work, "batch_size", "prompts_at_once", "resume", "share")
    if not isinstance(provenance, Provenance):
        reasons.append(
            f"got provenance of type {type(provenance).__name__}; expected a result of `grow`, or "
            "a model with provenance=grown.provenance or load('folder/provenance.json')"
        )
    null = compared[-1].provenance if isinstance(compared[-1], Grown) else None
    if len(compared) == 3 and null is not None and isinstance(provenance, Provenance):
        if (null.layers, null.axes) != (provenance.layers, provenance.axes):
            reasons.append(
                "the null model grew differently; expected the same growth, trained separately"
            )
        elif null.source and provenance.source and null.source.differences(provenance.source):
            reasons.append("the null model grew from another model; expected the same growth")
    reasons += no_gradient_reasons()
    models = [model.model if isinstance(model, Grown) else model for model in compared]
    for label, model in zip(MODELS, models, strict=False):
        if not hasattr(model, "cfg"):
            reasons.append(f"{label}: got {a_type(model)}; expected a model")
    ComparisonError.raise_if(reasons, _PROBLEM)
    for size in ("d_vocab", "d_vocab_out"):
        expected, *sizes = (getattr(model.cfg, size, None) for model in models)
        for label, got in zip(MODELS[1:], sizes, strict=False):
            if got != expected:
                reasons.append(f"{label} has {size} {got}; the original has {expected}")
    ComparisonError.raise_if(reasons, _PROBLEM)


def _expose(models: Sequence[Any], stack: ExitStack) -> None:
    """Expose neuron-heads until the ExitStack closes; raise an error if models do not match."""
    for model in models:
        if not has_neuron_heads(model):
            stack.enter_context(expose_neuron_heads(model))
    reasons = [
        f"{label}: {reason}"
        for label, model in zip(MODELS, models, strict=False)
        for reason in transcoder_reasons(model) + reasons_not_to_run(model)
    ]
    grown, *null = (
        [(sites.kind, len(sites.names)) for sites in resolve_sites(model, "all")]
        + [("coordinates", model.cfg.d_model)]
        for model in models[1:]
    )
    if null and null[0] != grown:
        reasons.append(
            f"the null model's layers have (kind, count) {null[0]}, but the grown model's have "
            f"{grown}; expected the same shape"
        )
    ComparisonError.raise_if(reasons, _PROBLEM)


def _require_source(model: Any, provenance: Provenance) -> None:
    """Raise an error unless the model's weights are the weights that `grow` started from."""
    if provenance.source is None:
        reason = "the provenance is for weights, and does not identify a model"
    elif odd := provenance.source.differences(identity(model)):
        reason = (
            f"the original is not the model that was grown: {len(odd)} tensors differ, such as "
            f"{odd[0]}; pass the model with the weights that were grown"
        )
    else:
        return
    advice = (
        "to compare with this model anyway (e.g. because it was trained), pass provenance="
        "dataclasses.replace(provenance, source=grow(model, []).provenance.source)"
    )
    raise ComparisonError([reason, advice], _PROBLEM)
