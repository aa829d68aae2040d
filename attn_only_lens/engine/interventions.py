"""Ablate or steer z of heads: in recorded activations, or in every run of a model in a context.

    ablated    z is 0 ("zero"), its mean over real tokens ("mean"), that of another prompt
               ("resample"), or the output with all attention on the bias token ("bias")
    steered    z + the value given for the head

In a context, positions count from the start of the text, also with a key-value cache.
Sources: activation addition is Turner et al., "Steering Language Models With Activation
Engineering" (2023); mean ablation is Wang et al., "Interpretability in the Wild" (2022).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count, is_number, option_reasons
from attn_only_lens.axes import SELF, Tokens
from attn_only_lens.devices import keep_random_state
from attn_only_lens.engine.edit_checks import require_edits_read
from attn_only_lens.engine.model_checks import reasons_not_to_run
from attn_only_lens.engine.passed_tests import passed_tests
from attn_only_lens.engine.prompts import PromptPair, Prompts, single_prompts
from attn_only_lens.engine.recording import NeuronRun, Recording, record
from attn_only_lens.engine.sites import (
    ALL_MEMBERS,
    LayerSites,
    Part,
    Sites,
    resolve_sites,
    split_positions,
)
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads import HeadName, host_of
from attn_only_lens.heads.host import HeadKind

DIRECTIONS = ("denoise", "noise")
"""Patch clean activations into the corrupted run, or corrupted ones into the clean run."""
Ablation = Literal["zero", "mean", "resample", "bias"]
ABLATIONS: tuple[str, ...] = get_args(Ablation)
AblateTo = Literal["zero", "mean", "bias"]
Steering: TypeAlias = Mapping[str | HeadName, float | Sequence[float] | Tensor]
_Change: TypeAlias = Callable[[Tensor], Tensor]
_ABLATED, _STEERED = "these heads cannot be ablated", "these heads cannot be steered"


# Recorded activations


def ablate(
    recording: Recording, reference: Recording, to: Ablation, real: Bool[Tensor, "batch pos"]
) -> Recording:
    """Return a run's activations with z ablated at every recorded head."""
    is_reference = reference is recording
    reasons = []
    if to == "bias" and recording.hooked:
        reasons.append(
            "'bias' is for neuron-heads: attention heads have no bias token; patch "
            "neuron_heads(), or ablate to 'zero'"
        )
    if to == "resample":
        reasons += resample_reasons(
            recording.tokens, None if is_reference else reference.tokens, real
        )
    InputError.raise_if(reasons, "these heads cannot be ablated like this")

    def ablated_z(z: Tensor, reference_z: Tensor) -> Tensor:
        if to == "mean":
            return reference_z[real.to(z.device)].mean(dim=0).expand_as(z)
        if to == "resample":
            return reference_z.roll(-1, dims=0) if is_reference else reference_z
        return torch.zeros_like(z)

    neurons = {
        layer: NeuronRun(ablated_z(run.z, reference.neurons[layer].z))
        for layer, run in recording.neurons.items()
    }
    hooked = {name: ablated_z(z, reference.hooked[name]) for name, z in recording.hooked.items()}
    return replace(recording, neurons=neurons, hooked=hooked)


def resample_reasons(
    clean: Tokens, reference: Tokens | None, real: Bool[Tensor, "batch pos"]
) -> list[str]:
    """Return why prompts cannot be resampled from a reference, or from each other without one."""
    if reference is not None and reference.shape != clean.shape:
        return [
            f"got reference prompts {list(reference.shape)}; expected {list(clean.shape)}, a "
            "row for each clean prompt, token for token"
        ]
    if reference is not None:
        return [
            f"got clean prompt {row} itself in row {row} of the reference, from which it is "
            "resampled; expected another prompt"
            for row, same in enumerate((clean == reference).all(dim=1).tolist())
            if same
        ]
    reasons = []
    if len(real) < 2:
        reasons.append(
            "'resample' takes activations of other prompts: give two prompts or more, or a "
            "reference"
        )
    if not torch.equal(real, real.roll(-1, 0)):
        reasons.append(
            "'resample' would take activations at padding of other prompts: give prompts of one "
            "length, or a reference"
        )
    return reasons


# Every run of a model


@contextmanager
def ablated(
    model: Any,
    names: Sites,
    to: AblateTo = "zero",
    *,
    prompts: Prompts | None = None,
    mask: Tensor | None = None,
    positions: int | Sequence[int] | None = None,
) -> Iterator[None]:
    """Ablate heads in every run of a model inside a `with`.

    Args:
        model: converted by `convert`, or with exposed neuron-heads; it is edited itself.
        names: `L5H3`, `L5N1234`, several of them, or `heads(layers=5)` and the like; `L5N1234@13`
            at that position alone.
        to: "zero", "mean" over all real tokens of `prompts`, or "bias": all attention of a
            neuron-head on the bias token, so that it writes nothing.
        prompts: texts or tokens for the means. Means are taken without hooks on the model: if
            contexts are nested, the one with to="mean" must be the outermost.
        mask: 1 for real tokens, 0 for padding, if the prompts are tokens.
        positions: for names without a position: numbers from 0 that count prompt tokens, padding
            and generated tokens; by default all.

    Raises:
        InputError: with every reason: unknown names, no prompts for means, prompts for another
            ablation, attention heads ablated to "bias", or invalid positions.
        UnsupportedModelError: the model does not read z where it is hooked, or a torch hook would
            see z without the edit.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> tokens = torch.tensor([[3, 4, 113]])
        >>> before = model(tokens)
        >>> with p.ablated(model, ["L0N7", "L0H1"], to="mean", prompts=tokens):
        ...     bool((model(tokens) - before).abs().max() > 1e-3)
        True
    """
    places = _places(model, names, positions)
    reasons = option_reasons("to", to, get_args(AblateTo))
    if to == "bias" and any(place.sites.kind == "attention" for place in places):
        reasons.append("attention heads have no bias token; ablate them to 'zero' or 'mean'")
    if (prompts is None) == (to == "mean"):
        got = "no prompts" if prompts is None else "prompts"
        reasons.append(f"got {got} with to={to!r}; give prompts for to='mean', and only then")
    if mask is not None and prompts is None:
        reasons.append("got a mask without prompts; it says which of their tokens are real")
    if to == "mean" and (unready := reasons_not_to_run(model)):
        reasons += [*unready, "if contexts are nested, the one with to='mean' must be outermost"]
    InputError.raise_if(reasons + _position_reasons(places), _ABLATED)
    pair = None if prompts is None else single_prompts(model, prompts, mask)
    run = _recorded(model, places, "pattern" if to == "bias" else "z", pair)
    real = torch.ones_like(run.tokens, dtype=torch.bool) if pair is None else pair.real
    source = ablate(run, run, to, real)
    edits = list[tuple[_Place, str, _Change]]()
    for place in places:
        if to == "bias":
            new = torch.ones(2, device=real.device)
            new[SELF] = 0
            edits.append((place, "pattern", new.to))
            continue
        new = _z(source, model, place)[0, 0]  # the same at every token
        if not new.isfinite().all():
            reason = (
                f"the mean of z is not finite in layer {place.sites.layer}: some models give nan "
                "to padding on the left; pad on the right, or give prompts of one length"
            )
            raise InputError([reason], _ABLATED)
        edits.append((place, "z", new.to))
    with _edited(model, edits):
        yield


@contextmanager
def steered(
    model: Any, steering: Steering, *, positions: int | Sequence[int] | None = None
) -> Iterator[None]:
    """Add a value to z of heads in every run of a model inside a `with`.

    Args:
        model: converted by `convert`, or with exposed neuron-heads; it is edited itself.
        steering: the value added to z, by head name: for a neuron-head a number, which changes its
            neuron's activation by as much; for an attention head a vector [d_head]. Heads that
            share a neuron are named one by one, such as `L5N1234.2`.
        positions: as for `ablated`.

    Raises:
        InputError: with every reason: unknown names, a neuron of several heads, values that
            are not finite numbers or have the wrong length, or invalid positions.
        UnsupportedModelError: as for `ablated`.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> tokens = torch.tensor([[3, 4, 113]])
        >>> before = model(tokens)
        >>> with p.steered(model, {"L0N7": 4.0}, positions=2):
        ...     (model(tokens) != before).any(dim=-1).tolist()
        [[False, False, True]]
    """
    if not isinstance(steering, Mapping) or not steering:
        raise InputError(["got no steering; expected such as {'L5N1234': 4.0}"], _STEERED)
    places = _places(model, list(steering), positions)
    vectors = {str(name): value for name, value in steering.items()}
    InputError.raise_if(_position_reasons(places), _STEERED)
    run = _recorded(model, places, "z")
    reasons, edits = list[str](), list[tuple[_Place, str, _Change]]()
    for place in places:
        added = torch.zeros_like(_z(run, model, place)[0, 0])
        for name, heads in zip(place.sites.names, place.heads(model), strict=True):
            name += place.suffix
            kind, d_head = place.sites.kind, added.shape[-1]
            value = _vector(name, vectors[name], len(heads), d_head, kind, reasons)
            if value is not None:
                added[heads] = added.new_tensor(value)

        def add(value: Tensor, added: Tensor = added) -> Tensor:
            return value + added.to(value)

        edits.append((place, "z", add))
    InputError.raise_if(reasons, _STEERED)
    with _edited(model, edits):
        yield


def _vector(
    name: str, value: Any, n_heads: int, d_head: int, kind: str, reasons: list[str]
) -> list[float] | None:
    """Return the numbers to add to z of a head; None, and a reason, if they are invalid."""
    plain = as_plain(value)
    numbers = [plain] if not isinstance(plain, list | tuple) else list(map(as_plain, plain))
    if n_heads > 1:
        reasons.append(f"{name}: {n_heads} heads share it; steer {name}.0 … {name}.{n_heads - 1}")
    elif len(numbers) != d_head or not all(map(is_number, numbers)):
        got = f"{len(numbers)} numbers" if isinstance(plain, list | tuple) else repr(value)
        expected = "a finite number" if kind == "neuron" else f"a vector of {d_head} finite numbers"
        reasons.append(f"{name}: got {got}; expected {expected}, which is added to its z")
    else:
        return numbers
    return None


# Heads and positions of edits


@dataclass(frozen=True)
class _Place:
    """Heads of one layer, and the positions at which they are edited."""

    sites: LayerSites
    positions: tuple[int, ...] | None  # None for all
    suffix: str = ""  # "@13" if the names say so

    def hook(self, model: Any, point: str) -> str:
        return host_of(model).hook_name(self.sites.layer, self.sites.kind, point)

    def heads(self, model: Any) -> list[list[int]]:
        """Return the indices of each site's heads at the hook point."""
        sites, width = self.sites, 1
        if sites.kind == "neuron":
            width = host_of(model).neurons[sites.layer].heads_per_neuron
        return [
            [index * width + i for i in (range(width) if member == ALL_MEMBERS else [member])]
            for index, member in zip(sites.index.tolist(), sites.member.tolist(), strict=True)
        ]


def _places(model: Any, names: Sites, positions: Any) -> list[_Place]:
    """Return heads with their positions, which a name such as `L3N7@13` may contain."""
    plain = as_plain(positions)
    chosen = plain if isinstance(plain, list | tuple | range) or plain is None else (plain,)
    default = None if chosen is None else tuple(map(as_plain, chosen))
    split = split_positions(names)
    if split is None:
        return [_Place(sites, default) for sites in resolve_sites(model, names)]
    if named := [f"{head}@{position}" for head, position in split if isinstance(position, str)]:
        raise InputError(
            [f"got {named[0]!r}; expected a number after @: a text that grows has no roles"],
            "these heads cannot be edited",
        )
    if positions is not None and all(position is not None for _, position in split):
        raise InputError(
            [f"got positions={positions!r} and names with positions; expected one of the two"],
            "these heads cannot be edited",
        )
    places: list[_Place] = []
    for position in dict.fromkeys(position for _, position in split):
        heads = [head for head, head_position in split if head_position == position]
        where_edited = default if position is None else (position,)
        suffix = "" if position is None else f"@{position}"
        places += [_Place(sites, where_edited, suffix) for sites in resolve_sites(model, heads)]
    return places


def _position_reasons(places: Sequence[_Place]) -> list[str]:
    reasons = {
        f"got positions {list(place.positions)}; expected numbers from 0 (a text that grows "
        "has no fixed end), or None for all": None
        for place in places
        if place.positions is not None
        and not (place.positions and all(map(is_count, place.positions)))
    }
    return list(reasons)


def _z(run: Recording, model: Any, place: _Place) -> Float[Tensor, "batch pos head_index d"]:
    if place.sites.kind == "neuron":
        return run.neurons[place.sites.layer].z.unsqueeze(-1)
    return run.hooked[place.hook(model, "z")]


# Hooks


@contextmanager
def _tokens_before(model: Any) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of tokens before those of this thread's pass.

    It is 0 if the pass starts at a later block.
    """
    host, key = host_of(model), object()
    values = host.passing.values

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        host.passing.values[key] = host.tokens_before(args, kwargs)

    handle = host.model.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield lambda: host.passing.values.get(key, 0)
    finally:
        handle.remove()
        values.pop(key, None)  # of blocks that were run outside a pass of the model


@contextmanager
def _edited(model: Any, edits: Sequence[tuple[_Place, str, _Change]]) -> Iterator[None]:
    """Change z [batch, pos, head_index, d] or patterns [batch, head_index, pos, 2] in a `with`."""

    def hook(
        place: _Place, point: str, change: _Change, before: Callable[[], int]
    ) -> Callable[[Tensor, Any], Tensor]:
        heads = [head for heads in place.heads(model) for head in heads]

        def edit(value: Tensor, hook: Any) -> Tensor:
            device, (n_pos, n_heads) = value.device, value.shape[1:3][:: 1 if point == "z" else -1]
            edited = torch.zeros(n_pos, n_heads, dtype=torch.bool, device=device)
            edited[:, heads] = True
            if place.positions is not None:
                of_text = torch.arange(n_pos, device=device) + before()
                chosen = torch.tensor(place.positions, device=device)
                edited &= torch.isin(of_text, chosen)[:, None]
            edited = edited if point == "z" else edited.T
            return torch.where(edited.unsqueeze(-1), change(value), value)

        return edit

    with _tokens_before(model) as before:
        hooks = [(edit[0].hook(model, edit[1]), hook(*edit, before)) for edit in edits]
        with model.hooks(fwd_hooks=hooks):
            yield


def _recorded(
    model: Any, places: Sequence[_Place], part: Part, pair: PromptPair | None = None
) -> Recording:
    """Record z of prompts, or of two tokens; refuse a model that would not read edits."""
    layers: dict[HeadKind, list[int]] = {"neuron": [], "attention": []}
    for layer, kind in dict.fromkeys((place.sites.layer, place.sites.kind) for place in places):
        layers[kind].append(layer)
    reasons = [
        reason
        for kind, of_kind in layers.items()
        for layer in of_kind
        for reason in host_of(model).unseen_edit_reasons(layer, kind)
    ]
    UnsupportedModelError.raise_if(reasons, "these heads cannot be edited")
    device = next(model.parameters()).device
    tokens = torch.zeros((1, 2), dtype=torch.long, device=device) if pair is None else pair.clean
    mask = None if pair is None else pair.mask
    names = [host_of(model).hook_name(layer, "attention", "z") for layer in layers["attention"]]
    with keep_random_state(device):
        run = record(model, tokens, mask, layers=layers["neuron"], names=names)
        tested = passed_tests(model)
        for kind, of_kind in layers.items():
            if of_kind:
                require_edits_read(model, run, kind, sorted(of_kind), part, tested)
    return run
