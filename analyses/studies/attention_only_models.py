"""Trainable neuron-heads, and transformers that have neuron-heads in place of MLPs.

Let x be a token of the normalised stream. A neuron-head is a masked attention head of width 1: each
token attends to itself and to one static row outside the text.

    q = x·W_Q    k = x·W_K    v = x·W_V      key_b, value_b: of the static row
    scores    self: q k          static row: q key_b            (width 1 has the scale √1)
    pattern   self: p = σ(q (k - key_b))     static row: 1 - p
    output    (p v + (1 - p) value_b) W_O

    bias token   as in the paper: one row [b | 1] for all heads of all layers, b learned, and tokens
                 [x | 0]: key_b = [b | 1]·W_K, value_b = [b | 1]·W_V; four vectors per head
    persistent   Sukhbaatar et al. (2019): key_b and value_b are two learned numbers of each head
    without keys the theorem's W_K = [0 | -1], so that p = σ(q), and value_b = 0: three vectors;
                 p v is then a gated linear unit (Dauphin et al., 2017)
    theorem      "without keys" with W_Q = W_V: two vectors, σ(q) q; the MLP, computed as heads
    mlp          SiLU(x W_Q) W_O, computed by torch: Definition 1, no biases

"set free" is "bias token" with the theorem's initial weights, so it starts as the MLP.

    all-attention   Sukhbaatar et al. (2019), with no MLP: each ordinary head attends, in one
                    softmax, to the text and to its own N learned pairs of a key and a value

Its N vectors per head have as many parameters and flops as N neurons of an MLP.
"""

import copy
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

NeuronKind = Literal["mlp", "theorem", "without keys", "bias token", "set free", "persistent"]
Kind = Literal[NeuronKind, "all-attention"]
KINDS: tuple[NeuronKind, ...] = get_args(NeuronKind)
VECTORS = {"mlp": 2, "theorem": 2, "without keys": 3, "all-attention": 2}
"""Vectors [d_model] per neuron-head; a key and a value of each head count as two; others have 4."""


class Neurons(nn.Module):
    """The neuron-heads of a layer, or its MLP.

    Vectors are drawn with standard deviation `std`, output vectors with `std_out`; `bias` is b of
    the bias token, shared by all layers.
    """

    def __init__(
        self,
        kind: NeuronKind,
        d_model: int,
        n_heads: int,
        std: float,
        std_out: float,
        bias: nn.Parameter,
    ) -> None:
        super().__init__()
        self.kind, self.bias = kind, None
        self.cut: frozenset[str] = frozenset()
        n_extra = 1 if kind in ("bias token", "set free") else 0  # the coordinate of the bias token

        def drawn(*shape: int, std: float = std) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) * std)

        self.W_Q, self.W_O = drawn(d_model, n_heads), drawn(n_heads, d_model, std=std_out)
        if kind not in ("mlp", "theorem"):
            self.W_V = drawn(d_model + n_extra, n_heads)
        if kind not in ("mlp", "theorem", "without keys"):
            self.W_K = drawn(d_model + n_extra, n_heads)
        if n_extra:
            self.bias = bias
        if kind == "persistent":
            self.key_b, self.value_b = drawn(n_heads), drawn(n_heads)
        if kind == "set free":
            with torch.no_grad():
                self.W_K.zero_()[-1] = -1.0
                self.W_V.zero_()[:-1] = self.W_Q

    def parts(self, x: Float[Tensor, "... d_model"]) -> dict[str, Tensor]:
        """Return q, k, v [..., head], and key_b and value_b, which broadcast to them.

        `self.cut` names parts that measurements remove: "key" replaces every key by its mean over
        the tokens in x, and "value_b" sets value_b to 0.
        """
        q = x @ self.W_Q
        d_model, zero, one = x.shape[-1], x.new_zeros(()), x.new_ones(())
        k = x @ self.W_K[:d_model] if hasattr(self, "W_K") else zero
        v = x @ self.W_V[:d_model] if hasattr(self, "W_V") else q
        key_b, value_b = -one, zero
        if self.bias is not None:
            row = torch.cat([self.bias, one[None]])
            key_b, value_b = row @ self.W_K, row @ self.W_V
        elif self.kind == "persistent":
            key_b, value_b = self.key_b, self.value_b
        if "key" in self.cut:
            k = k.flatten(0, -2).mean(0).expand_as(k)
        if "value_b" in self.cut:
            value_b = zero
        return {"q": q, "k": k, "v": v, "key_b": key_b, "value_b": value_b}

    def pattern(self, parts: dict[str, Tensor]) -> Tensor:
        """Return each token's weight on itself; the cut "gate" replaces it by its mean."""
        self_weight = torch.sigmoid(parts["q"] * (parts["k"] - parts["key_b"]))
        if "gate" in self.cut:
            self_weight = self_weight.flatten(0, -2).mean(0).expand_as(self_weight)
        return self_weight

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """Return the sum of all heads' outputs."""
        if self.kind == "mlp" and not self.cut:
            return F.silu(x @ self.W_Q) @ self.W_O
        parts = self.parts(x)
        p, value_b = self.pattern(parts), parts["value_b"]
        return (value_b + p * (parts["v"] - value_b)) @ self.W_O

    def dense(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the same sum in the dense form of Definition 1: all scores, most of them masked.

        The bias token has no query, because its vector does not change.
        """
        parts, pos = self.parts(x), x.shape[1]

        def rows(of_token: Tensor, of_bias: Tensor) -> Tensor:
            """Return the rows of tokens and the bias token, [batch, head, pos + 1, 1]."""
            shape = (len(x), 1, self.W_Q.shape[1])
            every = [of_token.expand_as(parts["q"]), of_bias.expand(shape)]
            return torch.cat(every, dim=1).transpose(1, 2)[..., None]

        k, v = rows(parts["k"], parts["key_b"]), rows(parts["v"], parts["value_b"])
        seen = torch.eye(pos, pos + 1, dtype=torch.bool, device=x.device)
        seen[:, -1] = True
        scores = parts["q"].transpose(1, 2)[..., None] @ k.transpose(2, 3)
        z = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        return z[..., 0].transpose(1, 2) @ self.W_O


class AllAttention(nn.Module):
    """The attention of a GPT-2 block, with persistent vectors in each head.

    For a head with queries q, keys k and values v [pos, d_head], one softmax has two parts:

        scores    token t: q·k_t / √d_head        persistent vector n: q·key_n / √d_head
        output    (Σ_t p_t v_t + Σ_n p_n value_n) W_O + b_O

    Persistent vectors have no position and no bias. Their parameters are `key` / √d_head and
    `value` / √N, drawn with variances 1/d_head and 1/N, as in the paper and its code. The weights
    of transformers' GPT-2 attention are used, and not copied.
    """

    kind = "all-attention"

    def __init__(self, attention: GPT2Attention, n_vectors: int) -> None:
        super().__init__()
        self.n_heads, self.d_head = attention.num_heads, attention.head_dim
        self.c_attn, self.c_proj = attention.c_attn, attention.c_proj
        shape = (self.n_heads, n_vectors, self.d_head)
        self.scaled_key = nn.Parameter(torch.randn(shape) * self.d_head**-0.5)
        self.scaled_value = nn.Parameter(torch.randn(shape) * max(n_vectors, 1) ** -0.5)

    @property
    def key(self) -> Float[Tensor, "head vector d_head"]:
        """The persistent keys."""
        return self.scaled_key * self.d_head**0.5

    @property
    def value(self) -> Float[Tensor, "head vector d_head"]:
        """The persistent values."""
        return self.scaled_value * self.scaled_value.shape[1] ** 0.5

    def rows(self, x: Float[Tensor, "batch pos d_model"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [batch, head, pos, d_head], and keys and values of N + pos rows.

        The first N rows are the persistent vectors.
        """
        split = self.c_attn(x).unflatten(-1, (3, self.n_heads, self.d_head))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        shape = (len(x), -1, -1, -1)
        k = torch.cat([self.key.expand(shape), k], dim=2)
        v = torch.cat([self.value.expand(shape), v], dim=2)
        return q, k, v

    def seen(self, pos: int, device: torch.device) -> Tensor:
        """Return which rows each token sees, [pos, N + pos]: vectors, itself, earlier tokens."""
        n_vectors = self.scaled_key.shape[1]
        mask = torch.ones(pos, n_vectors + pos, dtype=torch.bool, device=device)
        return mask.tril(n_vectors)

    def pattern(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch head pos row"]:
        """Return the pattern; its first N columns are the weights on persistent vectors."""
        q, k, _ = self.rows(x)
        scores = q @ k.transpose(-1, -2) / self.d_head**0.5
        return scores.masked_fill(~self.seen(x.shape[1], x.device), -torch.inf).softmax(-1)

    def forward(self, x: Float[Tensor, "batch pos d_model"], **_: Any) -> tuple[Tensor, None]:
        """Return the output; texts have no padding on the left, and nothing is cached."""
        seen = self.seen(x.shape[1], x.device)
        z = F.scaled_dot_product_attention(*self.rows(x), attn_mask=seen)
        return self.c_proj(z.transpose(1, 2).flatten(2)), None


class Nothing(nn.Module):
    """A sublayer that adds nothing to the stream."""

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(x)


def flops(kind: Kind, d_model: int, n_heads: int, n_dense: int = 0) -> int:
    """Return a forward pass's matrix flops per token; a training step takes three times as many.

    `n_dense` is how many rows each token scores in the dense form. The two scores of the narrow
    form are not counted, because they are no matrix products. "all-attention" has one form only.
    """
    n_dense = 0 if kind == "all-attention" else n_dense
    return 2 * n_heads * (VECTORS.get(kind, 4) * d_model + 2 * n_dense)


def text_model(
    kind: Kind, n_heads: int, *, d_vocab: int, seed: int, n_layers: int, d_model: int, heads: int
) -> GPT2LMHeadModel:
    """Return an untrained GPT-2 with `Neurons` as MLPs, or with `AllAttention` and no MLPs.

    Other weights are equal for all kinds. For "all-attention", `n_heads` is N.
    """
    config = GPT2Config(
        vocab_size=d_vocab,
        n_positions=128,
        n_embd=d_model,
        n_layer=n_layers,
        n_head=heads,
        n_inner=1,
        activation_function="silu",
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=1,
        use_cache=kind != "all-attention",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(config)
    bias = nn.Parameter(torch.zeros(d_model))
    for block in model.transformer.h:
        if kind == "all-attention":
            block.attn = AllAttention(block.attn, n_heads)
            block.ln_2, block.mlp = nn.Identity(), Nothing()
            continue
        std_out = (2 * n_layers * n_heads) ** -0.5
        block.mlp = Neurons(kind, d_model, n_heads, d_model**-0.5, std_out, bias)
    return model


def neurons_of(model: Any) -> list[Neurons]:
    """Return the neurons of each layer."""
    return [module for module in model.modules() if isinstance(module, Neurons)]


def sublayers_of(model: Any) -> list[Neurons | AllAttention]:
    """Return the neurons of each layer, or its attention with persistent vectors."""
    return [module for module in model.modules() if isinstance(module, (Neurons, AllAttention))]


def size_of(sublayer: Neurons | AllAttention) -> int:
    """Return the number of neuron-heads of a layer, or N."""
    vectors = sublayer.W_Q if isinstance(sublayer, Neurons) else sublayer.scaled_key
    return vectors.shape[1]


def in_package(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Return the same model with plain SiLU MLPs, so that this package can expose them.

    Raises:
        ValueError: the neurons are neither "mlp" nor "theorem". Neuron-heads in this package have
            keys that do not depend on the token, and their value is q. `all_attention.py` loads
            "all-attention".
    """
    layers = neurons_of(model)
    odd = {layer.kind for layer in sublayers_of(model)} - {"mlp", "theorem"}
    if odd:
        raise ValueError(f"got neuron-heads of kind {sorted(odd)}; expected those of an MLP")
    config = copy.deepcopy(model.config)
    config.n_inner = layers[0].W_Q.shape[1]
    plain = GPT2LMHeadModel(config).to(layers[0].W_Q.dtype)
    weights = model.state_dict()
    for layer, sublayer in enumerate(layers):
        name = f"transformer.h.{layer}.mlp"
        weights |= {f"{name}.c_fc.weight": sublayer.W_Q, f"{name}.c_proj.weight": sublayer.W_O}
    for name, tensor in plain.state_dict().items():
        if ".mlp." in name and name not in weights:
            tensor.zero_()  # biases are zero, because Definition 1 has none
        else:
            tensor.copy_(weights[name].detach())
    return plain.eval()
