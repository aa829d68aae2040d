"""Run a model on a batch, and collect activations of its neurons and attention heads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.gradients import Tape, start_graph
from attn_only_lens.engine.metrics import Metric, bind
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import require_seen, run, run_blocks
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import NEURON_KINDS
from attn_only_lens.neurons.accumulate import quadrants
from attn_only_lens.neurons.corpus import Batch

OfLayer: TypeAlias = dict[str, Tensor]
"""One layer's activations at all tokens of a batch, in order: z, gate, value and, with quadrants,
quadrant of neurons [place, neuron]; or pattern [head, batch, pos, pos] and norm [place, head] of
attention heads. With a metric, also attributions."""
TakeIn: TypeAlias = Callable[[int, OfLayer], None]
_ATTENTION_POINTS = ("pattern", "z")
_PROBLEM = "these neurons cannot be attributed in a corpus"


def run_by_layer(model: Any, sites: Sequence[LayerSites], batch: Batch, take_in: TakeIn) -> None:
    """Run a model's blocks, and call `take_in` with each layer's activations."""
    ran: set[str] = set()

    def look(number: int) -> Callable[[str, Tensor], None]:
        seen: dict[str, Tensor] = {}
        # The pattern's hook may fire after that of z, as in BERT; a neuron's z is the last.
        points = set(_ATTENTION_POINTS if sites[number].kind == "attention" else ("z",))

        def keep(point: str, value: Tensor) -> None:
            seen[point] = value
            if points <= seen.keys():
                ran.add(str(number))
                take_in(number, _of_layer(model, sites[number], seen))
                seen.clear()

        return keep

    keep = [look(i) for i in range(len(sites))]
    with torch.no_grad(), _looking(model, sites, keep):
        run_blocks(model, batch.tokens, batch.mask, _attention_hooks(model, sites, keep))
    expected = {str(i): f"{site.kind} of layer {site.layer}" for i, site in enumerate(sites)}
    require_seen(expected, ran)


def run_by_gradient(
    model: Any, sites: Sequence[LayerSites], batch: Batch, metric: Metric, take_in: TakeIn
) -> None:
    """Run a model; call `take_in` with the activations and attributions of each layer."""
    seen: list[dict[str, Tensor]] = [{} for _ in sites]
    nodes = [host_of(model).hook_name(site.layer, site.kind, "z") for site in sites]
    rows = len(batch.tokens)
    # `loss` rejects a list of one-token texts, so mark the batch as part of a longer list.
    pair = PromptPair(batch.tokens, batch.tokens, batch.mask, (range(rows), rows))
    tape = Tape(nodes)
    keep = [x.__setitem__ for x in seen]
    hooks = [*_attention_hooks(model, sites, keep), *tape.hooks]
    with torch.enable_grad(), _looking(model, sites, keep):
        with start_graph(model):
            logits = run(model, batch.tokens, batch.mask, hooks)
        bound = bind(metric, model, pair, logits.detach())
        values = bound.of_prompts(bound.select(logits)[None])[0]
        if len(values) != len(batch.tokens):
            raise InputError(
                [
                    f"{bound.name} returned one number for {len(batch.tokens)} texts; expected a "
                    "tensor [batch], with one number per text. Or pass batch_size=1"
                ],
                _PROBLEM,
            )
        # Each text's metric depends only on that text, so one backward pass of the sum is enough.
        gradients = tape.gradients(values.sum())
    for number, (item, node) in enumerate(zip(sites, nodes, strict=True)):
        attribution = (gradients[node].detach() * seen[number]["z"]).sum(-1)
        take_in(number, _of_layer(model, item, seen[number] | {"attribution": attribution}))


def shows_q(model: Any, site: LayerSites) -> bool:
    """Return True in gated MLPs with exact gates, where q = x W_gate can be recorded.

    In a mixture of experts, it is not computed for experts that a token does not visit.
    """
    heads = host_of(model).neurons[site.layer]
    return site.kind in NEURON_KINDS and heads.value_is_product and not heads.experts[0]


def write_factors(model: Any, site: LayerSites) -> Float[Tensor, "head rank d_head"]:
    """Return each head's factor R in W_Oᵀ = QR; ‖R z‖ is the norm of the head's output z W_O."""
    W_O = float32_if_half(host_of(model).attention(site.layer).W_O.detach())
    return torch.linalg.qr(W_O[site.index.to(W_O.device)].transpose(1, 2), mode="r").R


def _attention_hooks(
    model: Any, sites: Sequence[LayerSites], keep: Sequence[Callable[[str, Tensor], None]]
) -> list[tuple[str, Callable[..., None]]]:
    """Return hooks that call their layer's `keep` with the patterns and z of attention heads."""

    def look(value: Tensor, hook: Any, show: Callable[[str, Tensor], None], point: str) -> None:
        show(point, value.detach().clone())

    return [
        (
            host_of(model).hook_name(site.layer, "attention", point),
            partial(look, show=show, point=point),
        )
        for site, show in zip(sites, keep, strict=True)
        if site.kind == "attention"
        for point in _ATTENTION_POINTS
    ]


@contextmanager
def _looking(
    model: Any, sites: Sequence[LayerSites], keep: Sequence[Callable[[str, Tensor], None]]
) -> Iterator[None]:
    """Context manager that calls each layer's `keep` with gates, values and z of neuron-heads.

    A hook before hook_z would make the model compute z from patterns. This takes several times as
    long, and changes logits by rounding errors. So gates are computed from pre-activations here.
    """
    host = host_of(model)
    layers = {
        host.neurons[item.layer]: (keep_of_layer, shows_q(model, item))
        for item, keep_of_layer in zip(sites, keep, strict=True)
        if item.kind != "attention"
    }

    @torch.no_grad()
    def look_before(heads: Any, q: Tensor, up: Tensor | None) -> None:
        if heads in layers:
            keep_of_layer, has_quadrants = layers[heads]
            gate, value = heads.weights_and_values(q.detach(), None if up is None else up.detach())
            if has_quadrants and up is not None:
                keep_of_layer("quadrant", quadrants(q, up))
            keep_of_layer("gate", gate)
            keep_of_layer("value", value)

    def look(module: Any, args: Any, z: Tensor, of_layer: Any) -> None:
        of_layer("z", z.detach())

    with ExitStack() as stack:
        for heads, (keep_of_layer, _) in layers.items():
            hook = partial(look, of_layer=keep_of_layer)
            stack.callback(heads.hook_z.register_forward_hook(hook).remove)
        stack.callback(setattr, host.passing, "gate_rule", None)
        host.passing.gate_rule = look_before
        yield


def _of_layer(model: Any, sites: LayerSites, seen: dict[str, Tensor]) -> OfLayer:
    return (_of_heads if sites.kind == "attention" else _of_neurons)(model, sites, seen)


def _of_heads(model: Any, sites: LayerSites, seen: dict[str, Tensor]) -> OfLayer:
    """Return the patterns, the norms of z W_O and the attributions of attention heads."""
    z, pattern = float32_if_half(seen["z"]), float32_if_half(seen["pattern"])
    n_heads = host_of(model).n_heads[sites.layer]
    if z.ndim != 4 or pattern.ndim != 4 or not z.shape[2] == pattern.shape[1] == n_heads:
        shapes = f"z {list(z.shape)} and pattern {list(pattern.shape)}"
        reason = f"layer {sites.layer} has {shapes}; expected an axis of {n_heads} heads"
        raise InputError([reason], "these heads cannot be looked up in a corpus")
    index = sites.index.to(z.device)
    R = write_factors(model, sites)
    written = torch.einsum("bphd,hed->bphe", z[:, :, index], R.to(z))
    norm = written.norm(dim=-1).flatten(0, 1)
    values = {"pattern": pattern[:, index].transpose(0, 1), "norm": norm}
    if "attribution" in seen:
        attribution = float32_if_half(seen["attribution"])
        values["attribution"] = attribution[:, :, index].flatten(0, 1)
    return values


def _of_neurons(model: Any, sites: LayerSites, seen: dict[str, Tensor]) -> OfLayer:
    """Return z, gate, value, quadrant and attribution of neurons for all tokens of a batch."""
    heads, index = host_of(model).neurons[sites.layer], sites.index
    whole = torch.equal(index, torch.arange(heads.n_neurons, device=index.device))
    values = {}
    for name, x in seen.items():
        x = x.squeeze(-1) if name == "z" else x
        x = x.flatten(0, 1) if whole else x.flatten(0, 1)[:, index.to(x.device)]
        values[name] = float32_if_half(x)
    return values
