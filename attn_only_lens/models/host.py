"""What the hosts of all kinds of models have in common, and those of all HookedTransformers."""

from typing import Any

from attn_only_lens.engine.attached_hooks import weight_hook_reasons
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import CHANGED, Host
from attn_only_lens.models.norms import Norm, hooked_final_norm


class ModelHost(Host):
    """A model whose weights are checked by its modules and by the hooks on them."""

    def require_weights(self) -> None:
        """Refuse replaced modules, and torch hooks that may change what weights compute."""
        InputError.raise_if(self.reasons() or weight_hook_reasons(self.model), CHANGED)


class HookedTransformerHost(ModelHost):
    """A `HookedTransformer`, converted or exposed."""

    def final_norm(self) -> Norm:
        """Return the norm before the unembedding."""
        return hooked_final_norm(self.model)

    def tokens_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the length of the keys in the first block's entry of a cache."""
        entry = kwargs.get("past_kv_cache_entry")
        return 0 if entry is None else int(entry.past_keys.shape[1])
