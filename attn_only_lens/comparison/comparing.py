"""`compare`: a model and one grown from it, over a dataset, and their circuits on a part of it.

Two forward passes and a backward one a model stream over the dataset: patterns, outputs and
attribution of every component come of the same passes. What takes runs of its own for each
component, patching, and the search for circuits are done on the first batch.

Memory, beyond the models: of one batch, in each model and for each token, 3 numbers a neuron and
d_head + pos a head in both runs, what the backward pass keeps, and the logits; of the first batch
that, and one number for each component and token; and 12 float64 a component. Nothing grows with
the number of batches.
"""

from contextlib import ExitStack
from typing import Any

from tqdm.auto import tqdm

from attn_only_lens.circuits.discovery import Circuit, discover
from attn_only_lens.comparison.alignment import align
from attn_only_lens.comparison.batches import Batch, Source, batches
from attn_only_lens.comparison.checks import exposed, require, require_source
from attn_only_lens.comparison.circuits import Found, scores
from attn_only_lens.comparison.differences import differences
from attn_only_lens.comparison.measure import on
from attn_only_lens.comparison.overlap import Resampling
from attn_only_lens.comparison.patched import with_patching
from attn_only_lens.comparison.results import Comparison
from attn_only_lens.comparison.streamed import Streamed
from attn_only_lens.errors import ComparisonError
from attn_only_lens.expansion import Provenance
from attn_only_lens.growth import Grown
from attn_only_lens.patching.custom_metric import AnyMetric
from attn_only_lens.patching.prompts import Prompts
from attn_only_lens.plain import as_plain
from attn_only_lens.texts import token_texts

__all__ = ["compare"]


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
    settings = {name: as_plain(value) for name, value in settings.items()}
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
                "settings": {**settings, "seed": seed},
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
