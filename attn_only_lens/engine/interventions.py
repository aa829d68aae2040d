"""Ablate or steer heads, in recorded activations or in every run of a model inside a `with`.

    ablated    z becomes 0 ("zero"), its mean over real tokens ("mean"), the z of another prompt
               ("resample"), or its value with all attention on the bias token ("bias")
    steered    z becomes z + the value given for the head

Inside `ablated` and `steered`, positions count from the start of the text, even if a key-value
cache holds its first tokens. Sources: activation addition is from Turner et al., "Steering Language
Models With Activation Engineering" (2023); mean ablation is from Wang et al., "Interpretability in
the Wild" (2022).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count, is_number, one_of
from attn_only_lens.axes import BIAS, Tokens
from attn_only_lens.devices import keep_random_state
from attn_only_lens.engine.directions import AblationKind
from attn_only_lens.engine.edit_checks import require_edits_read
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.passed_tests import passed_tests
from attn_only_lens.engine.prompts import PromptPair, Prompts, single_prompts
from attn_only_lens.engine.recording import NeuronRun, Recording, record
from attn_only_lens.engine.sites import (
    Part,
    Sites,
    SomeSites,
    resolve_sites,
)
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import HEAD_KINDS, NEURON_KINDS, HeadKind

AblateTo = Literal["zero", "mean", "bias"]
Steering: TypeAlias = Mapping[str | HeadName, float | Sequence[float] | Tensor]
_ABLATED, _STEERED = "these heads cannot be ablated", "these heads cannot be steered"


# Recorded activations


def ablate(
    recording: Recording, reference: Recording, to: AblationKind, real: Bool[Tensor, "batch pos"]
) -> Recording:
    """Return a recording with ablated outputs z; the mean for "mean" is taken over `reference`."""
    if to == "bias" and recording.hooked:
        reason = (
            "got 'bias' for attention heads, which have no bias token; patch "
            "sites='neurons', or ablate to 'zero'"
        )
        raise InputError([reason], "these heads cannot be ablated like this")

    def ablated_z(z: Tensor, reference_z: Tensor) -> Tensor:
        if to == "mean":
            return reference_z[real.to(z.device)].mean(dim=0).expand_as(z)
        return z.roll(-1, dims=0) if to == "resample" else torch.zeros_like(z)

    neurons = {
        layer: NeuronRun(ablated_z(run.z, reference.neurons[layer].z))
        for layer, run in recording.neurons.items()
    }
    hooked = {name: ablated_z(z, reference.hooked[name]) for name, z in recording.hooked.items()}
    return replace(recording, neurons=neurons, hooked=hooked)


def resample_reasons(
    clean: Tokens, reference: Tokens | None, real: Bool[Tensor, "batch pos"]
) -> list[str]:
    """Return error messages if 'resample' cannot take activations from `reference` or `clean`."""
    reasons = []
    if reference is None:
        if len(real) < 2:
            reasons.append(
                "'resample' takes activations from other prompts: give two prompts or more, or a "
                "reference"
            )
        if not torch.equal(real, real.roll(-1, 0)):
            reasons.append(
                "'resample' would take activations from the padding of other prompts: give prompts "
                "of one length, or a reference"
            )
    elif reference.shape != clean.shape:
        reasons.append(
            f"got reference prompts {list(reference.shape)}; expected {list(clean.shape)}, one row "
            "for each clean prompt, with tokens at the same positions"
        )
    elif rows := (clean == reference).all(dim=1).nonzero().flatten().tolist():
        reasons.append(
            f"got the same prompt in rows {rows} of the clean prompts and of the reference; "
            "expected different prompts to resample from"
        )
    return reasons


# Ablation and steering of a running model


@contextmanager
def ablated(
    model: Any,
    sites: SomeSites,
    to: AblateTo = "zero",
    *,
    prompts: Prompts | None = None,
    mask: Tensor | None = None,
) -> Iterator[None]:
    """Ablate heads in every run of a model inside a `with`.

    Args:
        model: a model that `convert` returned, or a model with exposed neuron-heads. This model
            itself is edited, not a copy.
        sites: the heads, at every position or at numbers from 0, which count prompt tokens, padding
            and generated tokens; see `Sites`. `L5N1234@13` is that head only at position 13.
        to: "zero"; "mean", the mean over all non-padding tokens of `prompts`; or "bias", which puts
            all attention of a neuron-head on the bias token, so that its output is 0.
        prompts: texts or tokens for the means. Means are computed without hooks on the model, so of
            nested contexts, the one with to="mean" must be the outermost.
        mask: if the prompts are tokens, 1 for tokens and 0 for padding.

    Raises:
        InputError: names are unknown, prompts are missing for "mean" or given for another
            ablation, attention heads are ablated to "bias", or positions are invalid. The error
            lists every reason.
        UnsupportedModelError: the model does not use z from the hook point, or a torch hook would
            see z without the edit.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, load, patching as p
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> tokens = torch.tensor([[3, 4, 113]])
        >>> before = model(tokens)
        >>> with p.ablated(model, ["L0N7", "L0H1"], to="mean", prompts=tokens):
        ...     bool((model(tokens) - before).abs().max() > 1e-3)
        True
    """
    sites = Sites.of(sites)
    positions = None if sites.positions in ("each", "all") else sites.positions
    places, reasons = _places(model, sites, positions)
    reasons += one_of(*get_args(AblateTo)).reasons(to=to)
    if to == "bias" and any(place.kind not in NEURON_KINDS for place in places):
        reasons.append("attention heads have no bias token; ablate them to 'zero' or 'mean'")
    if (prompts is None) == (to == "mean"):
        got = "no prompts" if prompts is None else "prompts"
        reasons.append(f"got {got} with to={to!r}; give prompts if and only if to='mean'")
    if mask is not None and prompts is None:
        reasons.append("got a mask without prompts; a mask marks the real tokens of prompts")
    if to == "mean" and (unready := reasons_not_to_run(model)):
        reasons += [*unready, "of nested contexts, the one with to='mean' must be the outermost"]
    InputError.raise_if(reasons, _ABLATED)
    pair = None if prompts is None else single_prompts(model, prompts, mask)
    run = _recorded(model, places, "pattern" if to == "bias" else "z", pair)
    edits: list[_Edit] = []
    for place in places:
        if to == "bias":
            edits.append(_Edit(place, "pattern", torch.arange(2, device="cpu") == BIAS))
            continue
        z = _z(run, model, place)
        new = torch.zeros_like(z[0, 0]) if pair is None else z[pair.real.to(z.device)].mean(dim=0)
        if not new.isfinite().all():
            reason = f"the mean of z is not finite in layer {place.layer}"
            raise InputError([reason], _ABLATED)
        edits.append(_Edit(place, "z", new))
    with _edited(model, edits):
        yield


@contextmanager
def steered(
    model: Any, steering: Steering, *, positions: int | Sequence[int] | None = None
) -> Iterator[None]:
    """Add a given value to each head's output z, in every run of a model inside a `with`.

    Args:
        model: a model that `convert` returned, or a model with exposed neuron-heads. This model
            itself is edited, not a copy.
        steering: for each head name, the value to add to z. For a neuron-head, it is a number,
            which also changes the neuron's activation by this number. For an attention head, it is
            a vector [d_head].
        positions: the positions for names without a position: numbers from 0; see `ablated`. None
            for all positions.

    Raises:
        InputError: names are unknown, values are not finite numbers or have the wrong length, or
            positions are invalid. The error lists every reason.
        UnsupportedModelError: see `ablated`.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, load, patching as p
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> tokens = torch.tensor([[3, 4, 113]])
        >>> before = model(tokens)
        >>> with p.steered(model, {"L0N7": 4.0}, positions=2):
        ...     (model(tokens) != before).any(dim=-1).tolist()
        [[False, False, True]]
    """
    if not isinstance(steering, Mapping) or not steering:
        raise InputError(
            ["got no steering; expected a dictionary such as {'L5N1234': 4.0}"], _STEERED
        )
    places, reasons = _places(model, Sites(list(steering)), positions)
    InputError.raise_if(reasons, _STEERED)
    vectors = {str(name): value for name, value in steering.items()}
    run, edits = _recorded(model, places, "z"), list[_Edit]()
    for place in places:
        added = torch.zeros_like(_z(run, model, place)[0, 0])
        for name, head in place.heads.items():
            numbers = _numbers(name, vectors[name], added.shape[1], place.kind)
            if isinstance(numbers, str):
                reasons.append(numbers)
            else:
                added[head] = added.new_tensor(numbers)
        edits.append(_Edit(place, "z", added, adds=True))
    InputError.raise_if(reasons, _STEERED)
    with _edited(model, edits):
        yield


def _numbers(name: str, value: Any, d_head: int, kind: HeadKind) -> list[float] | str:
    """Return the numbers to add to a head's z, or an error message if `value` is invalid."""
    plain = as_plain(value)
    is_list = isinstance(plain, list | tuple)
    numbers = list(map(as_plain, plain)) if is_list else [plain]
    if len(numbers) == d_head and all(map(is_number, numbers)):
        return numbers
    got = f"{len(numbers)} numbers" if is_list else repr(value)
    expected = "a finite number" if kind in NEURON_KINDS else f"a vector of {d_head} finite numbers"
    return f"{name}: got {got}; expected {expected} to add to this head's z"


# The heads and positions that are edited


@dataclass(frozen=True)
class _Place:
    """Some heads of one layer, and the positions at which these heads are edited.

    Attributes:
        heads: for each name, the index of its head.
        positions: the edited positions; None for all positions.
    """

    layer: int
    kind: HeadKind
    heads: dict[str, int]
    positions: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class _Edit:
    """An edit of some heads: a vector that replaces their z or pattern, or is added to z."""

    place: _Place
    point: Literal["z", "pattern"]
    vector: Tensor
    adds: bool = False


def _places(model: Any, sites: Sites, positions: Any) -> tuple[list[_Place], list[str]]:
    """Return the heads to edit with their positions, and error messages about invalid positions."""
    plain = as_plain(positions)
    chosen = plain if isinstance(plain, list | tuple | range) or plain is None else (plain,)
    default = None if chosen is None else tuple(map(as_plain, chosen))
    split, reasons = sites.split(), list[str]()
    by_position: dict[Any, Any] = {None: sites}
    if split is not None:
        by_position = {position: [] for _, position in split}
        for head, position in split:
            by_position[position].append(head)
    if default is not None and None not in by_position:
        reasons.append(
            f"got positions={positions!r} and names with positions; give only one of the two"
        )
    places: list[_Place] = []
    for position, heads in by_position.items():
        suffix = "" if position is None else f"@{position}"
        edited = default if position is None else (position,)
        if edited is not None and not (edited and all(map(is_count, edited))):
            reasons.append(
                f"got positions {list(edited)}; expected numbers from 0, or no positions, for all: "
                "roles and negative positions are undefined while a text grows"
            )
        for of_layer in resolve_sites(model, heads):
            names_here = [f"{name}{suffix}" for name in of_layer.names]
            by_name = dict(zip(names_here, of_layer.index.tolist(), strict=True))
            places.append(_Place(of_layer.layer, of_layer.kind, by_name, edited))
    return places, reasons


def _z(run: Recording, model: Any, place: _Place) -> Float[Tensor, "batch pos head_index d"]:
    if place.kind in NEURON_KINDS:
        return run.neurons[place.layer].z.unsqueeze(-1)
    return run.hooked[host_of(model).hook_name(place.layer, place.kind, "z")]


# Hooks


@contextmanager
def _tokens_before(model: Any) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many cached tokens precede this thread's forward pass."""
    host, key = host_of(model), object()
    values = host.passing.values

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        host.passing.values[key] = host.tokens_before(args, kwargs)

    handle = host.model.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield lambda: host.passing.values.get(key, 0)
    finally:
        handle.remove()
        values.pop(key, None)  # the counter is set only if a block ran outside the model


@contextmanager
def _edited(model: Any, edits: Sequence[_Edit]) -> Iterator[None]:
    """Context manager that edits z [batch, pos, head, d] or patterns [batch, head, pos, 2]."""

    def hook(edit: _Edit, before: Callable[[], int]) -> Callable[[Tensor, Any], Tensor]:
        positions, heads = edit.place.positions, list(edit.place.heads.values())

        def change(value: Tensor, hook: Any) -> Tensor:
            value = value if edit.point == "z" else value.transpose(1, 2)
            edited = torch.zeros(value.shape[1:3], dtype=torch.bool, device=value.device)
            edited[:, heads] = True
            if positions is not None:
                of_text = torch.arange(value.shape[1], device=value.device) + before()
                chosen = torch.tensor(positions, device=value.device)
                edited &= torch.isin(of_text, chosen)[:, None]
            vector = edit.vector.to(value)
            value = torch.where(edited[..., None], value + vector if edit.adds else vector, value)
            return value if edit.point == "z" else value.transpose(1, 2)

        return change

    host = host_of(model)
    with _tokens_before(model) as before:
        hooks = [
            (host.hook_name(edit.place.layer, edit.place.kind, edit.point), hook(edit, before))
            for edit in edits
        ]
        with model.hooks(fwd_hooks=hooks):
            yield


@one_thread_per_model
def _recorded(
    model: Any, places: Sequence[_Place], part: Part, pair: PromptPair | None = None
) -> Recording:
    """Record z on the prompts, or on two dummy tokens; raise an error if edits have no effect."""
    host, layers = host_of(model), {kind: list[int]() for kind in HEAD_KINDS}
    for layer, kind in dict.fromkeys((place.layer, place.kind) for place in places):
        layers[kind].append(layer)
    reasons = [
        reason
        for kind, of_kind in layers.items()
        for layer in of_kind
        for reason in host.unseen_edit_reasons(layer, kind)
    ]
    UnsupportedModelError.raise_if(reasons, "these heads cannot be edited")
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.long, device=device) if pair is None else pair.clean
    mask = None if pair is None else pair.mask
    names = [
        host.hook_name(layer, kind, "z")
        for kind in layers
        for layer in layers[kind]
        if kind not in NEURON_KINDS
    ]
    neurons = [layer for kind in NEURON_KINDS for layer in layers[kind]]
    with keep_random_state(device):
        run = record(model, tokens, mask, layers=neurons, names=names)
        tested = passed_tests(model)
        for kind, of_kind in layers.items():
            if of_kind:
                require_edits_read(model, run, kind, sorted(of_kind), part, tested)
    return run
