"""Compare a model with its grown model: heads and neurons on a dataset, circuits on one batch.

    alignment.py     matches the components of both models, by provenance
    batches.py       yields batches of prompts, each prompt with a corrupted prompt
    batch_runs.py    runs a batch through a model; computes the largest effects by patching
    statistics.py    adds every batch to sums, and makes frames from the sums
    circuits.py      compares the two models' circuits on the first batch
    options.py       holds how large batches and circuits are, and how prompts are resampled
    results.py       holds, saves and loads the result

On each batch, each model runs two forward passes and one backward pass. Patching and circuit search
run a batch many times, so they use only the first batch.

Memory does not grow with the number of batches. Besides the models, memory holds tensors of one
batch: for each model and token, 3 values per neuron, d_head + pos values per head in both runs, the
logits, and the tensors for the backward pass. For the first batch, memory also holds one value per
component and token and, during a circuit search, both runs of one model. The sums over the dataset
take 14 float64 values per component.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from attn_only_lens.arguments import a_type, as_plain
from attn_only_lens.circuits.ablated_model import AblatedModel
from attn_only_lens.circuits.search import smallest_prefix
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.input_warnings import warn, warned_once
from attn_only_lens.engine.metrics import no_gradient_reasons
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.positions import length_reasons
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.engine.tokens import token_texts
from attn_only_lens.errors import ComparisonError
from attn_only_lens.growth.comparison.alignment import Alignment, align
from attn_only_lens.growth.comparison.batch_runs import MODELS, BatchRun, add_patching, stage_bar
from attn_only_lens.growth.comparison.batches import Batch, batches
from attn_only_lens.growth.comparison.circuits import compare_circuits
from attn_only_lens.growth.comparison.options import ComparisonSizes, Resampling
from attn_only_lens.growth.comparison.results import Comparison
from attn_only_lens.growth.comparison.statistics import Statistics
from attn_only_lens.growth.expansion.provenance import Provenance
from attn_only_lens.growth.models._grow import Grown, identity
from attn_only_lens.heads import has_neuron_heads
from attn_only_lens.heads.host import transcoder_reasons
from attn_only_lens.models.expose import expose_neuron_heads
from attn_only_lens.patching.repairs import on_one_device
from attn_only_lens.patching.site_groups import site_groups, site_rows
from attn_only_lens.work import Work, work_reasons

_PROBLEM = "these cannot be compared"
_KEPT = 0.5  # `compare` warns if a model keeps less than this share of the metric's range
_N_RANDOM = 3  # the number of random circuits of the same size per circuit


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
    resampling: Resampling = Resampling(),
    work: Work = Work(),
) -> Comparison:
    """Compare every component of a model with the same component of its grown model.

    The *drop* of a component is the decrease of the metric when the component's output is replaced
    by its output on the corrupted prompt. If the contrast has no corrupted prompts, the next prompt
    (in a stream, the next prompt of the same contrast) is used instead. In that case, the metric
    must depend on the prompt's tokens, as `loss` does.

    A circuit has the smallest number of sites (heads and neurons at positions), by |estimated
    drop|, that reaches the faithfulness in `sizes`. All models use this rule, so circuit sizes can
    be compared. Circuits from `discover` are smaller, because it ranks by secants and prunes.

    Growth is from Gesmundo and Maile, "Composable Function-preserving Expansions for Transformer
    Architectures", 2023. `circuits.discover` and `patching.attribution` describe the other methods.

    Args:
        original: the model, with the weights that it had when it grew, in any dtype and of any
            kind: a HookedTransformer, a TransformerBridge, or a converted model. If its
            neuron-heads are not exposed, they are exposed during the call.
        grown: the result of `grow`, perhaps trained afterwards; or a model, with `provenance`.
        contrast: the prompts and the metric, with a gradient. A contrast is cut into batches, and
            so are the metric's answers for each prompt; without corrupted prompts, a batch has
            prompts of one length. Or an iterable of contrasts, each of which is a batch of any
            size; they are read once.
        provenance: the provenance of `grown` if that is a model; otherwise it replaces the
            provenance in `grown`. It identifies the original model; other models are refused
            (`growth.identity`).
        null: like `grown`, but trained with another seed after the same growth. `grown` is
            compared with this null model too, which shows how much two training runs differ.
        sizes: how large the batches and the circuits are, and how many components are patched.
        resampling: how prompts are resampled, for confidence intervals.
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
        UnsupportedModelError: neuron-heads cannot be exposed, or the model with frozen patterns and
            norms is not linear.

    Example:
        >>> import torch
        >>> from attn_only_lens import Contrast, compare, grow, growth, patching, pretrained
        >>> model = pretrained.modular_addition()
        >>> grown = grow(model, d_mlp=517, seed=0)
        >>> sums = Contrast(torch.tensor([[3, 4, 113], [3, 5, 113]]), None,
        ...                 patching.logit_diff([7, 8], [8, 7]))
        >>> sizes = growth.ComparisonSizes(n_patched=5, n_nodes=20)
        >>> found = compare(model, grown, sums, sizes=sizes)
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
        statistics = Statistics(models, alignment)
        stream = batches(models[0], contrast, sizes.batch_size)
        first = next(stream)
        result = _first_batch(models, alignment, statistics, first, sizes, resampling, progress)
        # Run the other batches, and patch components
        try:
            total = None if first.of is None else (first.of - 1) * statistics.n_steps
            with stage_bar("more batches", total, "step", progress and total != 0) as bar:
                for batch in stream:
                    statistics.add(batch, bar)
            comparison = result(sizes.n_patched)
        except Exception as error:  # the new error contains the results so far
            raise _stopped(error, result(0)) from error
    _warn_if_lost(comparison.about["values"])
    return comparison


def _first_batch(
    models: Sequence[Any],
    alignment: Alignment,
    statistics: Statistics,
    first: Batch,
    sizes: ComparisonSizes,
    resampling: Resampling,
    progress: bool,
) -> Callable[[int | None], Comparison]:
    """Compare the circuits on the first batch.

    Return a function that patches a given number of components and returns the comparison on all
    batches that were run.
    """
    ComparisonError.raise_if(length_reasons(first.pair, only_columns=True), _PROBLEM)
    with stage_bar(first.label, statistics.n_steps, "step", progress) as bar:
        runs = statistics.add(first, bar, has_circuit=True)
    circuits = [
        _circuit(run, first, sizes.faithfulness, resampling.seed, label, progress)
        for run, label in zip(runs, MODELS, strict=False)
    ]
    n_sites = [circuit.size for circuit in circuits]
    frames = compare_circuits(
        *(models, alignment, first, runs, n_sites, sizes, resampling, progress)
    )
    settings = asdict(sizes) | asdict(resampling)
    about = {
        "faithfulness": [circuit.faithfulness for circuit in circuits],
        "completeness": [circuit.completeness for circuit in circuits],
        "circuit_sizes": n_sites,
        "random_faithfulness": [circuit.random for circuit in circuits],
        "n_prompts_of_circuits": len(first.pair.clean),
        "settings": {name: as_plain(value) for name, value in settings.items()},
    }
    texts = tuple(token_texts(models[0], first.pair.clean[0]))

    def result(n_patched: int | None) -> Comparison:
        old, new, silent = statistics.frames()
        old, new = add_patching(models, first, old, new, n_patched, progress)
        return Comparison(
            heads=old[old["kind"] == "attention"].reset_index(drop=True),
            neurons=old[old["kind"] == "neuron"].reset_index(drop=True),
            new=new,
            silent=silent,
            **frames,
            tokens=texts,
            about=statistics.about() | about,
        )

    return result


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
        "before the error, without patching",
    ]
    stopped = ComparisonError(reasons, "the comparison stopped")
    stopped.so_far = so_far
    return stopped


def _require_valid(compared: Sequence[Any], provenance: object, work: Work) -> None:
    """Raise ComparisonError for unused options, and for models that do not match."""
    reasons = work_reasons(work, "batch_size", "prompts_at_once", "resume")
    if not isinstance(provenance, Provenance):
        reasons.append(
            f"got provenance of type {type(provenance).__name__}; expected a result of `grow`, or "
            "a model with provenance=grown.provenance"
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
        "dataclasses.replace(provenance, source=attn_only_lens.growth.identity(model))"
    )
    raise ComparisonError([reason, advice], _PROBLEM)


class _Circuit(NamedTuple):
    """A circuit's size, and the faithfulness of the circuit, its complement and random circuits."""

    size: int
    faithfulness: float
    completeness: float
    random: list[float]


def _circuit(
    run: BatchRun, batch: Batch, faithfulness: float, seed: int, label: str, progress: bool
) -> _Circuit:
    """Find the smallest number of sites, ranked by |effect|, with the requested faithfulness."""
    groups = site_groups(run.model, run.pair, "all", "z", most_rows=None)
    effects = [group.sums(run.effects_of(group.sites)).mean(1) for group in groups]
    order = np.argsort(-on_one_device(effects).abs().cpu().double().numpy(), kind="stable")
    with stage_bar(f"circuit of {label}", None, "circuit", progress) as bar:
        prompts = run.model, run.pair, batch.metric
        options: dict[str, Any] = {"ablation": "resample", "on_done": bar.update}
        ablated = AblatedModel(*prompts, site_rows(groups), **options)
        rows = smallest_prefix(ablated, order, faithfulness)
        measured, complete, random = ablated.curves([rows], _N_RANDOM, seed)
        bar.total = bar.n  # the total number of steps is known only after the search
        bar.refresh()
    return _Circuit(len(rows), float(measured[0]), float(complete[0]), random[:, 0].tolist())
