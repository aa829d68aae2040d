"""The patterns of the original heads of a source layer, from the cache of either layout."""

from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache

from attn_only_lens.heads import neuron_heads
from attn_only_lens.heads.patterns import cached, require_known
from attn_only_lens.plain import is_count
from attn_only_lens.viz.checks import of_prompt, refuse

__all__ = ["attention_of"]


def attention_of(
    cache: ActivationCache, layer: int, prompt: int
) -> Float[Tensor, "head_index query_pos key_pos"]:
    """The weights of every head of a source layer over one prompt, in float64 on the CPU.

    Raises:
        PictureError: there is no such layer or prompt, or keys are of more tokens than queries.
        UnsupportedCallError: the cache is not of a model with neuron-heads, or lacks the pattern.
    """
    require_known(cache)
    n_layers = len(neuron_heads(cache.model))
    if not is_count(layer, 0, n_layers - 1):
        refuse([f"got layer={layer!r}; the model has source layers 0 to {n_layers - 1}"])
    held = cached(cache, layer, "attention", "pattern")
    pattern = of_prompt(held, prompt, cache.has_batch_dim)
    n_queries, n_keys = pattern.shape[-2:]
    if n_queries != n_keys:
        refuse(
            [f"the pattern is of {n_queries} queries over {n_keys} keys: run without a KV cache"]
        )
    return pattern
