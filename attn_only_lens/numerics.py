"""Numbers that do not depend on the device or on settings of the process: float64, noise, products.

Three things differ between machines. Some devices have no float64 (MPS). A generator of random
numbers belongs to one device, and draws other numbers than another's. And matrix products in
float32 may round their inputs to TF32's 10 bits or less, where the user has asked for speed
(`torch.set_float32_matmul_precision("high")`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["noise", "same_randomness", "where_float64_is"]


def where_float64_is(x: Tensor) -> Tensor:
    """A tensor on a device that has float64: its own, or the CPU.

    Example:
        >>> where_float64_is(torch.ones(2)).double().device
        device(type='cpu')
    """
    try:
        torch.ones((), device=x.device).double()
    except (RuntimeError, TypeError):  # as MPS says it, and others do
        return x.cpu()
    return x


def noise(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Normal numbers in float64 on the CPU: the same every time, whatever device they go to.

    Example:
        >>> torch.equal(noise((2, 3)), noise((2, 3)))
        True
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Put the random states of the CPU and of a device back: what runs next draws the same numbers.

    Example:
        >>> with same_randomness(torch.device("cpu")):
        ...     first = torch.rand(3)
        >>> torch.equal(first, torch.rand(3))
        True
    """
    own: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    which = () if device.type == "mps" else (device,)  # which has one state, and takes no device
    states = torch.get_rng_state(), None if own is None else own.get_rng_state(*which)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if own is not None:
            own.set_rng_state(states[1], *which)
