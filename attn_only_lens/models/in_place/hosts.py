"""Exposed models as hosts: a source layer is a block, its neuron-heads are beside its MLP."""

from typing import Any, Literal

from transformers.cache_utils import Cache

from attn_only_lens.heads.host import HeadKind, Host
from attn_only_lens.heads.pass_state import PassState
from attn_only_lens.models.hooked_host import HookedTransformerHost
from attn_only_lens.models.norms import (
    LayerNorms,
    Norm,
    bridge_final_norm,
    bridge_norms,
    hooked_norms,
    require_bridge_weights,
)
from attn_only_lens.runs.replay.base import Replay
from attn_only_lens.runs.replay.bridge import BridgeReplay
from attn_only_lens.runs.replay.hooked import HookedReplay


class _InPlaceHost(Host):
    in_place = True

    @property
    def neurons(self) -> list[Any]:
        """The neuron-heads beside each MLP."""
        return [block.mlp._neuron_heads for block in self.model.blocks]

    @property
    def passing(self) -> PassState:
        """What all MLPs share."""
        passing: PassState = self.neurons[0].passing
        return passing

    @property
    def n_heads(self) -> list[int]:
        """The number of attention heads, for each layer."""
        return [self.model.cfg.n_heads] * len(self.model.blocks)

    def block(self, layer: int, kind: HeadKind) -> int:
        """The block of the layer."""
        return layer

    def gates(self) -> list[dict[str, Any]]:
        """The gates and the activation of each layer."""
        return [{**each.gating.to_json(), "act_fn": each.act_fn} for each in self.neurons]

    def stream_hook(self, layer: int, point: Literal["pre", "mid", "post"]) -> str:
        """The hook point of the source."""
        return f"blocks.{layer}.hook_resid_{point}"


class HookedHost(HookedTransformerHost, _InPlaceHost):
    """An exposed `HookedTransformer`, whose configuration says which norms it has."""

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

    def norms(self) -> list[LayerNorms]:
        """The norms of each layer, as two tokens show them."""
        return bridge_norms(self.model)

    def final_norm(self) -> Norm:
        """The norm that the unembedding reads through, as two tokens show it."""
        return bridge_final_norm(self.model)

    def require_weights(self) -> None:
        """Hold the matrices against the modules that they are of."""
        require_bridge_weights(self.model)

    def tokens_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The length of the cache of transformers, which each family passes in its own way."""
        caches = [each for each in (*args, *kwargs.values()) if isinstance(each, Cache)]
        return max((int(each.get_seq_length()) for each in caches), default=0)

    def replay(self, recording: Any, metric: Any, precise: Any = None) -> Replay:
        """Through the wrapped model's own forward pass."""
        return BridgeReplay(self.model, recording, metric, precise)
