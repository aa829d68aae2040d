"""Count the floating-point operations of a block of code with torch's formulas."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class FlopCounter(TorchDispatchMode):
    """Counts the floating-point operations of matrix products in a `with` block, as `total`.

    torch's own `FlopCounterMode` also puts hooks on modules, which `torch.autograd.grad` with
    gradients at module inputs does not allow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and add what it costs."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += int(formula(*args, **kwargs, out_val=result))
        return result
