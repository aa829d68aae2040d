"""The part of a host that all HookedTransformers have in common, converted or exposed."""

from typing import Any

from attn_only_lens.heads.host import Host
from attn_only_lens.models.norms import Norm, hooked_final_norm


class HookedTransformerHost(Host):
    """A `HookedTransformer`, whose configuration and weights are what they say."""

    def final_norm(self) -> Norm:
        """The norm that the unembedding reads through."""
        return hooked_final_norm(self.model)

    def tokens_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The length of the keys in the first block's entry of a cache."""
        entry = kwargs.get("past_kv_cache_entry")
        return 0 if entry is None else int(entry.past_keys.shape[1])
