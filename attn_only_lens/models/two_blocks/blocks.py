"""The two blocks that one layer of the source becomes."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.axes import Residual
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.computation import is_live, require_grad_like
from attn_only_lens.heads.host import PassState
from attn_only_lens.models.two_blocks.attention import BilinearAttention, NeuronAttention
from attn_only_lens.models.two_blocks.config import BlockConfig
from attn_only_lens.models.two_blocks.refusals import NO_MLP
from attn_only_lens.tl import MLP, GatedMLP, TransformerBlock


class _WithoutMLP(nn.Module):
    """A block of a converted model, which has no `mlp`."""

    def __getattr__(self, name: str) -> Any:
        if name == "mlp":
            raise AttributeError(
                f"{type(self).__name__} has no mlp: the neurons of source layer l are the heads of "
                "block 2l + 1. Use model.blocks[2 * l + 1].attn, which has W_in, b_in, W_out, "
                "b_out and in gated MLPs W_gate; its hook_q is the MLP's hook_pre, its hook_z the "
                "MLP's hook_post"
            )
        return super().__getattr__(name)


class AttentionBlock(_WithoutMLP, TransformerBlock):
    """Block 2l: the attention heads of source layer l, run by TransformerLens' own code.

    The stock block is reused without its MLP. Its `cfg` claims a parallel MLP (see `BlockConfig`),
    so that `apply_mlp` gets the input of the block after the user's hooks, which the neuron block
    of a parallel model must read.
    """

    cfg: BlockConfig  # type: ignore[assignment]
    hook_mlp_out: "NoMLP"
    passing: PassState

    @classmethod
    def of(cls, source: TransformerBlock, cfg: BlockConfig, passing: PassState) -> "AttentionBlock":
        """Take over the attention half of `source`, a clone of a stock block with an MLP.

        In a parallel model, the block leaves its input in `passing`.
        """
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block.__dict__.update(source.__dict__)
        block._modules = {
            name: module
            for name, module in source._modules.items()
            if name not in ("mlp", "ln2", "ln2_post", "hook_resid_mid", "hook_mlp_in")
        }
        block.ln2 = nn.Identity().train(source.training)
        block.hook_mlp_out = NoMLP().train(source.training)
        block.cfg = cfg
        block.attn.cfg = cfg.of_attention()  # type: ignore[assignment]
        block.passing = passing
        return block

    def forward(
        self,
        resid_pre: Residual,
        shortformer_pos_embed: Tensor | None = None,
        past_kv_cache_entry: TransformerLensKeyValueCacheEntry | None = None,
        attention_mask: Tensor | None = None,
    ) -> Residual:
        """As the stock block; its entry in the key-value cache has the sizes of its heads."""
        entry = past_kv_cache_entry
        # TransformerLens gives all entries one size; an empty entry can be replaced.
        if isinstance(entry, TransformerLensKeyValueCacheEntry) and not entry.past_keys.shape[1]:
            shape = len(entry.past_keys), 0, self.cfg.n_key_value_heads or self.cfg.n_heads
            entry.past_keys = entry.past_keys.new_empty((*shape, self.cfg.d_head))
            entry.past_values = entry.past_values.new_empty((*shape, self.cfg.d_value))
        resid_post: Residual = super().forward(
            resid_pre, shortformer_pos_embed, entry, attention_mask
        )
        return resid_post

    def apply_mlp(self, normalized_resid: Tensor) -> Tensor:
        """Return zero for the missing MLP, as a full tensor only for live hooks."""
        if self.cfg.neurons_read_along:
            self.passing.values[self.cfg.layer] = normalized_resid
        return self.hook_mlp_out.zero(normalized_resid)


class NeuronBlock(_WithoutMLP):
    """Block 2l + 1: the neurons of source layer l as heads, with that layer's ln2 as its ln1."""

    def __init__(self, source: TransformerBlock, cfg: BlockConfig, passing: PassState) -> None:
        """Take over the MLP half of `source`, a clone of a stock block with an MLP."""
        super().__init__()
        assert isinstance(source.mlp, MLP | GatedMLP)
        self.cfg = cfg
        self.ln1 = source.ln2
        if cfg.use_normalization_before_and_after:
            self.ln1_post = source.ln2_post
        attention = NeuronAttention if cfg.gating.kind == "exact" else BilinearAttention
        self.attn = attention(source.mlp, cfg)
        self.hook_mlp_in = HookPoint()  # [batch, pos, d_model], if use_hook_mlp_in
        self.hook_attn_out = HookPoint()  # [batch, pos, d_model]
        self.hook_mlp_out = NoMLP()  # [batch, pos, d_model]
        self.hook_resid_pre = HookPoint()  # [batch, pos, d_model]
        self.hook_resid_post = HookPoint()  # [batch, pos, d_model]
        self.passing = passing

    def forward(
        self,
        resid_pre: Residual,
        shortformer_pos_embed: Tensor | None = None,
        past_kv_cache_entry: object = None,
        attention_mask: Tensor | None = None,
    ) -> Residual:
        """Return the stream after this block. Its heads see one token each: no mask, no cache."""
        post_norm = self.cfg.original_architecture in POST_NORM_ARCHITECTURES
        resid_pre = self.hook_resid_pre(resid_pre)
        stream = self._entered() if self.cfg.neurons_read_along else resid_pre
        if self.cfg.use_hook_mlp_in:
            stream = self.hook_mlp_in(stream.clone())
        out = self.attn(stream if post_norm else self.ln1(stream))
        if self.cfg.use_normalization_before_and_after:
            out = self.ln1_post(out)
        if post_norm:
            out = self.ln1(out)
        out = self.hook_attn_out(out)
        resid_post = resid_pre + out
        if is_live(self.hook_mlp_out):
            resid_post = resid_post + self.hook_mlp_out.zero(out)
        hooked: Tensor = self.hook_resid_post(resid_post)
        return hooked

    def _entered(self) -> Residual:
        """Return the input of the attention block of this layer, in this forward pass."""
        entered: Residual | None = self.passing.values.pop(self.cfg.layer, None)
        if entered is None:
            raise UnsupportedCallError(
                "the neuron block of a model with parallel attention and MLP reads the input of "
                "the attention block before it, so a pass cannot start between the two: "
                "start_at_layer must be even"
            )
        return entered


class NoMLP(HookPoint):
    """`hook_mlp_out` of a block without an MLP: zero, for TransformerLens' `attribution_patch`.

    That function requires this hook point in every block, and a gradient; a zero activation gets
    the score zero. A hook may only read here, and only through `model.hooks`: an edit is meant for
    the neuron block, and would silently change nothing.
    """

    def add_hook(
        self,
        hook: Any,
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As in TransformerLens, but only for `model.hooks`, which passes a level."""
        if level is None:
            raise UnsupportedCallError(f"a hook on {self.name}: {NO_MLP}")
        super().add_hook(hook, dir, is_permanent, level, *args, **kwargs)

    def zero(self, like: Tensor) -> Tensor:
        """Return zero, as a full tensor only if a hook is live."""
        if not is_live(self):
            return like.new_zeros(())
        with torch.inference_mode(False):  # a tensor of inference mode has no version counter
            zero = torch.zeros_like(like)
        zero = require_grad_like(zero, like)
        version = zero._version
        hooked: Tensor = self(zero)
        # Compare addresses, because backward hooks return an alias of their input.
        if hooked.data_ptr() != zero.data_ptr() or zero._version != version:
            raise UnsupportedCallError(f"an edit at {self.name}: {NO_MLP}")
        return hooked
