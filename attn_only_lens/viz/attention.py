"""Draw the attention of heads and the activations of neurons on a text.

A neuron-head is an attention head that computes one neuron. The pattern of a neuron-head is one
number per token: the token's attention to itself, called the gate. The rest of the token's
attention goes to the bias token. Colouring tokens by their gates would mislead, because SiLU's gate
is ½ if the pre-activation is 0. A token's colour therefore shows z = gate × value, and its gate and
value are below it. circuitsvis draws attention heads as query-by-key heatmaps.
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache

from attn_only_lens.arguments import as_plain, is_count
from attn_only_lens.axes import SELF
from attn_only_lens.engine.model_checks import mode_reasons
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.sites import (
    Sites,
    SomeSites,
    resolve_sites,
    whole_head_reasons,
    wide_reasons,
)
from attn_only_lens.engine.tokens import checked_tokens, token_texts
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads import HeadName, host_of, neuron_pattern
from attn_only_lens.heads.host import NEURON_KINDS, WIDE_KINDS
from attn_only_lens.heads.names import place_of
from attn_only_lens.heads.patterns import cached_activation, require_neuron_heads
from attn_only_lens.viz.page import (
    Page,
    import_extra,
    page_of_tokens,
    refuse,
    short_numbers,
    visible_token,
    with_space,
)

MOST_CELLS = 400_000
"""The maximum number of heatmap cells on one page, because browsers are slow with more."""

MOST_HEADS = 24
"""The maximum number of heads on one page."""

_NEURON_POINTS = ("pattern", "v", "z")


@one_thread_per_model
def attention_view(
    source: Any,
    names: SomeSites,
    text: str | Tensor | Sequence[int] | Sequence[str],
    *,
    prompt: int = 0,
) -> Page:
    """Draw the activations of attention heads and neuron-heads (MLP neurons as heads) on one text.

    A layer has thousands of neurons, so first select some, for example the strongest in a sweep
    (`sweep.top(7)["name"]`).

    Args:
        source: a converted model or a model with exposed neuron-heads, which is run; or a cache
            from such a model, with the patterns of the heads, and z and v of neurons.
        names: up to 24 names, such as "L2H3" or ["L3N7", "L2H3"], drawn in this order; or
            `patching.Sites("heads", layers=[2])`. Features of transcoders (`L3F7`) are drawn like
            neurons.
        text: with a model, a text or its tokens [pos]. With a cache, the text or tokens of the
            cached run, or the texts of these tokens.
        prompt: index of the prompt in the cache's batch.

    Returns:
        One page. The tokens of a neuron-head are coloured by z = gate × value: blue is positive,
        white 0, and red negative. Under each token are its gate (the weight on itself) and its
        value. An attention head is a query-by-key heatmap of its pattern.

    Raises:
        InputError: there are no names or too many, or the model has no such heads; the text does
            not match the cache or is too long to draw; the model's dropout is active.
        UnsupportedCallError: the cache lacks an activation; the model cannot run on the text.
        ImportError: attention heads are drawn, and circuitsvis is not installed.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load, viz
        >>> model = expose_neuron_heads(load("modular-addition")).model
        >>> page = viz.attention_view(model, ["L0N7", "L0N11"], [3, 4, 113])
        >>> "L0N11" in page
        True
    """
    is_cache = isinstance(source, ActivationCache | dict)  # plain dicts are rejected below
    if is_cache:
        require_neuron_heads(source)
    model = source.model if is_cache else source
    heads, entries = _heads(model, names), as_plain(text)
    is_texts = isinstance(entries, list | tuple) and any(isinstance(x, str) for x in entries)
    if is_cache:
        cache, texts = source, list(entries) if is_texts else token_texts(model, entries)
    else:
        refuse(*host_of(model).reasons(), *mode_reasons(model))
        if is_texts:
            refuse("got a list of texts; expected one text, or the tokens of one text")
        tokens = _tokens(model, entries)
        hooks = {
            host_of(model).hook_name(head.layer, head.kind, point)
            for head in heads
            for point in (_NEURON_POINTS if head.kind in NEURON_KINDS else ("pattern",))
        }
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens, names_filter=sorted(hooks))
        texts = token_texts(model, tokens[0])
    attention = [head for head in heads if head.kind == "attention"]
    patterns = {
        layer: _pattern(cache, layer, prompt) for layer in {head.layer for head in attention}
    }
    neurons = [_neuron(cache, head, prompt) for head in heads if head.kind in NEURON_KINDS]
    n_tokens = len(neurons[0]["z"]) if neurons else patterns[attention[0].layer].shape[-1]
    if len(texts) != n_tokens or not all(isinstance(text_, str) for text_ in texts):
        refuse(f"got {len(texts)} tokens; expected the texts of the cache's {n_tokens} tokens")
    if (n_cells := len(attention) * n_tokens**2) > MOST_CELLS:
        refuse(f"got {n_cells:,} heatmap cells; expected at most {MOST_CELLS:,}: shorten the text")
    shown = [{"shown": with_space(text_), "name": visible_token(text_)} for text_ in texts]
    data: dict[str, Any] = {"tokens": shown, "neurons": neurons, "heads": None}
    libraries = []
    if attention:
        square = [patterns[head.layer][head.index] for head in attention]
        data["heads"] = {
            "attention": [[short_numbers(row, 4) for row in matrix.tolist()] for matrix in square],
            "attentionHeadNames": [str(head) for head in attention],
            "tokens": [head["name"] for head in shown],
            # Grey out the cells above the diagonal only if no head attends to them.
            "maskUpperTri": all(bool((matrix.triu(1) == 0).all()) for matrix in square),
            **{"minValue": -1, "maxValue": 1},
        }
        import_extra("circuitsvis")
        # In circuitsvis' own HTML, the browser would download this script.
        bundle = files("circuitsvis").joinpath("dist/cdn/iife.js")
        libraries.append(bundle.read_text(encoding="utf-8"))
    title = ", ".join(map(str, heads[:3])) + ", …" * (len(heads) > 3)
    below = (
        "<h2>Attention heads</h2><p class='note'>Blue is the weight of a query on a key, 0 to 1; "
        "point at a cell for the number.</p><div id='heads' class='light-only'></div>"
    )
    main = f'<main id="attention"><div id="neurons"></div>{below * bool(attention)}</main>'
    page = page_of_tokens(title, f"{len(texts)} tokens", main, data, "attention", libraries)
    # Estimate the page's height: lines of tokens are 860 px wide, and characters about 10 px.
    lines = -(-sum(len(text_) + 1 for text_ in texts) * 10 // 860)
    height = 70 + len(neurons) * (90 + 48 * lines) + 900 * bool(attention)
    return Page(page, height=min(height, 1_200))


def _pattern(
    cache: ActivationCache, layer: int, prompt: int
) -> Float[Tensor, "head_index query_pos key_pos"]:
    pattern = cached_activation(cache, layer, "attention", "pattern")
    pattern = _of_prompt(pattern, prompt, cache.has_batch_dim)
    n_queries, n_keys = pattern.shape[-2:]
    if n_queries != n_keys:
        refuse(f"the pattern has {n_queries} queries and {n_keys} keys; run without a KV cache")
    return pattern


def _heads(model: Any, names: SomeSites) -> list[HeadName]:
    """Return the named heads in the given order, without repetitions."""
    chosen = Sites.of(names).without(*WIDE_KINDS)
    refuse(*whole_head_reasons(chosen))
    listed = chosen.heads if isinstance(chosen.heads, tuple) else [chosen.heads]
    head_names = list(dict.fromkeys(map(str, listed)))
    if chosen.kinds:
        head_names = [name for site in resolve_sites(model, chosen) for name in site.names]
    if not 1 <= len(head_names) <= MOST_HEADS:
        refuse(
            f"got {len(head_names)} heads; expected 1 to {MOST_HEADS}: select some, for example by "
            'sweep.top(7)["name"]'
        )
    refuse(*wide_reasons(resolve_sites(model, head_names)))
    return [HeadName.parse(name) for name in head_names]


def _tokens(model: Any, text: Any) -> Tensor:
    """Return the tokens of one text as a batch of one prompt."""
    if isinstance(text, str):
        return checked_tokens(model, text)
    try:
        tokens = torch.tensor(text, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedCallError(f"text: expected a text or its tokens: {error}") from error
    tokens = checked_tokens(model, tokens[None] if tokens.ndim == 1 else tokens)
    if len(tokens) > 1:
        refuse(f"got {len(tokens)} prompts; expected one prompt: pass tokens[0], or a cache")
    return tokens


def _neuron(cache: ActivationCache, head: HeadName, prompt: int) -> dict[str, Any]:
    """Return z, gate and value of a neuron at each token."""
    name = str(head)
    z, value = (
        cached_activation(cache, head.layer, head.kind, point)[..., place_of(head, cache.model), 0]
        for point in ("z", "v")
    )
    quantities = {"z": z, "gate": neuron_pattern(cache, name)[..., SELF], "value": value}
    numbers = {
        key: short_numbers(_of_prompt(x, prompt, cache.has_batch_dim).tolist(), 4)
        for key, x in quantities.items()
    }
    return {"name": name, **numbers}


def _of_prompt(values: Tensor, prompt: int, has_batch: bool) -> Float[Tensor, "..."]:
    """Return the cached values of one prompt as float64 on the CPU."""
    batch = values if has_batch else values[None]
    if not is_count(prompt, 0, len(batch) - 1):
        refuse(f"got prompt={prompt!r}; the cache has prompts 0 to {len(batch) - 1}")
    one = batch[prompt].detach().cpu().double()
    if not bool(one.isfinite().all()):
        refuse("the cache has values that are not finite")
    return one
