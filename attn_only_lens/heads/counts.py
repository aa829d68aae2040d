"""Counts of heads, parameters and flops of one layer, from its sizes alone.

The paper's figures are of GPT-3, with d_model 12,288, 96 heads of width 128, and 4 · 12,288 =
49,152 neurons: 49,152 neuron-heads a layer against 96 heads, "500:1" (512), and parameters "2:1".
In general, with weight matrices counted and biases not,

    attention     2 · d_model · d_head · (n_heads + n_key_value_heads)      W_Q, W_O; W_K, W_V
    MLP           2 · d_model · d_mlp, or 3 · d_model · d_mlp if it is gated

so that the ratio is 2 only where n_heads · d_head = d_model, each head has its own keys and values,
d_mlp = 4 · d_model, and the MLP is plain: 8 d_model² against 4 d_model².

Flops are the multiplications and additions of matrix products, for one token that attends to `pos`
tokens, itself included: 2 a weight, and 4 · d_head a key and head for scores and values. A
neuron-head has two keys, the token itself and the bias token, and d_head = 1. It needs no more than
these two: 8 flops a neuron besides the MLP's own products, as W_Q = W_V is applied once.
In the paper's dense form every score with all pos + 1 keys is computed, and all but two are masked.

The blog post's heads: "the linear transformation sublayer just needs enough to spread the rank of
the weight matrix across the V matrices". A D × 4D matrix has a rank of D at most, and a value
matrix one of d_head, which makes ⌈D / d_head⌉ heads. The numbers themselves are blank in the
renderings of the post that we have; these are derived. The construction takes more: the biases add
one to either rank, and the sublayer out of the hidden part also clears it, which makes its rank
d_mlp + 1.

Sources: "Attention-Only Transformers and Implementing MLPs with Attention Heads", sections 4 and 5;
"No Really, Attention is ALL You Need" (Robert_AIZI, 2023), with its comments.
"""

from dataclasses import dataclass
from typing import Any

from attn_only_lens.arguments import as_plain
from attn_only_lens.errors import InputError

_PROBLEM = "the heads of such a layer cannot be counted"


@dataclass(frozen=True)
class HeadCounts:
    """The sizes of one layer, and what follows from them: see `head_counts`.

    Attributes:
        d_model: the width of the stream.
        n_heads: attention heads.
        d_head: their width.
        d_mlp: neurons, each a neuron-head of width 1 (with bilinear gates, m of them).
        n_key_value_heads: keys and values that the heads share; None where each has its own.
        gated: whether the MLP is gated.

    Raises:
        InputError: a size is no whole number above 0, or heads do not fall into groups.

    Example:
        >>> from attn_only_lens import HeadCounts
        >>> gpt3 = HeadCounts(d_model=12288, n_heads=96, d_head=128, d_mlp=49152)
        >>> gpt3.n_neuron_heads, gpt3.n_neuron_heads / gpt3.n_heads
        (49152, 512.0)
        >>> gpt3.mlp_parameters / gpt3.attention_parameters
        2.0
        >>> gpt3.post_heads()
        {'attention': 96, 'into_hidden': 96, 'activation': 49152, 'out_of_hidden': 96}
        >>> gpt3.post_width(n_ctx=2048)
        63489
    """

    d_model: int
    n_heads: int
    d_head: int
    d_mlp: int
    n_key_value_heads: int | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        reasons = []
        for name in ("d_model", "n_heads", "d_head", "d_mlp", "n_key_value_heads"):
            size = as_plain(getattr(self, name))
            object.__setattr__(self, name, size)
            if size is None and name == "n_key_value_heads":
                continue
            if type(size) is not int or size < 1:
                reasons.append(f"got {name}={size!r}; expected a whole number, 1 or more")
        if type(self.gated) is not bool:
            reasons.append(f"got gated={self.gated!r}; expected True or False")
        if not reasons and self.n_heads % self._key_value_heads:
            reasons.append(
                f"got n_heads={self.n_heads} and n_key_value_heads={self.n_key_value_heads}; "
                "expected a multiple of it"
            )
        InputError.raise_if(reasons, _PROBLEM)

    @property
    def _key_value_heads(self) -> int:
        return self.n_heads if self.n_key_value_heads is None else self.n_key_value_heads

    @property
    def n_neuron_heads(self) -> int:
        """One for each neuron."""
        return self.d_mlp

    @property
    def attention_parameters(self) -> int:
        """Weights of W_Q, W_K, W_V and W_O of all attention heads."""
        return 2 * self.d_model * self.d_head * (self.n_heads + self._key_value_heads)

    @property
    def mlp_parameters(self) -> int:
        """Weights of W_in and W_out, and of W_gate; the neuron-heads have the same, and no more."""
        return (2 + self.gated) * self.d_model * self.d_mlp

    def attention_flops(self, pos: int) -> int:
        """Flops of the attention heads, for a token that attends to `pos` tokens."""
        return 2 * self.attention_parameters + 4 * pos * self.n_heads * self.d_head

    @property
    def mlp_flops(self) -> int:
        """Flops of the MLP, for a token."""
        return 2 * self.mlp_parameters

    @property
    def neuron_head_flops(self) -> int:
        """Flops of the neuron-heads with two keys each, as in this package, for a token."""
        return self.masked_flops(1)

    def masked_flops(self, pos: int) -> int:
        """Flops of the neuron-heads in the paper's dense form, for one of `pos` tokens.

        Scores and values of all pos + 1 keys are computed, and those of pos - 1 thrown away. As
        many patterns of pos + 1 numbers as there are neurons are what such a layer costs in memory.
        """
        return self.mlp_flops + 4 * (pos + 1) * self.d_mlp

    def post_heads(self, *, built: bool = False) -> dict[str, int]:
        """Count the heads of the blog post's four sublayers.

        Args:
            built: count those that its construction takes, with biases and with the hidden part
                cleared, as in `attn_only_lens.reference.post`; by default, those that spread the
                rank of the two weight matrices alone.

        Raises:
            InputError: the MLP is gated, which the post's are not.
        """
        if self.gated:
            raise InputError(["its MLP is gated; the post has plain ones"], _PROBLEM)
        rank = min(self.d_model, self.d_mlp)
        into, out = (self.d_model + 1, self.d_mlp + 1) if built else (rank, rank)
        return {
            "attention": self.n_heads,
            "into_hidden": -(-into // self.d_head),
            "activation": self.d_mlp,
            "out_of_hidden": -(-out // self.d_head),
        }

    def post_width(self, n_ctx: int) -> int:
        """Return the width of the blog post's stream for `n_ctx` tokens: D + 4D + (N + 1)."""
        return self.d_model + self.d_mlp + n_ctx + 1


_FIELDS = ("d_model", "n_heads", "d_head", "d_mlp", "n_key_value_heads")


def head_counts(cfg: Any) -> HeadCounts:
    """Count the heads, parameters and flops of a layer, as the paper does for GPT-3.

    Source: "Attention-Only Transformers and Implementing MLPs with Attention Heads", sections 4
    and 5; `HeadCounts` has the arithmetic.

    Args:
        cfg: `model.cfg` of a `HookedTransformer`, of a `TransformerBridge`, or of what `convert`
            returned.

    Returns:
        The counts of one layer.

    Raises:
        InputError: it is another configuration (one of transformers lacks a common name for sizes:
            take that of a bridge, or `HeadCounts(…)`), has no MLPs or a mixture of experts.
        UnsupportedCallError: layers of a converted model differ.

    Example:
        >>> from attn_only_lens import head_counts, pretrained
        >>> counts = head_counts(pretrained.small_english().cfg)
        >>> counts.n_heads, counts.n_neuron_heads
        (4, 344)
    """
    cfg = cfg.source_cfg() if hasattr(cfg, "source_cfg") else cfg
    missing = [name for name in (*_FIELDS, "gated_mlp") if not hasattr(cfg, name)]
    if missing:
        reason = f"got a {type(cfg).__name__}, which has no {', '.join(missing)}"
        raise InputError(
            [f"{reason}; expected the cfg of a HookedTransformer or TransformerBridge"], _PROBLEM
        )
    reasons = []
    if cfg.d_mlp is None or getattr(cfg, "attn_only", False):
        reasons.append("it has no MLPs")
    if getattr(cfg, "num_experts", None):
        reasons.append(f"it is a mixture of {cfg.num_experts} experts: which neurons run is routed")
    InputError.raise_if(reasons, _PROBLEM)
    return HeadCounts(**{name: getattr(cfg, name) for name in _FIELDS}, gated=bool(cfg.gated_mlp))
