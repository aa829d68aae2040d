"""Which heads copy: the eigenvalues of every OV circuit in the vocabulary, from weights alone.

The OV circuit M = W_E W_V W_O W_U C of a head, with W_U C the unembedding less its mean over the
vocabulary (`token_circuits.py`), copies where it raises the logit of the token that it reads. Then
its eigenvalues are positive (Elhage et al. 2021, "A Mathematical Framework for Transformer
Circuits"):

    copying = Σ λ / Σ |λ|               1: all are positive; -1: all are negative; 0 in the mean
                                        for a head that is unrelated to the tokens
    cosine  = Σ λ / ‖M‖_F               the cosine of M and the identity, times √d_vocab

A neuron-head has one eigenvalue, λ = (W_out W_U C) · (W_E W_in), so its copying score is its sign;
its cosine is that of what it reads and writes over the vocabulary, in [-1, 1].

The eigenvalues that are not zero by rank are those of W_O W_U W_E W_V, d_head × d_head, and
‖M‖² = tr((W_Vᵀ W_Eᵀ W_E W_V)(W_O W_U W_Uᵀ W_Oᵀ)): with the three d_model × d_model matrices
W_U W_E, W_Eᵀ W_E and W_U W_Uᵀ, made once, no head needs the vocabulary. Memory beyond the model,
in bytes, for a model in float32 (in float64, twice as much of the last):

    64 d_model²                             those three, in float64 at first, and copies
    32 · 1024 d_model                       a slice of the vocabulary, in float64
    4 · 8 d_model max(Σ d_head, d_mlp)      the matrices of the heads of one layer
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.circuits.weights.vocabulary_matrices import VocabularyMatrices
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.sites import LayerSites, Sites, all_heads, resolve_sites
from attn_only_lens.errors import InputError
from attn_only_lens.precision import full_precision

_ROWS = 1024  # of the vocabulary at once
_PROBLEM = "these heads have no copying scores"


@torch.no_grad()
@full_precision()
def copying_scores(
    model: Any,
    sites: Sites | None = None,
    *,
    tokens: Sequence[int] | None = None,
    fold_norms: bool = True,
) -> pd.DataFrame:
    """Return how much each head and neuron-head copies, by the eigenvalues of its OV circuit.

    The circuit has W_U less its mean over the vocabulary, as in `ov_circuit`.

    Args:
        model: converted, or with exposed neuron-heads.
        sites: `patching.heads()`, `patching.neuron_heads()`, names; None for all.
        tokens: as in `qk_circuit`; each must be in the output vocabulary, too. Eigenvalues are
            then those of the circuit between these tokens alone.
        fold_norms: whether to fold gains of norms into the weights.

    Returns:
        A row for each head, by layer: `name`, `layer`, `kind` ("attention" or "neuron"),
        `eigenvalue_sum` (of a neuron, its one eigenvalue), `copying`, and `cosine`; the last two
        are missing where a head reads or writes nothing.

    Raises:
        InputError: with every reason: the model has no neuron-heads, or not those heads; unknown
            weights or norms; an output vocabulary of another size, without tokens that are in
            both; weights that are not finite.

    Example:
        >>> from attn_only_lens import circuits, expose_neuron_heads, patching as p, pretrained
        >>> model = expose_neuron_heads(pretrained.small_english()).model
        >>> frame = circuits.copying_scores(model, p.heads())
        >>> frame.columns.tolist()
        ['name', 'layer', 'kind', 'eigenvalue_sum', 'copying', 'cosine']
        >>> bool(frame["copying"].between(-1, 1).all())
        True
    """
    chosen = resolve_sites(model, all_heads() if sites is None else sites)
    matrices = VocabularyMatrices.of(model, tokens, fold_norms=fold_norms)
    d_vocab, d_out = len(matrices.W_E), matrices.W_U.shape[1]
    if d_vocab != d_out:
        raise InputError(
            [f"it reads {d_vocab} tokens and writes {d_out}; pass tokens=, those that are in both"],
            _PROBLEM,
        )
    products = _products(matrices)
    frames = []
    for each in chosen:
        found = (_of_attention if each.kind == "attention" else _of_neurons)(
            matrices, each, products
        )
        total, size, norm = (x.cpu().double().numpy() for x in found)
        frame = pd.DataFrame({"name": each.names, "layer": each.layer, "kind": each.kind})
        frame["eigenvalue_sum"] = total
        for name, of in (("copying", size), ("cosine", norm)):
            frame[name] = frame["eigenvalue_sum"] / pd.Series(of).where(lambda x: x > 0)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _products(matrices: VocabularyMatrices) -> tuple[Tensor, Tensor, Tensor]:
    """W_U C W_E, W_Eᵀ W_E and W_U C W_Uᵀ, with the final norm in W_U: [d_model, d_model] each."""
    d_model = matrices.W_E.shape[1]
    precise = to_float64_device(matrices.W_E)
    across, read, written = (
        torch.zeros(d_model, d_model, dtype=torch.float64, device=precise.device) for _ in range(3)
    )
    mean = matrices.mean.to(precise.device).double()
    for first in range(0, len(precise), _ROWS):
        some = slice(first, first + _ROWS)
        E = precise[some].double()
        U = matrices.W_U[:, some].T.to(precise.device).double() - mean
        across.addmm_(U.T, E)
        read.addmm_(E.T, E)
        written.addmm_(U.T, U)
    across, read, written = (each.to(matrices.W_E) for each in (across, read, written))
    norm = matrices.final
    return norm.before(across), read, norm.before(norm.before(written).T)


_Sums = tuple[Float[Tensor, "site"], Float[Tensor, "site"], Float[Tensor, "site"]]
"""Σ λ, Σ |λ| and ‖M‖ of each head."""


def _of_attention(
    matrices: VocabularyMatrices, sites: LayerSites, products: tuple[Tensor, Tensor, Tensor]
) -> _Sums:
    across, read, written = products
    own = matrices.heads.write_matrices(sites)
    W_V, W_O = own.A.to(across), own.B.to(across)
    square = to_float64_device(W_O @ across @ W_V).double()
    inner = (W_V.transpose(-2, -1) @ read @ W_V) * (W_O @ written @ W_O.transpose(-2, -1))
    if not inner.isfinite().all():
        raise InputError([f"{sites.names[0]}: weights that are not finite"], _PROBLEM)
    eigenvalues = torch.linalg.eigvals(square)
    norm = inner.sum((-2, -1)).clamp(min=0).sqrt()
    return eigenvalues.sum(-1).real, eigenvalues.abs().sum(-1), norm


def _of_neurons(
    matrices: VocabularyMatrices, sites: LayerSites, products: tuple[Tensor, Tensor, Tensor]
) -> _Sums:
    across, read, written = products
    own = matrices.heads.write_matrices(sites)
    column = matrices.heads.read_matrices(sites, "v").A[:, :, 0].to(across)
    row = (own.A * own.B)[:, 0].to(across)
    value = ((row @ across) * column).sum(-1)
    if not value.isfinite().all():
        wrong = sites.names[int((~value.isfinite()).nonzero()[0])]
        raise InputError([f"{wrong}: weights that are not finite"], _PROBLEM)
    sizes = [((x @ of) * x).sum(-1) for x, of in ((column, read), (row, written))]
    return value, value.abs(), (sizes[0] * sizes[1]).clamp(min=0).sqrt()
