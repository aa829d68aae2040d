"""A neuron over a corpus: at each token, its value and the share of it that its gate passes.

A neuron-head's output is gate × value, so lines of one output are hyperbolas, and the whole of a
plain neuron lies on one curve, its activation: gate = σ(score(value)). In a gated MLP the two are
free of each other, and the cloud shows how they go together (TransformerLens adds `b_in` of such an
MLP after the product; it is a constant, and no part of either).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import ActivationCache

from attn_only_lens.heads import HeadName, host_of, neuron_gate
from attn_only_lens.heads.patterns import cached_activation
from attn_only_lens.viz.checks import refuse, token_reasons
from attn_only_lens.viz.figures import empty_figure, plotly_text, style_figure

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_POINTS = 20_000
"""Tokens of one picture: each is a shape of its own, with its text."""

_CONTEXT = 5


def gate_value_scatter(
    cache: ActivationCache,
    name: str,
    tokens: Sequence[Sequence[str]],
    mask: Int[Tensor, "batch pos"] | None = None,
) -> "go.Figure":
    """Draw gate and value of a neuron at every token of a corpus; point at one for its context.

    Args:
        cache: of a converted or exposed model, with the pattern and v of the neuron's heads.
        name: a neuron by source layer, `L5N1234`.
        tokens: the texts of the tokens of each row of the batch, padding included:
            `[token_texts(model, row) for row in tokens]`.
        mask: 1 or True for tokens that are real; all are drawn where it is not given.

    Returns:
        A plotly figure.

    Raises:
        InputError: tokens or mask do not fit the cache, tokens are too many, or the heads of
            the neuron have values of their own (an edited run).
        UnknownHeadError: the name is not of a neuron of the model.
        UnsupportedCallError: the cache does not hold the neuron's pattern or v.
        ImportError: plotly is not installed.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, pretrained, viz
        >>> model = expose_neuron_heads(pretrained.modular_addition()).model
        >>> _, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:2])
        >>> figure = viz.gate_value_scatter(cache, "L0N7", [["0", "0", "="], ["0", "1", "="]])
        >>> len(figure.data[0].x)
        6
    """
    gate, value = neuron_gate(cache, name), _value(cache, name)
    if not cache.has_batch_dim:
        gate, value = gate[None], value[None]
    refuse(*_reasons(tokens, mask, *gate.shape))
    real = (
        torch.ones(gate.shape, dtype=torch.bool, device="cpu")
        if mask is None
        else mask.bool().cpu()
    )
    x, y = (each.detach().cpu().double()[real] for each in (value, gate))
    if not bool((x.isfinite() & y.isfinite()).all()):
        refuse(f"{name} has values that are not finite")
    if len(x) > MOST_POINTS:
        refuse(f"got {len(x):,} tokens; expected {MOST_POINTS:,} at most: take part of the corpus")
    contexts = [
        [plotly_text(tokens[row][at]), _context(tokens[row], at), row, at]
        for row, at in real.nonzero().tolist()
    ]
    figure = empty_figure().add_scatter(
        x=x.tolist(),
        y=y.tolist(),
        mode="markers",
        marker={"size": 6, "opacity": 0.6, "color": (x * y).tolist(), "cmid": 0}
        | {"colorscale": "RdBu", "colorbar": {"title": "gate × value"}}
        | {"line": {"width": 0.5, "color": "#666"}},
        customdata=contexts,
        hovertemplate="<b>%{customdata[0]}</b> · prompt %{customdata[2]}, "
        "position %{customdata[3]}<br>%{customdata[1]}<br>value %{x:.4g}, gate %{y:.4g}"
        "<extra></extra>",
    )
    title = f"{name}: {len(x):,} tokens"
    return style_figure(figure, title, xaxis_title="value", yaxis_title="gate", height=560)


def _value(cache: ActivationCache, name: str) -> Float[Tensor, "*batch pos"]:
    """Return the value that all heads of the neuron share, before their patterns weigh it."""
    head = HeadName.parse(name)
    v = cached_activation(cache, head.layer, head.kind, "v")
    shared = host_of(cache.model).neurons[head.layer].heads_per_neuron
    each = v.squeeze(-1)[..., head.heads(shared)]
    if not bool((each == each[..., :1]).all()):
        refuse(f"the {shared} heads of {name} have values of their own in this run")
    return each[..., 0]


def _reasons(
    tokens: Sequence[Sequence[str]], mask: Tensor | None, n_prompts: int, n_tokens: int
) -> list[str]:
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or len(tokens) != n_prompts:
        return [f"expected the tokens of each of the {n_prompts} prompts: a list of lists of texts"]
    reasons = [
        f"prompt {row}: {reason}"
        for row, prompt in enumerate(tokens)
        for reason in token_reasons(prompt, n_tokens)
    ]
    if mask is not None and mask.shape != (n_prompts, n_tokens):
        reasons.append(f"got a mask {list(mask.shape)}; expected {[n_prompts, n_tokens]}")
    elif mask is not None and not bool(mask.any()):
        reasons.append("the mask leaves no token")
    return reasons


def _context(prompt: Sequence[str], at: int) -> str:
    """Return the token among its neighbours."""
    first = max(0, at - _CONTEXT)
    parts = prompt[first:at], prompt[at : at + 1], prompt[at + 1 : at + 1 + _CONTEXT]
    before, here, after = (plotly_text("".join(part)) for part in parts)
    return f"{'…' * (first > 0)}{before}<b>{here}</b>{after}"
