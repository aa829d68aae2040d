"""The interface to models whose MLP neurons are attention heads ("neuron-heads").

A converted model has two blocks per original layer l: attention heads in block 2l, neuron-heads in
block 2l + 1. An exposed model has one block per layer, whose MLP computes neuron-heads.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args
from weakref import WeakKeyDictionary

from torch import Tensor

from attn_only_lens.arguments import a_type
from attn_only_lens.devices import read_all
from attn_only_lens.errors import UnsupportedCallError

HeadKind = Literal["attention", "neuron", "feature", "skip", "error", "router"]
HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)
NEURON_KINDS: tuple[HeadKind, ...] = ("neuron", "feature")
"""The kinds of neuron-heads: neurons of MLPs, and features of transcoders."""
WIDE_KINDS: tuple[HeadKind, ...] = ("skip", "error", "router")
"""The kinds of nodes with a vector as output and without a pattern.

These are a transcoder's skip node and error node (d_head is d_model), and the router of a mixture
of experts (d_head is the number of routing weights).
"""
HEAD_PLURALS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "heads",
        "neuron": "neurons",
        "feature": "features",
        "skip": "skip nodes",
        "error": "error nodes",
        "router": "routers",
    }
)
"""The plural noun for each kind of head, in messages and pictures."""

# In an exposed model, these names must not match users' filters for attention hook points. Such
# filters look for names that end in z, q, k, v, pattern, scores or result, or that contain z, attn,
# pattern, score, hook_q or result.
POINTS = {
    "q": "hook_neuron_query",
    "k": "hook_neuron_key",
    "v": "hook_neuron_value",
    "attn_scores": "hook_neuron_logits",
    "pattern": "hook_neuron_probs",
    "z": "hook_neuron_act",
    "result": "hook_neuron_write",
}
"""The steps of a head's computation, with the hook point of each in an exposed model's MLP.

In a block's attention, the hook points are `hook_q`, `hook_k` and so on, as in TransformerLens.
"""

CHANGED = "the model has changed since its neurons became heads"
_NO_VALUES: Mapping[Any, Any] = MappingProxyType({})


@dataclass
class LaterWrites:
    """What the features of a cross-layer transcoder wrote to later layers in one forward pass.

    Attributes:
        written: {(layer, source): (with edits of the features, without edits)}.
        ran: the layers that ran.
    """

    written: dict[tuple[int, int], tuple[Tensor, Tensor]]
    ran: set[int] = field(default_factory=set)

    def begin(self, layer: int) -> None:
        """Start a layer; raise an error if its earlier layers did not run in the same pass."""
        n_layers = 1 + max((target for target, _ in self.written), default=0)
        if layer == 0 and len(self.ran) == n_layers:
            self.written, self.ran = {}, set()  # a new pass: TransformerLens tests caches with many
        if layer in self.ran:
            raise UnsupportedCallError(
                f"layer {layer} ran twice, or another pass ran inside this one, so it is unclear "
                "what earlier features wrote: run other passes by calling the model itself"
            )
        self.ran.add(layer)
        if missing := [x for x in range(layer) if (layer, x) not in self.written]:
            raise UnsupportedCallError(
                f"layer {layer} ran without layers {missing}, whose features write to it: call the "
                "model itself (not a block, or the model that it wraps), from its first layer"
            )


LATER_WRITES = "later writes"
"""The key of the `LaterWrites` in `PassState.values`."""


class PassState(threading.local):
    """Values that one module passes to a later module in the same forward pass.

    The values are not module attributes, because other threads, or hooks, may run the model during
    a forward pass. Each thread has its own values, and a copy of this object is empty. It also
    holds the runs that analyses share (`engine/kept_runs.py`).

    Attributes:
        values: the values of the current pass.
        skipped: the later writes of layers that the next passes do not run.
    """

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}
        self.skipped: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.kept_runs: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        self._errors: list[tuple[Tensor, str]] | None = None
        self.gate_rule: Callable[[Any, Tensor, Tensor | None], Tensor | None] | None = None
        self.routing_rule: Callable[[Any, Tensor, Tensor], Tensor] | None = None
        self.both_runs = False  # whether the batch holds a clean and a corrupted run
        self.functions: Any = None  # `FunctionRules` for clamps of pre-activations

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @contextmanager
    def new_pass(self, values: Mapping[Any, Any] = _NO_VALUES) -> Iterator[None]:
        """Context manager that uses these values, and restores the previous values at its end."""
        outer, self.values = self.values, dict(values)
        is_outermost, self._errors = self._errors is None, self._errors or []
        try:
            yield
        finally:
            self.values = outer
            if is_outermost:
                errors, self._errors = self._errors, None
                _raise_if_large(errors)

    def model_pass(self) -> AbstractContextManager[None]:
        """Return a context of one forward pass of the whole model."""
        return self.new_pass({LATER_WRITES: LaterWrites(dict(self.skipped))})

    @contextmanager
    def rules(
        self, gate: Any, routing: Any, both_runs: bool = False, functions: Any = None
    ) -> Iterator[None]:
        """Context manager that sets the functions that replace z and the routing weights.

        `functions` replaces other nonlinear functions of the neurons, such as clamps.
        """
        before = self.gate_rule, self.routing_rule, self.both_runs, self.functions
        self.gate_rule, self.routing_rule = gate, routing
        self.both_runs, self.functions = both_runs, functions
        try:
            yield
        finally:
            self.gate_rule, self.routing_rule, self.both_runs, self.functions = before

    def require_small(self, error: Tensor, message: str) -> None:
        """At the end of the outermost pass, raise UnsupportedCallError if `error` exceeds 1."""
        if self._errors is None:
            _raise_if_large([(error, message)])
        else:
            self._errors.append((error, message))


def _raise_if_large(errors: Sequence[tuple[Tensor, str]]) -> None:
    """Raise UnsupportedCallError if any error exceeds 1; read all errors in one transfer."""
    for error, (_, message) in zip(read_all([x for x, _ in errors]), errors, strict=True):
        if error > 1.0:
            raise UnsupportedCallError(message)


class Host(ABC):
    """The interface to a model with neuron-heads: its heads, hook points and norms."""

    in_place: ClassVar[bool]
    """True if the model has the same blocks as its source."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    @abstractmethod
    def neurons(self) -> list[Any]:
        """The neuron-heads (`NeuronHeads`) of each layer of the original model."""

    @property
    @abstractmethod
    def n_heads(self) -> list[int]:
        """The number of attention heads in each layer of the original model."""

    @property
    def n_layers(self) -> int:
        """The number of layers of the original model."""
        return len(self.neurons)

    def kinds(self, layer: int) -> tuple[HeadKind, ...]:
        """Return the kinds of heads in an original layer, in their order of computation."""
        return ("attention", *self.neurons[layer].kinds)

    @property
    def writes_later(self) -> bool:
        """True if features write to several layers, as in a cross-layer transcoder."""
        return any(getattr(heads.module, "W_later", None) is not None for heads in self.neurons)

    def layers_written(self, layer: int, kind: HeadKind) -> range:
        """Return the layers to whose outputs the heads in a layer write, with this layer first."""
        n = len(self.neurons[layer].decoders) if kind in NEURON_KINDS else 1
        return range(layer, layer + n)

    def count(self, layer: int, kind: HeadKind) -> int:
        """Return the number of heads of one kind in a layer."""
        if kind not in self.kinds(layer):
            return 0
        if kind in NEURON_KINDS:
            return int(self.neurons[layer].n_neurons)
        return self.n_heads[layer] if kind == "attention" else 1

    def experts(self, layer: int, kind: HeadKind) -> tuple[int, int]:
        """Return the number of experts whose neurons are heads of this kind, and of each's neurons.

        Shared experts, and MLPs that are no mixture, do not count.
        """
        return self.neurons[layer].experts if kind == "neuron" else (0, 0)

    @abstractmethod
    def block(self, layer: int, kind: HeadKind) -> int:
        """Return the index of the block that runs an original layer's heads of this kind."""

    def hook_name(self, layer: int, kind: HeadKind, point: str) -> str:
        """Return the full name of a hook point (a key of `POINTS`) for a layer's heads."""
        block = self.block(layer, kind)
        if kind in WIDE_KINDS:
            return f"blocks.{block}.mlp.hook_{kind}"
        if kind in NEURON_KINDS and self.in_place:
            return f"blocks.{block}.mlp.{POINTS[point]}"
        return f"blocks.{block}.attn.hook_{point}"

    def hook_names(self, point: str, kinds: Sequence[HeadKind] = HEAD_KINDS) -> list[str]:
        """Return the names of a hook point for all layers' heads of these kinds."""
        return [
            self.hook_name(layer, kind, point)
            for layer in range(self.n_layers)
            for kind in self.kinds(layer)
            if kind in kinds
        ]

    @property
    @abstractmethod
    def passing(self) -> PassState:
        """The values that the model's modules pass to each other during a forward pass."""

    def attention(self, layer: int) -> Any:
        """Return the module with the attention heads of a layer of the original model."""
        return self.model.blocks[self.block(layer, "attention")].attn

    def is_gated(self, layer: int) -> bool:
        """Return whether the MLP of a layer of the original model has a W_gate."""
        heads = self.neurons[layer]
        return bool(heads.experts[0]) or getattr(heads.module, "W_gate", None) is not None

    @abstractmethod
    def gates(self) -> list[dict[str, Any]]:
        """Return a JSON-compatible description of each original layer's gates."""

    @abstractmethod
    def stream_hook(self, layer: int, point: Literal["pre", "mid", "post"]) -> str:
        """Return the hook name of the residual stream before, within or after an original layer."""

    def write_hook(self, layer: int, kind: HeadKind) -> str:
        """Return the hook name of the summed output of the heads in an original layer."""
        sublayer = "mlp" if kind != "attention" and self.in_place else "attn"
        return f"blocks.{self.block(layer, kind)}.hook_{sublayer}_out"

    def residual_factor(self, layer: int) -> float:
        """Return the constant that multiplies the outputs at a layer's write hooks."""
        return 1.0

    @abstractmethod
    def reasons(self) -> list[str]:
        """Return error messages if the model no longer runs the modules of its heads."""

    def unseen_edit_reasons(self, layer: int, kind: HeadKind) -> list[str]:
        """Return an error message for each torch hook that would see z before edits."""
        return []

    @abstractmethod
    def norms(self) -> list[Any]:
        """Return the norms of each original layer; raise InputError if a norm's kind is unknown."""

    def reads_centred(self) -> bool:
        """Return whether the norms before all heads subtract the mean of the residual stream."""
        layers = self.norms()
        return all(norms.attention[0].centres and norms.neuron[0].centres for norms in layers)

    @abstractmethod
    def final_norm(self) -> Any:
        """Return the norm before the unembedding; raise InputError if its kind is unknown."""

    @abstractmethod
    def norm_modules(self) -> list[Any]:
        """Return the modules that normalise the residual stream, or queries and keys."""

    @abstractmethod
    def norms_of(self, seen: Any) -> Any:
        """Return each module's kind of norm, found from the module's input and output.

        `seen` is {module: (x, y)}.
        """

    @abstractmethod
    def require_weights(self) -> None:
        """Raise InputError if the model does not compute with its weights `W_Q`, `W_in` etc."""

    @abstractmethod
    def tokens_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return how many tokens the key-value cache holds, given the first block's arguments."""

    @abstractmethod
    def replay(self, recording: Any, metric: Any, precise: Any = None) -> Any:
        """Return a replay, which recomputes parts of a recorded forward pass (`engine/replay`)."""


class WithNeuronHeads:
    """A mixin that marks a model whose MLP neurons are attention heads (neuron-heads)."""

    _host: ClassVar[type[Host]]


def stock_class(module: object) -> type:
    """Return the class that a module had before neuron-heads were added to it."""
    kind = type(module)
    return vars(kind).get("_stock", kind)  # `vars` ignores base classes


def has_neuron_heads(model: object) -> bool:
    """Return whether a model's MLP neurons are implemented as attention heads (neuron-heads)."""
    return isinstance(model, WithNeuronHeads)


def host_of(model: Any) -> Host:
    """Return a model's `Host`; raise UnsupportedCallError if no MLP neurons are attention heads."""
    if not isinstance(model, WithNeuronHeads):
        raise UnsupportedCallError("; ".join(reasons_without_heads(model)))
    return model._host(model)


def exposed_reasons(model: object) -> list[str]:
    """Return [error message] if neuron-heads are exposed in place in a model, otherwise []."""
    if not has_neuron_heads(model) or not host_of(model).in_place:
        return []
    exposed = "its neuron-heads are exposed; first call expose_neuron_heads(model).undo()"
    return transcoder_reasons(model) or [exposed]


def transcoder_reasons(model: object) -> list[str]:
    """Return [error message] if transcoders replace MLPs of a model, otherwise []."""
    layers = host_of(model).neurons if has_neuron_heads(model) else []
    if not any("feature" in heads.kinds for heads in layers):
        return []
    return ["transcoders replace its MLPs; first call transcoders.detach(model)"]


def later_write_reasons(model: Any, so: str) -> list[str]:
    """Return [error message] if features write to several layers; `so` says what follows."""
    if not has_neuron_heads(model) or not host_of(model).writes_later:
        return []
    return [f"the features of a cross-layer transcoder write to several layers, so {so}"]


def reasons_without_heads(model: object) -> list[str]:
    """Return [error message] if a model has no neuron-heads, otherwise []."""
    if has_neuron_heads(model):
        return []
    return [
        f"the model, {a_type(model)}, has no neuron-heads: call "
        "attn_only_lens.convert(model), or attn_only_lens.expose_neuron_heads(model), first"
    ]
