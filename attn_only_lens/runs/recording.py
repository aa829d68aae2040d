"""One forward pass of a model, kept: the streams between its blocks and what its heads did."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attn_only_lens.axes import SELF, Residual, Tokens
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of

__all__ = [
    "Hooks",
    "NeuronRun",
    "Recording",
    "again",
    "record",
    "require_shown",
    "returned_stream",
    "run",
    "stream_of",
    "watched_streams",
]

Hooks = Sequence[tuple[str, Callable[..., Any]]]


@dataclass(frozen=True)
class NeuronRun:
    """What the neuron-heads of one layer did.

    Attributes:
        v: their values.
        weight: their attention to the token itself, the rest being on the bias token.
        z: what they put out, `weight * v`.
    """

    v: Float[Tensor, "batch pos head_index"]
    weight: Float[Tensor, "batch pos head_index"]
    z: Float[Tensor, "batch pos head_index"]


@dataclass(frozen=True)
class Recording:
    """A forward pass.

    Attributes:
        tokens: what it ran on.
        mask: 1 for real tokens, 0 for padding; None where there is none.
        streams: what entered each block, and last what left the last one.
        beside: how many things each block returned beside the stream; None where it is no tuple.
        logits: its output.
        neurons: by source layer, for the layers that were asked for.
        hooked: by hook name, for the hook points that were asked for.
    """

    tokens: Tokens
    mask: Int[Tensor, "batch pos"] | None
    streams: tuple[Residual, ...]
    beside: tuple[int | None, ...]
    logits: Float[Tensor, "batch pos d_vocab"]
    neurons: dict[int, NeuronRun]
    hooked: dict[str, Tensor]


def record(
    model: Any,
    tokens: Tokens,
    mask: Int[Tensor, "batch pos"] | None,
    *,
    layers: Iterable[int] = (),
    names: Iterable[str] = (),
    hooks: Hooks = (),
    graph: bool = False,
) -> Recording:
    """Run a model once, and keep what it did.

    Args:
        model: a converted or an exposed model.
        tokens: what to run it on.
        mask: 1 for real tokens, 0 for padding.
        layers: source layers whose neuron-heads to keep.
        names: hook points of attention heads to keep.
        hooks: hooks of the caller's, which run after what enters them is kept.
        graph: whether the logits keep their graph; nothing else does.

    Raises:
        UnsupportedModelError: a hook point shows nothing, as what it is on did not run.
    """
    seen: dict[str, Tensor] = {}
    layers, names = sorted(set(layers)), sorted(set(names))

    def keep(key: str) -> Callable[[Tensor, Any], None]:
        def hook(value: Tensor, hook: Any) -> None:
            seen[key] = value.detach().clone()

        return hook

    def look(key: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, args, value: keep(key)(value, None)

    parts = ("v", "pattern", "z")
    with ExitStack() as stack:
        for layer in layers:
            heads = host_of(model).neurons[layer]
            for part in parts:
                point = getattr(heads, f"hook_{part}")
                handle = point.register_forward_hook(look(f"{layer}.{part}"))
                stack.callback(handle.remove)
        streams = stack.enter_context(watched_streams(model))
        beside = stack.enter_context(_watched_returns(model))
        stack.enter_context(torch.set_grad_enabled(graph))
        logits = run(model, tokens, mask, [*((name, keep(name)) for name in names), *hooks])
    expected = {
        f"{layer}.{part}": f"layer {layer}, {part} of its neurons"
        for layer in layers
        for part in parts
    }
    require_shown({**expected, **{name: name for name in names}}, seen)
    neurons = {
        layer: NeuronRun(
            v=seen[f"{layer}.v"].squeeze(-1),
            weight=seen[f"{layer}.pattern"][..., SELF].transpose(1, 2),
            z=seen[f"{layer}.z"].squeeze(-1),
        )
        for layer in layers
    }
    hooked = {name: seen[name] for name in names}
    return Recording(tokens, mask, tuple(streams), tuple(beside), logits, neurons, hooked)


def again(model: Any, recording: Recording) -> Recording:
    """The same run once more, with the same things kept."""
    layers, names = recording.neurons, recording.hooked
    return record(model, recording.tokens, recording.mask, layers=layers, names=names)


def require_shown(expected: dict[str, str], shown: Container[str]) -> None:
    """Refuse a model that does not run what has the hook points that are to be seen.

    Args:
        expected: how to call each hook point, by its key in `shown`.
        shown: what has been seen.

    Raises:
        UnsupportedModelError: with every hook point that showed nothing.
    """
    silent = [name for key, name in expected.items() if key not in shown]
    if silent:
        more = f" and {len(silent) - 3} more" * (len(silent) > 3)
        raise UnsupportedModelError(
            [
                f"{', '.join(silent[:3])}{more} showed nothing in a forward pass: the model does "
                "not run the module that has the hook point"
            ],
            "these heads cannot be seen",
        )


def run(
    model: Any,
    tokens: Tokens,
    mask: Int[Tensor, "batch pos"] | None,
    hooks: Hooks = (),
    **kwargs: Any,
) -> Float[Tensor, "batch pos d_vocab"]:
    """The logits of a model, with hooks on it meanwhile."""
    # A bridge resolves all its aliases at that call: as long as a forward pass of a short suffix.
    with model.hooks(fwd_hooks=list(hooks)) if hooks else nullcontext():
        logits: Tensor = model(tokens, attention_mask=mask, return_type="logits", **kwargs)
    return logits


@contextmanager
def watched_streams(model: Any) -> Iterator[list[Residual]]:
    """A list that the next forward pass fills: what enters each block, and what leaves the last."""
    streams: list[Residual] = []

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append(stream_of(args, kwargs).detach().clone())

    def leaving(module: nn.Module, args: Any, output: Any) -> None:
        streams.append(returned_stream(output).detach().clone())

    with ExitStack() as stack:
        for block in model.blocks:
            handle = block.register_forward_pre_hook(entering, with_kwargs=True)
            stack.callback(handle.remove)
        handle = model.blocks[-1].register_forward_hook(leaving)
        stack.callback(handle.remove)
        yield streams


@contextmanager
def _watched_returns(model: Any) -> Iterator[list[int | None]]:
    """A list that the next forward pass fills: how many things each block returns besides."""
    beside: list[int | None] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        beside.append(len(output) - 1 if isinstance(output, tuple | list) else None)

    with ExitStack() as stack:
        for block in model.blocks:
            stack.callback(block.register_forward_hook(look).remove)
        yield beside


def stream_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Residual:
    """The residual stream among what a block is called with."""
    found: Residual = args[0] if args else kwargs["hidden_states"]
    return found


def returned_stream(output: Any) -> Residual:
    """The residual stream, or a sublayer's output, among what a module returns."""
    found: Residual = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(found, Tensor):
        raise UnsupportedModelError(
            [
                f"a block returns a {type(found).__name__}; expected the residual stream, or a "
                "tuple or list that begins with it"
            ],
            "this model cannot be recorded",
        )
    return found
