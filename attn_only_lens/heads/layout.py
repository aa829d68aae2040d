"""Where the neuron-heads of a model are: in blocks of their own, or beside its MLPs."""

from typing import Any

from attn_only_lens.heads.computation import NeuronHeads
from attn_only_lens.heads.config import AttentionOnlyConfig
from attn_only_lens.heads.exposed import exposed_heads
from attn_only_lens.heads.names import Layout, neurons_block

__all__ = ["layout_of", "neuron_heads"]


def layout_of(model: Any) -> Layout | None:
    """The layout of a model with neuron-heads; none for any other object."""
    if isinstance(getattr(model, "cfg", None), AttentionOnlyConfig):
        return "two blocks a layer"
    return "in place" if exposed_heads(model) else None


def neuron_heads(model: Any) -> list[NeuronHeads]:
    """The neuron-heads of each source layer, in either layout; none where there are none."""
    if layout_of(model) == "two blocks a layer":
        n_layers = model.cfg.n_layers // 2
        return [model.blocks[neurons_block(layer)].attn for layer in range(n_layers)]
    return list(exposed_heads(model))
