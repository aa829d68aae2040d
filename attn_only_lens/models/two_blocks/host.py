"""Hosts of converted models: two blocks a layer, called one by one."""

from typing import Any, Literal

import torch

from attn_only_lens.axes import Residual
from attn_only_lens.engine.replay.base import Joined, Replay
from attn_only_lens.engine.replay.hooked import HookedReplay
from attn_only_lens.heads.host import HeadKind, PassState
from attn_only_lens.models.host import HookedTransformerHost
from attn_only_lens.models.norms import LayerNorms, hooked_norms
from attn_only_lens.models.shared_weights import parted_reasons
from attn_only_lens.models.two_blocks.attention import BilinearAttention, NeuronAttention
from attn_only_lens.models.two_blocks.blocks import AttentionBlock, NeuronBlock
from attn_only_lens.models.two_blocks.half_layers import block_layer, heads_block, neurons_block
from attn_only_lens.models.two_blocks.known_modules import module_reasons
from attn_only_lens.tl import Attention, GroupedQueryAttention

_ATTENTION = ((Attention, GroupedQueryAttention), (NeuronAttention, BilinearAttention))


class TwoBlocksHost(HookedTransformerHost):
    """A converted `HookedTransformer`."""

    in_place = False

    @property
    def neurons(self) -> list[Any]:
        """The attention module of each neuron block."""
        return [block.attn for block in self.model.blocks[1::2]]

    def reasons(self) -> list[str]:
        """Return which modules were replaced or have another forward pass."""
        reasons = parted_reasons(self.model) + module_reasons(self.model)
        for name, block in self.model.blocks.named_children():
            for path, module, known in (
                (f"blocks.{name}", block, (AttentionBlock, NeuronBlock)),
                (f"blocks.{name}.attn", getattr(block, "attn", None), _ATTENTION[int(name) % 2]),
            ):
                if type(module) not in known:
                    kinds = " or ".join(kind.__name__ for kind in known)
                    reasons.append(
                        f"{path} was replaced by a {type(module).__qualname__}; expected a {kinds}"
                    )
        return reasons

    @property
    def passing(self) -> PassState:
        """The values of a forward pass, shared by all blocks."""
        passing: PassState = self.model.passing
        return passing

    @property
    def n_heads(self) -> list[int]:
        """The number of attention heads of each source layer."""
        return [block.cfg.n_heads for block in self.model.blocks[::2]]

    def block(self, layer: int, kind: HeadKind) -> int:
        """Return block 2l or 2l + 1."""
        return heads_block(layer) if kind == "attention" else neurons_block(layer)

    def gates(self) -> list[dict[str, Any]]:
        """Return the gates of the model, for each layer."""
        return [dict(self.model.cfg.gating.to_json()) for _ in self.neurons]

    def stream_hook(self, layer: int, point: Literal["pre", "mid", "post"]) -> str:
        """Return the hook point of the input of a block, or of the output of the second."""
        block = heads_block(layer) if point == "pre" else neurons_block(layer)
        return f"blocks.{block}.hook_resid_{'post' if point == 'post' else 'pre'}"

    def norms(self) -> list[LayerNorms]:
        """Return the norms of each source layer, half of them in each block."""
        blocks = self.model.blocks
        names = ("ln1", "ln1_post")
        modules = [
            [getattr(block, name, None) for name in names for block in pair]
            for pair in zip(blocks[::2], blocks[1::2], strict=True)
        ]
        return hooked_norms(self.model.cfg, [block.attn for block in blocks[::2]], modules)

    def replay(self, recording: Any, metric: Any, precise: Any = None) -> Replay:
        """Return a replay, block by block."""
        return _TwoBlocksReplay(self.model, recording, metric, precise)


class _TwoBlocksReplay(HookedReplay):
    def _run(self, joined: Joined, end: int) -> Residual:
        with self.model.passing.new_pass():
            return super()._run(joined, end)

    def enter(self, joined: Joined, block: int) -> None:
        """In a parallel model, give neurons the recorded input of the attention block before
        theirs.

        A variant that begins between the two blocks has not changed that input.
        """
        n = sum(len(variant.stream) for variant in joined.entering(block)) // self.batch
        if not (self.model.cfg.parallel_attn_mlp and block % 2 and n):
            return
        values, layer = self.model.passing.values, block_layer(block - 1)
        recorded = self.recorded_stream(block - 1, joined.first, n)
        earlier = [values[layer]] if layer in values else []
        values[layer] = torch.cat([*earlier, recorded])
