"""Gradient estimates of nodes and edges, for any `HookedTransformer`: the baselines.

All estimates multiply the change of an output between the two prompts by a gradient of the metric,
and add up absolute values over positions and pairs:

    node    Σ |g_z · Δz|                         g_z at the part's output
    edge    Σ |g · Δw|                           g at the stream, through one input of the reader

They differ in the gradient, in the corrupted run unless another place is named:

    gradient    attribution patching: AtP for nodes, EAP for edges (Syed, Rager and Conmy 2023)
    AtP*        GradDrop: the sum over runs in which the gradient skips one layer, and for queries
                and keys the exact change of the attention pattern (Kramár et al. 2024)
    EAP-IG      the mean over 5 runs with interpolated embeddings (Hanna et al. 2024)
    EAP-IG, activations
                the mean over 5 runs in which a sublayer's outputs are interpolated: for a node, its
                own sublayer's (Marks et al. 2024); for an edge, each sublayer's in turn
    RelP        patterns and norm scales held constant (Rezaei Jafari et al. 2025)
    GIM         norm scales held constant, the softmax at temperature 2, and gradients divided by
                the number of factors of a product (Edin et al. 2025)
    integrated  integrated gradients: for each sublayer, the mean over 5 runs in which the stream
                next to it is interpolated between the two runs. For each sublayer, the products
                of these gradients with the changes of all writers nearly add up to Δmetric.

Norm scales before a reader are held fixed, as in the functions of the package.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.benchmark.tasks import Pairs, Task
from analyses.benchmark.tracr_edges import Edge
from attn_only_lens.tl import HookedTransformer

STEPS = 5
TEMPERATURE = 2.0
SHARES = {"attn.hook_q": 1 / 4, "attn.hook_k": 1 / 4, "attn.hook_v": 1 / 2}
"""The shares of gradients that GIM passes on to a product's factors."""
_ENDS = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z", "mlp.hook_pre")
_KEPT = (*_ENDS, "mlp.hook_post", "hook_resid_pre", "hook_resid_mid", "hook_resid_post")
_SCALES = ("hook_scale", "hook_pattern")
_Hooks = list[tuple[str, Callable[..., Any]]]
_Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Gradients:
    """Gradients at hook points, and the run whose norm scales are held."""

    by_hook: _Numbers
    run: _Numbers


Way = Callable[[HookedTransformer, Pairs], list[Gradients]]


def activations(model: HookedTransformer, tokens: Tensor) -> _Numbers:
    """Return all activations of a run."""
    with torch.no_grad():
        return dict(model.run_with_cache(tokens, return_cache_object=False)[1])


def _gradients(
    model: HookedTransformer, tokens: Tensor, weights: Tensor, hooks: _Hooks = ()
) -> _Numbers:
    """Return the gradients of Σ weights · logits at all hook points in `_KEPT`."""
    seen: _Numbers = {}

    def keep(x: Tensor, hook: Any) -> Tensor:
        # A constant, such as a stream that a hook replaced, becomes a leaf.
        x = x if x.requires_grad else x.detach().requires_grad_()
        seen[hook.name] = x
        return x

    with torch.enable_grad():
        fwd_hooks = [*hooks, (lambda name: name.endswith(_KEPT), keep)]
        logits = model.run_with_hooks(tokens, fwd_hooks=fwd_hooks)
        value = (logits * weights).sum()
        grads = torch.autograd.grad(value, list(seen.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(seen.items(), grads, strict=True)
    }


def plain(model: HookedTransformer, pairs: Pairs) -> list[Gradients]:
    """Return the gradients in the corrupted run."""
    by_hook = _gradients(model, pairs.corrupted, pairs.weights)
    return [Gradients(by_hook, activations(model, pairs.corrupted))]


def held_patterns(model: HookedTransformer, pairs: Pairs) -> list[Gradients]:
    """Return the gradients with patterns and norm scales held constant (RelP)."""
    hold = (lambda name: name.endswith(_SCALES), lambda x, hook: x.detach())
    by_hook = _gradients(model, pairs.corrupted, pairs.weights, [hold])
    return [Gradients(by_hook, activations(model, pairs.corrupted))]


def dropped(model: HookedTransformer, pairs: Pairs) -> list[Gradients]:
    """Return gradients that skip one layer, for each layer in turn (GradDrop)."""
    n_layers = model.cfg.n_layers
    if n_layers == 1:
        return plain(model, pairs)
    run, every = activations(model, pairs.corrupted), []
    for layer in range(n_layers):
        ends = (f"blocks.{layer}.hook_attn_out", f"blocks.{layer}.hook_mlp_out")
        skip = [(name, lambda x, hook: x.detach()) for name in ends]
        by_hook = _gradients(model, pairs.corrupted, pairs.weights, skip)
        every.append(Gradients({n: g / (n_layers - 1) for n, g in by_hook.items()}, run))
    return every


def softened(model: HookedTransformer, pairs: Pairs) -> list[Gradients]:
    """Return the gradients of GIM (arXiv 2505.17630), whose forward pass is the model's.

    The paper changes three rules. LayerNorm freeze: scales are constants. Temperature-adjusted
    softmax gradients: for p = softmax(s), the gradient at s is p' (g - Σ p' g) with p' =
    softmax(s / 2). Gradient normalisation: each factor of a product gets half of its gradient, so
    values get 1/2, and queries and keys, factors of a factor, 1/4.
    """
    scores: _Numbers = {}

    def remember(x: Tensor, hook: Any) -> None:
        scores[hook.name.removesuffix("hook_attn_scores")] = x

    def soften(pattern: Tensor, hook: Any) -> Tensor:
        x = scores[hook.name.removesuffix("hook_pattern")]
        return pattern.detach() + TEMPERATURE * _change((x / TEMPERATURE).softmax(-1))

    def share(x: Tensor, hook: Any) -> Tensor:
        return x.detach() + _share(hook.name) * _change(x)

    rules = {"hook_scale": lambda x, hook: x.detach(), "hook_attn_scores": remember,
             "hook_pattern": soften, **dict.fromkeys(SHARES, share)}  # fmt: skip
    hooks = [(partial(_has_end, end), rule) for end, rule in rules.items()]
    by_hook = _gradients(model, pairs.corrupted, pairs.weights, hooks)
    passed = {name: g * _share(name) for name, g in by_hook.items()}
    return [Gradients(passed, activations(model, pairs.corrupted))]


def _has_end(end: str, name: str) -> bool:
    return name.endswith(end)


def _share(name: str) -> float:
    return next((x for end, x in SHARES.items() if name.endswith(end)), 1.0)


def _change(x: Tensor) -> Tensor:
    """Return 0 with the gradient of x."""
    return x - x.detach()


def _replace(stream: Tensor, x: Tensor, hook: Any) -> Tensor:
    return stream


def _along(model: HookedTransformer, pairs: Pairs, runs: Sequence[_Numbers], name: str) -> _Numbers:
    """Return mean gradients over runs in which one stream is interpolated."""
    total: _Numbers = {}
    start, end = (run[name] for run in runs)
    for step in range(STEPS):
        stream = torch.lerp(start, end, (step + 0.5) / STEPS)
        hooks = [(name, partial(_replace, stream))]
        for hook, g in _gradients(model, pairs.corrupted, pairs.weights, hooks).items():
            total[hook] = total.get(hook, 0.0) + g / STEPS
    return total


def interpolated_embeddings(model: HookedTransformer, pairs: Pairs) -> list[Gradients]:
    """Return mean gradients over runs with interpolated embeddings (EAP-IG)."""
    runs = [activations(model, tokens) for tokens in (pairs.corrupted, pairs.clean)]
    return [Gradients(_along(model, pairs, runs, "blocks.0.hook_resid_pre"), runs[0])]


def interpolated_outputs(model: HookedTransformer, pairs: Pairs) -> list[Gradients]:
    """Return mean gradients over runs with interpolated outputs (EAP-IG, activations).

    At a part's output z, z itself is interpolated: Σ_α ∇_z m(z_0 + α Δz) / n · Δz, equation 3 of
    Marks et al. (arXiv 2403.19647). At a reader's input, gradients are means over such runs of all
    sublayers and of the embedding, as in the code that Hanna et al. published.
    """
    runs = [activations(model, tokens) for tokens in (pairs.corrupted, pairs.clean)]
    written: _Numbers = {}
    read: _Numbers = {}
    points = ["blocks.0.hook_resid_pre", *_outputs(model, runs[0])]
    for point in points:
        along = _along(model, pairs, runs, point)
        written[point] = along[point]
        for name, g in along.items():
            read[name] = read.get(name, 0.0) + g / len(points)
    return [Gradients(read | written, runs[0])]


def integrated(model: HookedTransformer, pairs: Pairs) -> list[Gradients]:
    """Return gradients integrated over the stream next to each sublayer.

    At a reader's inputs, the stream that it reads is interpolated; at a part's output, the stream
    that it writes to.
    """
    runs = [activations(model, tokens) for tokens in (pairs.corrupted, pairs.clean)]
    result: _Numbers = {}
    for layer, block in enumerate(model.blocks):
        prefix = f"blocks.{layer}."
        before = _along(model, pairs, runs, f"{prefix}hook_resid_pre")
        between = _along(model, pairs, runs, f"{prefix}hook_resid_mid")
        after = _along(model, pairs, runs, f"{prefix}hook_resid_post")
        for point in ("attn.hook_q", "attn.hook_k", "attn.hook_v"):
            result[prefix + point] = before[prefix + point]
        result[f"{prefix}mlp.hook_pre"] = between[f"{prefix}mlp.hook_pre"]
        into_mid, into_post = between[f"{prefix}hook_resid_mid"], after[f"{prefix}hook_resid_post"]
        W_O, W_out = block.attn.W_O.detach(), block.mlp.W_out.detach()
        result[f"{prefix}attn.hook_z"] = torch.einsum("bpd,hed->bphe", into_mid, W_O)
        result[f"{prefix}mlp.hook_post"] = into_post @ W_out.T
        result[f"{prefix}hook_resid_post"] = into_post
    return [Gradients(result, runs[0])]


# Nodes


def node_scores(task: Task, way: Way) -> list[float]:
    """Return Σ |g_z · Δz| for each part."""
    total = torch.zeros(len(task.nodes), dtype=torch.float64)
    for pairs in task.pairs:
        change = _changes(task.model, pairs, _outputs)
        for gradients in way(task.model, pairs):
            total += _sizes(gradients.by_hook, change)
    return total.tolist()


def node_scores_from_zero(task: Task, seed: int = 0) -> list[float]:
    """Return Σ |g_z · z| for each part: its output against 0, in the runs on all prompts.

    The gradient is of the sum of all logits with random signs.
    """
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(len(task.nodes), dtype=torch.float64)
    for tokens in task.batches():
        for row in tokens.split(1):
            gradients = _of_random_logits(task.model, row, generator)
            total += _sizes(gradients.by_hook, _outputs(task.model, gradients.run))
    return total.tolist()


def _of_random_logits(
    model: HookedTransformer, tokens: Tensor, generator: torch.Generator
) -> Gradients:
    """Return the gradients of the sum of all logits with random signs.

    At the end of the stream, the last norm's scale is held, as before all other readers: outputs
    that are compared with 0 may be large.
    """
    shape = *tokens.shape, model.cfg.d_vocab_out
    signs = torch.randn(shape, generator=generator, dtype=torch.float64).sign().to(tokens.device)
    by_hook = _gradients(model, tokens, signs)
    gradients = Gradients(by_hook, activations(model, tokens))
    last = signs @ model.W_U.detach().T
    by_hook[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"] = _before_norm(
        getattr(model, "ln_final", None), "ln_final", gradients, last
    )
    return gradients


def _sizes(by_hook: _Numbers, change: _Numbers) -> Tensor:
    """Return Σ |g · change| over positions and prompts, for all parts in order."""
    products = [by_hook[name] * x for name, x in change.items()]
    by_part = [x.sum(-1) if x.ndim == 4 else x for x in products]
    return torch.cat([x.abs().sum((0, 1)) for x in by_part]).cpu()


def _outputs(model: HookedTransformer, run: _Numbers) -> _Numbers:
    names = [
        f"blocks.{layer}.{end}" for layer in range(model.cfg.n_layers)
        for end in ("attn.hook_z", "mlp.hook_post")
    ]  # fmt: skip
    return {name: run[name] for name in names}


def _changes(model: HookedTransformer, pairs: Pairs, of: Callable[..., _Numbers]) -> _Numbers:
    """Return something of the clean run minus the same of the corrupted run."""
    one, other = (of(model, activations(model, x)) for x in (pairs.clean, pairs.corrupted))
    return {name: x - other[name] for name, x in one.items()}


# Edges


def edge_scores(task: Task, way: Way, *, exact_patterns: bool = False) -> list[float]:
    """Return Σ |g · Δw| for each edge.

    Args:
        task: the task.
        way: a function that returns gradients.
        exact_patterns: whether to compute the change of attention patterns exactly for queries and
            keys, and to multiply the change of z by its gradient (the QK fix of AtP*).
    """
    total: dict[Edge, float] = dict.fromkeys(task.edges, 0.0)
    for pairs in task.pairs:
        change = _changes(task.model, pairs, writes)
        writers, written = list(change), torch.stack(list(change.values()))
        for gradients in way(task.model, pairs):
            blocks = read_covectors(task.model, gradients)
            if exact_patterns:
                patterns = _through_patterns(task.model, gradients, written)
                blocks = [block for block in blocks if block[1] not in ("q", "k")]
                add_scores(total, writers, patterns)
            add_scores(total, writers, _products(written, blocks))
    return list(total.values())


def edge_scores_from_zero(task: Task, seed: int = 0) -> list[float]:
    """Return Σ |g · w| for each edge: EAP with w's output against 0, in the runs on all prompts.

    The gradient is of the sum of all logits with random signs. This is the first-order estimate of
    an exact cut in `two_factors.py` with a zero reference.
    """
    generator = torch.Generator().manual_seed(seed)
    total: dict[Edge, float] = dict.fromkeys(task.edges, 0.0)
    for tokens in task.batches():
        gradients = _of_random_logits(task.model, tokens, generator)
        written = writes(task.model, gradients.run)
        blocks = read_covectors(task.model, gradients)
        add_scores(total, list(written), _products(torch.stack(list(written.values())), blocks))
    return list(total.values())


def _products(
    written: Float[Tensor, "writer batch pos d_model"], blocks: "list[_Covectors]"
) -> Iterator[tuple[list[str], str, Float[Tensor, "reader writer"]]]:
    """Yield Σ |g · w| over positions and prompts, for the readers and the side of each block."""
    for readers, side, g in blocks:
        yield readers, side, torch.einsum("wbpd,rbpd->rwbp", written, g).abs().sum((2, 3))


def add_scores(total: dict[Edge, float], writers: Sequence[str], blocks: Any) -> None:
    """Add scores [reader, writer] of blocks (readers, side, scores) to the edges among them."""
    for readers, side, numbers in blocks:
        for reader, row in zip(readers, numbers.tolist(), strict=True):
            for writer, score in zip(writers, row, strict=True):
                edge = Edge(writer, reader, side)
                if edge in total:
                    total[edge] += score


def writes(model: HookedTransformer, run: _Numbers) -> _Numbers:
    """Return what each writer adds to the stream."""
    written = {"embed": run["hook_embed"] + run["hook_pos_embed"]}
    for layer, block in enumerate(model.blocks):
        z, post = (run[f"blocks.{layer}.{end}"] for end in ("attn.hook_z", "mlp.hook_post"))
        for i, W in enumerate(block.attn.W_O.detach()):
            written[f"L{layer}H{i}"] = z[:, :, i] @ W
        for i, row in enumerate(block.mlp.W_out.detach()):
            written[f"L{layer}N{i}"] = post[:, :, i, None] * row
    return written


def read_changes(
    model: HookedTransformer, run: _Numbers, change: Float[Tensor, "writer batch pos d_model"]
) -> Iterator[tuple[str, Float[Tensor, "writer batch pos reader"]]]:
    """Yield a hook point of each sublayer's inputs, and how much these change with the stream.

    Norm scales are those of the run. The change of a head's query, key or value is its length.
    """
    for layer, block in enumerate(model.blocks):
        prefix = f"blocks.{layer}."
        x = _after_norm(block.ln1, f"{prefix}ln1", run, change)
        for side in "qkv":
            entering = torch.einsum("wbpd,hde->wbphe", x, _matrix(block, side))
            yield f"{prefix}attn.hook_{side}", entering.norm(dim=-1)
        x = _after_norm(block.ln2, f"{prefix}ln2", run, change)
        yield f"{prefix}mlp.hook_pre", (x @ block.mlp.W_in.detach()).abs()


_Covectors = tuple[list[str], str, Float[Tensor, "reader batch pos d_model"]]


def read_covectors(model: HookedTransformer, gradients: Gradients) -> list[_Covectors]:
    """Return, for each side of each sublayer's parts, the gradients at the stream they read."""
    blocks = list[_Covectors]()
    for layer, block in enumerate(model.blocks):
        prefix = f"blocks.{layer}."
        heads = [f"L{layer}H{i}" for i in range(model.cfg.n_heads)]
        for side in "qkv":
            g, W = gradients.by_hook[f"{prefix}attn.hook_{side}"], _matrix(block, side)
            entering = torch.einsum("bphe,hde->hbpd", g, W)
            blocks.append(
                (heads, side, _before_norm(block.ln1, f"{prefix}ln1", gradients, entering))
            )
        neurons = [f"L{layer}N{i}" for i in range(model.cfg.d_mlp)]
        g, W = gradients.by_hook[f"{prefix}mlp.hook_pre"], block.mlp.W_in.detach()
        entering = torch.einsum("bpn,dn->nbpd", g, W)
        blocks.append((neurons, "in", _before_norm(block.ln2, f"{prefix}ln2", gradients, entering)))
    last = gradients.by_hook[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]
    return [*blocks, (["output"], "in", last[None])]


def _matrix(block: Any, side: str) -> Tensor:
    return getattr(block.attn, f"W_{side.upper()}").detach()


def _before_norm(norm: Any, name: str, gradients: Gradients, g: Tensor) -> Tensor:
    """Return gradients at a norm's input, for its scale in the run."""
    if f"{name}.hook_scale" not in gradients.run:
        return g
    g = g * norm.w.detach()
    return (g - g.mean(-1, keepdim=True)) / gradients.run[f"{name}.hook_scale"]


def _after_norm(norm: Any, name: str, run: _Numbers, change: Tensor) -> Tensor:
    if f"{name}.hook_scale" not in run:
        return change
    centred = change - change.mean(-1, keepdim=True)
    return centred / run[f"{name}.hook_scale"] * norm.w.detach()


def _through_patterns(
    model: HookedTransformer,
    gradients: Gradients,
    written: Float[Tensor, "writer batch pos d_model"],
) -> Iterator[tuple[list[str], str, Float[Tensor, "reader writer"]]]:
    """Yield scores of edges into queries and keys: the exact change of z times its gradient."""
    run = gradients.run
    for layer, block in enumerate(model.blocks):
        attn, prefix = block.attn, f"blocks.{layer}.attn."
        q, k, v, z, scores = (
            run[prefix + end]
            for end in ("hook_q", "hook_k", "hook_v", "hook_z", "hook_attn_scores")
        )
        entering = _after_norm(block.ln1, f"blocks.{layer}.ln1", run, written)
        g = gradients.by_hook[f"{prefix}hook_z"]
        for side in "qk":
            moved = torch.einsum("wbpd,hde->wbphe", entering, _matrix(block, side))
            ends = (moved, k[None]) if side == "q" else (q[None], moved)
            change = torch.einsum("wbqhe,wbkhe->wbhqk", *torch.broadcast_tensors(*ends))
            pattern = (scores + change / attn.attn_scale).softmax(-1)
            new_z = torch.einsum("wbhqk,bkhe->wbqhe", pattern, v)
            sizes = ((new_z - z) * g).sum(-1).abs().sum((1, 2))
            yield [f"L{layer}H{i}" for i in range(model.cfg.n_heads)], side, sizes.T
