"""Build block matrices in the paper's notation, and check the shapes and dtypes of matrices.

The paper's notation (section 2): M_{n,k} is the set of real n × k matrices; X ⊕ Y is the block
matrix with X and Y on its diagonal and 0 elsewhere; [X|Y] puts Y to the right of X. All matrices
are float64, because tests compare the rest of the package with them.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def zeros(rows: int, columns: int) -> Float[Tensor, "rows columns"]:
    """Return a float64 matrix of zeros, which the paper writes **0**."""
    return torch.zeros(rows, columns, dtype=torch.float64, device="cpu")


def ones(rows: int, columns: int) -> Float[Tensor, "rows columns"]:
    """Return a float64 matrix of ones, which the paper writes **1**."""
    return torch.ones(rows, columns, dtype=torch.float64, device="cpu")


def block(
    top_left: Float[Tensor, "n k"],
    top_right: Float[Tensor, "n l"],
    bottom_left: Float[Tensor, "m k"],
    bottom_right: Float[Tensor, "m l"],
) -> Float[Tensor, "n+m k+l"]:
    """Return the 2 × 2 block matrix that consists of the four given blocks."""
    top = torch.cat([top_left, top_right], dim=1)
    bottom = torch.cat([bottom_left, bottom_right], dim=1)
    return torch.cat([top, bottom], dim=0)


def direct_sum(
    X: Float[Tensor, "n k"], Y: Float[Tensor, "m l"] | float
) -> Float[Tensor, "n+m k+l"]:
    """Return the direct sum X ⊕ Y; a number y is treated as the 1 × 1 matrix [y].

    Args:
        X: the block at the top left.
        Y: the block at the bottom right.

    Returns:
        The matrix with the blocks X and Y on its diagonal and 0 elsewhere.

    Raises:
        ValueError: X or Y is not a float64 matrix.

    Example:
        >>> import torch
        >>> from attn_only_lens.reference import direct_sum
        >>> direct_sum(torch.tensor([[3.0, 5.0]], dtype=torch.float64), 1.0).tolist()
        [[3.0, 5.0, 0.0], [0.0, 0.0, 1.0]]
    """
    if not isinstance(Y, Tensor):
        Y = torch.tensor([[Y]], dtype=torch.float64, device="cpu")
    check_matrix("X", X)
    check_matrix("Y", Y)
    return block(X, zeros(X.shape[0], Y.shape[1]), zeros(Y.shape[0], X.shape[1]), Y)


def check_matrix(
    name: str, matrix: Tensor, rows: int | None = None, columns: int | None = None
) -> None:
    """Raise ValueError unless `matrix` is float64 and has these numbers of rows and columns."""
    sizes = (rows, columns)
    fits = matrix.ndim == 2 and all(
        size is None or size == actual for size, actual in zip(sizes, matrix.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in (rows, columns))
        raise ValueError(
            f"{name}: got shape {list(matrix.shape)}; expected a matrix [{expected}] "
            "(rows, columns; without a batch axis: call the function once per sequence)"
        )
    _check_dtype(name, matrix)


def check_vector(name: str, vector: Tensor, size: int) -> None:
    """Raise ValueError unless `vector` is a float64 vector of this size."""
    if vector.shape != (size,):
        raise ValueError(f"{name}: got shape {list(vector.shape)}; expected a vector [{size}]")
    _check_dtype(name, vector)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float64:
        raise ValueError(f"{name}: got {tensor.dtype}; expected torch.float64: call .double()")
