"""The part of a host that all HookedTransformers have in common, converted or exposed."""

from attn_only_lens.heads.host import Host
from attn_only_lens.models.norms import Norm, hooked_final_norm


class HookedTransformerHost(Host):
    """A `HookedTransformer`, whose configuration and weights are what they say."""

    def final_norm(self) -> Norm:
        """The norm that the unembedding reads through."""
        return hooked_final_norm(self.model)

    def require_weights(self) -> None:
        """Pass: a HookedTransformer computes with the matrices that it names."""
