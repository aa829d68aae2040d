"""What a block reads from the residual stream, and under which norm."""

from typing import TYPE_CHECKING

from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.blocks import block_kind
from attn_only_lens.two_blocks.config import AttentionOnlyConfig

if TYPE_CHECKING:
    from attn_only_lens.two_blocks.cache import AttentionOnlyCache

__all__ = ["embeddings_in_stream", "refuse_mlp_input", "require_labels", "require_norm_of_stream"]


def refuse_mlp_input(mlp_input: bool) -> None:
    """A converted model has no input half-way through a block."""
    if mlp_input:
        raise UnsupportedCallError(
            "mlp_input on a converted model: a block has one input. The input of the neurons of "
            "source layer l is that of block 2l + 1: pass layer=2 * l + 1 and no mlp_input"
        )


def require_labels(cache: "AttentionOnlyCache", name: str, return_labels: bool) -> None:
    """Rows without names would be taken for those of other heads, by counting them."""
    if not return_labels:
        raise UnsupportedCallError(
            f"{name} on a converted model without labels: attention heads and neuron-heads are in "
            "blocks of their own and of unequal numbers, so the stack does not come apart into "
            f"cfg.n_layers = {cache.model.cfg.n_layers} equal parts, as "
            '"(layer head) … -> layer head …" would have it. Pass return_labels=True, and select '
            'rows by their labels: those of attention heads hold an "H", those of neurons an "N"'
        )


def require_norm_of_stream(cfg: AttentionOnlyConfig, block: int) -> None:
    """Refuse to apply a block's norm to the stream where the model does not either."""
    if block == cfg.n_layers or cfg.normalization_type is None:
        return
    if cfg.original_architecture in POST_NORM_ARCHITECTURES:
        raise UnsupportedCallError(
            f"apply_ln at block {block}: this model normalises what a block writes, not what "
            "it reads. Use apply_ln=False, or layer=-1 for the final norm"
        )
    if cfg.parallel_attn_mlp and block_kind(block) == "neuron":
        raise UnsupportedCallError(
            f"apply_ln at block {block}: attention and MLP of this model run in parallel, so "
            f"its norm applies to the input of block {block - 1}. Use layer={block - 1}"
        )


def embeddings_in_stream(cache: "AttentionOnlyCache") -> list[str]:
    """The embeddings that are in the stream (shortformer adds positions to q and k only)."""
    kind = cache.model.cfg.positional_embedding_type
    positions = cache.has_pos_embed and kind != "shortformer"
    return ["embed"] * cache.has_embed + ["pos_embed"] * positions
