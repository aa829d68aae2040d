"""Theorem 7: if each token attends only to itself, a head is linear for every W_QK.

If Λ = I_N then h(X) = X W_OV. Proof: the only unmasked entry in each row of the pattern is on the
diagonal, and each row sums to 1, so the pattern is I_N. ("Attention-Only Transformers and
Implementing MLPs with Attention Heads"; Theorem 6 of the draft.)
"""

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.reference.masked_attention import Head


def linear_head(W_OV: Float[Tensor, "d d"], n_tokens: int) -> Head:
    """Return a head with W_QK = 0 that maps X to X W_OV, as in Theorem 7.

    Args:
        W_OV: the linear map, acting on rows from the right.
        n_tokens: N.

    Returns:
        The head, which acts on N × D matrices. Its mask is the identity I_N, so each token attends
        only to itself.

    Raises:
        ValueError: W_OV is not a square float64 matrix.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import linear_head
        >>> X = torch.tensor([[2.0, 3.0]], dtype=torch.float64)
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
        >>> linear_head(swap, n_tokens=1)(X).tolist()
        [[3.0, 2.0]]
    """
    return Head(
        torch.zeros_like(W_OV), W_OV, torch.eye(n_tokens, dtype=torch.float64, device="cpu")
    )
