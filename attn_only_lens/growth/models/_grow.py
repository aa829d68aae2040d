"""Grow a model: build a larger model that computes the same function."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from typing_extensions import TypedDict, Unpack

from attn_only_lens.arguments import POSITIVE, a_type, as_plain
from attn_only_lens.devices import float32_if_half
from attn_only_lens.engine.model_checks import hook_reasons
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.expansion import (
    Expansion,
    ExpansionSequence,
    PaddedExpansion,
    compose,
    reasons_against_bytes,
)
from attn_only_lens.growth.expansion.heads import AddHeads
from attn_only_lens.growth.expansion.initialise import Initialiser, own
from attn_only_lens.growth.expansion.layers import InsertLayer
from attn_only_lens.growth.expansion.neurons import AddNeurons
from attn_only_lens.growth.expansion.provenance import Provenance
from attn_only_lens.growth.expansion.queries import WidenQueriesAndKeys
from attn_only_lens.growth.expansion.stream import WidenStream
from attn_only_lens.growth.expansion.values import WidenValues
from attn_only_lens.growth.expansion.weights import (
    NOT_GROWN,
    Axis,
    Identity,
    Weights,
    identity_of,
    in_layer,
)
from attn_only_lens.growth.models.encoder_decoder import ENCODER_DECODERS, EncoderDecoderBridge
from attn_only_lens.growth.models.growable import Growable
from attn_only_lens.growth.models.grown_folder import save_pretrained
from attn_only_lens.growth.models.hooked import HookedModel
from attn_only_lens.growth.models.hugging_face import FAMILIES, HuggingFaceBridge
from attn_only_lens.growth.models.native import NativeBridge
from attn_only_lens.growth.models.optimizer import OptimizerT, grown_optimizer
from attn_only_lens.growth.models.two_blocks import ConvertedModel
from attn_only_lens.models.in_place.known_mlps import non_finite_weights
from attn_only_lens.storage import tensor_digest

_KINDS: tuple[type[Growable], ...] = (
    *(HookedModel, ConvertedModel, NativeBridge, HuggingFaceBridge),
    EncoderDecoderBridge,
)
_UNTIED = "untied: the embedding and the unembedding were one matrix; a wider stream needs two"
_CENTRED = (
    "centred: all weights that write to the residual stream lost their mean over d_model, which "
    "LayerNorm ignores; shrink() restores it"
)


@dataclass(frozen=True)
class Grown:
    """A grown model that can be shrunk back to the original model.

    Attributes:
        model: the grown model, which has the class of the original model.
        provenance: the new place of each old head, neuron, layer, coordinate and parameter.
        notes: sentences that describe what else growth changed, for example by rounding.
    """

    model: Any
    provenance: Provenance
    notes: tuple[str, ...] = ()
    # For each tensor that growth changed, its original value and a digest of its changed value.
    # `shrink` restores the original if the digest shows that training has not changed the tensor.
    _originals: dict[str, tuple[Tensor, str]] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        name, n = type(self.model).__name__, sum(x.numel() for x in self.model.parameters())
        return f"<Grown {name} with {n:,} parameters; see .model, .provenance and .notes>"

    def shrink(self, *, drop_new: bool = False) -> Any:
        """Return a model of the original size, without the parts that growth added.

        Right after growth, the result equals the original model exactly. After training, the result
        contains the trained values of the old entries, divided by the factors that growth applied.
        If growth centred the residual stream, the residual stream of the result is centred too.

        Args:
            drop_new: whether to drop new parts even if they affect the model's output.

        Raises:
            InputError: entries that had to be zero are not zero any more, so the old part alone
                computes another function.
        """
        growable, provenance = growable_of(self.model), self.provenance
        if reasons := _all_reasons(growable):
            raise InputError(reasons, "this model cannot be shrunk")
        now = growable.read()
        broken = provenance.broken(now.tensors)
        if broken and not drop_new:
            reasons = [
                f"{name}: entries that {was} after growth have changed; shrink(drop_new=True) "
                "drops them anyway, which changes the model's function"
                for name, was in broken.items()
            ]
            raise InputError(reasons, "this model cannot be shrunk")
        tensors = {}
        for name in now.tensors:
            old = provenance.old_name(name)
            if old is None:
                continue
            part = provenance.old_part(old, now.tensors)
            original, digest = self._originals.get(old, (None, ""))
            if original is not None and tensor_digest([(old, part)]) == digest:
                tensors[old] = original.to(part.device, copy=True)
            else:
                tensors[old] = provenance.tensor_map(old).unscaled(part)
        constants = provenance.constants
        if constants.tied and not torch.equal(tensors["embed.W_E"], tensors["unembed.W_U"].T):
            constants = replace(constants, tied=False)  # training has made the two matrices differ
        before = Weights(tensors, constants)
        return growable.write(_unshared(before, now), provenance.name)

    def optimizer(self, optimizer: OptimizerT, model: Any) -> OptimizerT:
        """Return an optimizer for the grown model that continues from the old optimizer's state.

        The new optimizer's first step changes old parameters exactly as the old one's next step
        would. The steps differ if d_model grew in a model with LayerNorm (`growth/optimizer.py`
        says by how much). Create learning-rate schedulers again for the new optimizer, and pass
        `last_epoch`.

        Args:
            optimizer: torch's `SGD`, `Adam` or `AdamW`; it is not changed.
            model: the original model, whose parameters the optimizer trains.

        Raises:
            InputError: the optimizer has an unsupported class, or trains another model.

        Example:
            >>> import torch
            >>> from attn_only_lens import grow, load
            >>> model = load("modular-addition")
            >>> old = torch.optim.AdamW(model.parameters(), lr=1e-3)
            >>> grown = grow(model, d_mlp=640)
            >>> new = grown.optimizer(old, model)
            >>> new.param_groups[0]["lr"] == old.param_groups[0]["lr"]
            True
        """
        return grown_optimizer(
            optimizer, growable_of(model), growable_of(self.model), self.provenance
        )

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write the grown model with its current weights to a folder, completely or not at all.

        For a bridge around a transformers model, `AutoModelForCausalLM.from_pretrained(folder)`
        loads the saved model (BERT: `AutoModelForMaskedLM`, T5: `AutoModelForSeq2SeqLM`). For a
        HookedTransformer, the folder has `config.json`, `model.safetensors` and `tokenizer/`.
        `provenance.json` has a digest of every file except `README.md`, a model card for the
        Hugging Face hub; a card that is there is kept. After more training, call this method again;
        do not overwrite only the weights.

        Args:
            folder: path of the folder. A grown model in the folder is replaced. A folder with other
                files is refused.

        Returns:
            The folder.

        Raises:
            InputError: models of this kind cannot be saved, or no transformers configuration can
                describe the model. `attn_only_lens.save` can save such models with neuron-heads.
            CheckpointError: the folder holds other files.

        Example:
            >>> import tempfile
            >>> from attn_only_lens import grow, load
            >>> grown = grow(load("modular-addition"), n_layers=2)
            >>> with tempfile.TemporaryDirectory() as parent:
            ...     folder = grown.save_pretrained(f"{parent}/grown")
            ...     load(folder / "provenance.json") == grown.provenance
            True
        """
        return save_pretrained(growable_of(self.model), self.provenance, folder)


class ModelSizes(TypedDict, total=False):
    """Sizes of a grown model; None keeps a size."""

    d_mlp: int | None
    n_heads: int | None
    d_head: int | None
    d_model: int | None
    n_layers: int | None


@torch.inference_mode(False)  # tensors created in inference mode cannot be trained
def grow(
    model: Any,
    expansion: Expansion | Sequence[Expansion] | None = None,
    *,
    init: Initialiser | None = None,
    seed: int = 0,
    **sizes: Unpack[ModelSizes],
) -> Grown:
    """Make a larger model that computes the same function as `model`. `model` does not change.

    Args:
        model: a `TransformerBridge` around a transformers language model, or from `boot_native`; a
            `HookedTransformer`, or a model that `convert` made attention-only.
        expansion: an expansion from `attn_only_lens.growth`, or a list of expansions, which are
            applied in this order; None if you pass sizes. The layer indices of each expansion refer
            to the model after the earlier ones: after `InsertLayer(at=0)`, layer 0 is the new
            layer. With an empty list, the grown model is a copy.
        init: an initialiser from `growth.init` that draws free entries. By default, they have the
            distribution of the model's own initial weights.
        seed: the seed for `init`.
        **sizes: of the grown model: `d_mlp`, neurons in every layer; `n_heads`, attention heads in
            every layer; `d_head`, the width of queries, keys and values; `d_model`, the width of
            the residual stream; `n_layers`, where new layers come last. In an encoder-decoder
            model, both stacks grow; to grow one stack, pass an expansion with `stack=`.

    Returns:
        An object with `model`, the grown model, on the device and in the dtype of the original,
        with its tokenizer, modes and frozen parameters; `provenance`, which maps the names of old
        heads and neurons to their new names; and `notes` on what else changed. Its methods are
        `shrink`, back to the original size; `optimizer`, which continues from the state of the
        original's optimizer; and `save_pretrained`, into a folder.

    Raises:
        InputError: this expansion cannot be applied to the model. The error lists every reason.

    Example:
        >>> import torch
        >>> from attn_only_lens import grow, load, pretrained
        >>> model = load("modular-addition")
        >>> grown = grow(model, d_mlp=517, n_layers=2, seed=0)
        >>> grown.provenance["L0N17"], grown.provenance.new_layers
        ('L0N17', ('L1',))
        >>> tokens = pretrained.modular_addition_tokens()[:11]
        >>> torch.allclose(grown.model(tokens), model(tokens), atol=1e-4)
        True
        >>> torch.equal(grown.shrink()(tokens), model(tokens))
        True
    """
    # Check
    growable = growable_of(model)
    if growable.reasons_against():
        raise InputError(_all_reasons(growable), NOT_GROWN)
    weights, seed = growable.read(), as_plain(seed)
    asked = {name: as_plain(size) for name, size in sizes.items() if size is not None}
    chosen = _checked_expansion(growable, weights, expansion, asked, init, seed)
    # Expand
    larger, provenance = chosen.expand(weights.map(float32_if_half), init or own(), seed)
    larger, error = _rounded(larger, weights, provenance)
    originals = {}
    for name, tensor in weights.tensors.items():
        part = provenance.old_part(name, larger.tensors)
        if part.data_ptr() != tensor.data_ptr() and not torch.equal(part, tensor):
            originals[name] = tensor.clone(), tensor_digest([(name, part)])
    notes = [_CENTRED] * provenance.centred
    notes += [_UNTIED] * (weights.constants.tied and not larger.constants.tied)
    if isinstance(chosen, PaddedExpansion):
        padding = ", ".join(map(repr, chosen.padding.steps))
        notes.append(f"padded: {growable.padded_because}: {padding}")
    if error is not None:
        notes.append(
            f"rounded: weights that growth scaled were rounded once to half precision; the largest "
            f"change of a tensor is {error:.2g} of its norm"
        )
    # Build the grown model and test it
    provenance = replace(provenance, source=identity_of(weights.tensors))
    grown = growable.write(_unshared(larger, weights), provenance.source_of)
    InputError.raise_if(growable.trial(grown), NOT_GROWN)
    return Grown(grown, provenance, tuple(notes), originals)


def _checked_expansion(
    growable: Growable,
    weights: Weights,
    expansion: Expansion | Sequence[Expansion] | None,
    asked: dict[str, int],
    init: object,
    seed: object,
) -> Expansion:
    """Return the requested expansion, or raise an error with every reason why it is impossible."""
    if (expansion is None) == (not asked):
        raise InputError(["give either an expansion or sizes (d_mlp=1024, …)"], NOT_GROWN)
    reasons = [*hook_reasons(growable.model), *non_finite_weights(growable.model)]
    odd, known = POSITIVE.reasons(**asked), ModelSizes.__annotations__
    unknown = [name for name in asked if name not in known]
    odd += [f"got a size {name!r}; expected one of {', '.join(known)}" for name in unknown]
    if type(seed) is not int:
        odd.append(f"got seed={seed!r}; expected a whole number")
    if init is not None and not callable(init):
        odd.append(f"got init={init!r}; expected an initialiser from attn_only_lens.growth.init")
    steps: list[Any] = [*expansion] if isinstance(expansion, list | tuple) else [expansion]
    wrong = [x for x in steps if not isinstance(x, Expansion) and expansion is not None]
    odd += [f"got {a_type(x)}; expected an expansion from attn_only_lens.growth" for x in wrong[:1]]
    if odd:
        raise InputError([*reasons, *odd], NOT_GROWN)
    chosen: Expansion
    if expansion is None:
        chosen, impossible = _expansion_to(weights, asked)
        reasons += impossible
    else:
        chosen = compose(*steps)
    against = chosen.reasons_against(weights)
    if not against:
        sketch, _ = chosen.expand(weights.sketch(), own(), 0)
        if growable.padded_because and (padding := _padding(sketch)).steps:
            chosen = PaddedExpansion(chosen, padding)
            against = growable.reasons_against_padding(padding)
            sketch, _ = chosen.expand(weights.sketch(), own(), 0)
        against = [*against, *growable.reasons_against_weights(sketch)]
    InputError.raise_if([*reasons, *against], NOT_GROWN)
    return chosen


def _rounded(
    larger: Weights, source: Weights, provenance: Provenance
) -> tuple[Weights, float | None]:
    """Round tensors to their original dtypes; also return the largest relative rounding error."""
    tensors, errors = dict(larger.tensors), []
    for name, tensor in larger.tensors.items():
        tensors[name] = tensor.to(source.tensors[provenance.source_of(name)].dtype)
        old = provenance.old_name(name)
        if tensors[name].dtype != tensor.dtype and old is not None:
            part, now = (provenance.tensor_map(old).old_part(x) for x in (tensor, tensors[name]))
            errors.append(float((now.float() - part).norm() / part.norm().clamp(min=1e-30)))
    largest = max(errors, default=0.0)
    return replace(larger, tensors=tensors), largest or None


_BY_LAYER = (
    ("d_mlp", "d_mlp", AddNeurons),
    ("n_heads", "head", AddHeads),
    ("d_head", "d_value", WidenValues),
    ("d_head", "d_query", WidenQueriesAndKeys),
)


def _padding(weights: Weights) -> ExpansionSequence:
    """Return the expansion to the largest sizes of any layer, with one width of heads."""
    largest: defaultdict[str, int] = defaultdict(int)
    sizes = weights.sizes
    for name, label, _ in _BY_LAYER:
        largest[name] = max(largest[name], *(sizes[axis] for axis in sizes if axis.label == label))
    return _expansion_to(weights, largest)[0]


def _expansion_to(weights: Weights, asked: dict[str, int]) -> tuple[ExpansionSequence, list[str]]:
    """Return the expansion to the given sizes, and every reason why the sizes are impossible."""
    steps: list[Expansion] = []
    reasons: list[str] = []
    sizes, stacks = weights.sizes, weights.constants.stacks

    def missing(name: str, had: int, owner: str = "model") -> int:
        if asked[name] < had:
            reasons.append(
                f"got {name}={asked[name]}, but the {owner} has {had}; expected at least {had}"
            )
        return asked[name] - had

    for name, label, expansion in _BY_LAYER:
        for stack, all_layers in stacks.items() if name in asked else ():
            layers_by_n = defaultdict(list)
            for index, layer in enumerate(all_layers):
                layers_by_n[missing(name, sizes.get(Axis(label, layer), 0))].append(index)
            steps += [
                expansion(n, layers, stack=stack) for n, layers in layers_by_n.items() if n > 0
            ]
    if "d_model" in asked:
        n = missing("d_model", sizes[Axis("d_model")])
        steps += [WidenStream(n)] if n > 0 else []
    for stack, layers in stacks.items() if "n_layers" in asked else ():
        n = missing("n_layers", len(layers), stack or "model")
        last = (item for name, item in weights.tensors.items() if in_layer(name) == layers[-1])
        too_many = reasons_against_bytes(n * sum(x.numel() * x.element_size() for x in last))
        reasons += too_many
        new = range(len(layers), len(layers) + n) if not too_many else ()
        steps += [InsertLayer(at, stack=stack) for at in new]
    if not steps and not reasons:
        reasons.append(f"got {asked}, which are the current sizes; pass at least one larger size")
    return compose(*steps), list(dict.fromkeys(reasons))


def read(model: Any) -> Weights:
    """Return a model's weights as `Weights`, without copying tensors.

    Raises:
        InputError: the model cannot be grown.
    """
    growable = growable_of(model)
    InputError.raise_if(growable.reasons_against(), "this model cannot be read")
    return growable.read()


def identity(model: Any) -> Identity:
    """Return numbers that identify a model, computed from its current weights.

    The numbers do not depend on the model's device, dtype or format. They stay the same if you cast
    or convert the model, save and load it, or expose its neurons as heads. Training changes them.

    Args:
        model: any model that `grow` or `compare` accepts.

    Raises:
        InputError: the argument is not a model.

    Example:
        >>> from attn_only_lens import convert, grow, load
        >>> from attn_only_lens.growth.models._grow import identity
        >>> model = load("modular-addition")
        >>> source = grow(model, d_mlp=517).provenance.source
        >>> source.differences(identity(convert(model).double()))
        []
        >>> model.W_E.data[0] += 0.01
        >>> source.differences(identity(model))
        ['embed.W_E']
    """
    if not isinstance(model, nn.Module):
        raise InputError([f"got {a_type(model)}; expected a model"], "it has no weights")
    try:
        tensors = growable_of(model).read().tensors
    except InputError:  # even a model that cannot be grown has an identity
        tensors = dict(model.named_parameters())
    return identity_of(tensors)


def growable_of(model: Any) -> Growable:
    """Return the `Growable` that reads and writes models of this kind."""
    for kind_of_model in _KINDS:
        if kind_of_model.is_kind(model):
            return kind_of_model(model)
    got = a_type(model, with_module=isinstance(model, nn.Module))
    if isinstance(model, str | os.PathLike):
        got = f"{str(model)!r}, which is not loaded: pass load({str(model)!r})"
    if isinstance(model, TransformerBridge):  # a bridge with exposed neuron-heads has another class
        got = f"a TransformerBridge of {model.cfg.architecture}"
    raise InputError(
        [
            f"got {got}; expected a HookedTransformer, a model that convert made from one, a "
            "TransformerBridge from boot_native, or a TransformerBridge around a transformers "
            f"model with one of these model types: {', '.join([*FAMILIES, *ENCODER_DECODERS])}"
        ],
        NOT_GROWN,
    )


def _all_reasons(growable: Growable) -> list[str]:
    return list(dict.fromkeys([*growable.reasons_against(), *hook_reasons(growable.model)]))


def _unshared(weights: Weights, source: Weights) -> Weights:
    """Return the weights, after copying the tensors that share memory with `source`."""
    pointers = {tensor.data_ptr() for tensor in source.tensors.values()}
    return weights.map(lambda x: x.clone() if x.data_ptr() in pointers else x)
