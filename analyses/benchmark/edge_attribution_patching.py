"""Edge attribution patching (EAP) with a zero reference, for any `HookedTransformer`.

    EAP(w → R, kind) = Σ_tokens |∂m/∂(R's input of that kind) · what w wrote, as R reads it|

(Syed, Rager and Conmy, "Attribution Patching Outperforms Automated Circuit Discovery", 2023). Here,
m is the sum of all logits with random signs, norm scales before R are held fixed, and w's output is
removed. EAP is the first-order estimate of an exact cut in `two_factors.py` with a zero reference.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from attn_only_lens import HeadName
from attn_only_lens.engine.sites import resolve_sites
from attn_only_lens.engine.writes import decompose

_HOOKS = {"q": "attn.hook_q", "k": "attn.hook_k", "value": "attn.hook_v"}
_MATRICES = {"q": "W_Q", "k": "W_K", "value": "W_V"}


def edge_attribution_patching(
    source: Any,
    model: Any,
    batches: Sequence[Int[Tensor, "batch pos"]],
    nodes: Collection[str],
    seed: int = 0,
) -> dict[tuple[str, str, str], float]:
    """Return the score of every edge: writer, reader, kind, with the names of `two_factors.py`.

    Args:
        source: a `HookedTransformer`, which computes the gradients.
        model: the same model with neuron-heads, which gives the outputs of parts.
        batches: batches of prompts; all prompts in a batch have the same length.
        nodes: names of heads and neurons.
        seed: the seed of the signs.
    """
    scores: dict[tuple[str, str, str], float] = defaultdict(float)
    generator = torch.Generator().manual_seed(seed)
    chosen = resolve_sites(model, list(nodes))
    for tokens in batches:
        gradients, logits_gradient = _gradients(source, tokens, generator)
        parts = decompose(model, tokens, None)

        def add(
            reader: str, kind: str, g: Tensor, reads: Any, before: Any, parts: Any = parts
        ) -> None:
            names, written = ["embed"], [parts.embedding[None]]
            for sites in chosen:
                if (part := parts.of(sites.layer, sites.kind)) in before:
                    names += sites.names
                    written.append(part.written(sites))
            products = (reads.change(torch.cat(written)) * g).sum(-1).abs().sum((1, 2))
            for writer, value in zip(names, products.tolist(), strict=True):
                scores[writer, reader, kind] += value

        for name in (name for sites in chosen for name in sites.names):
            head = HeadName.parse(name)
            part, before = (f(head.layer, head.kind) for f in (parts.of, parts.before))
            for kind, g in _read_gradients(source, gradients, head).items():
                add(name, kind, g, part.reads, before)
        g = logits_gradient @ source.unembed.W_U.T
        add("output", "in", g, parts.final, parts.sublayers)
    return dict(scores)


def _gradients(
    source: Any, tokens: Tensor, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Return gradients of the randomly signed sum of logits, at inputs of heads; and the signs."""
    seen: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: Any) -> None:
        seen[hook.name] = x

    ends = (*_HOOKS.values(), "mlp.hook_pre", "mlp.hook_pre_linear")
    with torch.enable_grad():
        logits = source.run_with_hooks(tokens, fwd_hooks=[(lambda n: n.endswith(ends), keep)])
        signs = torch.randn(logits.shape, generator=generator, dtype=logits.dtype).sign().to(logits)
        grads = torch.autograd.grad((logits * signs).sum(), list(seen.values()), allow_unused=True)
    gradients_of = {
        n: torch.zeros_like(x) if g is None else g
        for (n, x), g in zip(seen.items(), grads, strict=True)
    }
    return gradients_of, signs


def _read_gradients(source: Any, gradients: dict[str, Tensor], head: HeadName) -> dict[str, Tensor]:
    """Return the gradient at a head's input, after its norm, for each kind of input."""
    block, prefix, i = source.blocks[head.layer], f"blocks.{head.layer}.", head.index
    if head.kind == "attention":
        return {
            kind: gradients[prefix + hook][:, :, i] @ getattr(block.attn, _MATRICES[kind])[i].T
            for kind, hook in _HOOKS.items()
        }
    gated = source.cfg.gated_mlp
    by = {"mlp.hook_pre": block.mlp.W_gate if gated else block.mlp.W_in}
    if gated:
        by["mlp.hook_pre_linear"] = block.mlp.W_in
    terms = [gradients[prefix + hook][:, :, i, None] * W[:, i] for hook, W in by.items()]
    return {"in": sum(terms, torch.zeros_like(terms[0])).detach()}
