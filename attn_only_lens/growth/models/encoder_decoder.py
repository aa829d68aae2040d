"""Grow TransformerBridges around encoder-decoder models of Hugging Face transformers: T5 and mT5.

Both models are pre-norm with RMSNorm, and do not divide attention scores. A block of the decoder
attends to itself and to the encoder's output, which is the encoder's stream after a norm. Relative
positions add an entry of a table to each score of self-attention. The first block of a stack holds
the stack's table; if a layer is inserted before this block, the table moves.

The configuration has one d_ff, one num_heads and one d_kv for all layers of both stacks. If only
some layers grow, the other layers therefore get units of zeros, which never learn (see
`PaddedExpansion`). The stacks also share d_model, and cannot differ in it even with zeros: both
streams start with rows of one embedding matrix, so training writes to a new coordinate of both.
"""

import copy
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from attn_only_lens.growth.expansion.expansion import ExpansionSequence
from attn_only_lens.growth.expansion.neurons import AddNeurons
from attn_only_lens.growth.expansion.weights import (
    Axis,
    Constants,
    Weights,
    block_name,
    in_layer,
    tail,
)
from attn_only_lens.growth.models.bridge import OF_BLOCK, WRAPPED
from attn_only_lens.growth.models.growable import Parameter
from attn_only_lens.growth.models.hugging_face import HuggingFaceBridge
from attn_only_lens.tl import HAS_HOOKED_TRANSFORMER

ENCODER_DECODERS = ("t5", "mt5")
"""The families that can grow, by `model_type`."""
_OF_MODEL = {
    "embed.W_E": "shared",
    "pos_bias.encoder": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "pos_bias.decoder": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "encoder_ln_final.w": "encoder.final_layer_norm",
    "ln_final.w": "decoder.final_layer_norm",
    "unembed.W_U": "lm_head",
}
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_NAMES = {"shared.weight": "embed.weight", "lm_head.weight": "unembed.weight"}  # as in all bridges
_ATTENTIONS = {"attn": "layer.0.SelfAttention", "cross_attn": "layer.1.EncDecAttention"}
_NEURONS = {"W_gate": "wi_0", "W_in": "wi", "W_out": "wo"}
_PATTERNS = dict(OF_BLOCK.values()) | {"unembed.W_U": "vocab model -> model vocab"}
_BLOCK = re.compile(r"(encoder|decoder)(\.block\.)(\d+)")


class EncoderDecoderBridge(HuggingFaceBridge):
    """A TransformerBridge around an encoder-decoder model of a known family."""

    may_differ_by_layer = frozenset()
    padded_because = (
        "the configuration has one d_ff, num_heads and d_kv for all layers, so layers that did not "
        "grow got units of zeros, which compute and learn nothing"
    )

    def reasons_against_padding(self, padding: ExpansionSequence) -> list[str]:
        """Return why units of zeros would learn: neurons that are not 0 for an input of 0."""
        config = self.model.original_model.config
        at_zero = float(ACT2FN[config.dense_act_fn](torch.zeros((), device="cpu")))
        neurons = any(isinstance(step, AddNeurons) for step in padding.steps)
        if config.is_gated_act or not at_zero or not neurons:
            return []
        return [
            f"{config.dense_act_fn}(0) is {at_zero:.3g}, so neurons of zeros in the layers that do "
            "not grow would learn; expected neurons in all layers of both stacks"
        ]

    @staticmethod
    def is_kind(model: Any) -> bool:
        """Return True for a bridge around a T5 or mT5 model with a language modelling head."""
        wrapped = getattr(model, "original_model", None)
        return (
            isinstance(model, TransformerBridge)
            and isinstance(wrapped, PreTrainedModel)
            and wrapped.config.model_type in ENCODER_DECODERS
            and type(wrapped).__name__.endswith("ForConditionalGeneration")
        )

    def reasons_against(self) -> list[str]:
        """Return every reason why the model cannot be grown."""
        if HAS_HOOKED_TRANSFORMER:
            return ["transformer-lens 3.9 cannot run T5 of this transformers; install version 4"]
        if reasons := super().reasons_against():
            return reasons
        named = self._named_by_transformers()
        return [
            f"{name} is not shared.weight; expected one embedding for both stacks"
            for name in _COPIES
            if named[name] is not named["shared.weight"]
        ]

    def read(self) -> Weights:
        """Return the model's weights."""
        config = self.config
        constants = Constants(
            n_layers=config.num_layers + config.num_decoder_layers,
            n_encoder_layers=config.num_layers,
            norm="RMS",
            final_norm="RMS",
            eps=config.layer_norm_epsilon,
            scale=1.0,
            positions="relative",
            tied=self.is_tied,
            unembed_scaled=getattr(config, "scale_decoder_outputs", False),
            init=("T5", float(config.initializer_factor)),
        )
        return Weights(self.tensors(), constants)

    def reasons_against_saving(self) -> list[str]:
        """Return an empty list, because the configuration describes every grown model."""
        return []

    def grown_config(self, weights: Weights) -> PretrainedConfig:
        """Return the configuration of a model with the given weights."""
        config, constants, sizes = copy.deepcopy(self.config), weights.constants, weights.sizes
        fields = {
            "d_model": sizes[Axis("d_model")],
            "d_ff": sizes[Axis("d_mlp", 0)],
            "d_kv": sizes[Axis("d_query", 0)],
            "num_heads": sizes[Axis("head", 0)],
            "num_layers": constants.n_encoder_layers,
            "num_decoder_layers": constants.n_layers - constants.n_encoder_layers,
            "layer_norm_epsilon": constants.eps,
            "tie_word_embeddings": True,  # also ties the embeddings of the stacks
        }
        for key, value in fields.items():
            setattr(config, key, value)
        return config

    def state(self, weights: Weights) -> dict[str, Tensor]:
        """Return the state dict of a transformers model with the given weights."""
        n_encoder = weights.constants.n_encoder_layers
        state = {
            self._path_of(name, n_encoder): _layout(name).from_weights(tensor)
            for name, tensor in weights.tensors.items()
        }
        if weights.constants.tied:
            state["lm_head.weight"] = state["shared.weight"]
        return state | dict.fromkeys(_COPIES, state["shared.weight"])

    def _path_of(self, tensor: str, n_encoder: int) -> str:
        """Return the name that transformers gives the parameter which stores a tensor."""
        layer = in_layer(tensor)
        if layer is None:
            return f"{_OF_MODEL[tensor]}.weight"
        stack, index = ("encoder", layer) if layer < n_encoder else ("decoder", layer - n_encoder)
        module, _, kind = tail(tensor).partition(".")
        if module == "mlp":
            linear = _NEURONS[kind]
            linear += "_1" * (linear == "wi" and self.config.is_gated_act)
            inner = f"layer.{1 + (stack == 'decoder')}.DenseReluDense.{linear}"
        elif module in _ATTENTIONS:
            inner = f"{_ATTENTIONS[module]}.{kind[-1].lower()}"
        else:
            inner = f"layer.{int(module[-1]) - 1}.layer_norm"
        return f"{stack}.block.{index}.{inner}.weight"

    @cached_property
    def _parts(self) -> dict[str, tuple[nn.Parameter, Parameter]]:
        config = self.config
        mlp = ["mlp.W_gate"] * config.is_gated_act + ["mlp.W_in", "mlp.W_out"]
        tails = ["ln1.w", "ln2.w", *(f"attn.W_{x}" for x in "QKVO"), *mlp]
        of_decoder = [*tails, "ln3.w", *(f"cross_attn.W_{x}" for x in "QKVO")]
        blocks = [tails] * config.num_layers + [of_decoder] * config.num_decoder_layers
        tensors = [block_name(layer, of) for layer, block in enumerate(blocks) for of in block]
        named = self.model.original_model.named_parameters(remove_duplicate=False)
        parameters = {name.replace(WRAPPED, ""): parameter for name, parameter in named}
        parts = {}
        for tensor in [*_OF_MODEL, *tensors]:
            name = self._path_of(tensor, config.num_layers)
            parts[_NAMES.get(name, name)] = parameters[name], _layout(tensor, config.num_heads)
        return parts

    def _logits(self, model: Any, tokens: Tensor) -> Tensor:
        """Run the transformers model, which decodes the tokens in reverse."""
        model = getattr(model, "original_model", model)
        logits: Tensor = model(input_ids=tokens, decoder_input_ids=tokens.flip(1)).logits
        return logits

    def _is_known(self, name: str) -> bool:
        return name in _COPIES or _NAMES.get(name, name) in self._parts

    def _beside(self) -> set[str]:
        return set()  # the bridge adds no parameters

    def _old_path(
        self, path: str, old_layer: Callable[[int], int], grown: HuggingFaceBridge
    ) -> str:
        def in_stack(match: re.Match[str]) -> str:
            of_decoder = match[1] == "decoder"
            layer = old_layer(int(match[3]) + grown.config.num_layers * of_decoder)
            return f"{match[1]}{match[2]}{layer - self.config.num_layers * of_decoder}"

        return _BLOCK.sub(in_stack, path)

    def _module(
        self, config: PretrainedConfig, state: Mapping[str, Tensor] | None = None
    ) -> PreTrainedModel:
        model: Any = super()._module(config, state)
        if state is not None and state["lm_head.weight"] is not state["shared.weight"]:
            # T5's configuration cannot say that embeddings are not tied.
            model.lm_head.weight = nn.Parameter(state["lm_head.weight"])
        return model


def _layout(tensor: str, n_heads: int | None = None) -> Parameter:
    """Return the layout of the parameter that stores a tensor."""
    pattern = _PATTERNS.get(tail(tensor).replace("cross_attn", "attn"))
    axes = (axis for axis in ("head", "kv_head") if f"({axis} " in (pattern or ""))
    return Parameter(tensor, pattern, tuple((axis, n_heads or 0) for axis in axes))
