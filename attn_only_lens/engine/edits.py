"""Turn patches of heads into changes in the residual stream, or into hooks on the model.

A neuron-head (a single-neuron attention head) outputs z = w v, where w is its attention to its own
token and v its value. A prime (') marks values in the source run, from which patches are taken.
For each patched part, the new z, on which later blocks depend, is:

    part          new z
    "z"           z' = w' v'
    "pattern"     w' v
    "value"       w v'
    "q"           w' v, because a query changes only the pattern

The head's contribution to the residual stream changes by Δz times its row of W_O. A feature of a
cross-layer transcoder has such a row for each layer to whose MLP output it writes.

For attention heads, the block runs again for a batch of variants (patched copies of the run); a
hook patches different heads at different positions in each variant. In models with grouped-query
attention, heads share keys and values. To patch a key or value for one head only, the shared key or
value is patched, and then the z of all other heads is restored. The result equals a patch in a
model where each head has its own keys and values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from attn_only_lens.axes import Residual
from attn_only_lens.engine.recording import Hooks, NeuronRun
from attn_only_lens.engine.replay import Replay, Variants
from attn_only_lens.engine.sites import LayerSites, Part
from attn_only_lens.errors import UnsupportedModelError


def change_of_z(
    target: NeuronRun, source: NeuronRun, part: Part
) -> Float[Tensor, "batch pos head_index"]:
    """Return the change in z when one part of the heads is patched from `source` into `target`."""
    if part == "z":
        return source.z - target.z
    if part == "value":
        return target.weight * (source.v - target.v)
    return (source.weight - target.weight) * target.v


def by_site(
    sites: LayerSites, by_head: Float[Tensor, "batch pos head_index"]
) -> Float[Tensor, "site batch pos"]:
    """Select the values of the given sites from the values of all heads of their layer."""
    index = sites.index
    every = torch.equal(index, torch.arange(by_head.shape[2], device=index.device))
    chosen = by_head if every else by_head[:, :, index.to(by_head.device)]
    return chosen.permute(2, 0, 1)


def writes_of(
    decoders: Sequence[Float[Tensor, "head_index d_model"]],
    change: Float[Tensor, "row pos"],
    index: Int[Tensor, "row"],
) -> list[Residual]:
    """Return what each row's head writes if its z changes: to its layer, then to later layers."""
    # Decoders are large, so select rows first.
    return [(change.unsqueeze(-1) * W[index].unsqueeze(1)).to(W.dtype) for W in decoders]


def neuron_variants(
    replay: Replay, layer: int, first: int, written: Sequence[Residual]
) -> Variants:
    """Return patched copies of a run that add to the output of a layer's neurons.

    With a cross-layer transcoder, `written` has a second tensor for the next layer, and so on.
    """
    block, (own, *later) = replay.host.block(layer, "neuron"), written
    module, *modules = (x.output_module for x in replay.host.neurons[layer : layer + len(written)])
    added, n = list(zip(modules, later, strict=True)), len(own) // replay.batch
    if replay.adds_mlp_output(block, module):
        stream = replay.recorded_stream(block + 1, first, n)
        return Variants(block + 1, first, stream + own, added=added)
    stream = replay.recorded_stream(block, first, n)
    return Variants(block, first, stream, added=[(module, own), *added])


def differences(target: Tensor, source: Tensor, part: Part) -> Bool[Tensor, "batch pos head_index"]:
    """Return a mask that is True for heads and positions whose activations differ between runs."""
    differs = (target != source).any(dim=-1)
    return differs.transpose(1, 2) if part == "pattern" else differs


def of_group(heads: Int[Tensor, "head"], n_heads: int, n_shared: int) -> Int[Tensor, "head"]:
    """Return the index of the shared key or value that each head reads (see `require_groups`)."""
    return heads // (n_heads // n_shared)


def by_head(shared: Float[Tensor, "batch pos group d"], n_heads: int) -> Tensor:
    """Return shared keys or values, repeated for each head that reads them."""
    return shared.repeat_interleave(n_heads // shared.shape[2], dim=2)


def share_edits(
    name: str,
    z_name: str,
    source: Tensor,
    z: Float[Tensor, "batch pos head_index d_head"],
    heads: Int[Tensor, "variant"],
    places: Bool[Tensor, "variant batch pos"],
    first: int,
) -> Hooks:
    """Return hooks that, in each patched run, patch a shared key or value for one head only."""
    n_heads, n_shared = z.shape[2], source.shape[2]
    groups = one_hot(of_group(heads, n_heads, n_shared), n_shared).bool()
    other_heads = ~one_hot(heads, n_heads).bool()
    return [
        (name, attention_edit(source, "value", groups, places, first)),
        (z_name, attention_edit(z, "z", other_heads, torch.ones_like(places), first)),
    ]


def attention_edit(
    source: Tensor,
    part: Part,
    heads: Bool[Tensor, "variant head_index"],
    positions: Bool[Tensor, "variant batch pos"],
    first: int,
) -> Callable[[Tensor, Any], Tensor]:
    """Return a hook that patches, in each variant of a run, the variant's heads and positions."""
    n_variants = len(heads)
    # Activations other than patterns have the axes [batch, pos, head_index, …].
    position_axis = 2 if part == "pattern" else 1
    kept = source.narrow(position_axis, first, source.shape[position_axis] - first)
    rows = kept.repeat(n_variants, 1, 1, 1)
    chosen = positions[:, :, first:, None].to(heads.device) & heads[:, None, None, :]
    chosen = chosen.flatten(0, 1)  # [row, pos, head_index]
    if part == "pattern":
        chosen = chosen.transpose(1, 2)

    def hook(value: Tensor, hook: Any) -> Tensor:
        if value.shape != rows.shape:  # `torch.where` would broadcast a single position
            reason = (
                f"{hook.name} has shape {list(value.shape)} in a run of {n_variants} variants that "
                f"start at position {first}; expected {list(rows.shape)}"
            )
            raise UnsupportedModelError([reason], "these hook points cannot be patched")
        return torch.where(chosen.unsqueeze(-1), rows, value)

    return hook
