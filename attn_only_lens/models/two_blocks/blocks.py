"""The two blocks that replace an original layer: its attention heads, and its neurons as heads.

For a token with normalised residual x, the head of neuron i of a plain MLP computes

    q = x · W_in[:, i] + b_in[i]      the query, and the value: W_Q = W_V
    scores    (self, bias) = (0, -logit p(q))
    pattern   (self, bias) = (p(q), 1 - p(q))
    z = p(q) · v = act(q)             the bias token's value is 0
    result = z · W_out[i, :]

For p = σ this is Theorem 3 of "Attention-Only Transformers and Implementing MLPs with Attention
Heads". In a gated MLP, q = x · W_gate[:, i], and the value is v = q · u with u = x · W_in[:, i], so
v is not linear in x. TransformerLens adds b_in to act(q) · u, so the block's output bias b_O
includes b_in @ W_out.

Tokens have key 0 and the bias token has a constant key, so `hook_k` receives zeros; if a hook sets
a token's key to k, q · k is added to the token's score for itself. Unless a hook point before z has
hooks, act(q) is computed with the original model's code, so that outputs are bitwise equal to the
original's, at the same cost. For bilinear gates, see `heads/bilinear.py`.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.addmm import batch_addmm
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from attn_only_lens.axes import PreActivation, Residual
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.gates.bilinear import BilinearGate
from attn_only_lens.gates.exact import Gate
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.heads.computation import NeuronHeads, is_live, require_grad_like
from attn_only_lens.heads.host import PassState
from attn_only_lens.models.two_blocks.config import BlockConfig
from attn_only_lens.models.two_blocks.refusals import NO_MLP
from attn_only_lens.tl import MLP, GatedMLP, TransformerBlock


class QKAndOV:
    """A mixin that computes the QK and OV matrices of heads from W_Q, W_K, W_V and W_O."""

    W_Q: Any
    W_K: Any
    W_V: Any
    W_O: Any

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q @ W_K^T for every head; for neuron-heads, this is zero."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V @ W_O for every head."""
        return FactoredMatrix(self.W_V, self.W_O)


class NeuronAttention(NeuronHeads, QKAndOV, nn.Module):
    """The d_mlp neuron-heads of one MLP of the original model, with the MLP's parameters.

    `W_Q`, `W_K`, `W_V` and `W_O` are computed from the MLP's parameters.
    """

    W_in: nn.Parameter
    b_in: nn.Parameter
    W_out: nn.Parameter
    b_out: nn.Parameter
    W_gate: nn.Parameter | None

    attn_type = "neuron"

    def __init__(self, mlp: MLP | GatedMLP, cfg: BlockConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.act_fn: Callable[[Tensor], Tensor] = mlp.act_fn
        self.W_in = mlp.W_in  # type: ignore[assignment]
        self.b_in = mlp.b_in
        self.W_out = mlp.W_out  # type: ignore[assignment]
        self.b_out = mlp.b_out
        self.W_gate = mlp.W_gate if isinstance(mlp, GatedMLP) else None
        self._add_hook_points()

    @property
    def gate(self) -> Gate:
        """The gate of this block, looked up by name, so that pickled models hold no code."""
        return self.cfg.gating.activation(self.cfg.act_fn)

    @property
    def module(self) -> nn.Module:
        return self

    @property
    def value_is_product(self) -> bool:
        """True for a gated MLP."""
        return self.W_gate is not None

    def forward(self, x: Residual) -> Residual:
        """Return the original MLP's output for the normalised residual stream `x`."""
        q, up = self.projections(x)
        z = self._through_hooks(
            q, up, lambda: self.act_fn(q) if up is None else self.act_fn(q) * up
        )
        return self._write(z)

    def projections(self, x: Residual) -> tuple[PreActivation, PreActivation | None]:
        """Return the MLP's pre-activation q and, in a gated MLP, its second projection u."""
        if self.W_gate is None:
            return batch_addmm(self.b_in, self.W_in, x), None
        # Call the same functions as TransformerLens' GatedMLP, because others round differently.
        gate = F.linear(x, self.W_gate.T.contiguous())
        return gate, F.linear(x, self.W_in.T.contiguous())

    def _write(self, z: PreActivation) -> Residual:
        if self.cfg.use_attn_result and is_live(self.hook_result):
            result = self.hook_result(z.unsqueeze(-1) * self.W_out)
            return result.sum(dim=-2) + self.b_O
        if self.W_gate is None:
            return batch_addmm(self.b_out, self.W_out, z.contiguous())
        return F.linear(z + self.b_in, self.W_out.T.contiguous(), self.b_out)

    @property
    def b_O(self) -> Float[Tensor, "d_model"]:
        """The output bias of the block: b_out, plus b_in @ W_out for a gated MLP."""
        return self.b_out if self.W_gate is None else self.b_in @ self.W_out + self.b_out

    # Weights in the shapes that TransformerLens uses for heads

    @property
    def W_Q(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """The query weights: W_in, or W_gate in a gated MLP."""
        return self.read_matrices[0].T.unsqueeze(-1)

    @property
    def b_Q(self) -> Float[Tensor, "head_index d_head=1"]:
        """The query biases: b_in, or 0 in a gated MLP."""
        return self._bias

    @property
    def W_K(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """The key weights: zero, because the keys of neuron-heads do not depend on the token."""
        return torch.zeros_like(self.W_Q)

    @property
    def b_K(self) -> Float[Tensor, "head_index d_head=1"]:
        """The key biases: zero for the token itself (the bias token's key is not included)."""
        return torch.zeros_like(self.b_Q)

    @property
    def W_V(self) -> Float[Tensor, "head_index d_model d_head=1"]:
        """The value weights: a_1 a_2 W_in for a generalized SiLU, otherwise W_in itself."""
        self._refuse_product_value("W_V")
        return self.gate.values(self.read_matrices[-1].T.unsqueeze(-1))

    @property
    def b_V(self) -> Float[Tensor, "head_index d_head=1"]:
        """The value biases: b_in, or a_1 a_2 b_in for a generalized SiLU."""
        self._refuse_product_value("b_V")
        return self.gate.values(self._bias)

    @property
    def _bias(self) -> Float[Tensor, "d_mlp 1"]:
        return (self.b_in if self.W_gate is None else torch.zeros_like(self.b_in)).unsqueeze(-1)

    def _refuse_product_value(self, name: str) -> None:
        if self.value_is_product:
            raise UnsupportedCallError(
                f"a neuron-head in a gated MLP has no {name}: its value is the product "
                "(x · W_gate) · (x · W_in), which no value matrix can compute. Use W_gate and W_in "
                "of model.blocks[i].attn, or hook_v for the values themselves"
            )


class BilinearAttention(BilinearHeads, NeuronAttention):
    """The bilinear neuron-heads of one MLP: m heads for each of its d_mlp neurons."""

    @property
    def bilinear_gate(self) -> BilinearGate:  # type: ignore[override]
        return self.cfg.gating.bilinear(self.cfg.act_fn, self.cfg.layer)

    def forward(self, x: Residual) -> Residual:
        """Approximate the original MLP's output for the normalised residual stream `x`."""
        q, up = self.mlp_projections(x)
        results = self.cfg.use_attn_result and is_live(self.hook_result)
        if not (results or any(map(is_live, (*self._before_z, self.hook_z)))):
            return self._write(self._sum_of_heads(q, q if up is None else up))
        queries = self._of_heads(q, up)
        z = self._through_hooks(*queries, lambda: self._attend(*queries))
        if results:
            result = self.hook_result(z.unsqueeze(-1) * self.W_O.squeeze(-2))
            return (result.sum(dim=-2) + self.b_O).to(q.dtype)
        return self._write(self._weighted(z).sum(-1).to(q.dtype))

    @property
    def b_Q(self) -> Float[Tensor, "head_index d_head=1"]:
        """The query biases b_j b_in[i] + c_j; a large finite number replaces c_j = ∞."""
        gate = self.bilinear_gate
        return self._times(gate.b, self._bias) + self._times(gate.c, torch.ones_like(self._bias))

    @property
    def b_V(self) -> Float[Tensor, "head_index d_head=1"]:
        """The value biases: b_in[i], or 0 in a gated MLP."""
        return self._shared(self._bias.T).T


class _WithoutMLP(nn.Module):
    """A block without an MLP; reading `mlp` raises an error that says what to use instead."""

    def __getattr__(self, name: str) -> Any:
        if name == "mlp":
            raise AttributeError(
                f"{type(self).__name__} has no mlp: the neurons of source layer l are the heads of "
                "block 2l + 1. Use model.blocks[2 * l + 1].attn, which has W_in, b_in, W_out, "
                "b_out and, for gated MLPs, W_gate; its hook_q is the MLP's hook_pre, and its "
                "hook_z is the MLP's hook_post"
            )
        return super().__getattr__(name)


class AttentionBlock(_WithoutMLP, TransformerBlock):
    """Block 2l: the attention heads of the original layer l, in a stock block without its MLP.

    The block's `cfg` always has parallel_attn_mlp=True, so that TransformerLens calls `apply_mlp`
    with the block's input (after hooks on resid_pre). The neurons read this input if attention and
    MLP run in parallel in the source. `apply_mlp` returns zero, which is added to resid_pre +
    attn_out.
    """

    cfg: BlockConfig  # type: ignore[assignment]
    hook_mlp_out: "NoMLP"
    passing: PassState

    @classmethod
    def of(cls, source: TransformerBlock, cfg: BlockConfig, passing: PassState) -> "AttentionBlock":
        """Build the block from the attention half of `source`, a copy of a stock block."""
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
        """Run the stock block, after fitting an empty key-value cache entry to the heads."""
        entry = past_kv_cache_entry
        # TransformerLens creates equally large cache entries for all blocks.
        if isinstance(entry, TransformerLensKeyValueCacheEntry) and not entry.past_keys.shape[1]:
            shape = len(entry.past_keys), 0, self.cfg.n_key_value_heads or self.cfg.n_heads
            entry.past_keys = entry.past_keys.new_empty((*shape, self.cfg.d_head))
            entry.past_values = entry.past_values.new_empty((*shape, self.cfg.d_value))
        return super().forward(resid_pre, shortformer_pos_embed, entry, attention_mask)

    def apply_mlp(self, normalized_resid: Tensor) -> Tensor:
        """Return zero; if the neurons read this block's input, store the input for their block."""
        if self.cfg.neurons_read_along:
            self.passing.values[self.cfg.layer] = normalized_resid
        return self.hook_mlp_out.zero(normalized_resid)


class NeuronBlock(_WithoutMLP):
    """Block 2l + 1: the neurons of the original layer l as heads. Its ln1 is the layer's ln2."""

    def __init__(self, source: TransformerBlock, cfg: BlockConfig, passing: PassState) -> None:
        """Build the block from the MLP half of `source`, a copy of a stock block."""
        super().__init__()
        assert isinstance(source.mlp, MLP | GatedMLP)
        self.cfg = cfg
        self.ln1 = source.ln2
        if cfg.use_normalization_before_and_after:
            self.ln1_post = source.ln2_post
        attention = NeuronAttention if cfg.gating.kind == "exact" else BilinearAttention
        self.attn = attention(source.mlp, cfg)
        self.hook_mlp_in = HookPoint()  # [batch, pos, d_model]; needs use_hook_mlp_in
        self.hook_attn_out = HookPoint()  # [batch, pos, d_model]
        self.hook_mlp_out = NoMLP()  # [batch, pos, d_model]
        self.hook_resid_pre = HookPoint()  # [batch, pos, d_model]
        self.hook_resid_post = HookPoint()  # [batch, pos, d_model]
        self.passing = self.attn.passing = passing

    def forward(
        self,
        resid_pre: Residual,
        shortformer_pos_embed: Tensor | None = None,
        past_kv_cache_entry: object = None,
        attention_mask: Tensor | None = None,
    ) -> Residual:
        """Return the residual stream after this block. Neuron-heads use no mask and no cache."""
        post_norm = self.cfg.original_architecture in POST_NORM_ARCHITECTURES
        resid_pre = self.hook_resid_pre(resid_pre)
        stream = self._layer_input() if self.cfg.neurons_read_along else resid_pre
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
        return self.hook_resid_post(resid_post)

    def _layer_input(self) -> Residual:
        """Return the input of this layer's attention block in the current forward pass."""
        stream: Residual | None = self.passing.values.pop(self.cfg.layer, None)
        if stream is None:
            raise UnsupportedCallError(
                "the neuron block of a model with parallel attention and MLP reads the input of "
                "the attention block before it, so a pass cannot start between the two: "
                "start_at_layer must be even"
            )
        return stream


class NoMLP(HookPoint):
    """The hook point `hook_mlp_out` of a block without an MLP, at which the value is zero.

    TransformerLens' `attribution_patch` needs this hook point, and a gradient at it, in every
    block. Only `model.hooks` can add hooks. Hooks may read the zero, but not edit it, because an
    edit would silently have no effect.
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
        """Add a hook if `level` is given (as in `model.hooks`); otherwise raise an error."""
        if level is None:
            raise UnsupportedCallError(f"a hook on {self.name} is refused: {NO_MLP}")
        super().add_hook(hook, dir, is_permanent, level, *args, **kwargs)

    def zero(self, like: Tensor) -> Tensor:
        """Return a scalar zero or, if this hook point has hooks, zeros with the shape of `like`."""
        if not is_live(self):
            return like.new_zeros(())
        with torch.inference_mode(False):  # inference tensors have no `_version`
            zero = torch.zeros_like(like)
        zero = require_grad_like(zero, like)
        version = zero._version
        hooked: Tensor = self(zero)
        # Compare addresses, since backward hooks make the hook point return an alias.
        if hooked.data_ptr() != zero.data_ptr() or zero._version != version:
            raise UnsupportedCallError(f"an edit at {self.name} has no effect: {NO_MLP}")
        return hooked
