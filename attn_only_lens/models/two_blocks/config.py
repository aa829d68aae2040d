"""The configuration of a converted model, each block's live view of it, and the sizes of layers.

In a model that `convert` made, all source layers are alike. They need not be: a block of heads
writes a sum over them, whatever their number, so the layers of a converted model may differ in
their heads and neurons (`rebuild`), and queries and keys may have another width than values, as in
the growth paper. The stream's d_model is one for all.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pprint import pformat
from typing import Any, NoReturn

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads.gating import Gating
from attn_only_lens.models.two_blocks.block_numbers import block_kind, block_layer
from attn_only_lens.models.two_blocks.get_act_patch import sweep_of_caller
from attn_only_lens.tl import HookedTransformerConfig


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one source layer, under the names that a configuration has for all but d_value.

    Attributes:
        n_heads: attention heads.
        n_key_value_heads: keys and values that they share, in groups of equal size; None where
            each head has its own.
        d_head: the width of an attention head's queries and keys.
        d_value: the width of its values, and of z; for TransformerLens the same.
        d_mlp: neurons.
        attn_scale: the divisor of the scores of its attention heads, if the model has one.

    Raises:
        ValueError: a size is no whole number above 0, or heads do not fall into groups.
    """

    n_heads: int
    n_key_value_heads: int | None
    d_head: int
    d_value: int
    d_mlp: int
    attn_scale: float

    def __post_init__(self) -> None:
        shared = 1 if self.n_key_value_heads is None else self.n_key_value_heads
        counts = [self.n_heads, self.d_head, self.d_value, self.d_mlp, shared]
        if any(type(each) is not int or each < 1 for each in counts):
            raise ValueError(f"got {self}; expected whole numbers, 1 or more")
        if self.n_key_value_heads and self.n_heads % self.n_key_value_heads:
            raise ValueError(f"got {self}; expected n_heads to be a multiple of n_key_value_heads")
        if isinstance(self.attn_scale, bool) or not isinstance(self.attn_scale, int | float):
            raise ValueError(f"got {self}; expected attn_scale to be a number")

    @property
    def stock_fields(self) -> dict[str, Any]:
        """The fields of a `HookedTransformerConfig`: all but d_value."""
        return {name: size for name, size in asdict(self).items() if name != "d_value"}

    def n_params(self, cfg: HookedTransformerConfig) -> int:
        """Count the parameters of the layer as TransformerLens does in `cfg.n_params`."""
        attention = 2 * self.n_heads * (self.d_head + self.d_value)
        return cfg.d_model * (attention + self.d_mlp * (2 + cfg.gated_mlp))


def sizes_of(cfg: HookedTransformerConfig) -> LayerSizes:
    """The sizes of every layer of a stock model with MLPs."""
    grouped = None if cfg.n_key_value_heads is None else int(cfg.n_key_value_heads)
    heads, width, neurons = int(cfg.n_heads), int(cfg.d_head), int(cfg.d_mlp or 0)
    return LayerSizes(heads, grouped, width, width, neurons, float(cfg.attn_scale))


def by_layer(values: Sequence[Any]) -> str:
    """Say in words which source layers have which value.

    Example:
        >>> from attn_only_lens.models.two_blocks.config import by_layer
        >>> by_layer([37, 41, 37])
        '37 in layers 0, 2 and 41 in layer 1'
    """
    layers: dict[Any, list[str]] = {}
    for layer, value in enumerate(values):
        layers.setdefault(value, []).append(str(layer))
    return " and ".join(
        f"{value} in layer{'s' * (len(of) > 1)} {', '.join(of)}" for value, of in layers.items()
    )


_READ_ONLY = (
    "act_fn",
    "attn_only",
    "d_mlp",
    "d_model",
    "gated_mlp",
    "gating",
    "layer_sizes",
    "n_layers",
)


class AttentionOnlyConfig(HookedTransformerConfig):
    """A `HookedTransformerConfig` with two blocks a source layer.

    `n_layers` counts blocks. `n_heads` raises: no single number is right for blocks of two kinds,
    and code that loops over `n_layers` × `n_heads` would silently skip most neuron-heads. Ask
    `model.blocks[i].cfg.n_heads`, or `model.cfg.layer_sizes`. It also keeps TransformerLens
    from building a different model out of this configuration.

    Where source layers differ in size, `d_mlp` raises too, and `n_key_value_heads`, `d_head` (of
    queries and keys) and `attn_scale` are those of layer 0: TransformerLens begins a key-value
    cache with the first two, and each attention block fits its own entry to its heads.
    """

    gating: Gating
    """The gates of the neuron-heads, for which the blocks were built."""
    layer_sizes: tuple[LayerSizes, ...]
    """The numbers of heads and neurons of each source layer, and the widths of its heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedCallError(
            "the configuration of a converted model is made by attn_only_lens.convert(model) or "
            "attn_only_lens.load(folder), not from fields"
        )

    def __repr__(self) -> str:
        return "AttentionOnlyConfig:\n" + pformat(vars(self))

    def to_dict(self) -> NoReturn:
        """Raises: a `HookedTransformerConfig` made of these fields would be of another model."""
        raise UnsupportedCallError(
            "to_dict of the configuration of a converted model: its blocks are of two kinds, for "
            "which HookedTransformerConfig has no fields. Use model.source_cfg.to_dict(), or "
            "model.cfg.layer_cfg(l).to_dict() where layers differ, for the source; and "
            "attn_only_lens.save(model, folder) to keep the model"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _READ_ONLY:
            raise UnsupportedCallError(
                f"cfg.{name} is read-only after conversion: blocks and gates were made for it. "
                "Set it on the source, and convert again"
            )
        super().__setattr__(name, value)

    @property
    def n_heads(self) -> int:  # type: ignore[override]
        """Raise, as the class says; return 0 to TransformerLens' patching of whole blocks."""
        if (sweep := sweep_of_caller(1)) is not None:
            sweep.require_no_heads()
            return 0
        m = self.gating.heads_per_neuron
        counts = by_layer([f"{each.n_heads} and {each.d_mlp * m}" for each in self.layer_sizes])
        raise UnsupportedCallError(
            f"cfg.n_heads of a converted model: its {self.n_layers} blocks alternate between "
            f"attention heads and neuron-heads ({counts}), so no "
            "one number is right. Use model.blocks[i].cfg.n_heads for a block, "
            "model.cfg.layer_sizes[l].n_heads for the attention heads of a source layer, and "
            "model.all_head_labels(neurons=True) for every head. To patch heads, "
            "from attn_only_lens import patching, and call patching.activation_patch(model, clean, "
            "corrupted, metric), or for paths between heads patching.path_patch(model, clean, "
            'corrupted, metric, senders="L0H1", receivers=patching.heads(), part="q"); or give '
            "generic_activation_patch an explicit index_df. To build a model, use "
            "attn_only_lens.convert or attn_only_lens.load"
        )

    @property
    def d_mlp(self) -> int:  # type: ignore[override]
        """Neurons of a source layer; raises where layers differ."""
        counts = [each.d_mlp for each in self.layer_sizes]
        if len(set(counts)) > 1:
            raise UnsupportedCallError(
                f"cfg.d_mlp of a converted model whose layers differ ({by_layer(counts)}): use "
                "model.cfg.layer_sizes[l].d_mlp, or model.blocks[i].cfg.d_mlp"
            )
        return counts[0]

    @property
    def has_stock_sizes(self) -> bool:
        """True if a stock model can have these sizes: of all layers, with one width of heads."""
        first = self.layer_sizes[0]
        return set(self.layer_sizes) == {first} and first.d_value == first.d_head

    def source_cfg(self) -> HookedTransformerConfig:
        """A stock configuration of the source model, at the present dtype and device.

        Raises:
            UnsupportedCallError: no stock model has such sizes: source layers differ, or values
                have another width than queries and keys.
        """
        if not self.has_stock_sizes:
            raise UnsupportedCallError(
                "source_cfg of a converted model whose layers differ, or whose values have another "
                "width than queries and keys: no stock model is like it. "
                f"It has {by_layer(self.layer_sizes)}. Use model.cfg for what all layers share, "
                "model.cfg.layer_sizes[l] or model.blocks[i].cfg for what they do not, and "
                "model.cfg.layer_cfg(l) for a stock configuration with every layer like layer l"
            )
        return self.layer_cfg(0)

    def layer_cfg(self, layer: int) -> HookedTransformerConfig:
        """A stock configuration of a source model with every layer of the size of this one.

        Its d_head is that of queries and keys.
        """
        fields = {k: v for k, v in self.__dict__.items() if k not in ("gating", "layer_sizes")}
        fields |= {
            "n_layers": len(self.layer_sizes),
            "attn_only": False,
            **self.layer_sizes[layer].stock_fields,
        }
        source = object.__new__(HookedTransformerConfig)
        source.__dict__.update(fields)
        source.n_params = source.n_layers * self.layer_sizes[layer].n_params(source)
        return source


def attention_only_config(
    source: HookedTransformerConfig, gating: Gating, sizes: Sequence[LayerSizes] | None = None
) -> AttentionOnlyConfig:
    """Make the configuration of a converted model.

    Args:
        source: the configuration of its source.
        gating: the gates of neuron-heads.
        sizes: of each layer, where they differ from those in `source`.
    """
    sizes = (sizes_of(source),) * source.n_layers if sizes is None else tuple(sizes)
    # TransformerLens sizes its key-value cache by n_key_value_heads where that is set and by
    # n_heads where it is not; the first always has a right answer here: neuron-heads cache nothing.
    first = sizes[0]
    kv_heads = first.n_heads if first.n_key_value_heads is None else first.n_key_value_heads
    cfg = object.__new__(AttentionOnlyConfig)
    cfg.__dict__.update(source.__dict__ | first.stock_fields)
    cfg.__dict__.update(
        n_layers=2 * source.n_layers,
        attn_only=True,
        n_key_value_heads=kv_heads,
        gating=gating,
        layer_sizes=sizes,
    )
    cfg.n_params = sum(each.n_params(source) for each in sizes)
    return cfg


class BlockConfig:
    """A block's view of the model's configuration: its overrides are fixed, the rest is live.

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
        raise AttributeError(f"a block's cfg is read-only: set {name} on the model's cfg")

    def of_attention(self) -> "BlockConfig":
        """The view of TransformerLens' attention, which reads d_head for the width of z alone."""
        view = copy.copy(self)
        view.__dict__["_overrides"] = self._overrides | {"d_head": self.d_value}
        return view


def _overrides(root: AttentionOnlyConfig, block: int) -> dict[str, Any]:
    layer = block_layer(block)
    sizes = root.layer_sizes[layer]
    # The second where the neurons read what the heads of their layer read: GPT-J, GPT-NeoX.
    both = {"layer": layer, "neurons_read_along": root.parallel_attn_mlp}
    if block_kind(block) == "neuron":
        n_heads = sizes.d_mlp * root.gating.heads_per_neuron
        heads = {"n_heads": n_heads, "d_head": 1, "d_value": 1, "n_key_value_heads": None}
        return {**both, **heads, "d_mlp": sizes.d_mlp}
    return {
        **both,
        **asdict(sizes),
        "use_hook_mlp_in": False,
        # Of the stock block's three endings, the one that adds an MLP's output to resid_pre +
        # attn_out and reads the MLP's input after the hooks of resid_pre. See AttentionBlock.
        "parallel_attn_mlp": True,
    }
