"""The patterns of the original heads of a source layer, from the cache of either layout."""

from jaxtyping import Float
from torch import Tensor
from transformer_lens import ActivationCache

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads import layout_of, neuron_heads, point_name
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
    model = getattr(cache, "model", None)
    if layout_of(model) is None:
        raise UnsupportedCallError(
            f"got a {type(cache).__name__} of no model with neuron-heads; expected what "
            "run_with_cache of a converted or exposed model returns"
        )
    n_layers = len(neuron_heads(model))
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < n_layers:
        refuse([f"got layer={layer!r}; the model has source layers 0 to {n_layers - 1}"])
    hook = point_name(model, layer, "attention", "pattern")
    if hook not in cache.cache_dict:
        raise UnsupportedCallError(
            f"the cache does not hold {hook}: run_with_cache with a names_filter that keeps it"
        )
    pattern = of_prompt(cache.cache_dict[hook], prompt, cache.has_batch_dim)
    n_queries, n_keys = pattern.shape[-2:]
    if n_queries != n_keys:
        refuse(
            [f"the pattern is of {n_queries} queries over {n_keys} keys: run without a KV cache"]
        )
    return pattern
