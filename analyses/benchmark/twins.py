"""Load trained twins as problems: transformers trained to compute programs in known parts.

The twins were trained by strict interchange interventions (SIIT: Gupta et al., "InterpBench: Semi-
Synthetic Transformers for Evaluating Mechanistic Interpretability Techniques", 2024);
`analyses/tools/README.md` says how. Each program has a twin for each of `SEEDS`. The ground truth
is the design (`design_of`). A head or neuron is true if it has a counterpart in the program and is
*alive*: its output is not 0 on all inputs (some neurons with relu die in training). An edge is true
if both its ends are true (or `embed`, `output`), and the program has an edge between the
counterparts, on the same side. A part or an edge changes a logit if removing it changes one by more
than `LEAST`, a tenth of the difference between right and wrong outputs. Training is not perfect:
`faithfulness` is the measured share of outputs that are right after interventions.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from analyses.benchmark.disguise import parts
from analyses.benchmark.tasks import (
    Problem,
    Task,
    Truth,
    candidate_edges,
    load,
    pairs_of,
    truth_of,
)
from analyses.benchmark.tracr_edges import Edge
from analyses.benchmark.tracr_models import TracrProgram
from attn_only_lens import HeadName
from attn_only_lens.tl import HookedTransformer, HookedTransformerConfig

FOLDER = Path(__file__).parent / "twins"
SEEDS = tuple(range(5))
LEAST = 0.1
MAPPED, OTHERS = 12, 8  # neurons of a layer with and without a counterpart
D_MODEL, D_HEAD = 32, 8

Part = tuple[int, str, tuple[int, ...]]
"""A layer, "H" or "N", and indices: what interventions replace at once."""


def names() -> list[str]:
    """Return the names of the programs that have a twin."""
    return sorted(path.stem for path in FOLDER.glob("seed0/*.safetensors"))


def faithfulness(name: str, seed: int = 0) -> dict[str, float]:
    """Return the shares of outputs that are right, by kind of intervention."""
    card = json.loads((FOLDER / f"seed{seed}" / f"{name}.json").read_text("utf-8"))
    return dict(card["faithfulness"])


def design_of(program: TracrProgram) -> list[tuple[Part, Part]]:
    """Return pairs of a part of a program and a part of its twin; others have no counterpart."""
    true = {edge.writer for edge in program.true_edges()} - {"embed"}
    heads = [HeadName.parse(name) for name in sorted(true)]
    pairs: list[tuple[Part, Part]] = []
    for layer in range(program.model.cfg.n_layers):
        of_layer = [x for x in heads if x.layer == layer]
        pairs += [((layer, "H", (x.index,)),) * 2 for x in of_layer if x.kind == "attention"]
        if neurons := tuple(x.index for x in of_layer if x.kind == "neuron"):
            pairs.append(((layer, "N", neurons), (layer, "N", tuple(range(MAPPED)))))
    return pairs


def untrained(program: TracrProgram, seed: int) -> HookedTransformer:
    """Return a transformer of the twin's sizes, in float32."""
    cfg = program.model.cfg
    return HookedTransformer(
        HookedTransformerConfig(
            n_layers=cfg.n_layers,
            n_heads=cfg.n_heads + 1,
            d_model=D_MODEL,
            d_head=D_HEAD,
            d_mlp=MAPPED + OTHERS,
            d_vocab=cfg.d_vocab,
            d_vocab_out=cfg.d_vocab_out,
            n_ctx=cfg.n_ctx,
            act_fn="relu",
            normalization_type=None,
            attention_dir=cfg.attention_dir,
            seed=seed,
            device="cpu",
            model_name=f"twin-{program.name}",
        )
    )


def load_twin(program: TracrProgram, seed: int = 0) -> HookedTransformer:
    """Return the twin of a program, in float64."""
    twin = untrained(program, seed).to(torch.float64, print_details=False)
    weights = load_file(FOLDER / f"seed{seed}" / f"{program.name}.safetensors")
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(weights[name])
    return twin


def problems(
    only: Collection[str] | None = None, seeds: Collection[int] = SEEDS
) -> Iterator[Problem]:
    """Yield the problem of each twin."""
    for name in names() if only is None else only:
        program = load(name)
        pairs = tuple(pairs_of(program))
        for seed in seeds:
            twin = load_twin(program, seed)
            edges = candidate_edges(twin)
            truth = truth_of_twin(program, twin, edges)
            task = Task(name, "trained", twin, pairs, tuple(parts(twin)), edges, seed)
            yield Problem(task, truth)


def truth_of_twin(program: TracrProgram, twin: HookedTransformer, edges: tuple[Edge, ...]) -> Truth:
    """Return the truth of a twin."""
    counterparts = {"embed": {"embed"}, "output": {"output"}}
    for (layer, letter, indices), (twins_layer, _, twins_indices) in design_of(program):
        mapped = {f"L{layer}{letter}{i}" for i in indices}
        for i in set(twins_indices) & _alive(program, twin, twins_layer, letter):
            counterparts[f"L{twins_layer}{letter}{i}"] = mapped
    true = program.true_edges()
    is_true = [
        any(
            Edge(writer, reader, edge.side) in true
            for writer in counterparts.get(edge.writer, ())
            for reader in counterparts.get(edge.reader, ())
        )
        for edge in edges
    ]
    return truth_of(program, twin, edges, is_true, least=LEAST)


@torch.no_grad()
def _alive(program: TracrProgram, twin: HookedTransformer, layer: int, letter: str) -> set[int]:
    """Return the heads or neurons of a layer whose output is not 0 on all inputs."""
    name = f"blocks.{layer}." + ("attn.hook_z" if letter == "H" else "mlp.hook_post")
    alive = set[int]()
    for tokens, _, _ in program.batches():
        _, cache = twin.run_with_cache(tokens, names_filter=name, return_cache_object=False)
        z = cache[name].flatten(3).norm(dim=-1) if letter == "H" else cache[name]
        alive |= set((z.abs().amax((0, 1)) > 1e-6).nonzero()[:, 0].tolist())
    return alive
