"""Exposed models as hosts: a source layer is a block, its neuron-heads are beside its MLP."""

from typing import Any, Literal

from transformers.cache_utils import Cache

from attn_only_lens.engine.attached_hooks import weight_hook_reasons
from attn_only_lens.engine.replay.base import Replay
from attn_only_lens.engine.replay.bridge import BridgeReplay
from attn_only_lens.engine.replay.hooked import HookedReplay
from attn_only_lens.errors import InputError
from attn_only_lens.heads.host import CHANGED, HeadKind, Host
from attn_only_lens.heads.pass_state import PassState
from attn_only_lens.models.hooked_host import HookedTransformerHost
from attn_only_lens.models.in_place.bridge_parts import part_reasons, unseen_edit_reasons
from attn_only_lens.models.in_place.hook_points import UnknownMLPError, find_hook_points
from attn_only_lens.models.norms import (
    LayerNorms,
    Norm,
    bridge_final_norm,
    bridge_norms,
    hooked_norms,
    require_bridge_weights,
    stream_is_centred,
)
from attn_only_lens.models.shared_weights import parted_reasons
from attn_only_lens.models.two_blocks.known_modules import structure_reasons

_AGAIN = "undo() and expose_neuron_heads again"


def replaced_mlps(model: Any) -> list[str]:
    """Return the reasons why an exposed model's MLPs are not those that were exposed."""
    heads, blocks = vars(model)["_neuron_heads"], model.blocks
    if len(heads) != len(blocks):
        return [f"it has {len(blocks)} blocks; expected {len(heads)}, as when exposed; {_AGAIN}"]
    reasons = [
        f"blocks.{neurons.layer}.mlp was replaced by a {type(mlp).__qualname__}; {_AGAIN}"
        for neurons, block in zip(heads, blocks, strict=True)
        for mlp in (block._modules.get("mlp"), _run_mlp(block, neurons.mlp))
        if getattr(mlp, "__dict__", None) is not vars(neurons.mlp)  # torch.export wraps modules
    ]
    return list(dict.fromkeys(reasons))


def _run_mlp(block: Any, mlp: Any) -> Any:
    """Return the module that the layer wrapped by a bridge's block runs as its MLP."""
    layer = block._modules.get("_original_component")
    name = None if layer is None else mlp.name
    return layer._modules.get(name) if name in getattr(layer, "_modules", ()) else mlp


class _InPlaceHost(Host):
    in_place = True

    @property
    def neurons(self) -> list[Any]:
        """The neuron-heads of each MLP, as they were exposed."""
        heads: list[Any] = vars(self.model)["_neuron_heads"]
        return heads

    @property
    def passing(self) -> PassState:
        """The values of a forward pass, which all MLPs share."""
        passing: PassState = self.neurons[0].passing
        return passing

    @property
    def n_heads(self) -> list[int]:
        """The number of attention heads, for each layer."""
        return [self.model.cfg.n_heads] * len(self.model.blocks)

    def block(self, layer: int, kind: HeadKind) -> int:
        """The block of the layer."""
        return layer

    def require_weights(self) -> None:
        """Check the weights, and refuse torch hooks that may change what they compute."""
        super().require_weights()
        InputError.raise_if(weight_hook_reasons(self.model), CHANGED)

    def _mlp_reasons(self) -> list[str]:
        """Return why MLPs, or their hook points, are not those that were exposed."""
        reasons = replaced_mlps(self.model)
        for heads in [] if reasons else self.neurons:
            try:
                if find_hook_points(heads.mlp) != heads.mlp_points:
                    reasons.append(f"layer {heads.layer}: parts of its mlp were replaced; {_AGAIN}")
            except UnknownMLPError as error:
                reasons.append(f"layer {heads.layer}: {error}")
        return reasons

    def gates(self) -> list[dict[str, Any]]:
        """The gates and the activation of each layer."""
        return [{**each.gating.to_json(), "act_fn": each.act_fn} for each in self.neurons]

    def stream_hook(self, layer: int, point: Literal["pre", "mid", "post"]) -> str:
        """The hook point of the source."""
        return f"blocks.{layer}.hook_resid_{point}"


class HookedHost(HookedTransformerHost, _InPlaceHost):
    """An exposed `HookedTransformer`, whose configuration says which norms it has."""

    def reasons(self) -> list[str]:
        """Return which MLPs were replaced, or which modules have an unknown class."""
        reasons = self._mlp_reasons() or structure_reasons(self.model)
        return parted_reasons(self.model) + reasons

    def norms(self) -> list[LayerNorms]:
        """The norms of each layer."""
        blocks = self.model.blocks
        names = ("ln1", "ln2", "ln1_post", "ln2_post")
        modules = [[getattr(block, name, None) for name in names] for block in blocks]
        return hooked_norms(self.model.cfg, [block.attn for block in blocks], modules)

    def replay(self, recording: Any, metric: Any, precise: Any = None) -> Replay:
        """Block by block."""
        return HookedReplay(self.model, recording, metric, precise)


class BridgeHost(_InPlaceHost):
    """An exposed `TransformerBridge`, whose norms and matrices are found by running it."""

    def reasons(self) -> list[str]:
        """Return which MLPs, or other parts, were replaced or wrapped."""
        return self._mlp_reasons() + part_reasons(self.model)

    def unseen_edit_reasons(self, layer: int, kind: HeadKind) -> list[str]:
        """Return which torch hooks read z before it is edited."""
        if kind == "neuron":
            return unseen_edit_reasons(self.model, self.neurons[layer].mlp_points.post)
        return unseen_edit_reasons(
            self.model, self.model.hook_dict[self.hook_name(layer, kind, "z")]
        )

    def norms(self) -> list[LayerNorms]:
        """The norms of each layer, as two tokens show them."""
        return bridge_norms(self.model)

    def reads_centred(self) -> bool:
        """Judge by a run of two tokens; `norms` has no norms on the stream, such as BERT's."""
        return stream_is_centred(self.model) or super().reads_centred()

    def final_norm(self) -> Norm:
        """The norm that the unembedding reads through, as two tokens show it."""
        return bridge_final_norm(self.model)

    def require_weights(self) -> None:
        """Hold the matrices against the modules that they are of."""
        super().require_weights()
        require_bridge_weights(self.model)

    def tokens_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The length of the cache of transformers, which each family passes in its own way."""
        caches = [each for each in (*args, *kwargs.values()) if isinstance(each, Cache)]
        return max((int(each.get_seq_length()) for each in caches), default=0)

    def replay(self, recording: Any, metric: Any, precise: Any = None) -> Replay:
        """Through the wrapped model's own forward pass."""
        return BridgeReplay(self.model, recording, metric, precise)
