"""A pair of runs: checked, recorded, and measured. What sweeps and attribution begin with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from attn_only_lens.errors import PatchingError
from attn_only_lens.heads import has_neuron_heads, host_of
from attn_only_lens.runs.attached_hooks import hook_reasons
from attn_only_lens.runs.edits import Part, hook_name
from attn_only_lens.runs.metrics import AnyMetric, BoundMetric, bind, require_distinct
from attn_only_lens.runs.prompts import PromptPair
from attn_only_lens.runs.recording import Hooks, Recording, record
from attn_only_lens.runs.sites import LayerSites

__all__ = ["Runs", "Side", "not_one_of", "reasons_against", "recorded"]

Side = Literal["clean", "corrupted"]


@dataclass(frozen=True, eq=False)
class Runs:
    """Two runs of a model, and the metric of each.

    Attributes:
        pair: the prompts.
        clean: the clean run.
        corrupted: the corrupted run.
        metric: the metric, for these prompts.
        clean_value: the metric of the clean run.
        corrupted_value: the metric of the corrupted run.
    """

    pair: PromptPair
    clean: Recording
    corrupted: Recording
    metric: BoundMetric
    clean_value: float
    corrupted_value: float


def reasons_against(model: Any) -> list[str]:
    """Return why a model with neuron-heads cannot be patched as it stands."""
    if not has_neuron_heads(model):
        return []
    reasons = hook_reasons(model, "would run on batches of variants, or be left out of them")
    dropout = any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in model.modules())
    if dropout:
        reasons.append("it drops activations at random: call model.eval() first")
    return reasons


def not_one_of(label: str, got: object, expected: Sequence[str]) -> list[str]:
    """Why a setting is refused, if it is."""
    if got in expected:
        return []
    return [f"got {label}={got!r}; expected one of {', '.join(expected)}"]


def recorded(
    model: Any,
    pair: PromptPair,
    metric: AnyMetric,
    sites: Sequence[LayerSites],
    part: Part,
    *,
    names: Sequence[str] = (),
    traced: Side | None = None,
    hooks: Hooks = (),
    distinct: bool = True,
) -> Runs:
    """Run both prompts, keep what the sites did, and measure.

    Args:
        model: converted, or with exposed neuron-heads.
        pair: the prompts.
        metric: to be bound to them.
        sites: whose heads to keep.
        part: of attention heads, what to keep.
        names: hook points to keep besides.
        traced: the run whose logits keep their graph, if one does.
        hooks: on that run.
        distinct: whether the metric must tell the runs apart, as scores need it to.

    Raises:
        PatchingError: the metric does not fit or does not tell the runs apart; the part is shared
            between heads.
    """
    layers = [each.layer for each in sites if each.kind == "neuron"]
    attention = [each.layer for each in sites if each.kind == "attention"]
    own = {layer: hook_name(model, layer, part) for layer in attention}

    def ran(side: Side) -> Recording:
        mine = hooks if side == traced else ()
        return record(
            model,
            getattr(pair, side),
            pair.mask,
            layers=layers,
            names=[*own.values(), *names],
            hooks=mine,
            graph=side == traced,
        )

    clean, corrupted = ran("clean"), ran("corrupted")
    _require_own(model, own, clean)
    bound = bind(metric, model, pair, reference=clean.logits.detach())
    clean_value, corrupted_value = bound.of(clean.logits), bound.of(corrupted.logits)
    if distinct:
        require_distinct(clean_value, corrupted_value, clean.logits.dtype)
    return Runs(pair, clean, corrupted, bound, clean_value, corrupted_value)


def _require_own(model: Any, names: dict[int, str], run: Recording) -> None:
    """Refuse values that grouped queries share: to patch one head's would patch the group's."""
    reasons = []
    for layer, name in names.items():
        seen, n_heads = run.hooked[name], host_of(model).n_heads[layer]
        n_seen = seen.shape[1 if name.endswith("hook_pattern") else 2]
        if seen.ndim != 4 or n_seen != n_heads:
            reasons.append(
                f"{name} has shape {list(seen.shape)}, not one for each of {n_heads} heads: "
                "grouped queries share keys and values. On a HookedTransformer, "
                "model.set_ungroup_grouped_query_attention(True) gives each head its own; or "
                "patch z"
            )
    if reasons:
        raise PatchingError(reasons, "these heads cannot be patched one by one")
