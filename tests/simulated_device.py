"""A simulated device in Python, for tests of how the package treats devices.

`simulated:0`, `:1` and `:2` are devices in torch (the PrivateUse1 backend). Their tensors wrap CPU
tensors, so results are bitwise the CPU's. An operation that mixes devices raises, as on a GPU. As
with CUDA, scalars and indices may be on the CPU. With `forbid_float64`, a float64 tensor on the
device raises too, as on MPS.

The mode counts kernels (all operations except views and allocations); transfers
from ("D2H"), to ("H2D") and between devices ("D2D"); and "sync", where the host waits for a value
or for a shape that depends on values. A D2H is also such a wait: `synchronisations` counts both.

    set_up()
    with SimulatedDevice() as device:
        model.to("simulated:0")(tokens.to("simulated:0"))
        print(device.total("kernel"), device.synchronisations)

Not simulated are streams, memory limits, speed, a GPU's own kernels, and in-place changes of shape
(`t_`). Within the mode, autograd runs on the caller's thread.

PrivateUse1 stays registered in its process, so `test_devices.py` runs the tests that need it in
another one.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Float64Forbidden", "MixedDevices", "SimulatedDevice", "set_up"]

NAME = "simulated"
N_DEVICES = 3

# Operations without a kernel: views, allocations, and the answers that `_SYNC` counts.
_FREE = frozenset(
    (
        *("_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk"),
        *("detach", "diagonal", "empty", "empty_like", "empty_strided", "expand", "lift_fresh"),
        *("narrow", "new_empty", "new_empty_strided", "permute", "resize_", "select", "set_"),
        *("slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold"),
        *("unsqueeze", "view", "view_as_complex", "view_as_real"),
    )
)
# The host waits for a value, or for a shape that depends on values.
_SYNC = frozenset(
    (
        *("_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero"),
        *("unique_consecutive", "unique_dim"),
    )
)
_INDEXED = frozenset(["_index_put_impl_", "_unsafe_index", "index", "index_put", "index_put_"])


class MixedDevices(RuntimeError):
    """An operation has tensors of several devices."""


class Float64Forbidden(TypeError):
    """A float64 tensor is on a device without float64."""


class _Simulated(Tensor):
    """A wrapper around a CPU tensor, `inner`, that reports the simulated device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "_Simulated":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return SimulatedDevice.current().call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = _Simulated(self.inner.clone(), self.device)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)

    def __repr__(self) -> str:
        return f"_Simulated({self.inner}, device={self.device})"

    # Methods below torch's operations act as if the storage were on the device.

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
        # torch itself uses the current device, and only one exists here.
        return torch.tensor(data, dtype=dtype or self.dtype, **{"device": self.device, **how})

    def tolist(self) -> Any:
        SimulatedDevice.current().count("D2H")
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()


class SimulatedDevice(TorchDispatchMode):
    """A mode in which `simulated:0`, `simulated:1` and `simulated:2` exist.

    Args:
        forbid_float64: whether the device has no float64.

    Attributes:
        counts: the number of events, by kind.
    """

    _entered: ClassVar[list["SimulatedDevice"]] = []

    def __init__(self, *, forbid_float64: bool = False) -> None:
        super().__init__()
        self.forbid_float64 = forbid_float64
        self.counts: Counter[str] = Counter()

    @classmethod
    def current(cls) -> "SimulatedDevice":
        """Return the innermost active mode."""
        return cls._entered[-1] if cls._entered else cls()

    def __enter__(self) -> "SimulatedDevice":
        self._entered.append(self)
        # Autograd has one thread per device, and supports one device per Python backend.
        self._threads = torch.autograd.set_multithreading_enabled(False)
        # As on a GPU, moving a model keeps its parameters and its tied weights.
        self._swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        if len(self._entered) == 1:
            Tensor.data = property(_DATA.__get__, _set_data)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._threads.__exit__(*exc)
        torch.__future__.set_swap_module_params_on_conversion(self._swaps)
        if len(self._entered) == 1:
            del Tensor.data
        self._entered.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def total(self, kind: str) -> int:
        """Return the number of events of one kind: "kernel", "sync", "D2H", "H2D" or "D2D"."""
        return self.counts[kind]

    @property
    def synchronisations(self) -> int:
        """Return how often the host waited for the device."""
        return self.total("sync") + self.total("D2H")

    def count(self, kind: str) -> None:
        """Count one event."""
        self.counts[kind] += 1

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the wrapped tensors, and wrap its result."""
        name = func._schema.name.split("::")[1]
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        requested = _indexed(kwargs.get("device"))
        simulated = [x for x in tensors if isinstance(x, _Simulated)]
        if not simulated and (requested is None or requested.type != NAME):
            return func(*args, **kwargs)
        device = simulated[0].device if simulated else requested
        home = requested or device
        if name == "_to_copy":  # like `copy_`, it may mix two devices: `.to`, `.cpu`
            self._moved(args[0].device, home)
            if kwargs.get("dtype") == torch.float64 and device.type == NAME:
                self._refuse_float64(name, device)  # the cast is on the source device
            kept = {k: v for k, v in kwargs.items() if k in ("dtype", "layout", "memory_format")}
            return self._wrapped(name, func(_inner(args[0]), **kept), home)
        if name in ("copy_", "_copy_from"):
            source, target = args[:2] if name == "_copy_from" else args[1::-1]
            self._moved(source.device, target.device)
            _inner(target).copy_(_inner(source))
            return target
        indices = [x for x in args[1] if x is not None] if name in _INDEXED else []
        self._require_one(name, device, tensors, indices, kwargs.get("generator"))
        if name not in _FREE:
            self.count("kernel")
        if name in _SYNC or any(x.dtype == torch.bool for x in indices):
            self.count("sync")
        inner_args, inner = _mapped(_inner, (args, kwargs))
        if requested is not None:
            inner["device"] = torch.device("cpu") if requested.type == NAME else requested
        inner.pop("pin_memory", None)
        draws = torch.Tag.nondeterministic_seeded in func.tags and device.type == NAME
        with _MODULE.drawing(device) if draws else nullcontext():
            result = func(*inner_args, **inner)
        owners = {id(x.inner): x for x in simulated}  # in-place results keep their wrapper

        def wrapped(x: Any) -> Any:
            return owners[id(x)] if id(x) in owners else self._wrapped(name, x, home)

        return _mapped(wrapped, result)

    def _require_one(
        self,
        name: str,
        device: torch.device,
        tensors: list[Tensor],
        indices: list[Tensor],
        generator: Any,
    ) -> None:
        """Raise an error if an operation mixes devices."""
        for x in tensors:
            free = not x.ndim or any(x is index for index in indices)
            if x.device != device and not (x.device.type == "cpu" and free):
                raise MixedDevices(f"{name}: {device} and {x.device}")
        if generator is not None and generator.device != device:
            raise MixedDevices(f"{name}: {device}, and a generator of {generator.device}")

    def _moved(self, source: torch.device, target: torch.device) -> None:
        """Count a copy: a transfer, or a kernel within a device."""
        ends = ("D" if end.type == NAME else "H" for end in (source, target))
        self.count("kernel" if source == target else "2".join(ends))

    def _wrapped(self, name: str, x: Any, device: torch.device) -> Any:
        """Wrap a tensor for the device."""
        if not isinstance(x, Tensor) or device.type != NAME:
            return x
        if x.dtype in (torch.float64, torch.complex128):
            self._refuse_float64(name, device)
        return _Simulated(x, device)

    def _refuse_float64(self, name: str, device: torch.device) -> None:
        if self.forbid_float64:
            raise Float64Forbidden(f"{name}: no float64 on {device}")


_DATA = torch._C.TensorBase.data


def _set_data(x: Tensor, value: Tensor) -> None:
    """Set `x.data = value`, also across devices, without replacing the object x."""
    if isinstance(x, _Simulated) == isinstance(value, _Simulated):
        _DATA.__set__(x, value)
        if isinstance(x, _Simulated):
            x.inner = value.inner
        return
    moved = value.detach()
    if isinstance(x, torch.nn.Parameter):
        moved = torch.nn.Parameter(moved, requires_grad=x.requires_grad)
    torch.utils.swap_tensors(x, moved)


def _indexed(device: Any) -> torch.device | None:
    device_now = None if device is None else torch.device(device)
    return (
        torch.device(NAME, device_now.index or 0)
        if device_now and device_now.type == NAME
        else device_now
    )


def _leaves(x: Any) -> Iterator[Any]:
    """Yield the leaves of lists, tuples and dicts, like torch's pytree but three times as fast."""
    if isinstance(x, list | tuple):
        for item in x:
            yield from _leaves(item)
    elif isinstance(x, dict):
        yield from _leaves(list(x.values()))
    else:
        yield x


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, list | tuple):
        return type(x)([_mapped(change, item) for item in x])
    if isinstance(x, dict):
        return {key: _mapped(change, value) for key, value in x.items()}
    return change(x)


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, _Simulated) else x


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    return SimulatedDevice.current().call(op, args, kwargs)


class _Module(backend_registration._DummyBackendModule):
    """The module `torch.simulated`: devices, each with its own random state."""

    def __init__(self) -> None:
        self.states = [torch.Generator("cpu").get_state() for _ in range(N_DEVICES)]

    def device_count(self) -> int:
        return N_DEVICES

    def manual_seed_all(self, seed: int) -> None:
        self.states = [
            torch.Generator("cpu").manual_seed(seed).get_state() for _ in range(N_DEVICES)
        ]

    def get_rng_state(self, device: Any) -> Tensor:
        return self.states[torch.device(device).index or 0].clone()

    def set_rng_state(self, state: Tensor, device: Any) -> None:
        self.states[torch.device(device).index or 0] = state.clone()

    @contextmanager
    def drawing(self, device: torch.device) -> Iterator[None]:
        """Draw random numbers from the device's state instead of the CPU's."""
        rng_state = torch.get_rng_state()
        torch.set_rng_state(self.get_rng_state(device))
        try:
            yield
        finally:
            self.set_rng_state(torch.get_rng_state(), device)
            torch.set_rng_state(rng_state)


_MODULE = _Module()


@cache
def set_up() -> torch.library.Library:
    """Register PrivateUse1 for the rest of this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _MODULE)
    library = torch.library.Library("aten", "IMPL")
    aten = torch.ops.aten
    # Functions that torch calls below the mode.
    for op in (aten.empty.memory_format, aten.empty_strided.default, aten._copy_from.default):
        library.impl(op.name().removeprefix("aten::"), partial(_call, op), "PrivateUse1")
    return library
