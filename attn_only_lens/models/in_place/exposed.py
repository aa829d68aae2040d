"""Subclasses for models and MLPs whose neurons are exposed as attention heads in place.

`expose_neuron_heads` sets the `__class__` of a model to a subclass, and `undo` sets it back, so all
references to the model stay valid. The model subclasses raise an error for hooks on
`mlp.hook_neuron_write` while this hook point is switched off; TransformerLens would silently ignore
them. In a HookedTransformer, the MLP subclasses pass their output through `mlp.hook_neuron_write`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import (
    GatedMLPBridge,
    JointGateUpMLPBridge,
    MLPBridge,
    MoEBridge,
)

from attn_only_lens.axes import Residual
from attn_only_lens.engine.cached_generation import watch_cache
from attn_only_lens.engine.tokens import length_dependent_ropes
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError
from attn_only_lens.heads.feature_mlp import FeatureMLP
from attn_only_lens.heads.host import (
    CHANGED,
    POINTS,
    WithNeuronHeads,
    stock_class,
    transcoder_reasons,
)
from attn_only_lens.models.base import HookChecks
from attn_only_lens.models.in_place.hosts import BridgeHost, HookedHost, replaced_mlps
from attn_only_lens.models.in_place.mlp_hooks import InPlace
from attn_only_lens.models.shared_weights import parted_reasons, sharing_reasons
from attn_only_lens.tl import MLP, GatedMLP, HookedTransformer

_RESULT = f"mlp.{POINTS['result']}"
_WEIGHTS = "its weights cannot be processed"
_OFF = "{name} does not fire while it is off: call model.set_use_attn_result(True) first"


class _Exposed(WithNeuronHeads):
    """A model whose blocks have MLPs with neuron-heads."""

    blocks: Any
    _stock: type

    def forward(self, *args: Any, **how: Any) -> Any:
        """Run the model; raise an error if an MLP was replaced, because its heads would not run."""
        UnsupportedModelError.raise_if(replaced_mlps(self), CHANGED)
        if how.get("start_at_layer") and self._host(self).writes_later:
            raise UnsupportedCallError(
                f"start_at_layer={how['start_at_layer']} skips layers whose features write to "
                "later layers; run the model from its first layer"
            )
        with exposed_heads(self)[0].passing.model_pass():  # a hook may run the model again
            return super().forward(*args, **how)  # type: ignore[misc]


class ExposedTransformer(_Exposed, HookChecks):
    """A HookedTransformer whose MLPs have neuron-heads."""

    _stock = HookedTransformer
    _host = HookedHost

    def forward(self, *args: Any, **how: Any) -> Any:
        """Run the model; raise an error if another model's norms were folded into its weights."""
        UnsupportedModelError.raise_if(parted_reasons(self), CHANGED)
        return super().forward(*args, **how)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, after checking that shared weights are unchanged."""
        UnsupportedModelError.raise_if(parted_reasons(self), CHANGED)
        return self.__dict__

    def load_and_process_state_dict(
        self, state_dict: Any, fold_ln: bool = True, *args: Any, **how: Any
    ) -> None:
        """Load weights; raise an error instead of folding norms into shared weights."""
        require_no_transcoders(self, _WEIGHTS)
        if fold_ln:
            UnsupportedModelError.raise_if(sharing_reasons(self), "its norms cannot be folded")
        super().load_and_process_state_dict(state_dict, fold_ln, *args, **how)

    def process_weights_(self, *args: Any, **how: Any) -> None:
        """Process weights as TransformerLens does, but refuse a model with transcoders."""
        require_no_transcoders(self, _WEIGHTS)
        super().process_weights_(*args, **how)

    def _list_hook_points(self, heads: list[InPlace]) -> None:
        self.setup()

    _unlist_hook_points = _list_hook_points

    def _silence(self, hook_name: str) -> str | None:
        on = self.cfg.use_attn_result or not hook_name.endswith(_RESULT)
        return None if on else _OFF.format(name=hook_name)


class ExposedBridge(_Exposed, TransformerBridge):
    """A TransformerBridge whose MLPs have neuron-heads."""

    _stock = TransformerBridge
    _host = BridgeHost

    def forward(self, *args: Any, **how: Any) -> Any:
        """Run the model; frequencies of dynamic rotary positions depend on this run alone."""
        if "dynamic" in length_dependent_ropes(self):
            reset_dynamic_ropes(self)
        return super().forward(*args, **how)

    def _list_hook_points(self, heads: list[InPlace]) -> None:
        for layer in heads:
            for name, point in layer.points.items():
                point.name = f"blocks.{layer.layer}.mlp.{name}"
                self._hook_registry[point.name] = point

    def _unlist_hook_points(self, heads: list[InPlace]) -> None:
        for layer in heads:
            for name in layer.points:
                vars(layer.mlp).get("_hook_registry", {}).pop(name, None)
                self._hook_registry.pop(f"blocks.{layer.layer}.mlp.{name}", None)

    def enable_compatibility_mode(self, *args: Any, **how: Any) -> None:
        """Process weights as TransformerLens does, but refuse a model with transcoders."""
        require_no_transcoders(self, _WEIGHTS)
        super().enable_compatibility_mode(*args, **how)

    def process_weights(self, *args: Any, **how: Any) -> None:
        """Process weights as TransformerLens does, but refuse a model with transcoders."""
        require_no_transcoders(self, _WEIGHTS)
        super().process_weights(*args, **how)

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Turn head results on or off in all MLPs and, if the bridge supports it, in attention."""
        try:
            super().set_use_attn_result(use_attn_result)
        except NotImplementedError as error:
            warnings.warn(f"set_use_attn_result affects only {_RESULT}: {error}", stacklevel=2)
        for heads in exposed_heads(self):
            heads.results = use_attn_result

    def run_with_cache(self, *args: Any, **how: Any) -> Any:
        """Run the model and return a cache; raise an error if a named hook point is off."""
        wanted = how.get("names_filter", args[3] if len(args) > 3 else None)
        names = [wanted] if isinstance(wanted, str) else wanted
        for name in names if isinstance(names, list) else []:
            if name.endswith(_RESULT) and self._gated_hook_reason(name):
                raise UnsupportedCallError(_OFF.format(name=name))
        return super().run_with_cache(*args, **how)

    def _gated_hook_reason(self, hook_point_name: str) -> str | None:
        if hook_point_name.endswith(_RESULT):
            on = all(heads.results_on for heads in exposed_heads(self))
            return None if on else "use_attn_result"
        return super()._gated_hook_reason(hook_point_name)


class _ExposedMLPBridge:
    """A bridge's MLP with neuron-heads; a hook point follows its W_out."""

    _neuron_heads: InPlace

    def forward(self, *args: Any, **how: Any) -> Any:
        """Run TransformerLens' MLP, then discard the values that the neuron-heads stored."""
        with self._neuron_heads.run_alone():
            return super().forward(*args, **how)  # type: ignore[misc]


class _ExposedMLP:
    """A HookedTransformer's MLP with neuron-heads; no hook point follows its W_out."""

    _neuron_heads: InPlace

    def forward(self, x: Residual) -> Residual:
        """Return the MLP's output, after any hooks at hook_neuron_write."""
        heads = vars(self).get("_neuron_heads")
        if heads is None:  # after undo(), if torch.nn.utils.parametrize changed the class
            return super().forward(x)  # type: ignore[misc]
        with heads.run_alone():
            return heads.write(super().forward(x))  # type: ignore[misc]


class ExposedMLP(_ExposedMLP, MLP):
    """A plain MLP with neuron-heads, in a HookedTransformer."""

    _stock = MLP


class ExposedGatedMLP(_ExposedMLP, GatedMLP):
    """A gated MLP with neuron-heads, in a HookedTransformer."""

    _stock = GatedMLP


class ExposedPlainBridge(_ExposedMLPBridge, MLPBridge):
    """A plain MLP with neuron-heads, in a bridge."""

    _stock = MLPBridge


class ExposedGatedBridge(_ExposedMLPBridge, GatedMLPBridge):
    """A gated MLP with neuron-heads, in a bridge."""

    _stock = GatedMLPBridge


class ExposedJointBridge(_ExposedMLPBridge, JointGateUpMLPBridge):
    """A gated MLP with neuron-heads, in a bridge, where one matrix computes both projections."""

    _stock = JointGateUpMLPBridge


class ExposedMixture(_ExposedMLPBridge, MoEBridge):
    """A mixture of experts with neuron-heads, or a dense MLP of such a model, in a bridge."""

    _stock = MoEBridge


class ExposedFeatureMLP(_ExposedMLPBridge, FeatureMLP):
    """A transcoder (`FeatureMLP`) whose features are neuron-heads."""

    _stock = FeatureMLP


_CLASSES: tuple[Any, ...] = (
    *(ExposedTransformer, ExposedBridge, ExposedMLP, ExposedGatedMLP, ExposedFeatureMLP),
    *(ExposedPlainBridge, ExposedGatedBridge, ExposedJointBridge, ExposedMixture),
)
_EXPOSED: dict[type, type] = {exposed._stock: exposed for exposed in _CLASSES}


def reset_dynamic_ropes(model: Any) -> None:
    """Forget the longest earlier input, to which transformers' dynamic ropes stay scaled."""
    for module in model.original_model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
            module.max_seq_len_cached = module.original_max_seq_len


def show(model: Any, heads: list[InPlace]) -> None:
    """Attach neuron-heads to all MLPs of a model, and switch the model to its exposed class."""
    for layer in heads:
        layer.attach()
        layer.mlp.__class__ = _EXPOSED.get(type(layer.mlp), type(layer.mlp))
    model.__class__ = _EXPOSED[type(model)]
    vars(model)["_neuron_heads"] = heads
    if isinstance(model, TransformerBridge):
        vars(model)["_cache_watch"] = watch_cache(model)
    model._list_hook_points(heads)


def hide(model: Any) -> None:
    """Remove the neuron-heads that `show` attached; do nothing if the model is not exposed."""
    heads = exposed_heads(model)
    for layer in heads:
        layer.mlp.__class__ = stock_class(layer.mlp)
        layer.detach()
    if heads:
        model._unlist_hook_points(heads)
        model.__class__ = stock_class(model)
        del vars(model)["_neuron_heads"]
        if watch := vars(model).pop("_cache_watch", None):
            watch.remove()


def require_no_transcoders(model: Any, problem: str) -> None:
    """Raise UnsupportedCallError if transcoders replace MLPs of a model."""
    for reason in transcoder_reasons(model):
        raise UnsupportedCallError(f"{problem}: {reason}")


@contextmanager
def hidden(model: Any) -> Iterator[Any]:
    """Context manager that hides the heads that `expose_neuron_heads` added, if any."""
    heads = exposed_heads(model)
    hide(model)
    try:
        yield model
    finally:
        if heads:
            show(model, heads)


def exposed_heads(model: object) -> list[InPlace]:
    """Return the neuron-heads of each layer, or an empty list if the model is not exposed."""
    return model._host(model).neurons if isinstance(model, _Exposed) else []
