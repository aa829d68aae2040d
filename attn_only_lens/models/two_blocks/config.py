"""The configuration of a converted model, with a view for each block and the sizes of each layer.

Block 2l holds the attention heads of the original layer l, and block 2l + 1 holds its neurons.
Because a block's output is a sum over heads, layers may have different numbers of heads and neurons
(`rebuild`), and values may have another width than queries and keys. All layers share d_model.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pprint import pformat
from typing import Any, NoReturn

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.gates.gating import Gating
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.tl import HookedTransformerConfig


def heads_block(layer: int) -> int:
    """Return the index of the block with the attention heads of an original layer."""
    return 2 * layer


def neurons_block(layer: int) -> int:
    """Return the index of the block with the neuron-heads of an original layer."""
    return 2 * layer + 1


def block_layer(block: int) -> int:
    """Return the layer of the original model to which a block belongs."""
    return block // 2


def block_kind(block: int) -> HeadKind:
    """Return the kind of a block's heads, "attention" or "neuron"."""
    return "neuron" if block % 2 else "attention"


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one original layer, named as in TransformerLens (except d_value)."""

    n_heads: int
    n_key_value_heads: int | None  # None without grouped-query attention
    d_head: int  # the width of queries and keys
    d_value: int  # the width of values and z; equal to d_head in TransformerLens
    d_mlp: int
    attn_scale: float  # divides attention scores if use_attn_scale is set

    def __post_init__(self) -> None:
        groups = 1 if self.n_key_value_heads is None else self.n_key_value_heads
        counts = [self.n_heads, self.d_head, self.d_value, self.d_mlp, groups]
        if any(type(count) is not int or count < 1 for count in counts):
            raise ValueError(f"got {self}; expected whole numbers of at least 1")
        if self.n_heads % groups:
            raise ValueError(f"got {self}; expected n_heads to be a multiple of n_key_value_heads")
        if isinstance(self.attn_scale, bool) or not isinstance(self.attn_scale, int | float):
            raise ValueError(f"got {self}; expected attn_scale to be a number")

    @property
    def stock_fields(self) -> dict[str, Any]:
        """The sizes as fields of a `HookedTransformerConfig`, which has no d_value."""
        return {name: size for name, size in asdict(self).items() if name != "d_value"}

    def n_params(self, cfg: HookedTransformerConfig) -> int:
        """Return the layer's number of parameters, as TransformerLens counts `cfg.n_params`."""
        attention = 2 * self.n_heads * (self.d_head + self.d_value)
        return cfg.d_model * (attention + self.d_mlp * (2 + cfg.gated_mlp))


def sizes_of(cfg: HookedTransformerConfig) -> LayerSizes:
    """Return the layer sizes of a stock model, which are the same in all of its layers."""
    groups = None if cfg.n_key_value_heads is None else int(cfg.n_key_value_heads)
    heads, width, neurons = int(cfg.n_heads), int(cfg.d_head), int(cfg.d_mlp or 0)
    return LayerSizes(heads, groups, width, width, neurons, float(cfg.attn_scale))


def by_layer(values: Sequence[Any]) -> str:
    """Return a string such as "37 in layers 0, 2 and 41 in layer 1" for [37, 41, 37]."""
    layers: dict[Any, list[str]] = {}
    for layer, value in enumerate(values):
        layers.setdefault(value, []).append(str(layer))
    return " and ".join(
        f"{value} in layer{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
        for value, numbers in layers.items()
    )


_READ_ONLY = {"act_fn", "attn_only", "d_mlp", "d_model", "gated_mlp"}
_READ_ONLY |= {"gating", "layer_sizes", "n_layers"}


class AttentionOnlyConfig(HookedTransformerConfig):
    """A `HookedTransformerConfig` with two blocks per layer of the original model.

    `n_layers` is the number of blocks. Reading `n_heads` raises an error, because a loop over
    `n_layers` × `n_heads` heads would silently skip most neuron-heads. `n_key_value_heads`,
    `d_head` (of queries and keys) and `attn_scale` are those of layer 0 of the original. Reading
    `d_mlp` raises an error if layers have different numbers of neurons.
    """

    gating: Gating
    """The gates of the neuron-heads."""
    layer_sizes: tuple[LayerSizes, ...]
    """For each original layer, the numbers of heads and neurons, and the widths of heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedCallError(
            "the configuration of a converted model cannot be made from fields: use "
            "attn_only_lens.convert(model) or attn_only_lens.load(folder)"
        )

    def __repr__(self) -> str:
        return "AttentionOnlyConfig:\n" + pformat(vars(self))

    def to_dict(self) -> NoReturn:
        """Raise an error, because a HookedTransformerConfig with these fields is another model."""
        raise UnsupportedCallError(
            "to_dict of the configuration of a converted model: HookedTransformerConfig has no "
            "fields for blocks of two kinds. Use model.source_cfg.to_dict() for the source, or "
            "model.cfg.layer_cfg(l).to_dict() if layers differ. Use "
            "attn_only_lens.save(model, folder) to keep the model"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _READ_ONLY:
            raise UnsupportedCallError(
                f"cfg.{name} is read-only after conversion: blocks and gates depend on the "
                "current value. Set it on the source, and convert again"
            )
        super().__setattr__(name, value)

    @property
    def n_heads(self) -> int:  # type: ignore[override]
        """Raise an error: attention blocks and neuron blocks have different numbers of heads."""
        # TransformerLens' `generic_activation_patch` reads it, and ignores it if no axis has heads.
        axes = sys._getframe(1).f_locals.get("index_axis_names")
        if axes is not None and not {"head", "head_index"}.intersection(axes):
            return 0
        n_neurons = self.gating.n_heads
        counts = by_layer(
            [f"{sizes.n_heads} and {n_neurons(sizes.d_mlp)}" for sizes in self.layer_sizes]
        )
        raise UnsupportedCallError(
            "to patch heads, call attn_only_lens.patching.activation_patch(model, "
            "contrast)\n"
            f"A converted model has no cfg.n_heads: its {self.n_layers} blocks alternate between "
            f"attention heads and neuron-heads ({counts}), so no single number is correct. Use "
            "model.blocks[i].cfg.n_heads for a block, "
            "model.cfg.layer_sizes[l].n_heads for the attention heads of a source layer, and "
            "model.all_head_labels(neurons=True) for every head. For paths between heads, call "
            "attn_only_lens.patching.path_patch(model, contrast, "
            'attn_only_lens.patching.Edges("L0H1", "heads", part="q")); or give '
            "generic_activation_patch an explicit index_df. To build a model, use "
            "attn_only_lens.convert or attn_only_lens.load"
        )

    @property
    def d_mlp(self) -> int:  # type: ignore[override]
        """The number of neurons per original layer; raise an error if layers differ."""
        counts = [sizes.d_mlp for sizes in self.layer_sizes]
        if len(set(counts)) > 1:
            raise UnsupportedCallError(
                f"cfg.d_mlp has no single value, since layers differ ({by_layer(counts)}): use "
                "model.cfg.layer_sizes[l].d_mlp, or model.blocks[i].cfg.d_mlp"
            )
        return counts[0]

    @property
    def has_stock_sizes(self) -> bool:
        """True if all layers have the same sizes, with d_value = d_head, as in stock models."""
        first = self.layer_sizes[0]
        return set(self.layer_sizes) == {first} and first.d_value == first.d_head

    def source_cfg(self) -> HookedTransformerConfig:
        """Return the original's configuration; raise an error if no stock model has these sizes."""
        if not self.has_stock_sizes:
            raise UnsupportedCallError(
                "this model has no source_cfg, because its layers differ in size, or values and "
                "queries differ in width: no stock model has these sizes. "
                f"The sizes are {by_layer(self.layer_sizes)}. Use model.cfg for common settings, "
                "model.cfg.layer_sizes[l] or model.blocks[i].cfg for sizes, and "
                "model.cfg.layer_cfg(l) for a stock configuration with every layer like layer l"
            )
        return self.layer_cfg(0)

    def layer_cfg(self, layer: int) -> HookedTransformerConfig:
        """Return a stock configuration in which all layers have the sizes of one original layer."""
        fields = {k: v for k, v in self.__dict__.items() if k not in ("gating", "layer_sizes")}
        sizes = self.layer_sizes[layer]
        fields |= {"n_layers": len(self.layer_sizes), "attn_only": False, **sizes.stock_fields}
        source = object.__new__(HookedTransformerConfig)
        source.__dict__.update(fields)
        source.n_params = source.n_layers * sizes.n_params(source)
        return source


def attention_only_config(
    source: HookedTransformerConfig, gating: Gating, sizes: Sequence[LayerSizes] | None = None
) -> AttentionOnlyConfig:
    """Return the configuration of a converted model; `sizes` are by default those of `source`."""
    sizes = (sizes_of(source),) * source.n_layers if sizes is None else tuple(sizes)
    first = sizes[0]
    cfg = object.__new__(AttentionOnlyConfig)
    cfg.__dict__.update(source.__dict__ | first.stock_fields)
    cfg.__dict__.update(
        n_layers=2 * source.n_layers,
        attn_only=True,
        # Not None: to allocate key-value caches, TransformerLens would then read n_heads, which
        # raises an error.
        n_key_value_heads=first.n_key_value_heads or first.n_heads,
        gating=gating,
        layer_sizes=sizes,
    )
    cfg.n_params = sum(layer.n_params(source) for layer in sizes)
    return cfg


class BlockConfig:
    """A view of the model's configuration for one block, with the block's own `n_heads` and so on.

    All other entries are read from the model's configuration. A copy of the configuration would
    miss later changes such as `model.set_use_attn_result(True)`.
    """

    _root: AttentionOnlyConfig
    _overrides: dict[str, Any]

    def __init__(self, root: AttentionOnlyConfig, block: int) -> None:
        self.__dict__["_root"] = root
        self.__dict__["_overrides"] = _overrides(root, block)

    def __getattr__(self, name: str) -> Any:
        # copy.copy reads private attributes before it fills __dict__.
        if name.startswith("_"):
            raise AttributeError(name)
        overrides = self._overrides
        return overrides[name] if name in overrides else getattr(self._root, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a block's cfg is read-only: set {name} on the model's cfg")

    def of_attention(self) -> "BlockConfig":
        """Return a view for TransformerLens' attention module; its d_head is the width of z."""
        view = copy.copy(self)
        view.__dict__["_overrides"] = self._overrides | {"d_head": self.d_value}
        return view


def _overrides(root: AttentionOnlyConfig, block: int) -> dict[str, Any]:
    layer = block_layer(block)
    sizes = root.layer_sizes[layer]
    # If attention and MLP run in parallel (GPT-J, GPT-NeoX), both read the same residual stream.
    common = {"layer": layer, "neurons_read_along": root.parallel_attn_mlp}
    if block_kind(block) == "neuron":
        n_heads = root.gating.n_heads(sizes.d_mlp)
        heads = {"n_heads": n_heads, "d_head": 1, "d_value": 1, "n_key_value_heads": None}
        return {**common, **heads, "d_mlp": sizes.d_mlp}
    # The docstring of `AttentionBlock` explains why parallel_attn_mlp is True.
    return {**common, **asdict(sizes), "use_hook_mlp_in": False, "parallel_attn_mlp": True}
