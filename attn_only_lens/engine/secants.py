"""Compute differences between two runs exactly, with secant slopes in place of derivatives.

Let y_1 and y_0 be the values of y in two runs, Δy = y_1 - y_0, and ȳ their mean. Every rule is
exact, however large the changes are:

    y = f(x), elementwise      Δy = (Δf / Δx) Δx
    y = a b                    Δy = b̄ Δa + ā Δb
    p = softmax(s)             Δp = L (Δs - Σ_j w_j Δs_j)    L = Δp / Δlog p, w = L / Σ L
    log p                      Δlog p = Δs - Σ_j w_j Δs_j
    y = x r, r = 1 / √m(x)     Δy = r̄ Δx - x̄ (2 x̄ · Δx / d) (r_1 r_0)² / (r_1 + r_0)

L is the logarithmic mean of p_1 and p_0. The last rule is for norms, with m(x) = mean(x²) + ε; x is
centred if the norm subtracts the mean. If the two runs are equal, the slopes become derivatives.

The first two rules are from DeepLIFT, "summation to delta" (Shrikumar et al., 2017).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Slopes: TypeAlias = Float[Tensor, "*any"]
Both: TypeAlias = tuple[Tensor, Tensor]
"""The input and the output of a step, with the rows of both runs."""
_Linear: TypeAlias = Callable[[Tensor], Tensor]
_Backward: TypeAlias = Callable[[Tensor], Tensor | None]
_SMALL = 2**18  # steps with fewer activations than this share one computation of their slopes


def together(
    slopes: Callable[..., tuple[Tensor, ...]],
    steps: Mapping[Any, tuple[Tensor, ...]],
    kinds: Mapping[Any, Hashable],
) -> Iterator[tuple[Any, tuple[Tensor, ...]]]:
    """Yield each step and its slopes; small steps of the same kind and shape are computed at once.

    `slopes` is called per group, with the group's steps and their tensors stacked along axis 1.
    """
    groups = dict[Any, list[Any]]()
    for step, (x, *_) in steps.items():
        alone = None if x.numel() < _SMALL else step
        groups.setdefault((alone, kinds[step], x.shape, x.dtype, x.device), []).append(step)
    for group in groups.values():
        sides = zip(*[steps[step] for step in group], strict=True)
        stacks = [torch.stack(x, 1) if len(x) > 1 else x[0].unsqueeze(1) for x in sides]
        by_step = [result.unbind(1) for result in slopes(group, *stacks)]
        yield from zip(group, zip(*by_step, strict=True), strict=True)


def slope(
    y_1: Tensor, y_0: Tensor, x_1: Tensor, x_0: Tensor, derivative: Callable[[Tensor], Tensor]
) -> Slopes:
    """Return Δy / Δx of an elementwise function, or its derivative at the mean if Δx is small.

    For |Δx| below ∛ε (1 + |x̄|), with the machine epsilon ε, the quotient loses digits, and the
    derivative is exact up to rounding. The quotient is still used if the function has a jump or a
    kink between the runs. If Δx is subnormal, the quotient of a jump could overflow. The inputs are
    then as good as equal: a gate has its jump at 0, where the value that it multiplies is as small.
    """
    dx, dy, middle = x_1 - x_0, y_1 - y_0, (x_1 + x_0) / 2
    eps = torch.finfo(dx.dtype).eps
    at_middle = derivative(middle)
    near = dx.abs() < eps ** (1 / 3) * (1 + middle.abs())
    size = y_1.abs() + y_0.abs() + (at_middle * dx).abs()
    smooth = (dy - at_middle * dx).abs() <= 8 * eps * size
    flat = (near & smooth) | (dx.abs() < torch.finfo(dx.dtype).tiny)
    return torch.where(flat, at_middle, dy / torch.where(flat, torch.ones_like(dx), dx))


def log_mean(log_1: Tensor, log_0: Tensor) -> Slopes:
    """Return the secant slope of exp between two logarithms, or 0 if one of them is -∞."""
    finite = log_1.isfinite() & log_0.isfinite()
    a, b = (torch.where(finite, x, torch.zeros_like(x)) for x in (log_1, log_0))
    d = a - b
    near = d.abs() < 1e-2
    square = d.square()
    series = ((a + b) / 2).exp() * (1 + square / 24 * (1 + square / 80))
    quotient = (a.exp() - b.exp()) / torch.where(near, torch.ones_like(d), d)
    return torch.where(finite, torch.where(near, series, quotient), torch.zeros_like(d))


def softmax_slopes(
    log_1: Float[Tensor, "*any key"], log_0: Float[Tensor, "*any key"]
) -> tuple[Float[Tensor, "*any key"], Float[Tensor, "*any key"]]:
    """Return L and w of the softmax rule, given both runs' log-probabilities."""
    L = log_mean(log_1, log_0)
    total = L.sum(-1, keepdim=True)
    return L, L / torch.where(total == 0, torch.ones_like(total), total)


def softmax_change(L: Tensor, w: Tensor, change: Tensor) -> Tensor:
    """Return the change in the softmax's output, given the change in its scores."""
    change = change.masked_fill(L == 0, 0.0)  # masked scores are -∞
    return L * (change - (w * change).sum(-1, keepdim=True))


def gate_derivative(heads: Any, query: Tensor) -> Tensor:
    """Return, for each neuron-head, the derivative dw/dq of its attention w to its own token."""
    with torch.enable_grad():
        leaf = query.detach().requires_grad_()
        weight = heads._self_weight(leaf)
        if not weight.requires_grad:
            return torch.zeros_like(query)
        return torch.autograd.grad(weight.sum(), leaf)[0]


def norm_change(x: Tensor, r_1: Tensor, r_0: Tensor, change: Tensor) -> Tensor:
    """Return the change in a norm's output, given its input's change and mean over both runs."""
    r = (r_1 + r_0) / 2
    along = (x * change).mean(-1, keepdim=True)
    return r * change - (r_1 * r_0).square() / r * along * x


def mean(both: Tensor) -> Tensor:
    """Return the mean of two runs, given one batch with the rows of both runs."""
    return both.unflatten(0, (2, -1)).mean(0)


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Callable[[], Tensor], back: _Backward) -> Tensor:
        ctx.back, ctx.dtype = back, x.dtype
        return value()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        moved = ctx.back(gradients[0])
        return None if moved is None else moved.to(ctx.dtype), None, None


def replaced(x: Tensor, value: Callable[[], Tensor], back: _Backward) -> Tensor:
    """Return `value()`; in the backward pass, `back` maps the gradient at the result to that at x.

    If `back` returns None, x gets no gradient. All rules except `log_softmax` are symmetric linear
    maps, so `back` can be the rule itself.
    """
    y: Tensor = _Replaced.apply(x, value, back)
    return y


def at_mean(x: Tensor, both: Tensor, back: _Linear = lambda gradient: gradient) -> Tensor:
    """Return the mean of a function's outputs in both runs, with `back` as backward pass."""
    return replaced(x, partial(mean, both), back)


class Valve:
    """Identity maps through which gradients flow only while the valve is open."""

    def __init__(self) -> None:
        self._is_open = True

    def __call__(self, x: Tensor) -> Tensor:
        """Return x; its gradient passes if the valve is open during the backward pass."""
        return replaced(x, x.clone, lambda gradient: gradient if self._is_open else None)

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Context manager that shuts the valve."""
        self._is_open = False
        try:
            yield
        finally:
            self._is_open = True


class Weights(NamedTuple):
    """Attention weights: the patterns of attention heads, or the gates of neuron-heads.

    Attributes:
        inside: the weights as a function of the scores, in the autograd graph.
        outside: the weights as a factor of the values; between the two is a `Valve`, or nothing.
        query: the queries of neuron-heads.
    """

    inside: Tensor
    outside: Tensor
    query: Tensor | None = None


def _softmax_slopes(calls: Sequence[int], scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return softmax_slopes(*scores.log_softmax(-1).chunk(2))


def _log_softmax(seen: Both, x: Tensor, func: Callable[[Tensor], Tensor]) -> Tensor:
    _, w = softmax_slopes(*seen[1].chunk(2))
    return at_mean(x, seen[1], lambda gradient: gradient - w * gradient.sum(-1, keepdim=True))


def _elementwise(seen: Both, x: Tensor, func: Callable[[Tensor], Tensor]) -> Tensor:
    def derivative(middle: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = middle.detach().requires_grad_()
            return torch.autograd.grad(func(leaf).sum(), leaf)[0]

    (x_1, x_0), (y_1, y_0) = (side.chunk(2) for side in seen)
    return at_mean(x, seen[1], partial(torch.mul, slope(y_1, y_0, x_1, x_0, derivative)))


_CONVERSIONS = Tensor.to, Tensor.float, Tensor.type
_SOFTMAX = torch.softmax, Tensor.softmax, functional.softmax
_RULES: dict[Any, Callable[[Both, Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax, functional.log_softmax), _log_softmax),
    **{
        func: _elementwise
        for name in ("tanh", "clamp", "exp", "log", "sigmoid", "relu", "square")
        for func in (getattr(torch, name), getattr(Tensor, name))
    },
    **dict.fromkeys((functional.gelu, functional.silu, functional.relu), _elementwise),
}


class FunctionRules(TorchFunctionMode):
    """Record calls of torch's nonlinear functions, or replace these functions with linear maps.

    Replaced calls are matched with recorded calls by their order, so both passes must call the same
    functions.

    Args:
        seen: to replace functions with secants, the inputs and outputs that a first pass recorded.
        held: to hold only softmaxes, their outputs. If `seen` and `held` are None, calls are
            recorded.
        paused: whether to start paused; a paused mode neither records nor replaces.
        widens: whether to skip conversions of float64 to float32. Many transformers modules always
            compute in float32.

    Attributes:
        seen: the inputs and outputs of all functions.
        softmax: the outputs of all softmaxes in the recorded pass.
        weights: the outputs of all softmaxes in the autograd graph of replaced functions.
        valve: whether gradients reach softmaxes; held softmaxes get no gradient.
    """

    def __init__(
        self,
        seen: list[Both] | None = None,
        *,
        held: Sequence[Tensor] | None = None,
        paused: bool = False,
        widens: bool = True,
    ) -> None:
        super().__init__()
        self.seen: list[Both] = [] if seen is None else seen
        self.paused = paused
        self.softmax: list[Tensor] = []
        self.weights: list[Weights] = []
        self.valve = Valve()
        self._replaces, self._held, self._widens = seen is not None, held, widens
        self._n_calls = 0
        self._slopes: dict[int, tuple[Tensor, ...]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function and record it, or run the linear map that replaces the function."""
        kwargs = kwargs or {}
        if self._widens and func in _CONVERSIONS and _narrows(func, args, kwargs):
            return args[0]
        is_softmax = func in _SOFTMAX
        if not (is_softmax or func in _RULES) or not args[0].is_floating_point():
            return func(*args, **kwargs)
        x = args[0]
        is_wide = self._widens and x.dtype == torch.float64
        if is_wide and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = None
        if self.paused or (self._held is not None and not is_softmax):
            return func(*args, **kwargs)
        if self._held is not None:
            return self._hold(x, self._held[len(self.weights)])
        if not self._replaces:
            y = func(*args, **kwargs)
            recorded = y.detach().clone()
            if is_softmax:  # at padding, all keys may be masked
                recorded = recorded.nan_to_num(0.0)
                self.softmax.append(recorded)
            self.seen.append((x.detach().clone(), recorded))
            return y
        rest, call, seen = args[1:], self._n_calls, self.seen[self._n_calls]
        self._n_calls += 1
        if not is_softmax:
            return _RULES[func](seen, x, lambda x: func(x, *rest, **kwargs))
        if call not in self._slopes:  # batch calls of the same shape
            shape, n = seen[0].shape, len(self.seen) if seen[0].numel() < _SMALL else call + 1
            alike = {i: self.seen[i] for i in range(call, n) if self.seen[i][0].shape == shape}
            self._slopes |= together(_softmax_slopes, alike, dict.fromkeys(alike))
        y = at_mean(x, seen[1], partial(softmax_change, *self._slopes.pop(call)))
        self.weights.append(Weights(y, self.valve(y)))
        return self.weights[-1].outside

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Context manager that ends a pause."""
        paused, self.paused = self.paused, False
        try:
            yield
        finally:
            self.paused = paused

    def _hold(self, x: Tensor, recorded: Tensor) -> Tensor:
        """Return a softmax's recorded output, repeated if a batch has several copies of the run."""
        recorded = recorded.repeat(len(x) // len(recorded), *[1] * (x.ndim - 1)).to(x.dtype)
        inside = replaced(x, recorded.clone, partial(softmax_change, recorded, recorded))
        self.weights.append(Weights(inside, recorded.requires_grad_(torch.is_grad_enabled())))
        return recorded


def _narrows(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call converts float64 to float32."""
    if not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
        return False
    return func is Tensor.float or any(x is torch.float32 for x in (*args[1:], *kwargs.values()))
