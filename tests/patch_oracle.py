"""Reference patches by TransformerLens' own hooks, with one site per forward pass.

Only the names of hook points come from attn_only_lens.
"""

import torch

from attn_only_lens import HeadName

CORRECT, WRONG = 7, 11
ACTIVATION = {"z": "z", "pattern": "pattern", "value": "v", "q": "q", "k": "k"}


def difference(logits, positions=None):
    """Return the mean logit difference at the last position of each prompt, or at others."""
    rows = torch.arange(len(logits))
    places = logits.shape[1] - 1 if positions is None else positions
    chosen = logits[rows, places]
    return (chosen[:, CORRECT] - chosen[:, WRONG]).mean().item()


def place(model, name, part, pos):
    """Return the hook point of a part of a head, and the head's index in it."""
    head = HeadName.parse(name)
    if part == "pattern":
        return head.hook("pattern", model), (slice(None), head.index, pos)
    return head.hook(ACTIVATION[part], model), (slice(None), pos, head.index)


@torch.no_grad()
def seen(model, tokens, hook_name, mask=None, hooks=()):
    """Return the activation at a hook point in a run."""
    seen_values = []
    keep = (hook_name, lambda value, hook: seen_values.append(value.clone()))
    with model.hooks(fwd_hooks=[*hooks, keep]):
        model(tokens, attention_mask=mask, return_type="logits")
    return seen_values[-1]


@torch.no_grad()
def moved(model, tokens, hook_name, index, change, mask=None, hooks=()):
    """Return the logits of a run with a change added at an index of a hook point."""

    def edit(value, hook):
        value = value.clone()
        value[index] += change
        return value

    with model.hooks(fwd_hooks=[*hooks, (hook_name, edit)]):
        return model(tokens, attention_mask=mask, return_type="logits")


def slope(model, tokens, hook_name, index, change, metric=difference, mask=None, step=1e-4):
    """Return the derivative of the metric along a change, by central differences.

    The error is step² times the third derivative, plus rounding of 1e-16/step.
    """
    values = [
        metric(moved(model, tokens, hook_name, index, sign * step * change, mask))
        for sign in (1, -1)
    ]
    return (values[0] - values[1]) / (2 * step)
