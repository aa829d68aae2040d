"""The converted model, a `HookedTransformer` whose neurons are attention heads."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.arguments import a_type
from attn_only_lens.axes import Residual
from attn_only_lens.engine.replay.base import Joined, Replay
from attn_only_lens.engine.replay.hooked import HookedReplay
from attn_only_lens.errors import UnsupportedCallError, UnsupportedModelError
from attn_only_lens.heads.host import CHANGED, HeadKind, PassState, WithNeuronHeads
from attn_only_lens.heads.names import head_labels
from attn_only_lens.models.base import HookedTransformerHost
from attn_only_lens.models.norms import LayerNorms, hooked_norms
from attn_only_lens.models.shared_weights import parted_reasons
from attn_only_lens.models.two_blocks.blocks import (
    AttentionBlock,
    BilinearAttention,
    NeuronAttention,
    NeuronBlock,
    QKAndOV,
)
from attn_only_lens.models.two_blocks.cache import AttentionOnlyCache, refuse_mlp_input
from attn_only_lens.models.two_blocks.config import (
    AttentionOnlyConfig,
    block_kind,
    block_layer,
    by_layer,
    heads_block,
    neurons_block,
)
from attn_only_lens.models.two_blocks.known_modules import module_reasons
from attn_only_lens.models.two_blocks.refusals import ConvertedHookChecks, Refusals
from attn_only_lens.models.verification import Verification
from attn_only_lens.tl import (
    Attention,
    GroupedQueryAttention,
    HookedTransformer,
    HookedTransformerConfig,
)

_ATTENTION = ((Attention, GroupedQueryAttention), (NeuronAttention, BilinearAttention))


class StackedWeight:
    """A descriptor that stacks one weight over the original layers; None for a missing weight."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        stack = owner if isinstance(owner, HeadStack) else owner.neuron_heads
        weights = [getattr(attn, self.name) for attn in stack.attns]
        if weights[0] is None:
            return None
        shapes = [tuple(weight.shape) for weight in weights]
        if len(set(shapes)) > 1:
            block = "2 * l" if stack.kind == "attention" else "2 * l + 1"
            raise UnsupportedCallError(
                f"Cannot stack {self.name} across layers, because the layers differ in size: "
                f"{by_layer(shapes)}. Use "
                f"model.blocks[{block}].attn.{self.name} for source layer l"
            )
        return torch.stack(weights)


@dataclass(frozen=True)
class HeadStack(QKAndOV):
    """The stacked weights of all attention heads or all neuron-heads of a converted model.

    The first axis of each weight is the original model's layer. Grouped keys and values are
    repeated for each query head. d_value equals d_head unless the model was grown. If layers differ
    in size, reading a weight raises UnsupportedCallError.

    Attributes:
        kind: "attention" or "neuron".
        attns: the attention module of each layer.

    Example:
        >>> from attn_only_lens import convert, load
        >>> converted = convert(load("modular-addition"))
        >>> converted.attention_heads.W_Q.shape
        torch.Size([1, 4, 128, 32])
        >>> converted.neuron_heads.W_O.shape
        torch.Size([1, 512, 1, 128])
        >>> converted.neuron_heads.labels[-1]
        'L0N511'
    """

    kind: HeadKind
    attns: tuple[Any, ...]

    W_Q = StackedWeight()
    """Query weights [layer, head_index, d_model, d_head]."""
    W_K = StackedWeight()
    """Key weights [layer, head_index, d_model, d_head]; zero for neuron-heads."""
    W_V = StackedWeight()
    """Value weights [layer, head_index, d_model, d_value]; refused for gated neuron-heads."""
    W_O = StackedWeight()
    """Output weights [layer, head_index, d_value, d_model]."""
    b_Q = StackedWeight()
    """Query biases [layer, head_index, d_head]."""
    b_K = StackedWeight()
    """Key biases [layer, head_index, d_head]; zero for neuron-heads."""
    b_V = StackedWeight()
    """Value biases [layer, head_index, d_value]; refused for gated neuron-heads."""

    @property
    def labels(self) -> list[str]:
        """The names of all heads of this kind, layer by layer."""
        labels: list[str] = []
        for layer, attn in enumerate(self.attns):
            labels += head_labels(layer, self.kind, attn.cfg.n_heads)
        return labels


class TwoBlocksHost(HookedTransformerHost):
    """The host of a converted model, which has two blocks per layer of the original model."""

    in_place = False

    @property
    def neurons(self) -> list[Any]:
        """The modules with the neuron-heads, one for each layer of the original model."""
        return [block.attn for block in self.model.blocks[1::2]]

    def reasons(self) -> list[str]:
        """Return error messages for replaced modules and replaced forward methods."""
        reasons = parted_reasons(self.model) + module_reasons(self.model)
        for name, block in self.model.blocks.named_children():
            for path, module, known in (
                (f"blocks.{name}", block, (AttentionBlock, NeuronBlock)),
                (f"blocks.{name}.attn", getattr(block, "attn", None), _ATTENTION[int(name) % 2]),
            ):
                if type(module) not in known:
                    kinds = " or ".join(kind.__name__ for kind in known)
                    reasons.append(f"{path} was replaced by {a_type(module)}; expected a {kinds}")
        return reasons

    @property
    def passing(self) -> PassState:
        """The values that blocks store for later blocks in the same forward pass."""
        return self.model.passing

    @property
    def n_heads(self) -> list[int]:
        """The number of attention heads in each layer of the original model."""
        return [block.cfg.n_heads for block in self.model.blocks[::2]]

    def block(self, layer: int, kind: HeadKind) -> int:
        """Return the index of a layer's block: 2l for attention heads, 2l + 1 for neuron-heads."""
        return heads_block(layer) if kind == "attention" else neurons_block(layer)

    def gates(self) -> list[dict[str, Any]]:
        """Return JSON data with each layer's gates, which are the same in all layers."""
        return [dict(self.model.cfg.gating.to_json()) for _ in self.neurons]

    def stream_hook(self, layer: int, point: Literal["pre", "mid", "post"]) -> str:
        """Return the name of the residual stream's hook point before, within or after a layer."""
        block = heads_block(layer) if point == "pre" else neurons_block(layer)
        return f"blocks.{block}.hook_resid_{'post' if point == 'post' else 'pre'}"

    def norms(self) -> list[LayerNorms]:
        """Return each original layer's norms, which are in the layer's two blocks."""
        blocks = self.model.blocks
        names = ("ln1", "ln1_post")
        modules = [
            [getattr(block, name, None) for name in names for block in pair]
            for pair in zip(blocks[::2], blocks[1::2], strict=True)
        ]
        return hooked_norms(self.model.cfg, [block.attn for block in blocks[::2]], modules)

    def replay(self, recording: Any, metric: Any, precise: Any = None) -> Replay:
        """Return a `Replay`, which reruns the last blocks of a recorded forward pass one by one."""
        return _TwoBlocksReplay(self.model, recording, metric, precise)


class _TwoBlocksReplay(HookedReplay):
    def _run(self, joined: Joined, end: int) -> Residual:
        with self.model.passing.new_pass():
            return super()._run(joined, end)

    def enter(self, joined: Joined, block: int) -> None:
        """If neuron blocks read attention's input, restore this input from the recording."""
        n = sum(len(variant.stream) for variant in joined.entering(block)) // self.batch
        if not (self.model.cfg.parallel_attn_mlp and block % 2 and n):
            return
        values, layer = self.model.passing.values, block_layer(block - 1)
        recorded = self.recorded_stream(block - 1, joined.first, n)
        earlier = [values[layer]] if layer in values else []
        values[layer] = torch.cat([*earlier, recorded])


class AttentionOnlyTransformer(Refusals, ConvertedHookChecks, WithNeuronHeads):
    """An attention-only `HookedTransformer`, returned by `convert`.

    Block 2l holds the attention heads of the original layer l, and block 2l + 1 holds the layer's
    neurons as heads of width 1. In TransformerLens' methods, the argument `layer` is the index of a
    block. Names of heads refer to original layers (`L5H3`, `L5N1234`). TransformerLens methods that
    would give a wrong result raise an `UnsupportedCallError` that says what to use instead. After
    growth, layers may differ in their numbers of heads and neurons (`cfg.layer_sizes`).

    Example:
        >>> from attn_only_lens import convert, load, pretrained
        >>> model = convert(load("modular-addition"))
        >>> model.cfg.attn_only, len(model.blocks), model.source_cfg.n_layers
        (True, 2, 1)
        >>> logits, cache = model.run_with_cache(pretrained.modular_addition_tokens()[:7])
        >>> cache["pattern", 1].shape  # [batch, d_mlp, pos, (self, bias)]
        torch.Size([7, 512, 3, 2])
    """

    cfg: AttentionOnlyConfig
    verification: Verification | None = None
    """What `convert(check=…)` measured."""
    _host = TwoBlocksHost

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise UnsupportedCallError(
            "an AttentionOnlyTransformer cannot be made from a configuration: use "
            "attn_only_lens.convert(model) or attn_only_lens.load(folder)"
        )

    @property
    def passing(self) -> PassState:
        """The values that blocks store for later blocks in the same forward pass."""
        return cast(PassState, self.blocks[0].passing)

    # Names and weights

    @property
    def source_cfg(self) -> HookedTransformerConfig:
        """The original model's configuration, with this model's current dtype and device.

        Raises:
            UnsupportedCallError: layers differ in size, or values and queries differ in width.
        """
        return self.cfg.source_cfg()

    @property
    def attention_heads(self) -> HeadStack:
        """The attention heads of all layers of the original model."""
        return HeadStack("attention", tuple(block.attn for block in self.blocks[::2]))

    @property
    def neuron_heads(self) -> HeadStack:
        """The neuron-heads of all layers of the original model."""
        return HeadStack("neuron", tuple(block.attn for block in self.blocks[1::2]))

    def head_labels(self, block: int) -> list[str]:
        """Return the names of all heads in one block, ordered by head_index."""
        if not 0 <= block < self.cfg.n_layers:
            raise UnsupportedCallError(
                f"got block={block}; expected 0 to {self.cfg.n_layers - 1}: source layer l is "
                "blocks 2l and 2l + 1"
            )
        n_heads = self.blocks[block].attn.cfg.n_heads
        return list(head_labels(block_layer(block), block_kind(block), n_heads))

    def all_head_labels(self, neurons: bool = False) -> list[str]:
        """Return the names of all attention heads and, if `neurons` is set, of all neuron-heads."""
        blocks = range(0, len(self.blocks), 1 if neurons else 2)
        return [label for block in blocks for label in self.head_labels(block)]

    W_in: Any = StackedWeight()
    """Input weights [layer, d_model, d_mlp] of the neurons in every layer of the original."""
    b_in: Any = StackedWeight()
    """Input biases [layer, d_mlp] of the neurons in every layer of the original model."""
    W_out: Any = StackedWeight()
    """Output weights [layer, d_mlp, d_model] of the neurons in every layer of the original."""
    b_out: Any = StackedWeight()
    """Output biases [layer, d_model] of the neurons in every layer of the original model."""
    W_gate: Any = StackedWeight()
    """Gate weights [layer, d_model, d_mlp] of the neurons; None for plain MLPs."""

    @property
    def b_O(self) -> Float[Tensor, "block d_model"]:
        """The output biases of all blocks: attention blocks and neuron blocks alternate."""
        return torch.stack([block.attn.b_O for block in self.blocks])

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, "d_model"]:
        """Return the sum of the output biases of the blocks before block `layer`."""
        refuse_mlp_input(mlp_input)
        if not 0 <= layer <= self.cfg.n_layers:
            raise UnsupportedCallError(f"got layer={layer}; expected 0 to {self.cfg.n_layers}")
        return self.b_O[: layer : 1 if include_mlp_biases else 2].sum(dim=0)

    # Running

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model; `start_at_layer` and `stop_at_layer` are indices of blocks."""
        UnsupportedModelError.raise_if(parted_reasons(self), CHANGED)
        with self.passing.new_pass():  # a hook may run the model again
            return super().forward(input, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, after checking that shared weights are unchanged."""
        UnsupportedModelError.raise_if(parted_reasons(self), CHANGED)
        return self.__dict__

    def run_with_cache(
        self,
        *model_args: Any,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        names_filter: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model as in TransformerLens, but return an `AttentionOnlyCache`.

        Raises:
            UnsupportedCallError: `names_filter` names a hook point that does not fire.
        """
        # Skip HookedTransformer's own method, which would return an ActivationCache.
        out, cache = super(HookedTransformer, self).run_with_cache(
            *model_args, remove_batch_dim=remove_batch_dim, names_filter=names_filter, **kwargs
        )
        if return_cache_object:
            return out, AttentionOnlyCache(cache, self, has_batch_dim=not remove_batch_dim)
        return out, cache

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Turn on or off the hook points `hook_mlp_in`, which receive the neuron blocks' inputs."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Turn `hook_attn_in` on or off; raise an error for grouped-query attention."""
        if use_attn_in and any(sizes.n_key_value_heads for sizes in self.cfg.layer_sizes):
            raise UnsupportedCallError(
                "hook_attn_in with grouped-query attention: call set_use_split_qkv_input instead"
            )
        self.cfg.use_attn_in = use_attn_in
