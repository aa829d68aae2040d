"""Run a model on a batch, and collect the activations of its neuron-heads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import SELF
from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.gradients import Tape, start_graph
from attn_only_lens.engine.metrics import Metric, bind
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import require_seen, run, run_blocks
from attn_only_lens.engine.sites import LayerSites
from attn_only_lens.errors import InputError
from attn_only_lens.heads import host_of
from attn_only_lens.neurons.corpus import Batch

OfNeurons: TypeAlias = dict[str, Float[Tensor, "neuron place"]]
"""z, gate, value and perhaps attribution of a layer's neurons; tokens are flattened by row."""
TakeIn: TypeAlias = Callable[[int, OfNeurons], None]
_POINTS = ("v", "pattern", "z")
_PROBLEM = "these neurons cannot be attributed in a corpus"


def run_by_layer(model: Any, sites: Sequence[LayerSites], batch: Batch, take_in: TakeIn) -> None:
    """Run a model up to its last block, and pass each layer's activations to `take_in`."""
    ran: set[str] = set()

    def look(number: int) -> Callable[[str, Tensor], None]:
        seen: dict[str, Tensor] = {}

        def keep(point: str, value: Tensor) -> None:
            seen[point] = value
            if point == "z":  # z comes last
                ran.add(str(sites[number].layer))
                take_in(number, _of_neurons(model, sites[number], seen))
                seen.clear()

        return keep

    with torch.no_grad(), _looking(model, sites, [look(i) for i in range(len(sites))]):
        run_blocks(model, batch.tokens, batch.mask)
    require_seen({str(site.layer): f"neurons of layer {site.layer}" for site in sites}, ran)


def run_by_gradient(
    model: Any, sites: Sequence[LayerSites], batch: Batch, metric: Metric, take_in: TakeIn
) -> None:
    """Run a model, compute a metric's gradient, and pass all layers' activations to `take_in`."""
    seen: list[dict[str, Tensor]] = [{} for _ in sites]
    nodes = [host_of(model).hook_name(site.layer, "neuron", "z") for site in sites]
    rows = len(batch.tokens)
    # These texts count as some of many, because a batch may have only one-token texts without loss.
    pair = PromptPair(batch.tokens, batch.tokens, batch.mask, (range(rows), rows))
    tape = Tape(nodes)
    with torch.enable_grad(), _looking(model, sites, [x.__setitem__ for x in seen]):
        with start_graph(model):
            logits = run(model, batch.tokens, batch.mask, tape.hooks)
        bound = bind(metric, model, pair, logits.detach())
        values = bound.of_prompts(bound.select(logits)[None])[0]
        if len(values) != len(batch.tokens):
            raise InputError(
                [
                    f"{bound.name} has one number for {len(batch.tokens)} texts; expected one of "
                    "each: a tensor [batch]. Or take batch_size=1"
                ],
                _PROBLEM,
            )
        # Each value depends only on its own text, so the gradient of the sum has all gradients.
        gradients = tape.gradients(values.sum())
    for number, (item, node) in enumerate(zip(sites, nodes, strict=True)):
        z = seen[number]["z"]
        seen[number]["attribution"] = gradients[node].detach() * z
        take_in(number, _of_neurons(model, item, seen[number]))


@contextmanager
def _looking(
    model: Any, sites: Sequence[LayerSites], keep: Sequence[Callable[[str, Tensor], None]]
) -> Iterator[None]:
    """Pass the values, patterns and outputs of each layer's neuron-heads to a function."""
    with ExitStack() as stack:
        for item, of_layer in zip(sites, keep, strict=True):
            heads = host_of(model).neurons[item.layer]
            for point in _POINTS:

                def look(
                    module: Any, args: Any, value: Tensor, look: Any = of_layer, of: str = point
                ) -> None:
                    look(of, value.detach().clone())

                hook = getattr(heads, f"hook_{point}").register_forward_hook(look)
                stack.callback(hook.remove)
        yield


def _of_neurons(model: Any, sites: LayerSites, seen: dict[str, Tensor]) -> OfNeurons:
    """Return z, gate and value of neurons, and attributions; tokens are flattened by row."""
    heads = host_of(model).neurons[sites.layer]
    of_heads = {
        "z": seen["z"].squeeze(-1),
        "gate": seen["pattern"][..., SELF].transpose(1, 2),
        "value": seen["v"].squeeze(-1),
    }
    if "attribution" in seen:
        of_heads["attribution"] = seen["attribution"].squeeze(-1)
    index, per_neuron = sites.index.to(seen["z"].device), heads.heads_per_neuron
    values = {}
    for name, x in of_heads.items():
        if name in ("z", "gate"):
            x = heads.neuron_outputs(x)
        elif per_neuron > 1:  # one value for all heads of a neuron; an attribution is their sum
            x = x.unflatten(-1, (-1, per_neuron))
            x = x[..., 0] if name == "value" else x.sum(-1)
        values[name] = float32_if_half(x.flatten(0, 1)[:, index].T.contiguous())
    return values
