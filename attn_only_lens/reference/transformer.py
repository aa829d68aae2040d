"""Definitions of MLPs, LayerNorm, and post-norm and pre-norm transformers.

An MLP without biases is f(X) = α(X V₁) V₂, with V₁ ∈ M_{D,ℓ}, V₂ ∈ M_{ℓ,D} and α applied entry by
entry. A generalised SiLU is α(x) = a₁ SiLU(a₂ x) with SiLU(x) = x σ(x). A transformer is
X_0 ↦ X_1 ↦ … ↦ X_m, where sublayer j is a set of heads or an MLP, s_j(X) = Σ_i h_{j,i}(X) or
f_j(X), and

    post-norm, the paper's:    X_{j+1} = LayerNorm_j(X_j + s_j(X_j))
    pre-norm, GPT-2's:         X_{j+1} = X_j + s_j(LayerNorm_j(X_j)),    then LayerNorm_final(X_m)

("Attention-Only Transformers and Implementing MLPs with Attention Heads", section 2, which has no
pre-norm form.) The paper numbers sublayers 0 … m - 1 in this definition, but up to 2m in Theorem 6;
here m is always the number of sublayers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.reference.masked_attention import Head
from attn_only_lens.reference.matrices import check_matrix, check_vector, zeros

Norm = Callable[[Tensor], Tensor]
"""LayerNorm, or another function of a whole matrix [n_tokens, d]."""


@dataclass(frozen=True)
class GeneralizedSiLU:
    """The element-wise activation α(x) = a_1 SiLU(a_2 x).

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import GeneralizedSiLU
        >>> quick_gelu = GeneralizedSiLU(a_1=1 / 1.702, a_2=1.702)
        >>> round(quick_gelu(torch.tensor(2.0)).item(), 4)
        1.9357
    """

    a_1: float = 1.0
    a_2: float = 1.0

    def __call__(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return a_1 · (a_2 x) · σ(a_2 x)."""
        return self.a_1 * (self.a_2 * x) * torch.sigmoid(self.a_2 * x)


@dataclass(frozen=True, eq=False)
class MLP:
    """An MLP with one hidden layer and no biases, f(X) = α(X V_1) V_2.

    Attributes:
        V_1: column i is the input vector of neuron i.
        V_2: row i is the output vector of neuron i.
        activation: α, entry by entry.

    Raises:
        ValueError: the shapes of V_1 and V_2 do not match, or a matrix is not float64.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import MLP
        >>> V_1 = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
        >>> mlp = MLP(V_1, V_1.T, torch.relu)
        >>> mlp(torch.tensor([[5.0, 3.0]], dtype=torch.float64)).tolist()
        [[2.0, -2.0]]
    """

    V_1: Float[Tensor, "d d_mlp"]
    V_2: Float[Tensor, "d_mlp d"]
    activation: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        check_matrix("V_1", self.V_1)
        check_matrix("V_2", self.V_2, self.V_1.shape[1], self.V_1.shape[0])

    @property
    def width(self) -> int:
        """D."""
        return self.V_1.shape[0]

    def __call__(self, X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens d"]:
        """Return α(X V_1) V_2."""
        check_matrix("X", X, columns=self.width)
        return self.activation(X @ self.V_1) @ self.V_2


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Normalisation of each row x: (x - mean) / √(variance + eps) · gain + bias.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import LayerNorm
        >>> one, zero = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        >>> LayerNorm(gain=3 * one, bias=zero, eps=0.0)(torch.stack([4 * one, one], 1)).tolist()
        [[3.0, -3.0], [3.0, -3.0]]
    """

    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_vector("bias", self.bias, self.gain.numel())
        check_vector("gain", self.gain, self.gain.numel())

    def __call__(self, X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens d"]:
        """Normalise each row."""
        check_matrix("X", X, columns=self.gain.numel())
        centred = X - X.mean(dim=1, keepdim=True)
        variance = centred.square().mean(dim=1, keepdim=True)
        return centred / (variance + self.eps).sqrt() * self.gain + self.bias


Sublayer = MLP | tuple[Head, ...]


@dataclass(frozen=True, eq=False)
class Run:
    """Every intermediate matrix that a transformer with m sublayers computes from an input X_0.

    Attributes:
        stream: X_0 … X_m (m + 1 of them).
        inputs: the input of sublayer j: X_j (post-norm) or LayerNorm_j(X_j) (pre-norm).
        outputs: the output of sublayer j, before the skip connection adds X_j.
        patterns: the patterns of sublayer j, [n_heads, n_tokens, n_tokens]; an MLP has n_heads = 0.
        result: X_m, after the final norm if there is one.
    """

    stream: tuple[Float[Tensor, "n_tokens d"], ...]
    inputs: tuple[Float[Tensor, "n_tokens d"], ...]
    outputs: tuple[Float[Tensor, "n_tokens d"], ...]
    patterns: tuple[Float[Tensor, "n_heads n_tokens n_tokens"], ...]
    result: Float[Tensor, "n_tokens d"]


@dataclass(frozen=True, eq=False)
class Transformer:
    """A transformer: a sequence of sublayers, with skip connections and normalization layers.

    Attributes:
        sublayers: each an MLP or a tuple of heads.
        norms: one norm per sublayer, after (post-norm) or before (pre-norm) the sublayer.
        pre_norm: use GPT-2's order instead of the paper's.
        final_norm: the norm applied to X_m, only in the pre-norm form.

    Raises:
        ValueError: no sublayers, a sublayer without heads, sublayers of different sizes, a missing
            norm, or a final norm in the post-norm form.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import MLP, Transformer
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> transformer = Transformer((MLP(eye, eye, torch.relu),), norms=(torch.tanh,))
        >>> run = transformer.run(-eye)
        >>> run.outputs[0].tolist(), bool((run.result == torch.tanh(-eye)).all())
        ([[0.0, 0.0], [0.0, 0.0]], True)
    """

    sublayers: tuple[Sublayer, ...]
    norms: tuple[Norm, ...]
    pre_norm: bool = False
    final_norm: Norm | None = None

    def __post_init__(self) -> None:
        if () in self.sublayers or not self.sublayers:
            raise ValueError(
                "sublayers: got none, or an empty one; expected MLPs or tuples of heads"
            )
        terms = [term for sublayer in self.sublayers for term in _terms(sublayer)]
        widths = {term.width for term in terms}
        lengths = {term.n_tokens for term in terms if isinstance(term, Head)}
        if len(widths) > 1 or len(lengths) > 1:
            raise ValueError(
                f"sublayers: got widths {sorted(widths)} and numbers of tokens {sorted(lengths)}; "
                "expected the same width and number of tokens in all sublayers"
            )
        if len(self.norms) != len(self.sublayers):
            raise ValueError(
                f"norms: got {len(self.norms)} norms for {len(self.sublayers)} sublayers; "
                "expected one norm for each sublayer"
            )
        if self.final_norm is not None and not self.pre_norm:
            raise ValueError(
                "final_norm: got a norm without pre_norm=True; expected None, because the last "
                "sublayer's norm is the final norm"
            )

    @property
    def width(self) -> int:
        """D."""
        return _terms(self.sublayers[0])[0].width

    def run(self, X: Float[Tensor, "n_tokens d"]) -> Run:
        """Compute X_0 ↦ X_1 ↦ … ↦ X_m and return every intermediate matrix.

        Raises:
            ValueError: X has the wrong width or number of tokens, or is not float64.
        """
        stream, inputs, outputs, patterns = [X], [], [], []
        for sublayer, norm in zip(self.sublayers, self.norms, strict=True):
            X = stream[-1]
            read = norm(X) if self.pre_norm else X
            written = sum((term(read) for term in _terms(sublayer)), zeros(*X.shape))
            heads = [term.pattern(read) for term in _terms(sublayer) if isinstance(term, Head)]
            inputs.append(read)
            outputs.append(written)
            patterns.append(torch.stack(heads) if heads else X.new_zeros(0, len(X), len(X)))
            stream.append(X + written if self.pre_norm else norm(X + written))
        result = stream[-1] if self.final_norm is None else self.final_norm(stream[-1])
        return Run(tuple(stream), tuple(inputs), tuple(outputs), tuple(patterns), result)

    def __call__(self, X: Float[Tensor, "n_tokens d"]) -> Float[Tensor, "n_tokens d"]:
        """Return only the result t(X)."""
        return self.run(X).result


def _terms(sublayer: Sublayer) -> tuple[MLP | Head, ...]:
    """Return the functions whose outputs add up to a sublayer's output: its heads, or its MLP."""
    return sublayer if isinstance(sublayer, tuple) else (sublayer,)
