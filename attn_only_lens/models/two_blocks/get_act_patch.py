"""TransformerLens' `get_act_patch_*` on a converted model: one row for each block.

The functions that patch the stream, or what a block writes, need no number of heads, but all of
them read `cfg.n_heads`, which has no value here. They also use `hook_resid_mid` and `hook_mlp_out`,
for which a converted model otherwise raises an error that names the right hook point. All of them
call `generic_activation_patch` with the names of its axes. Nothing that they pass to the model
shows this, so the stack frame of that function is read, as it is in transformer-lens 3.9, the last
version with HookedTransformer. Every other caller gets the error.

Row b of a result is block b, which is half a layer of the source:

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
from attn_only_lens.models.two_blocks.block_numbers import block_kind

_GENERIC: Any = patching.generic_activation_patch
_PARTS = {"z": "z", "q": "q", "k": "k", "v": "value", "pattern": "pattern"}


@dataclass(frozen=True)
class Sweep:
    """A call of `get_act_patch_*` that is running.

    Attributes:
        activation: the activation that it patches: `resid_pre`, `z`, …
        axes: the axes that it iterates over: `layer`, `pos`, `head`, …
    """

    activation: str
    axes: tuple[str, ...]

    def require_no_heads(self) -> None:
        """Require that it does not iterate over heads.

        Raises:
            UnsupportedCallError: it does; with the call to make instead.
        """
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


HALF_LAYER_POINTS = ("hook_resid_mid", "hook_mlp_out")
"""How the names of hook points end that a layer of the source has, and a block does not."""


def sweep_of_caller(depth: int) -> Sweep | None:
    """Return the `get_act_patch_*` that calls a function; None if something else calls it.

    Args:
        depth: of that call: 1 if the function that calls `sweep_of_caller` was called by it.
    """
    frame: FrameType = sys._getframe(depth + 1)
    if frame.f_code is not _GENERIC.__code__ or frame.f_locals["index_axis_names"] is None:
        return None
    return Sweep(frame.f_locals["activation_name"], tuple(frame.f_locals["index_axis_names"]))


def written_at(hook_name: str) -> str | None:
    """Return the hook point of a block whose activation a sweep patches at `hook_name`.

    None where the block has no such activation: an MLP's output, in a block of attention heads.
    """
    block, _, point = hook_name.rpartition(".")
    if point == "hook_resid_mid":
        return f"{block}.hook_resid_post"
    if point != "hook_mlp_out":
        return hook_name
    return f"{block}.hook_attn_out" if block_kind(int(block.split(".")[1])) == "neuron" else None
