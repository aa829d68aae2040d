"""`compare`: a model and one grown from it, over a dataset, and their circuits on a part of it.

Two forward passes and a backward one a model stream over the dataset: patterns, outputs and
attribution of every component come of the same passes. What takes runs of its own for each
component, patching, and the search for circuits are done on the first batch.

Memory, beyond the models: of one batch, in each model and for each token, 3 numbers a neuron and
d_head + pos a head in both runs, what the backward pass keeps, and the logits; of the first batch
that, and one number for each component and token; and 12 float64 a component. Nothing grows with
the number of batches.

What a comparison asks of models and settings, before anything runs.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from tqdm.auto import tqdm

from attn_only_lens.circuits._discover import Circuit, discover
from attn_only_lens.comparison.alignment import align
from attn_only_lens.comparison.batches import Batch, Source, batches
from attn_only_lens.comparison.circuits import Found, Resampling, differences, scores
from attn_only_lens.comparison.measure import on, with_patching
from attn_only_lens.comparison.results import Comparison
from attn_only_lens.comparison.streaming import Streamed
from attn_only_lens.errors import ComparisonError
from attn_only_lens.expansion import Provenance
from attn_only_lens.growth import Grown, identity
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.models.expose import expose_neuron_heads
from attn_only_lens.numerics import as_plain, is_count
from attn_only_lens.runs.metrics import AnyMetric
from attn_only_lens.runs.paired_runs import reasons_against
from attn_only_lens.runs.prompts import Prompts
from attn_only_lens.runs.sites import all_heads, resolve
from attn_only_lens.runs.token_texts import token_texts

__all__ = ["compare", "exposed", "require", "require_source"]

_PROBLEM = "these cannot be compared"
_SAID = ("the original", "the grown model", "the null")


def require(given: Sequence[Any], provenance: object, **settings: Any) -> None:
    """Refuse settings and models that make no sense together.

    Args:
        given: the original, the grown one and, if there is one, the null; as `compare` has them.
        provenance: of the grown one.
        settings: by name.

    Raises:
        ComparisonError: with every reason.
    """
    reasons = []
    if not isinstance(provenance, Provenance):
        reasons.append(
            f"got provenance {type(provenance).__name__}; expected what `grow` returned for grown, "
            "or a model with provenance=grown.provenance"
        )
    for name in ("batch_size", "n_resamples", "n_nodes", "n_patched", "seed"):
        value, least = settings[name], 1 if name == "batch_size" else 0
        none = name == "n_patched" and value is None
        if not none and not is_count(value, least):
            reasons.append(f"got {name}={value!r}; expected {least} or more")
    for name in ("edge_mass", "confidence", "faithfulness"):
        value = settings[name]
        if not isinstance(value, int | float) or not 0 < value <= 1:
            reasons.append(f"got {name}={value!r}; expected more than 0, up to 1")
    if len(given) == 3 and isinstance(given[2], Grown) and isinstance(provenance, Provenance):
        other = given[2].provenance
        if (other.layers, other.axes) != (provenance.layers, provenance.axes):
            reasons.append("the null grew otherwise; expected the same growth, trained apart")
        elif other.source and provenance.source and other.source.differences(provenance.source):
            reasons.append("the null grew from another model; expected the same growth")
    models = [each.model if isinstance(each, Grown) else each for each in given]
    for said, model in zip(_SAID, models, strict=False):
        if not hasattr(model, "cfg"):
            reasons.append(f"{said}: got a {type(model).__name__}; expected a model")
    if torch.is_inference_mode_enabled():
        reasons.append("no gradient is taken in torch.inference_mode(); torch.no_grad() will do")
    if reasons:
        raise ComparisonError(reasons, _PROBLEM)
    first = models[0].cfg
    for said, model in zip(_SAID[1:], models[1:], strict=False):
        for size in ("d_vocab", "d_vocab_out"):
            mine, theirs = (getattr(cfg, size, None) for cfg in (first, model.cfg))
            if mine != theirs:
                reasons.append(f"{said} has {size} {theirs}; the original has {mine}")
    if reasons:
        raise ComparisonError(reasons, _PROBLEM)


def require_source(model: Any, provenance: Provenance) -> None:
    """Refuse a model that is not the one that grew, though it has its shape.

    Raises:
        ComparisonError: it is another, or the same after more training; or the provenance does not
            say which model grew.
    """
    here = identity(model)
    if provenance.source is None:
        reasons = ["the provenance is of weights, and does not say which model had them"]
    elif odd := provenance.source.differences(here):
        reasons = [
            f"the original is not the model that grew: {len(odd)} of its {len(here.marks)} tensors "
            f"are others, such as {odd[0]}; give the model as it was when it grew"
        ]
    else:
        return
    reasons.append(
        "to compare with this one all the same (trained on since, say), give provenance="
        "dataclasses.replace(provenance, source=attn_only_lens.growth.identity(model))"
    )
    raise ComparisonError(reasons, _PROBLEM)


def exposed(models: Sequence[Any], stack: ExitStack) -> None:
    """Expose neuron-heads where they are not, until the stack closes.

    Raises:
        ComparisonError: a model has hooks or drops activations; neurons of the models have
            different numbers of heads; the null is not of the grown model's shape.
        UnsupportedModelError: neuron-heads cannot be exposed.
    """
    for model in models:
        if not has_neuron_heads(model):
            stack.enter_context(expose_neuron_heads(model))
    reasons = [
        f"{said}: {reason}"
        for said, model in zip(_SAID, models, strict=False)
        for reason in reasons_against(model)
    ]
    heads = {each.heads_per_neuron for model in models for each in host_of(model).neurons}
    if len(heads) > 1:
        reasons.append(f"their neurons have {sorted(heads)} heads each; expected one number")
    grown, *null = [(*_sizes(each),) for each in models[1:]]
    if null and null[0] != grown:
        reasons.append(
            f"the null has layers of {null[0]} (kind, count), the grown model of {grown}; expected "
            "one shape"
        )
    if reasons:
        raise ComparisonError(reasons, _PROBLEM)


def _sizes(model: Any) -> list[tuple[str, int]]:
    sites = [(each.kind, len(each.names)) for each in resolve(model, all_heads())]
    return [*sites, ("coordinates", model.cfg.d_model)]


def compare(
    model: Any,
    grown: Any,
    tokens: Source,
    metric: AnyMetric | None = None,
    *,
    provenance: Provenance | None = None,
    corrupted: Prompts | None = None,
    null: Any = None,
    batch_size: int = 32,
    faithfulness: float = 0.9,
    n_patched: int | None = 200,
    n_nodes: int = 100,
    edge_mass: float = 0.9,
    n_resamples: int = 200,
    confidence: float = 0.95,
    seed: int = 0,
    progress: bool = True,
) -> Comparison:
    """Compare every component of a model with what became of it in one grown from it.

    Each prompt is held against another: what a component does is what the metric loses when it
    puts out what it puts out there. That is the corrupted prompt, or without any the next prompt
    (of a stream, the next of its batch); then the metric must ask another thing of each prompt, as
    `loss` does. Models run where they are; prompts are taken there.

    Source: Gesmundo and Maile, "Composable Function-preserving Expansions for Transformer
    Architectures", 2023, for growth; `circuits.discover` and `patching.attribution` for the rest.

    Args:
        model: the original, as it was when it grew, in any dtype and layout: a HookedTransformer,
            a TransformerBridge, or converted. Neuron-heads are exposed for the call where they are
            not.
        grown: what `grow` returned, trained since or not; or a model, with its provenance.
        tokens: texts or a tensor [prompt, pos], which are cut into batches; a `PromptPair`, which
            is one; or an iterable of batches: tensors [batch, pos], pairs, or (either, metric).
            Batches of a stream are read one at a time, and once, and may be of any size. Texts
            without pairs go with others of their length.
        metric: `patching.loss()` and the like, or a differentiable function of the logits of a
            batch, a mean over its prompts; bound to each batch, so that answers for each prompt
            come with the batches of a stream.
        provenance: of `grown`, where that is a model, or in place of its own. It says which model
            grew, and another one of its shape is refused (`growth.identity`).
        corrupted: what each of `tokens` is held against, where those are texts or a tensor.
        null: the same growth trained with another seed, as `grown`: how different two trainings
            come out. Its difference from `grown` is shown beside that of `grown` from `model`.
        batch_size: the most prompts of a batch, where tokens are cut.
        faithfulness: that both circuits must have, within 1 - faithfulness of 1.
        n_patched: how many components to patch, those of largest |attribution| in any model;
            None for all.
        n_nodes: how many nodes of the circuits to draw edges between, those of largest effect; 0
            for no edges, of models whose patterns cannot be frozen.
        edge_mass: the share of Σ |weight| that a circuit's edges of each kind must have.
        n_resamples: of the first batch's prompts, for intervals.
        confidence: of those.
        seed: of resamples, and of random circuits.
        progress: whether to show a bar over batches.

    Returns:
        Frames by component, the circuits, and a summary.

    Raises:
        ComparisonError: with every reason: models or a provenance that do not fit, prompts of no
            known kind, settings that make no sense. An error in a batch after the first, of
            whatever kind, is raised as one of these, and its `so_far` has the comparison on the
            batches before.
        PatchingError: prompts that a model cannot take; a metric that does not fit, or has no
            slope or difference between runs.
        UnsupportedModelError: neuron-heads that cannot be exposed; not linear when frozen.

    Example:
        >>> import torch
        >>> from attn_only_lens import compare, grow, patching, pretrained
        >>> model = pretrained.modular_addition()
        >>> grown = grow(model, d_mlp=517, seed=0)
        >>> found = compare(
        ...     model, grown, torch.tensor([[3, 4, 113], [3, 5, 113]]),
        ...     patching.logit_diff([7, 8], [8, 7]), n_patched=5, n_nodes=20, progress=False)
        >>> len(found.neurons), len(found.new), bool(found.neurons["divergence"].max() < 1e-6)
        (512, 5, True)
        >>> found.circuits["jaccard"].tolist()[0]
        1.0
    """
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "n_patched": n_patched,
        "n_nodes": n_nodes,
    }
    settings |= {"edge_mass": edge_mass, "faithfulness": faithfulness}
    settings |= {"n_resamples": n_resamples, "confidence": confidence}
    settings = {name: as_plain(value) for name, value in (settings | {"seed": seed}).items()}
    if provenance is None and isinstance(grown, Grown):
        provenance = grown.provenance
    given = [model, grown] if null is None else [model, grown, null]
    require(given, provenance, **settings)
    assert provenance is not None
    models = [each.model if isinstance(each, Grown) else each for each in given]
    with ExitStack() as stack:
        exposed(models, stack)
        alignment = align(models[0], models[1], provenance)
        require_source(models[0], provenance)
        streamed = Streamed(models, alignment)
        stream = batches(models[0], tokens, metric, corrupted, batch_size)
        with tqdm(unit="prompt", disable=not progress) as bar:
            # The circuits first, so that what does not fit is refused before hours of work.
            first = next(stream)
            circuits = [_circuit(each, first, faithfulness, seed) for each in models]
            runs = streamed.add(first)
            found = [
                Found(names, circuit, scores(run, names))
                for names, circuit, run in zip(streamed.names(first), circuits, runs, strict=True)
            ]
            del runs
            resampling = Resampling(len(first.pair.clean), n_resamples, confidence, seed)
            over = differences(
                *(models, first, found, resampling), n_nodes=n_nodes, edge_mass=edge_mass
            )
            del found
            bar.update(len(first.pair.clean))
            about = {
                "faithfulness": [each.faithfulness for each in circuits],
                "completeness": [each.completeness for each in circuits],
                "circuit_sizes": [len(each) for each in circuits],
                "random_faithfulness": [list(each.random) for each in circuits],
                "n_prompts_of_circuits": len(first.pair.clean),
                "settings": settings,
            }

            def compared(n_patched: int | None) -> Comparison:
                old, new, silent = streamed.frames()
                old, new = with_patching(models, first, old, new, n_patched)
                return Comparison(
                    heads=old[old["kind"] == "attention"].reset_index(drop=True),
                    neurons=old[old["kind"] == "neuron"].reset_index(drop=True),
                    new=new,
                    silent=silent,
                    circuits=over.circuits,
                    nodes=over.nodes,
                    edges=over.edges,
                    tokens=tuple(token_texts(models[0], first.pair.clean[0])),
                    about=streamed.about() | about,
                )

            try:
                for batch in stream:
                    streamed.add(batch)
                    bar.update(len(batch.pair.clean))
                return compared(n_patched)
            except Exception as error:  # whatever it is: hours of work are not to be lost
                raise _stopped(error, compared(0)) from error


def _stopped(error: Exception, so_far: Comparison) -> ComparisonError:
    """What says that a comparison stopped, and holds what there is of it."""
    stopped = ComparisonError(
        [
            f"{type(error).__name__}: {error}",
            f"what was found on the {so_far.about['n_prompts']} prompts before, without patching, "
            "is this error's `so_far`",
        ],
        "the comparison stopped",
    )
    stopped.so_far = so_far
    return stopped


def _circuit(model: Any, batch: Batch, faithfulness: float, seed: int) -> Circuit:
    pair = on(model, batch.pair)
    return discover(
        *(model, pair.clean, pair.corrupted, batch.metric),
        faithfulness=faithfulness,
        seed=seed,
        mask=pair.mask,
    )
