"""One protocol for all kinds of models with neuron-heads: a `Host` for each kind.

A converted HookedTransformer has two blocks for each source layer, attention heads in block 2l and
neuron-heads in block 2l + 1. An exposed model, HookedTransformer or TransformerBridge, keeps its
blocks, and its neuron-heads are beside its MLPs. Everything above asks the host.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, get_args

from attn_only_lens.errors import InputError, UnsupportedCallError
from attn_only_lens.heads.pass_state import PassState

HeadKind = Literal["attention", "neuron"]
HEAD_KINDS: tuple[HeadKind, ...] = get_args(HeadKind)

# In place, no name may be one that a filter for attention's hook points selects: those ask whether
# a name ends in z, q, k, v, pattern, scores or result, or whether it holds z, attn, pattern, score,
# hook_q or result.
POINTS = {
    "q": "hook_neuron_query",
    "k": "hook_neuron_key",
    "v": "hook_neuron_value",
    "attn_scores": "hook_neuron_logits",
    "pattern": "hook_neuron_probs",
    "z": "hook_neuron_act",
    "result": "hook_neuron_write",
}
"""The steps of a head's computation, and the hook point of each for neuron-heads in place.

Where heads are a block's attention, it is `hook_q`, `hook_k` and so on, as in TransformerLens.
"""


CHANGED = "the model is not what it was when its neurons became heads"


class Host(ABC):
    """A model with neuron-heads, as one of its kind: where its heads are, and how it is run.

    Attributes:
        model: the model.
        in_place: whether its blocks are those of its source.
    """

    in_place: ClassVar[bool]

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    @abstractmethod
    def neurons(self) -> list[Any]:
        """The neuron-heads of each source layer (`NeuronHeads`)."""

    @property
    @abstractmethod
    def n_heads(self) -> list[int]:
        """The number of attention heads of each source layer."""

    @property
    def n_layers(self) -> int:
        """The number of source layers."""
        return len(self.neurons)

    @abstractmethod
    def block(self, layer: int, kind: HeadKind) -> int:
        """The block that runs the attention heads, or the neurons, of a source layer."""

    def hook_name(self, layer: int, kind: HeadKind, point: str) -> str:
        """The full name of a hook point of the heads of a source layer.

        Args:
            layer: the source layer. The caller knows that the model has it.
            kind: of the heads.
            point: a key of `POINTS`.
        """
        block = self.block(layer, kind)
        if kind == "neuron" and self.in_place:
            return f"blocks.{block}.mlp.{POINTS[point]}"
        return f"blocks.{block}.attn.hook_{point}"

    @property
    @abstractmethod
    def passing(self) -> PassState:
        """The values that the modules of the model leave for each other in a forward pass."""

    def attention(self, layer: int) -> Any:
        """The module with the attention heads of a source layer."""
        return self.model.blocks[self.block(layer, "attention")].attn

    @abstractmethod
    def gates(self) -> list[dict[str, Any]]:
        """The gates of each source layer, as JSON."""

    @abstractmethod
    def stream_hook(self, layer: int, point: Literal["pre", "mid", "post"]) -> str:
        """The hook point of the residual stream before, within or after a source layer."""

    def write_hook(self, layer: int, kind: HeadKind) -> str:
        """The hook point of what the heads of a source layer add to the stream together."""
        sublayer = "mlp" if kind == "neuron" and self.in_place else "attn"
        return f"blocks.{self.block(layer, kind)}.hook_{sublayer}_out"

    @abstractmethod
    def reasons(self) -> list[str]:
        """Return why the model may no longer run the modules with its heads; empty if it does."""

    def unseen_edit_reasons(self, layer: int, kind: HeadKind) -> list[str]:
        """Return why an edit of z would miss part of what is computed from z; empty if none."""
        return []

    @abstractmethod
    def norms(self) -> list[Any]:
        """The norms of each source layer (`models/norms.py`).

        Raises:
            InputError: with every reason: norms, or an order of attention and MLP, not known.
        """

    def reads_centred(self) -> bool:
        """Return whether all that reads the stream subtracts the mean over d_model first.

        Raises:
            InputError: as `norms`.
        """
        layers = self.norms()
        return all(norms.attention[0].centres and norms.neuron[0].centres for norms in layers)

    @abstractmethod
    def final_norm(self) -> Any:
        """The norm that the unembedding reads through.

        Raises:
            InputError: it is not known.
        """

    def require_weights(self) -> None:
        """Check that `W_Q`, `W_in` and so on are the matrices that the model applies.

        Hooks of TransformerLens may be attached: they edit activations, not weights.

        Raises:
            InputError: with every matrix that differs, and every module that was replaced.
        """
        InputError.raise_if(self.reasons(), CHANGED)

    @abstractmethod
    def tokens_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """How many tokens came before those of a run, as the arguments of its first block say."""

    @abstractmethod
    def replay(self, recording: Any, metric: Any, precise: Any = None) -> Any:
        """The way to run a recorded pass again in part (`engine/replay`), unchecked."""


class WithNeuronHeads:
    """A model that has a host."""

    _host: ClassVar[type[Host]]


def stock_class(module: object) -> type:
    """Return the class that a module has without its neuron-heads."""
    kind = type(module)
    stock: type = vars(kind).get("_stock", kind)  # `vars`, as a subclass may compute something else
    return stock


def has_neuron_heads(model: object) -> bool:
    """Return True if the neurons of a model are heads."""
    return isinstance(model, WithNeuronHeads)


def host_of(model: Any) -> Host:
    """The host of a model.

    Raises:
        UnsupportedCallError: it has no neuron-heads.
    """
    if not isinstance(model, WithNeuronHeads):
        raise UnsupportedCallError("; ".join(reasons_without_heads(model)))
    return model._host(model)


def reasons_without_heads(model: object) -> list[str]:
    """List why an analysis refuses a model without neuron-heads; empty for one that has them."""
    if has_neuron_heads(model):
        return []
    return [
        f"the model, a {type(model).__name__}, has no neuron-heads: call "
        "attn_only_lens.convert(model), or attn_only_lens.expose_neuron_heads(model), first"
    ]
