"""Activations and the weights of their gates in arbitrary precision, without the package or torch.

An activation is α(q) = q p(q), where p(q) is the attention of a neuron-head to its own token.
"""

import mpmath


def logistic(x):
    return 1 / (1 + mpmath.exp(-x))


def weight(name, q):
    """Compute p(q) for one number.

    >>> float(weight("silu", 0.0))
    0.5
    """
    q = mpmath.mpf(q)
    cubic = q + mpmath.mpf("0.044715") * q**3
    tanh_slope = 2 * mpmath.sqrt(2 / mpmath.pi)
    return {
        "silu": lambda: logistic(q),
        "quick_gelu": lambda: logistic(mpmath.mpf("1.702") * q),
        "gelu": lambda: mpmath.ncdf(q),
        "gelu_new": lambda: logistic(tanh_slope * cubic),
        "gelu_pytorch_tanh": lambda: logistic(tanh_slope * cubic),
        "gelu_fast": lambda: logistic(2 * mpmath.mpf("0.7978845608") * cubic),
        "relu": lambda: mpmath.mpf(1 if q > 0 else 0),
    }[name]()
