"""Cut edges of a model without norms: a reader gets every writer's output except one.

Without norms, a reader's query (key, value, pre-activation) is a sum with one term per writer: the
writer's output times W. Cutting an edge subtracts the edge's term, with the writer's output in this
same run, so that cuts add up.
"""

from collections import defaultdict
from collections.abc import Collection

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from analyses.benchmark.tracr_edges import Edge
from attn_only_lens import HeadName
from attn_only_lens.tl import HookedTransformer


@torch.no_grad()
def logits_without(
    model: HookedTransformer, tokens: Int[Tensor, "batch pos"], cut: Collection[Edge]
) -> Float[Tensor, "batch pos d_vocab_out"]:
    """Run a model without norms with some of its edges cut."""
    wanted = {edge.writer for edge in cut}
    written: dict[str, Tensor] = {}
    by_hook = defaultdict(list)
    for edge in cut:
        by_hook[_hook(model, edge)].append(edge)

    def embed(x: Tensor, hook: HookPoint) -> None:
        written["embed"] = written["embed"] + x if "embed" in written else x

    def write(x: Tensor, hook: HookPoint) -> None:
        layer, block = hook.layer(), model.blocks[hook.layer()]
        heads = hook.name.endswith("hook_z")
        for i, W in enumerate(block.attn.W_O if heads else block.mlp.W_out):
            name = f"L{layer}{'H' if heads else 'N'}{i}"
            if name in wanted:
                written[name] = x[:, :, i] @ W if heads else x[:, :, i, None] * W

    def read(x: Tensor, hook: HookPoint) -> Tensor:
        x = x.clone()
        for edge in by_hook[hook.name]:
            if edge.reader == "output":
                x -= written[edge.writer]
                continue
            block, i = model.blocks[hook.layer()], HeadName.parse(edge.reader).index
            W = block.mlp.W_in[:, i] if edge.side == "in" else _side(block.attn, edge.side)[i]
            x[:, :, i] -= written[edge.writer] @ W
        return x

    layers = range(model.cfg.n_layers)
    return model.run_with_hooks(
        tokens,
        fwd_hooks=[
            ("hook_embed", embed),
            ("hook_pos_embed", embed),
            *((f"blocks.{layer}.attn.hook_z", write) for layer in layers),
            *((f"blocks.{layer}.mlp.hook_post", write) for layer in layers),
            *((name, read) for name in by_hook),
        ],
    )


def _side(attn: torch.nn.Module, side: str) -> Tensor:
    return {"q": attn.W_Q, "k": attn.W_K, "v": attn.W_V}[side]


def _hook(model: HookedTransformer, edge: Edge) -> str:
    """Return the hook point of an edge's reader."""
    if edge.reader == "output":
        return f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    if edge.side == "in":
        return f"blocks.{HeadName.parse(edge.reader).layer}.mlp.hook_pre"
    return HeadName.parse(edge.reader).hook(edge.side, model)
