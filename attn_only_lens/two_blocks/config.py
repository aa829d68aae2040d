"""The configuration of a converted model, and each block's live view of it."""

from typing import Any

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.gating import Gating
from attn_only_lens.heads.names import block_kind, block_layer
from attn_only_lens.tl import HookedTransformerConfig

__all__ = ["AttentionOnlyConfig", "BlockConfig", "attention_only_config"]


_SETTLED = ("act_fn", "attn_only", "d_mlp", "d_model", "gated_mlp", "gating", "n_layers")


class AttentionOnlyConfig(HookedTransformerConfig):
    """A `HookedTransformerConfig` with two blocks a source layer.

    `n_layers` counts blocks. `n_heads` raises: no single number is right for blocks of two kinds,
    and code that loops over `n_layers` × `n_heads` would silently skip most neuron-heads. Ask
    `model.blocks[i].cfg.n_heads`, or `model.source_cfg.n_heads`. It also keeps TransformerLens
    from building a different model out of this configuration.
    """

    before_conversion: dict[str, Any]
    _gating: Gating

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTLED and "_gating" in self.__dict__:
            raise UnsupportedCallError(
                f"cfg.{name} of a converted model is settled: blocks and gates were made for it. "
                f"Set it on the source, and convert that"
            )
        super().__setattr__(name, value)

    @property
    def gating(self) -> Gating:
        """The gates of the neuron-heads; settled by `convert`, since blocks are built for them."""
        return self._gating

    @property
    def n_heads(self) -> int:  # type: ignore[override]
        """Raises: see the class."""
        stored = self.__dict__
        raise UnsupportedCallError(
            f"cfg.n_heads of a converted model: its {self.n_layers} blocks alternate between "
            f"{stored['n_heads']} attention heads and {self.n_neuron_heads} neuron-heads, so no "
            "one number is right. Use model.blocks[i].cfg.n_heads for a block, "
            "model.source_cfg.n_heads for the attention heads of a source layer, and "
            "model.all_head_labels() for every head. To patch with TransformerLens, give "
            "generic_activation_patch an explicit index_df; to "
            "build a model, use attn_only_lens.convert or attn_only_lens.load"
        )

    @property
    def n_neuron_heads(self) -> int:
        """Neuron-heads of one block."""
        return (self.d_mlp or 0) * self.gating.heads_per_neuron

    def source_cfg(self) -> HookedTransformerConfig:
        """A stock configuration of the source model, at the present dtype and device."""
        ours = ("before_conversion", "_gating")
        fields = {k: v for k, v in self.__dict__.items() if k not in ours}
        source = object.__new__(HookedTransformerConfig)
        source.__dict__.update(fields | self.before_conversion)
        return source


def attention_only_config(source: HookedTransformerConfig, gating: Gating) -> AttentionOnlyConfig:
    """The configuration of the converted form of a model with configuration `source`."""
    # TransformerLens sizes its key-value cache by n_key_value_heads where that is set and by
    # n_heads where it is not; the first always has a right answer here: neuron-heads cache nothing.
    kv_heads = source.n_heads if source.n_key_value_heads is None else source.n_key_value_heads
    changed: dict[str, Any] = {
        "n_layers": 2 * source.n_layers,
        "attn_only": True,
        "n_key_value_heads": kv_heads,
    }
    cfg = object.__new__(AttentionOnlyConfig)
    cfg.__dict__.update(source.__dict__ | changed)
    cfg.before_conversion = {name: getattr(source, name) for name in changed}
    cfg._gating = gating
    return cfg


class BlockConfig:
    """A block's view of the model's configuration: what it overrides is fixed, the rest is live.

    Live, because `model.set_use_attn_result(True)` and its like change the model's configuration
    after the blocks are built; a block with a copy would silently ignore them.
    """

    _root: AttentionOnlyConfig
    _overrides: dict[str, Any]

    def __init__(self, root: AttentionOnlyConfig, block: int) -> None:
        self.__dict__["_root"] = root
        self.__dict__["_overrides"] = _overrides(root, block)

    def __getattr__(self, name: str) -> Any:
        # Reached before __dict__ is filled while a copy is being made.
        if name.startswith("_"):
            raise AttributeError(name)
        overrides = self._overrides
        return overrides[name] if name in overrides else getattr(self._root, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a block's cfg is a view: set {name} on the model's cfg")


def _overrides(root: AttentionOnlyConfig, block: int) -> dict[str, Any]:
    if block_kind(block) == "neuron":
        heads = {"n_heads": root.n_neuron_heads, "d_head": 1, "n_key_value_heads": None}
        return {**heads, "layer": block_layer(block)}
    source = root.source_cfg()
    return {
        "n_heads": source.n_heads,
        "n_key_value_heads": source.n_key_value_heads,
        "use_hook_mlp_in": False,
        # Of the stock block's three endings, the one that adds an MLP's output to resid_pre +
        # attn_out and reads the MLP's input after the hooks of resid_pre. See AttentionBlock.
        "parallel_attn_mlp": True,
    }
