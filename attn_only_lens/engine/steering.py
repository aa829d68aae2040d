"""Ablate or steer heads in every run of a model: forward passes, caches and generation.

Inside the context z of the named heads is

    ablated    0 ("zero"), its mean over the real tokens of given prompts ("mean"), or the head's
               output when all its attention is on the bias token ("bias")
    steered    z + the value given for the head

at all positions of the text, or at some. Positions count from the start of the text, also when a
key-value cache lets the model run only the new tokens. The hooks are removed at the end.
The papers: activation addition is Turner et al., "Steering Language Models With Activation
Engineering" (2023); mean ablation is Wang et al., "Interpretability in the Wild" (2022).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attn_only_lens.arguments import as_plain, is_count, is_number
from attn_only_lens.axes import SELF
from attn_only_lens.devices import keep_random_state
from attn_only_lens.engine.edit_checks import require_edits_read
from attn_only_lens.engine.inputs import option_reasons, reasons_not_to_run
from attn_only_lens.engine.interventions import ablate
from attn_only_lens.engine.prompts import Prompts, single_prompts
from attn_only_lens.engine.recording import Recording, record
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

AblateTo = Literal["zero", "mean", "bias"]
Steering: TypeAlias = Mapping[str | HeadName, float | Sequence[float] | Tensor]
_Change: TypeAlias = Callable[[Tensor], Tensor]
_ABLATED, _STEERED = "these heads cannot be ablated", "these heads cannot be steered"


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
        model: converted by `convert`, or with exposed neuron-heads.
        names: `L5H3`, `L5N1234`, several of them, or `heads(layers=5)` and the like; `L5N1234@13`
            at that position alone.
        to: "zero", "mean" over all real tokens of `prompts`, or "bias": all attention of a
            neuron-head on the bias token, where it writes nothing.
        prompts: texts or tokens for the means, which are taken without hooks on the model: if
            contexts are nested, the one with to="mean" must be the outermost.
        mask: 1 for real tokens, 0 for padding, if the prompts are tokens.
        positions: for names without a position: numbers from 0 that count prompt tokens, padding
            and generated tokens; by default all.

    Yields:
        Nothing; the given model itself is edited.

    Raises:
        InputError: with every reason: unknown names, no prompts for means, prompts for another
            ablation, attention heads ablated to "bias", or invalid positions.
        UnsupportedModelError: the model does not read z where it is hooked, or a torch hook on the
            part that z enters is given z without the edit.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> tokens = torch.tensor([[3, 4, 113]])
        >>> before = model(tokens)
        >>> with p.ablated(model, ["L0N7", "L0H1"], to="mean", prompts=tokens):
        ...     bool((model(tokens) - before).abs().max() > 1e-3)
        True
        >>> torch.equal(model(tokens), before)
        True
    """
    placed = _placed(model, names, positions)
    sites = [place for place, _, _ in placed]
    reasons = option_reasons("to", to, get_args(AblateTo))
    if to == "bias" and any(site.kind == "attention" for site in sites):
        reasons.append("attention heads have no bias token; ablate them to 'zero' or 'mean'")
    if (prompts is None) == (to == "mean"):
        got = "no prompts" if prompts is None else "prompts"
        reasons.append(f"got {got} with to={to!r}; means are of prompts, and nothing else is")
    if mask is not None and prompts is None:
        reasons.append("got a mask without prompts; it says which of their tokens are real")
    if to == "mean":
        unready = reasons_not_to_run(model)
        reasons += unready + ["among nested contexts, one of means is the outer one"] * bool(
            unready
        )
    reasons += _position_reasons(placed)
    InputError.raise_if(reasons, _ABLATED)
    _require_edits_seen(model, sites)
    if prompts is None:
        run = _short_run(model, sites)
        real = torch.ones_like(run.tokens, dtype=torch.bool)
    else:
        pair = single_prompts(model, prompts, mask)
        run, real = _record(model, sites, pair.clean, pair.mask), pair.real
    _require_read(model, run, sites, "pattern" if to == "bias" else "z")
    source = ablate(run, run, to, real)
    before, edits = _TokensBefore(model), list[tuple[str, _Change]]()
    for place, token_positions, _ in placed:
        where_edited = _Where(before, token_positions)
        heads = [head for heads in _heads_of_each(model, place) for head in heads]
        if to == "bias":
            edits.append((_hook(model, place, "pattern"), _all_on_bias(heads, where_edited)))
            continue
        new = _z(source, model, place)[0, 0]  # the same at every token
        if not new.isfinite().all():
            reason = (
                f"the mean of z is not finite in layer {place.layer}: the model runs these prompts "
                "to no numbers, as some do with padding on the left; pad on the right, or give "
                "prompts of one length"
            )
            raise InputError([reason], _ABLATED)
        edits.append((_hook(model, place, "z"), _replace(new, heads, where_edited)))
    with _edited(model, edits, before):
        yield


@contextmanager
def steered(
    model: Any, steering: Steering, *, positions: int | Sequence[int] | None = None
) -> Iterator[None]:
    """Add a value to z of heads in every run of a model inside a `with`.

    Args:
        model: converted by `convert`, or with exposed neuron-heads.
        steering: the value added to z, by head name: for a neuron-head a number, which changes its
            neuron's activation by as much; for an attention head a vector [d_head]. Heads that
            share a neuron are named one by one, such as `L5N1234.2`.
        positions: as for `ablated`.

    Yields:
        Nothing; the given model itself is edited.

    Raises:
        InputError: with every reason: unknown names, a neuron of several heads, values that
            are not finite numbers or have the wrong length, or invalid positions.
        UnsupportedModelError: the model does not read z where it is hooked, or a torch hook on the
            part that z enters is given z without the edit.

    Example:
        >>> import torch
        >>> from attn_only_lens import expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> tokens = torch.tensor([[3, 4, 113]])
        >>> _, before = model.run_with_cache(tokens)
        >>> with p.steered(model, {"L0N7": 4.0}, positions=2):
        ...     _, after = model.run_with_cache(tokens)
        >>> name = "blocks.0.mlp.hook_neuron_act"
        >>> (after[name] - before[name])[0, :, 7, 0].round(decimals=4).tolist()
        [0.0, 0.0, 4.0]
    """
    reasons: list[str] = []
    if not isinstance(steering, Mapping) or not steering:
        raise InputError(["got no steering; expected such as {'L5N1234': 4.0}"], _STEERED)
    placed = _placed(model, list(steering), positions)
    sites = [place for place, _, _ in placed]
    vectors = {str(name): value for name, value in steering.items()}
    reasons += _position_reasons(placed)
    InputError.raise_if(reasons, _STEERED)
    _require_edits_seen(model, sites)
    run = _short_run(model, sites)
    before, edits = _TokensBefore(model), list[tuple[str, _Change]]()
    for place, token_positions, suffix in placed:
        added = torch.zeros_like(_z(run, model, place)[0, 0])
        for name, heads in zip(place.names, _heads_of_each(model, place), strict=True):
            name += suffix
            value = _vector(name, vectors[name], len(heads), added.shape[-1], place.kind, reasons)
            if value is not None:
                added[heads] = added.new_tensor(value)
        edits.append((_hook(model, place, "z"), _add(added, _Where(before, token_positions))))
    InputError.raise_if(reasons, _STEERED)
    _require_read(model, run, sites, "z")
    with _edited(model, edits, before):
        yield


# What is edited


def _hook(model: Any, sites: LayerSites, point: str) -> str:
    return host_of(model).hook_name(sites.layer, sites.kind, point)


def _heads_of_each(model: Any, sites: LayerSites) -> list[list[int]]:
    """Return the indices of each site's heads at the hook point."""
    width = 1
    if sites.kind == "neuron":
        width = host_of(model).neurons[sites.layer].heads_per_neuron
    return [
        [index * width + one for one in (range(width) if member == ALL_MEMBERS else [member])]
        for index, member in zip(sites.index.tolist(), sites.member.tolist(), strict=True)
    ]


def _z(run: Recording, model: Any, sites: LayerSites) -> Float[Tensor, "batch pos head_index d"]:
    if sites.kind == "neuron":
        return run.neurons[sites.layer].z.unsqueeze(-1)
    return run.hooked[_hook(model, sites, "z")]


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


# Where


_Placed: TypeAlias = list[tuple[LayerSites, tuple[int, ...] | None, str]]
"""Heads, the positions at which they are edited (None for all), and `@13` if their names say so."""


class _TokensBefore:
    """Count the tokens before those of a forward pass, for each thread."""

    def __init__(self, model: Any) -> None:
        self._host = host_of(model)
        self._passing = self._host.passing

    @property
    def count(self) -> int:
        """The number of tokens before this pass; 0 if the pass starts at a later block."""
        count: int = self._passing.values.get(self, 0)
        return count

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Return a context in which every pass counts when it enters the first block."""
        values = self._passing.values

        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._passing.values[self] = self._host.tokens_before(args, kwargs)

        handle = self._host.model.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            values.pop(self, None)  # of blocks that were run outside a pass of the model


@dataclass(frozen=True)
class _Where:
    """The positions of an edit, of the whole text."""

    before: _TokensBefore
    positions: tuple[int, ...] | None

    def among(self, n_pos: int, device: torch.device) -> Bool[Tensor, "pos"]:
        """Return which tokens of a run to edit."""
        if self.positions is None:
            return torch.ones(n_pos, dtype=torch.bool, device=device)
        here = torch.arange(self.before.count, self.before.count + n_pos, device=device)
        return torch.isin(here, torch.tensor(self.positions, device=device))


def _placed(model: Any, names: Sites, positions: Any) -> _Placed:
    """Return heads with their positions, which a name such as `L3N7@13` may contain."""
    plain = as_plain(positions)
    asked = plain if isinstance(plain, list | tuple | range) or plain is None else (plain,)
    every = None if asked is None else tuple(map(as_plain, asked))
    split = split_positions(names)
    if split is None:
        return [(site, every, "") for site in resolve_sites(model, names)]
    if positions is not None and all(position is not None for _, position in split):
        raise InputError(
            [f"got positions={positions!r} and names that all say where; expected one of the two"],
            "these heads cannot be edited",
        )
    edits: _Placed = []
    for place in dict.fromkeys(position for _, position in split):
        here = [name for name, position in split if position == place]
        places, suffix = (every, "") if place is None else ((place,), f"@{place}")
        edits += [(site, places, suffix) for site in resolve_sites(model, here)]
    return edits


def _position_reasons(placed: _Placed) -> list[str]:
    reasons = []
    for positions in (positions for _, positions, _ in placed if positions is not None):
        bad = [pos for pos in positions if not is_count(pos)]
        if bad or not positions:
            reasons.append(
                f"got positions {list(positions)}; expected numbers from 0 (a text that grows "
                "has no fixed end), or None for all"
            )
    return list(dict.fromkeys(reasons))


def _replace(new: Float[Tensor, "head_index d"], heads: list[int], places: _Where) -> _Change:
    chosen = torch.zeros(len(new), dtype=torch.bool, device=new.device)
    chosen[heads] = True

    def change(value: Tensor) -> Tensor:
        edited = places.among(value.shape[1], value.device)[:, None] & chosen.to(value.device)
        return torch.where(edited.unsqueeze(-1), new.to(value), value)

    return change


def _add(added: Float[Tensor, "head_index d"], places: _Where) -> _Change:
    def change(value: Tensor) -> Tensor:
        edited = places.among(value.shape[1], value.device)
        return torch.where(edited[:, None, None], value + added.to(value), value)

    return change


def _all_on_bias(heads: list[int], places: _Where) -> _Change:
    """Return the edit of a pattern [batch, head_index, pos, 2]."""

    def change(value: Tensor) -> Tensor:
        edited_at = places.among(value.shape[2], value.device)
        new = torch.ones_like(value)
        new[..., SELF] = 0
        edited = value.clone()
        edited[:, heads] = torch.where(edited_at[:, None], new[:, heads], value[:, heads])
        return edited

    return change


# Hooks


@contextmanager
def _edited(
    model: Any, edits: Sequence[tuple[str, _Change]], before: _TokensBefore
) -> Iterator[None]:
    """Edit hook points of a model for as long as the context lasts."""

    def hook(change: _Change) -> Callable[[Tensor, Any], Tensor]:
        return lambda value, hook: change(value)

    hooks = [(name, hook(change)) for name, change in edits]
    with before.counted(), model.hooks(fwd_hooks=hooks):
        yield


def _record(model: Any, sites: Sequence[LayerSites], tokens: Tensor, mask: Any) -> Recording:
    layers = [site.layer for site in sites if site.kind == "neuron"]
    names = [_hook(model, site, "z") for site in sites if site.kind == "attention"]
    with keep_random_state(tokens.device):
        return record(model, tokens, mask, layers=layers, names=names)


def _short_run(model: Any, sites: Sequence[LayerSites]) -> Recording:
    """Record a run of two tokens, for the shapes of z."""
    device = next(model.parameters()).device
    return _record(model, sites, torch.zeros((1, 2), dtype=torch.long, device=device), None)


def _require_edits_seen(model: Any, sites: Sequence[LayerSites]) -> None:
    """Refuse a model with hooks that would see z before the edit; the hooks are not called."""
    reasons = [
        reason
        for layer, heads in dict.fromkeys((some.layer, some.kind) for some in sites)
        for reason in host_of(model).unseen_edit_reasons(layer, heads)
    ]
    UnsupportedModelError.raise_if(reasons, "these heads cannot be edited")


def _require_read(model: Any, run: Recording, sites: Sequence[LayerSites], part: Part) -> None:
    for kind in {site.kind for site in sites}:
        layers = sorted({site.layer for site in sites if site.kind == kind})
        with keep_random_state(run.tokens.device):
            require_edits_read(model, run, kind, layers, part)
