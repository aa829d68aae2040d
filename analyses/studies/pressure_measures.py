"""The measures of `pressure_small_english`: what new parts of a model do, and what old ones keep.

A *part* is an attention head or a neuron. Its *effect* on a task is how much the metric (the right
answer's logit minus the wrong one's) falls if only this part, at all positions, is patched from the
corrupted run. Every part is patched. Costs are fractions of the fall if all parts are patched.

    new_share     the sum of |effect| of new parts over the sum of all parts of their kinds
    new_odds      the mean |effect| of a new part over the mean |effect| of an old part
    single        the sum of the effects of new parts, each patched alone
    joint         the cost of patching all new parts together
    joint_old     the cost of patching all old parts together
    directions    the cost of patching as many random orthogonal directions as there are new neurons
                  in a layer (coordinates of new heads), in the space of all its neurons (heads)
    labels        the cost of patching as many parts with random labels "new", layer by layer
    by_pattern    the share of patterns in Σ |by_pattern| + Σ |by_value|, for new neurons and for
                  old ones; both are the exact parts of secants (`engine/contrast.py`)
    text_new      the rise of the loss on held-out texts if the outputs of all new parts are
                  replaced by their means over the texts; `text_old` is the same for old parts, and
                  `text_all` for all parts of these kinds
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analyses.tools import circuit_measures as measures
from analyses.tools.circuit_measures import Look, Question
from analyses.tools.train_small_english import losses_of
from attn_only_lens import expose_neuron_heads
from attn_only_lens import patching as p
from attn_only_lens.heads import HeadName


def effects_of(model: Any, questions: Mapping[str, Question], new: Collection[str] = ()) -> Look:
    """Patch every part of a model; return the effects, without gates, patterns and examples."""
    with expose_neuron_heads(model) as exposed:
        names, parts = measures.parts_of(exposed, questions, new, p.activation_patch)
    return Look(names, parts, {}, {}, {})


def of_kinds(names: tuple[str, ...], new: Collection[str]) -> Bool[np.ndarray, "component"]:
    """Return which parts are heads or neurons, whichever kinds have new parts."""
    kinds = {"N" in name for name in new}
    return np.array([("N" in name) in kinds for name in names])


def new_parts(look: Look, task: str, new: Collection[str]) -> dict[str, float]:
    """Return `new_share`, `parity`, `new_odds`, `single`, `joint` and `joint_old` of one task."""
    part, is_new = look.parts[task], np.isin(look.names, list(new))
    is_old = of_kinds(look.names, new) & ~is_new
    effects = part.effects.mean(1)
    sizes = abs(effects)
    fall = (part.clean - part.nothing).mean()
    return {
        "right": float((part.clean > 0).mean()),
        "new_share": sizes[is_new].sum() / sizes[is_new | is_old].sum(),
        "parity": is_new.sum() / (is_new | is_old).sum(),
        "new_odds": sizes[is_new].mean() / sizes[is_old].mean(),
        "single": effects[is_new].sum() / fall,
        "joint": (part.clean - part.without_new).mean() / fall,
        "joint_old": (part.clean - part.without_old).mean() / fall,
    }


def random_labels(names: tuple[str, ...], new: Collection[str], seed: int) -> list[str]:
    """Return as many parts of each kind and layer as are new there, drawn at random.

    If whole layers are new, the parts are drawn from all layers.
    """
    generator, drawn = np.random.default_rng(seed), list[str]()
    groups: dict[tuple[int, bool], list[str]] = {}
    layers_are_new = len({HeadName.parse(name).layer for name in new}) < len(
        {HeadName.parse(name).layer for name in names}
    )
    for name in names:
        layer = 0 if layers_are_new else HeadName.parse(name).layer
        groups.setdefault((layer, "N" in name), []).append(name)
    for group in groups.values():
        drawn += generator.permutation(group)[: sum(name in new for name in group)].tolist()
    return drawn


@torch.no_grad()
def patched_directions(
    exposed: Any, asked: Question, new: Collection[str], seed: int
) -> Float[np.ndarray, "prompt"]:
    """Return the metric with random directions patched, as many in each layer as new parts span."""
    counts: dict[str, int] = {}
    for name in new:
        point = HeadName.parse(name).hook("z", exposed)
        counts[point] = counts.get(point, 0) + 1
    _, cache = exposed.run_with_cache(asked.corrupted, names_filter=list(counts))
    generator = torch.Generator().manual_seed(seed)

    def patch(z: Tensor, hook: Any, corrupted_z: Tensor, basis: Tensor) -> Tensor:
        return z + ((corrupted_z - z).flatten(2) @ basis @ basis.T).view_as(z)

    hooks = []
    for point, count in counts.items():
        _, _, n_heads, d_head = cache[point].shape
        drawn = torch.randn(n_heads * d_head, count * d_head, generator=generator)
        basis = torch.linalg.qr(drawn)[0].to(cache[point])
        hooks.append((point, partial(patch, corrupted_z=cache[point], basis=basis)))
    return asked.of_logits(exposed.run_with_hooks(asked.clean, fwd_hooks=hooks))


def random_costs(
    model: Any, questions: Mapping[str, Question], look: Look, new: Collection[str], draws: int
) -> dict[str, dict[str, float]]:
    """Return by task `directions` and `labels`, the means over random draws."""
    costs: dict[str, dict[str, float]] = {}
    with expose_neuron_heads(model) as exposed:
        for task, asked in questions.items():
            part, runs = look.parts[task], {"directions": [], "labels": []}
            for seed in range(draws):
                labelled = random_labels(look.names, new, seed)
                runs["labels"].append(measures.patched(exposed, asked, labelled))
                runs["directions"].append(patched_directions(exposed, asked, new, seed))
            fall = (part.clean - part.nothing).mean()
            costs[task] = {
                name: float(np.mean([(part.clean - run).mean() for run in some]) / fall)
                for name, some in runs.items()
            }
    return costs


def by_pattern(
    model: Any, questions: Mapping[str, Question], new: Collection[str]
) -> dict[str, dict[str, float]]:
    """Return by task the share of patterns for new and for old neurons."""
    shares = {}
    with expose_neuron_heads(model) as exposed:
        for task, asked in questions.items():
            frame = p.attribution(
                *(exposed, asked.clean, asked.corrupted, asked.metric),
                sites=p.neuron_heads(),
                positions="all",
                method="secant",
                budget=0,
                split=True,
                mask=asked.mask,
                progress=False,
            ).to_frame()
            is_new = frame["name"].isin(list(new))
            sums = frame[["by_pattern", "by_value"]].abs().groupby(is_new.to_numpy()).sum()
            part = sums["by_pattern"] / sums.sum(axis=1)
            nothing = float("nan")
            shares[task] = {
                "by_pattern": float(part.get(True, nothing)),
                "by_pattern_old": float(part.get(False, nothing)),
            }
    return shares


Key: TypeAlias = tuple[int, bool]  # a layer, and whether its neurons are meant


@contextmanager
def hooked(model: Any, hook: Callable[[Key, Tensor], Tensor]) -> Iterator[Any]:
    """Pass the outputs of heads and neurons through a hook: inputs of `o_proj` and `down_proj`."""
    wrapped, handles = model.original_model, []

    def register(key: Key, module: torch.nn.Module) -> None:
        handles.append(module.register_forward_pre_hook(lambda _, inputs: (hook(key, inputs[0]),)))

    for number, layer in enumerate(wrapped.model.layers):
        register((number, False), layer.self_attn.o_proj)
        register((number, True), layer.mlp.down_proj)
    try:
        yield wrapped
    finally:
        for handle in handles:
            handle.remove()


def mean_loss(wrapped: Any, texts: list[Tensor]) -> float:
    """Return the mean loss over the words of texts, in nats."""
    return torch.cat([losses_of(wrapped, tokens) for tokens in texts]).double().mean().item()


def masks_of(
    means: Mapping[Key, Tensor], names: Collection[str], d_head: int
) -> dict[Key, Bool[Tensor, "coordinate"]]:
    """Return which coordinates of the outputs belong to these parts."""
    masks = {key: torch.zeros_like(mean, dtype=torch.bool) for key, mean in means.items()}
    for name in names:
        head = HeadName.parse(name)
        width = 1 if head.kind == "neuron" else d_head
        start = head.index * width
        masks[head.layer, head.kind == "neuron"][start : start + width] = True
    return masks


@torch.no_grad()
def text_costs(
    model: Any, texts: list[Tensor], names: tuple[str, ...], new: Collection[str]
) -> dict[str, float]:
    """Return `text_new`, `text_old` and `text_all`: rises of the loss, in nats."""
    outputs: dict[Key, list[Tensor]] = {}

    def keep(key: Key, z: Tensor) -> Tensor:
        outputs.setdefault(key, []).append(z.flatten(0, 1))
        return z

    with hooked(model, keep) as wrapped:
        whole = mean_loss(wrapped, texts)
    means = {key: torch.cat(rows).mean(0) for key, rows in outputs.items()}
    same_kind = {name for name, same in zip(names, of_kinds(names, new), strict=True) if same}
    groups = {"text_new": set(new), "text_old": same_kind - set(new), "text_all": same_kind}
    costs = {}
    for group, some in groups.items():
        masks = masks_of(means, some, model.cfg.d_head)

        def replace(key: Key, z: Tensor, masks: dict[Key, Tensor] = masks) -> Tensor:
            return torch.where(masks[key], means[key], z)

        with hooked(model, replace) as wrapped:
            costs[group] = mean_loss(wrapped, texts) - whole
    return costs
