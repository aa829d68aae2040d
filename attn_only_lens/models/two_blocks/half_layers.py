"""Blocks are half layers: their numbers, and TransformerLens' sweeps over layers.

Source layer l is block 2l, its attention heads, and block 2l + 1, its neurons.

TransformerLens' `get_act_patch_*` functions patch the stream or the output of a block. They run on
a converted model with one row for each block, although they read `cfg.n_heads`, which has no single
value, and use `hook_resid_mid` and `hook_mlp_out`, which a converted model otherwise refuses. All
of them call `generic_activation_patch` with the names of their axes. Nothing that they pass to the
model shows this, so this module reads the stack frame of that function, as it is in
transformer-lens 3.9, the last version with HookedTransformer. All other callers get the error.

    function      row 2l: attention heads of layer l      row 2l + 1: neurons of layer l
    resid_pre     the source's resid_pre, row l           the source's resid_mid, row l
    resid_mid     the source's resid_mid, row l           the source's resid_post
    attn_out      the source's attn_out, row l            the source's mlp_out, row l
    mlp_out       nothing to patch: the corrupted run     the source's mlp_out, row l
"""

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from transformer_lens import patching

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.host import HeadKind

_GENERIC: Any = patching.generic_activation_patch
_PARTS = {"z": "z", "q": "q", "k": "k", "v": "value", "pattern": "pattern"}

HALF_LAYER_POINTS = ("hook_resid_mid", "hook_mlp_out")
"""Endings of the names of hook points that a source layer has, but a block has not."""


def heads_block(layer: int) -> int:
    """Return the block of the attention heads of a source layer."""
    return 2 * layer


def neurons_block(layer: int) -> int:
    """Return the block of the neuron-heads of a source layer."""
    return 2 * layer + 1


def block_layer(block: int) -> int:
    """Return the source layer of a block."""
    return block // 2


def block_kind(block: int) -> HeadKind:
    """Return the kind of heads in a block."""
    return "neuron" if block % 2 else "attention"


@dataclass(frozen=True)
class LayerSweep:
    """A running call of `get_act_patch_*`: the activation that it patches, and its axes."""

    activation: str
    axes: tuple[str, ...]

    def require_no_heads(self) -> None:
        """Refuse a sweep over heads, and say which call to make instead."""
        if not {"head", "head_index"} & set(self.axes):
            return
        positions = "each" if {"pos", "dest_pos"} & set(self.axes) else "all"
        part = _PARTS.get(self.activation, self.activation)
        sites = "sites=patching.heads(), " if part == "k" else ""
        raise UnsupportedCallError(
            f"get_act_patch of {self.activation!r} by {', '.join(self.axes)} on a converted model: "
            "its blocks differ in their numbers of heads, so no tensor of blocks by heads holds "
            "them all. Call patching.activation_patch(model, clean_tokens, corrupted_tokens, "
            f"patching_metric, {sites}part={part!r}, positions={positions!r}) of "
            "attn_only_lens.patching; or generic_activation_patch with an explicit index_df of "
            "blocks and heads"
        )


def sweep_of_caller() -> LayerSweep | None:
    """Return the `get_act_patch_*` that called the calling function; None if something else did."""
    frame: FrameType = sys._getframe(2)
    if frame.f_code is not _GENERIC.__code__ or frame.f_locals["index_axis_names"] is None:
        return None
    return LayerSweep(frame.f_locals["activation_name"], tuple(frame.f_locals["index_axis_names"]))


def written_at(hook_name: str) -> str | None:
    """Return the hook point of a block that a sweep patches under `hook_name`.

    None for the output of an MLP in a block of attention heads, which has none.
    """
    block, _, point = hook_name.rpartition(".")
    if point == "hook_resid_mid":
        return f"{block}.hook_resid_post"
    if point != "hook_mlp_out":
        return hook_name
    return f"{block}.hook_attn_out" if block_kind(int(block.split(".")[1])) == "neuron" else None
