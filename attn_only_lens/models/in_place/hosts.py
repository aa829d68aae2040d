"""Hosts (interfaces for analyses) of models with neurons exposed as attention heads in place.

A host is the interface through which analyses access a model (`heads/host.py`).
"""

from typing import Any, Literal

from transformers.cache_utils import Cache

from attn_only_lens.arguments import a_type
from attn_only_lens.engine.replay.base import Replay
from attn_only_lens.engine.replay.bridge import BridgeReplay
from attn_only_lens.engine.replay.hooked import HookedReplay
from attn_only_lens.heads.host import NEURON_KINDS, HeadKind, PassState
from attn_only_lens.models.base import HookedTransformerHost, ModelHost
from attn_only_lens.models.in_place.bridge_components import component_reasons, unseen_edit_reasons
from attn_only_lens.models.in_place.hook_points import find_hook_points
from attn_only_lens.models.in_place.mlp_hooks import InPlace, UnknownMLPError
from attn_only_lens.models.norms import (
    LayerNorms,
    Norm,
    bridge_final_norm,
    bridge_norms,
    hooked_block_norms,
    require_bridge_weights,
    residual_factor,
    stream_is_centred,
)
from attn_only_lens.models.shared_weights import parted_reasons
from attn_only_lens.models.two_blocks.known_modules import structure_reasons

_AGAIN = "call undo() and expose_neuron_heads again"


def replaced_mlps(model: Any) -> list[str]:
    """Return error messages for MLPs that were replaced after a model's neurons were exposed."""
    heads, blocks = vars(model)["_neuron_heads"], model.blocks
    if len(heads) != len(blocks):
        return [f"it has {len(blocks)} blocks, but it was exposed with {len(heads)}; {_AGAIN}"]
    reasons = [
        f"blocks.{neurons.layer}.mlp was replaced by {a_type(mlp)}; {_AGAIN}"
        for neurons, block in zip(heads, blocks, strict=True)
        for mlp in (block._modules.get("mlp"), _run_mlp(block, neurons.mlp))
        if getattr(mlp, "__dict__", None) is not vars(neurons.mlp)  # torch.export wraps modules
    ]
    return list(dict.fromkeys(reasons))


def _run_mlp(block: Any, mlp: Any) -> Any:
    """Return the module that the transformers layer of a bridge block runs as its MLP."""
    layer = block._modules.get("_original_component")
    name = None if layer is None else mlp.name
    return layer._modules.get(name) if name in getattr(layer, "_modules", ()) else mlp


class _InPlaceHost(ModelHost):
    in_place = True

    @property
    def neurons(self) -> list[InPlace]:
        """The neuron-heads of all layers."""
        heads: list[InPlace] = vars(self.model)["_neuron_heads"]
        return heads

    @property
    def passing(self) -> PassState:
        """The values that modules store for later modules in the same forward pass."""
        return self.neurons[0].passing

    @property
    def n_heads(self) -> list[int]:
        """The number of attention heads in each layer."""
        return [self.model.cfg.n_heads] * len(self.model.blocks)

    def block(self, layer: int, kind: HeadKind) -> int:
        """Return the index of a layer's block, which is `layer` itself."""
        return layer

    def _mlp_reasons(self) -> list[str]:
        """Return error messages for MLPs or their components that were replaced after exposing."""
        reasons = replaced_mlps(self.model)
        for heads in [] if reasons else self.neurons:
            try:
                if find_hook_points(heads.mlp) != heads.mlp_points:
                    reasons.append(
                        f"layer {heads.layer}: components of its mlp were replaced; {_AGAIN}"
                    )
            except UnknownMLPError as error:
                reasons.append(f"layer {heads.layer}: {error}")
        return reasons

    def gates(self) -> list[dict[str, Any]]:
        """Return JSON data with each layer's gates and the name of its activation function."""
        return [{**heads.gating.to_json(), "act_fn": heads.act_fn} for heads in self.neurons]

    def stream_hook(self, layer: int, point: Literal["pre", "mid", "post"]) -> str:
        """Return the name of the residual stream's hook point before, within or after a layer."""
        return f"blocks.{layer}.hook_resid_{point}"


class HookedHost(HookedTransformerHost, _InPlaceHost):
    """The host of an exposed `HookedTransformer`; it finds norms from the configuration."""

    def reasons(self) -> list[str]:
        """Return error messages for replaced MLPs and for modules of unknown classes."""
        reasons = self._mlp_reasons() or structure_reasons(self.model)
        return parted_reasons(self.model) + reasons

    def norms(self) -> list[LayerNorms]:
        return hooked_block_norms(self.model)

    def replay(self, recording: Any, metric: Any, precise: Any = None) -> Replay:
        """Return a `Replay`, which reruns the last blocks of a recorded forward pass one by one."""
        return HookedReplay(self.model, recording, metric, precise)


class BridgeHost(_InPlaceHost):
    """The host of an exposed `TransformerBridge`; it finds norms by running the bridge."""

    def reasons(self) -> list[str]:
        """Return error messages for components, such as MLPs, that were replaced or wrapped."""
        return self._mlp_reasons() + component_reasons(self.model)

    def unseen_edit_reasons(self, layer: int, kind: HeadKind) -> list[str]:
        """Return error messages for torch hooks that would receive z before edits at hook_z."""
        if kind in NEURON_KINDS:
            return unseen_edit_reasons(self.model, self.neurons[layer].mlp_points.post)
        z = self.model.hook_dict[self.hook_name(layer, kind, "z")]
        return unseen_edit_reasons(self.model, z)

    def residual_factor(self, layer: int) -> float:
        """Return the constant that multiplies the outputs at a layer's write hooks (Granite)."""
        return residual_factor(self.model.blocks[layer])

    def write_hook(self, layer: int, kind: HeadKind) -> str:
        """Return the hook name of the summed output of heads, before a constant factor."""
        if self.residual_factor(layer) == 1.0:
            return super().write_hook(layer, kind)
        # Bridges of 3.9 drop what hooks on the multiplied outputs return, if it has equal values.
        return f"blocks.{layer}.{'attn' if kind == 'attention' else 'mlp'}.hook_out"

    def norms(self) -> list[LayerNorms]:
        """Return the norms of each layer, found by running the model on two tokens."""
        return bridge_norms(self.model)

    def reads_centred(self) -> bool:
        """Return whether heads read the residual stream with its mean subtracted."""
        return stream_is_centred(self.model) or super().reads_centred()

    def final_norm(self) -> Norm:
        """Return the final norm layer, found by running the model on two tokens."""
        return bridge_final_norm(self.model)

    def require_weights(self) -> None:
        """Raise an error for replaced modules, torch hooks, or weights that no module applies."""
        super().require_weights()
        require_bridge_weights(self.model)

    def tokens_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return how many tokens the key-value cache in the arguments holds (0 without a cache)."""
        caches = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Cache)]
        return max((int(cache.get_seq_length()) for cache in caches), default=0)

    def replay(self, recording: Any, metric: Any, precise: Any = None) -> Replay:
        """Return a `Replay`, which reruns parts of the wrapped model's recorded forward pass."""
        return BridgeReplay(self.model, recording, metric, precise)
