"""Grow TransformerBridges: the code that all kinds of bridges share.

A bridge uses the same names for the parts of any model, for example `blocks.0.attn.q`. A table
lists, for each parameter of these parts, the `Weights` tensor that it stores and the order of its
axes. If the wrapped model has a joint matrix for queries, keys and values, the bridge computes with
copies of the matrix's three parts. Training changes only the copies. Growth therefore builds the
joint matrix from the copies.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeAlias

from torch import nn
from transformers.pytorch_utils import Conv1D

from attn_only_lens.arguments import with_article
from attn_only_lens.growth.expansion.weights import block_name
from attn_only_lens.growth.models.growable import Growable, Parameter, shared_parameter_reasons
from attn_only_lens.heads.host import exposed_reasons
from attn_only_lens.models.in_place import reasons_against_copying

WRAPPED = "_original_component."  # prefix of a wrapped module's parameter names
_Table: TypeAlias = dict[str, tuple[str, str | None]]


def _norms(*names: str) -> _Table:
    """Return the table entries for the gains and biases of the given norms."""
    parts = {"weight": "w", "bias": "b"}
    return {f"{x}.{part}": (f"{x}.{ours}", None) for x in names for part, ours in parts.items()}


# For each parameter, the tensor that it stores and the einops pattern from parameter to tensor.
_OF_MODEL: _Table = {
    "embed.weight": ("embed.W_E", None),
    "pos_embed.weight": ("pos_embed.W_pos", None),
    "token_type_embed.weight": ("token_type_embed.W_token_type", None),
    **_norms("embed_ln"),
    "mlm_head.weight": ("mlm_head.W", "output input -> input output"),
    "mlm_head.bias": ("mlm_head.b", None),
    **_norms("ln_final"),
    "unembed.weight": ("unembed.W_U", "vocab model -> model vocab"),
    "unembed.bias": ("unembed.b_U", None),
}
OF_BLOCK: _Table = {
    **_norms("ln1", "ln1_post", "ln2", "ln2_post"),
    "attn.q.weight": ("attn.W_Q", "(head width) model -> head model width"),
    "attn.q.bias": ("attn.b_Q", "(head width) -> head width"),
    "attn.k.weight": ("attn.W_K", "(kv_head width) model -> kv_head model width"),
    "attn.k.bias": ("attn.b_K", "(kv_head width) -> kv_head width"),
    "attn.v.weight": ("attn.W_V", "(kv_head width) model -> kv_head model width"),
    "attn.v.bias": ("attn.b_V", "(kv_head width) -> kv_head width"),
    "attn.o.weight": ("attn.W_O", "model (head width) -> head width model"),
    "attn.o.bias": ("attn.b_O", None),
    "attn.q_norm.weight": ("attn.q_norm.w", None),
    "attn.k_norm.weight": ("attn.k_norm.w", None),
    "mlp.in.weight": ("mlp.W_in", "neuron model -> model neuron"),
    "mlp.in.bias": ("mlp.b_in", None),
    "mlp.gate.weight": ("mlp.W_gate", "neuron model -> model neuron"),
    "mlp.gate.bias": ("mlp.b_gate", None),
    "mlp.out.weight": ("mlp.W_out", "model neuron -> neuron model"),
    "mlp.out.bias": ("mlp.b_out", None),
}


class BridgeModel(Growable):
    """A TransformerBridge."""

    def reasons_against(self) -> list[str]:
        """Return every reason why the model cannot be grown."""
        model = self.model
        if reasons := exposed_reasons(model):
            return reasons
        if any(parameter.is_meta for parameter in model.parameters()):
            return ["the weights are on the meta device and have no values; load them first"]
        reasons = reasons_against_copying(model)
        if model.compatibility_mode:
            reasons.append(
                "the bridge is in compatibility mode, which may have changed its weights; grow the "
                "bridge before you call enable_compatibility_mode"
            )
        parts = {path: parameter for path, (parameter, _) in self._parts.items()}
        if self.is_tied:
            del parts["unembed.weight"]
        return reasons + shared_parameter_reasons(parts.items())

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that the bridge computes with; a tied parameter has two names."""
        return self._named

    @cached_property
    def _named(self) -> dict[str, nn.Parameter]:
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parameters: dict[str, nn.Parameter] = {}
        for path, (parameter, _) in self._parts.items():
            name = names[id(parameter)]
            parameters[path if name in parameters else name] = parameter
        return parameters

    def parameters(self) -> Mapping[str, Parameter]:
        """Return the layout of every parameter that the bridge computes with."""
        layouts = (layout for _, layout in self._parts.values())
        return dict(zip(self.named_parameters(), layouts, strict=True))

    @property
    def is_tied(self) -> bool:
        """True if the unembedding and the embedding share one parameter."""
        return self._parts["unembed.weight"][0] is self._parts["embed.weight"][0]

    @cached_property
    def _parts(self) -> dict[str, tuple[nn.Parameter, Parameter]]:
        """A dictionary from the bridge's paths to parameters and their layouts."""
        model, cfg = self.model, self.model.cfg
        heads = {"head": cfg.n_heads, "kv_head": cfg.n_key_value_heads or cfg.n_heads}
        blocks = [(block_name(i, ""), block, OF_BLOCK) for i, block in enumerate(model.blocks)]
        parts = {}
        for prefix, owner, table in [("", model, _OF_MODEL), *blocks]:
            for path, (tensor, pattern) in table.items():
                name, _, kind = path.rpartition(".")
                part = _part(owner, name)
                parameter = None if part is None else part._parameters.get(kind)
                if parameter is None:
                    continue
                if pattern is not None and isinstance(part, Conv1D) and kind == "weight":
                    pattern = _transposed(pattern)
                if parameter.ndim == 1 and name in ("attn.q_norm", "attn.k_norm"):
                    pattern = self._norm_pattern(name)
                split = ((axis, n) for axis, n in heads.items() if f"({axis} " in (pattern or ""))
                parts[prefix + path] = parameter, Parameter(prefix + tensor, pattern, tuple(split))
        return parts

    def _norm_pattern(self, name: str) -> str | None:
        """Return the einops pattern of a query or key norm's gain; None if heads share one gain."""
        return None


def _part(owner: Any, path: str) -> Any:
    """Return the module that a bridge component wraps, or None if there is no such component."""
    for name in path.split("."):
        owner = getattr(owner, "_modules", {}).get(name)
        if owner is None:
            return None
    while WRAPPED[:-1] in owner._modules:
        owner = owner._modules[WRAPPED[:-1]]
    return owner


def _transposed(pattern: str) -> str:
    """Return the einops pattern for a matrix that is stored transposed (transformers' Conv1D)."""
    left, right = pattern.split(" -> ")
    rows, columns = re.findall(r"\([^)]*\)|\w+", left)
    return f"{columns} {rows} -> {right}"


def differing_modules(model: Any, usual: Any) -> list[str]:
    """Return every difference between the modules and constants (eps, scale, …) of two models.

    `usual` is a new model with the same configuration, without a bridge.
    """
    modules = {name.replace(f".{WRAPPED[:-1]}", ""): x for name, x in model.named_modules()}
    reasons = []
    for name, twin in usual.named_modules():
        module, label = modules.get(name), name or "the model"
        if module is None or isinstance(twin, nn.ModuleList):
            continue  # bridges split joint matrices and name their block lists differently
        if type(module) is not type(twin):
            got, expected = type(module).__qualname__, type(twin).__qualname__
            reasons.append(f"{label} is {with_article(got)}; the configuration says {expected}")
            continue
        has, says = _constants(module), _constants(twin)
        reasons += [
            f"{label}.{key} is {has.get(key)!r}; the configuration says {says.get(key)!r}"
            for key in sorted(has.keys() | says.keys())
            if has.get(key) != says.get(key)
        ]
    return reasons


# Attributes that do not affect a model's output, or that transformers does not keep up to date.
_INCIDENTAL = ("training", "gradient_checkpointing", "max_seq_len_cached", "vocab_size", "p")


def _constants(module: Any) -> dict[str, Any]:
    """Return the numbers, strings and flags that can affect a module's output."""
    plain = (bool, int, float, str, tuple, type(None))
    return {
        key: value
        for key, value in vars(module).items()
        if key[0] != "_" and key not in _INCIDENTAL and isinstance(value, plain)
    }
