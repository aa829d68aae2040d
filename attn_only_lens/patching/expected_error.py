"""The expected error of an estimate by gradients, site by site, without a further patch.

A first-order estimate errs most where a patch writes much beside what is there: the norm of
whatever reads the stream next is then far from constant. For a patch that moves what a head writes
at token t by a vector of length a_t, with x_t the stream after the head's sublayer in the run
patched into, and g_t the gradient of the metric there,

    key = Σ_t a_t² ‖g_t‖ / ‖x_t‖

the largest effect that a linear model allows, a ‖g‖, times the size of the write relative to the
stream, a / ‖x‖. What a part writes:

    neuron-heads, any part    |Δz_i| ‖W_out[i]‖ (`engine/edits.py`)
    attention, z              ‖Δz W_O‖
    pattern, q                the same, z being that of the new pattern or query: one forward pass
                              in which all are replaced, and z restored before anything reads it
    value                     P[t, s] ‖Δv_s W_O‖, written at every t by a value at s
    k                         |P'[t, s] - P[t, s]| ‖(v_s - z_t) W_O‖, with P' of a pass in which all
                              keys are replaced; to first order in the change of the pattern

A norm after the sublayer (Gemma 2, OLMo 2) is left out: the key ranks sites, it is no bound.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.edits import by_head, change_of_z, neuron_changes
from attn_only_lens.engine.recording import Recording, run
from attn_only_lens.engine.sites import SHARED_PARTS, LayerSites, Part, hook_name
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.patching.site_groups import SiteGroup
from attn_only_lens.tolerances import LOGIT_TOLERANCE

_READ: dict[Part, tuple[Part, ...]] = {"value": ("pattern",), "k": ("pattern", "value", "z")}
"""What the keys of parts of attention heads need besides the part."""


def hook_points(model: Any, sites: Sequence[LayerSites], part: Part) -> tuple[set[str], set[str]]:
    """Return the hook points to take gradients at, and those to record."""
    host = host_of(model)
    writes = {host.write_hook(site.layer, site.kind) for site in sites}
    attention = {site.layer for site in sites if site.kind == "attention"}
    parts = {*_READ.get(part, ()), "z"}
    read = {hook_name(model, layer, chunk) for layer in attention for chunk in parts}
    return writes, writes | read


@torch.no_grad()
def expected_errors(
    model: Any,
    groups: Sequence[SiteGroup],
    part: Part,
    target: Recording,
    source: Recording,
    gradients: dict[str, Tensor],
) -> list[Float[Tensor, "row"]]:
    """Return the key of each row of each group."""
    host = host_of(model)
    attention = sorted(
        {site_group.sites.layer for site_group in groups if site_group.sites.kind == "attention"}
    )
    shown: dict[str, Tensor] = {}
    if attention and part in ("pattern", "q", "k"):
        shown = run_with_part(model, target, source, attention, part)

    def slope(layer: int, kind: HeadKind) -> Float[Tensor, "batch pos"]:
        name, block = host.write_hook(layer, kind), host.block(layer, kind)
        write, streams = target.hooked[name], target.streams
        x = streams[block].to(write) + write if kind == "attention" else streams[block + 1]
        length = float32_if_half(x).norm(dim=-1)
        steep = float32_if_half(gradients[name]).norm(dim=-1)
        return torch.where(length > 0, steep / length, 0.0)

    def of_neurons(sites: LayerSites) -> Float[Tensor, "head batch pos"]:
        heads = host.neurons[sites.layer]
        dz = change_of_z(target.neurons[sites.layer], source.neurons[sites.layer], part)
        change = float32_if_half(neuron_changes(heads, sites, dz))
        rows = float32_if_half(heads.W_out[sites.index.to(change.device)]).norm(dim=1)
        return (change * rows[:, None, None]).square() * slope(sites.layer, "neuron")

    def of_attention(sites: LayerSites) -> Float[Tensor, "head batch pos"]:
        layer = sites.layer
        W_O = float32_if_half(host.attention(layer).W_O)
        values_by_part: dict[Part, Tensor] = {}
        for one_part in (part, "z", *_READ.get(part, ())):
            shown_here = target.hooked[hook_name(model, layer, one_part)]
            if one_part in SHARED_PARTS:
                shown_here = by_head(shown_here, host.n_heads[layer])
            values_by_part[one_part] = float32_if_half(shown_here)

        def written(z: Tensor) -> Float[Tensor, "batch pos head d_model"]:
            return torch.einsum("bphd,hdm->bphm", float32_if_half(z), W_O)

        if part == "value":
            moved = source.hooked[hook_name(model, layer, part)]
            dv = by_head(moved, host.n_heads[layer]) - values_by_part["value"]
            spread = torch.einsum(
                "bhts,bt->bsh", values_by_part["pattern"].square(), slope(layer, "attention")
            )
            key = written(dv).square().sum(-1) * spread
        elif part == "k":
            dP = shown[hook_name(model, layer, "pattern")] - values_by_part["pattern"]
            v, z = written(values_by_part["value"]), written(values_by_part["z"])
            square = v.square().sum(-1).transpose(1, 2)[:, :, None]
            square = square + z.square().sum(-1).transpose(1, 2)[..., None]
            square = square - 2 * torch.einsum("bthm,bshm->bhts", z, v)
            terms = dP.square() * square.clamp(min=0)
            key = torch.einsum("bhts,bt->bsh", terms, slope(layer, "attention"))
        else:
            name = hook_name(model, layer, "z")
            source_value = shown[name] if name in shown else source.hooked[name]
            length = written(source_value - values_by_part["z"]).square().sum(-1)
            key = length * slope(layer, "attention").unsqueeze(-1)
        return key[:, :, sites.index.to(key.device)].permute(2, 0, 1)

    keys: dict[LayerSites, Tensor] = {}
    for site in dict.fromkeys(group.sites for group in groups):
        keys[site] = (of_neurons if site.kind == "neuron" else of_attention)(site)
    return [group.sums(keys[group.sites]).sum(dim=1).cpu() for group in groups]


@torch.no_grad()
def run_with_part(
    model: Any, target: Recording, source: Recording, layers: Sequence[int], part: Part
) -> dict[str, Tensor]:
    """Return z, and for keys the pattern, of heads with a part of the source run, by hook name.

    One forward pass for all heads: a part moves the z of its own head alone, and z is restored
    before anything reads it. Queries take another pass, to test that.
    """
    names = {hook_name(model, layer, part): hook_name(model, layer, "z") for layer in layers}
    patterns = [hook_name(model, layer, "pattern") for layer in layers] if part == "k" else []
    head_axis = 1 if part == "pattern" else 2

    def shown_with(n_heads: int | None) -> dict[str, Tensor]:
        """Run with the part of the first heads replaced, or of all."""
        changes: dict[str, Tensor] = {}

        def replace_part(value: Tensor, hook: Any, name: str) -> Tensor:
            if n_heads is None:
                return source.hooked[name].clone()
            source_value_ = source.hooked[name].narrow(head_axis, 0, n_heads)
            rest = value.narrow(head_axis, n_heads, value.shape[head_axis] - n_heads)
            return torch.cat([source_value_, rest], dim=head_axis)

        def look(value: Tensor, hook: Any, name: str) -> None:
            changes[name] = value.clone()

        def restore_z(value: Tensor, hook: Any, name: str) -> Tensor:
            changes[name] = value.clone()
            return target.hooked[name]

        hooks: list[tuple[str, Callable[..., Tensor | None]]]
        hooks = [(name, partial(replace_part, name=name)) for name in names]
        hooks += [(name, partial(look, name=name)) for name in patterns]
        hooks += [(name, partial(restore_z, name=name)) for name in names.values()]
        run(model, target.tokens, target.mask, hooks)
        return changes

    if part == "q":
        changed = [
            name
            for name, name_and_value in shown_with(1).items()
            if not _same(name_and_value[:, :, 1:], target.hooked[name][:, :, 1:])
        ]
        if changed:
            raise UnsupportedModelError(
                [
                    f"to patch the query of one head changes the z of others ({', '.join(changed)})"
                    ": its queries are normed all together. Take method='gradient' with budget=0, "
                    "or patch the pattern"
                ],
                "its queries cannot be patched in closed form",
            )
    return shown_with(None)


def _same(one: Tensor, second: Tensor) -> bool:
    if not one.numel():
        return True
    return float((one - second).abs().max()) <= LOGIT_TOLERANCE[one.dtype] * float(
        second.abs().max()
    )
