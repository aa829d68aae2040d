"""Reference patches and slopes with hooks, one whole forward pass at a time.

This file shares no code with the package: it parses names and spells out hook points itself.
"""

import re

import torch
from common import mlp_hook

ACTIVATION = {"z": "z", "pattern": "pattern", "value": "v", "q": "q", "k": "k"}


def two_blocks(model):
    """Return whether the model has two blocks per layer, or neuron-heads next to its MLPs."""
    return any("mlp" not in dict(block.named_children()) for block in model.blocks)


def hook_point(model, name, part):
    """Return the full name of the hook point for this part of the head."""
    layer, kind = re.fullmatch(r"L(\d+)([HN])\d+", name).groups()
    if two_blocks(model):
        return f"blocks.{2 * int(layer) + (kind == 'N')}.attn.hook_{ACTIVATION[part]}"
    if kind == "N":
        return mlp_hook(ACTIVATION[part], layer)
    return f"blocks.{layer}.attn.hook_{ACTIVATION[part]}"


def head_of(name):
    """Return the index of the head with this name at its hook point."""
    return int(re.fullmatch(r"L\d+[HN](\d+)", name)[1])


def cached(model, tokens, mask=None):
    """Return every hook point's activation."""
    return model.run_with_cache(tokens, attention_mask=mask)[1]


@torch.no_grad()
def patched_logits(model, tokens, source, name, part, places, mask=None):
    """Return the logits of a whole run with one head patched.

    Args:
        model: a model with neuron-heads.
        tokens: the tokens of the run to patch.
        source: the patched-in activations, by hook point.
        name: the head.
        part: the part of the head.
        places: the [batch, pos] positions to patch; for a pattern, the queries.
        mask: 1 for real tokens.
    """
    point, head = hook_point(model, name, part), head_of(name)

    def edit(value, hook):
        value = value.clone()
        for prompt, pos in places.nonzero().tolist():
            if part == "pattern":
                value[prompt, head, pos] = source[point][prompt, head, pos]
            else:
                value[prompt, pos, head] = source[point][prompt, pos, head]
        return value

    return model.run_with_hooks(tokens, fwd_hooks=[(point, edit)], attention_mask=mask)


def mask_at(batch, pos, *positions):
    """Return a [batch, pos] mask with these positions of every prompt set."""
    places = torch.zeros(batch, pos, dtype=torch.bool)
    places[:, list(positions)] = True
    return places


def places_of(label, real, roles=None):
    """Return the [batch, pos] mask of the positions that a label of a sweep stands for.

    Roles and negative numbers count the real tokens of each prompt, other numbers all columns.
    """
    if label == "all":
        return real
    chosen = torch.zeros_like(real)
    for prompt, row in enumerate(real):
        number = roles[label] if isinstance(label, str) else label
        number = number[prompt] if isinstance(number, list) else number
        in_columns = number >= 0 and not isinstance(label, str)
        chosen[prompt, number if in_columns else row.nonzero().flatten()[number]] = True
    return chosen & real


def difference(logits, mask=None, correct=7, wrong=8):
    """Return the mean logit difference at the last real position of each prompt."""
    ends = [logits.shape[1] - 1] * len(logits) if mask is None else mask.cumsum(1).argmax(1)
    return logit_diff(logits, torch.as_tensor(ends), correct, wrong)


def whole_runs(model, contrast, frame, part="z", measure=difference, noise=False):
    """Return a metric of a whole run with the patch of each row of a sweep.

    Only the contrast's tokens, mask and roles are used. For a row of one prompt, the metric is of
    this prompt.
    """
    clean, corrupted, mask = contrast.clean, contrast.corrupted, contrast.mask
    into, other = (clean, corrupted) if noise else (corrupted, clean)
    source = cached(model, other, mask)
    real = torch.ones_like(clean).bool() if mask is None else mask.bool()
    values = []
    for row in frame.itertuples():
        places = places_of(row.position, real, contrast.roles)
        logits = patched_logits(model, into, source, row.name, part, places, mask)
        some = [row.prompt] if hasattr(row, "prompt") else slice(None)
        values.append(measure(logits[some], None if mask is None else mask[some]))
    return values


def logit_diff(logits, last, correct, wrong):
    """Return the mean over prompts of the logit difference at each prompt's last position."""
    rows = torch.arange(len(logits))
    return (logits[rows, last, correct] - logits[rows, last, wrong]).mean().item()


def place(model, name, part, pos):
    """Return the hook point of a part of a head, and the head's index in it."""
    head = head_of(name)
    index = (slice(None), head, pos) if part == "pattern" else (slice(None), pos, head)
    return hook_point(model, name, part), index


@torch.no_grad()
def seen(model, tokens, hook_name, mask=None, hooks=()):
    """Return the activation at a hook point in a run."""
    values = []
    keep = (hook_name, lambda value, hook: values.append(value.clone()))
    with model.hooks(fwd_hooks=[*hooks, keep]):
        model(tokens, attention_mask=mask, return_type="logits")
    return values[-1]


@torch.no_grad()
def moved(model, tokens, hook_name, index, change):
    """Return the logits of a run with a change added at an index of a hook point."""

    def edit(value, hook):
        value = value.clone()
        value[index] += change
        return value

    return model.run_with_hooks(tokens, fwd_hooks=[(hook_name, edit)])


def node_outputs(cache, n_layers):
    """Return the outputs of heads, neurons or features, skip and error nodes, by hook point.

    The keys are the beginnings of their names: `L1H`, `L1N` or `L1F`, `L1S`, `L1E`.
    """
    outputs = {}
    for layer in range(n_layers):
        mlp = f"blocks.{layer}.mlp"
        neurons = "F" if f"{mlp}.hook_error" in cache else "N"
        points = {"H": f"blocks.{layer}.attn.hook_z", neurons: f"{mlp}.hook_neuron_act"}
        points |= {"S": f"{mlp}.hook_skip", "E": f"{mlp}.hook_error"}
        for letter, point in points.items():
            if point in cache:
                outputs[f"L{layer}{letter}"] = point, cache[point]
    return outputs


def others_held(sites, outputs):
    """Return hooks that give every site but some, such as `L1H0@3`, its output in another run.

    Args:
        sites: the sites that keep their own output.
        outputs: the other run's `node_outputs`.
    """
    hooks = []
    for beginning, (point, held) in outputs.items():
        outside = torch.ones(held.shape[:3], dtype=torch.bool)
        for site in sites:
            if site.startswith(beginning):
                index, _, position = site.removeprefix(beginning).partition("@")
                outside[:, int(position), int(index or 0)] = False

        def hold(z, hook, held=held, outside=outside[..., None]):
            return torch.where(outside, held, z)

        hooks.append((point, hold))
    return hooks


def slope(model, tokens, hook_name, index, change, step=1e-4):
    """Return the derivative of `difference` along a change, by central differences.

    The error is step² times the third derivative, plus rounding of 1e-16/step.
    """
    values = [
        difference(moved(model, tokens, hook_name, index, sign * step * change)) for sign in (1, -1)
    ]
    return (values[0] - values[1]) / (2 * step)


@torch.no_grad()
def faithfulness_by_hooks(model, sites, clean, corrupted, answers):
    """The faithfulness of a circuit for a logit difference; all other nodes are held by hooks."""
    outputs = node_outputs(model.run_with_cache(corrupted)[1], len(model.blocks))
    held = (others_held(some, outputs) for some in (sites, []))
    runs = [model.run_with_hooks(clean, fwd_hooks=hooks) for hooks in held]
    correct, wrong = answers
    value, none, whole = (
        (x[:, -1, correct] - x[:, -1, wrong]).mean().item() for x in (*runs, model(clean))
    )
    return (value - none) / (whole - none)
