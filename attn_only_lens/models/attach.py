"""Replace MLPs of a model by transcoders, whose features become neuron-heads.

In a layer with a transcoder, a `FeatureMLP` takes the place of the MLP. It runs the original MLP
only to compute the error, which is the part of the MLP's output that the transcoder misses. The
other layers keep their MLPs, with their neurons as neuron-heads.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import LinearBridge, MoEBridge

from attn_only_lens.arguments import a_type, is_count, one_of
from attn_only_lens.engine.tokens import require_model
from attn_only_lens.errors import InputError, UnsupportedModelError
from attn_only_lens.heads.feature_mlp import FeatureMLP
from attn_only_lens.heads.host import exposed_reasons
from attn_only_lens.heads.transcoder import Transcoder, cross_layer_reasons
from attn_only_lens.models.expose import expose_neuron_heads
from attn_only_lens.models.in_place import hidden, hide
from attn_only_lens.models.in_place.hook_points import find_hook_points
from attn_only_lens.models.in_place.mlp_hooks import UnknownMLPError
from attn_only_lens.models.norms import NO_NORM, LayerNorms, Norm, bridge_norms, hooked_block_norms
from attn_only_lens.tl import HookedTransformer

OnError = Literal["node", "zero"]
_PROBLEM = "these transcoders cannot be attached"
_EXPECTED = "expected a TransformerBridge or a HookedTransformer"
_SWAP = "_transcoders"
"""The attribute of a model that holds its `_Swap` while transcoders are attached."""


class AttachedTranscoders:
    """A model in which transcoders replace MLPs, until `undo` is called.

    `with` returns the model. When the `with` block ends, the model has its MLPs again.

    Attributes:
        model: the model, with features and neurons as neuron-heads.
        layers: the layers that have a transcoder.
    """

    def __init__(self, model: Any, swap: "_Swap", layers: tuple[int, ...]) -> None:
        self.model, self._swap, self.layers = model, swap, layers

    def __repr__(self) -> str:
        state = f"error={self._swap.error!r}"
        if _swap_of(self.model) is not self._swap:
            state = "undone"
        layers = ", ".join(map(str, self.layers))
        return f"<AttachedTranscoders of {self.model.cfg.model_name}, layers {layers}: {state}>"

    def undo(self) -> None:
        """Call `detach` on the model; do nothing if this was done before."""
        if _swap_of(self.model) is self._swap:
            detach(self.model)

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *error: object) -> None:
        self.undo()


def detach(model: Any) -> None:
    """Restore the MLPs, norms and hook points that a model had before `attach` or `load`.

    A model without transcoders is not changed. Hooks on attention heads and on the residual stream
    stay. Hooks on neuron-heads are removed, and so are hooks that were added in layers with
    transcoders to the hook points of the MLP and, in a bridge, to `hook_mlp_out`.

    Raises:
        UnsupportedCallError: the argument is not a model.

    Example:
        >>> from attn_only_lens import load, transcoders
        >>> model = load("small-english")
        >>> attached = transcoders.attach(model, transcoders.load("small-english"))
        >>> attached
        <AttachedTranscoders of small-english-4l, layers 0, 1, 2, 3: error='node'>
        >>> transcoders.detach(model)
        >>> attached
        <AttachedTranscoders of small-english-4l, layers 0, 1, 2, 3: undone>
    """
    require_model(model)
    if swap := _swap_of(model):
        hide(model)
        swap.undo()
        del vars(model)[_SWAP]


@contextmanager
def without_transcoders(model: Any) -> Iterator[tuple[dict[int, Transcoder], OnError | None]]:
    """Restore a model's MLPs until the context ends; yield its transcoders and their `error`."""
    swap = _swap_of(model)
    if swap is None:
        yield {}, None
        return
    mlps = {layer: block.mlp for layer, block in enumerate(model.blocks)}
    features = {layer: x.transcoder() for layer, x in mlps.items() if isinstance(x, FeatureMLP)}
    with hidden(model):
        swap.undo()
        try:
            yield features, swap.error
        finally:
            swap.redo()


def attach(
    model: HookedTransformer | TransformerBridge,
    transcoders: Mapping[int, Transcoder],
    *,
    error: OnError = "node",
) -> AttachedTranscoders:
    """Replace MLPs by transcoders, and expose features and neurons as neuron-heads.

    The features of layer 3 are the heads `L3F0`, `L3F1`, …. They have the hook points of
    neuron-heads (`expose_neuron_heads`), and every tool treats them in the same way as neurons.

    With `error="node"`, the model's output stays the same, up to rounding. The error is the MLP's
    output minus the transcoder's output. It is added at the hook point `blocks.{l}.mlp.hook_error`
    [batch, pos, 1, d_model]. The error of layer 3 is also a head: the error node `L3E`. Every
    forward pass computes the error from the MLP's input in this pass, so patches in other layers
    have the same effects as in the original model. If a feature is patched, the error stays the
    same, and the layer's output changes only by the feature's change times its row of W_dec.

    A cross-layer transcoder is a dict of transcoders with `W_later`. Its features are heads with
    several writes: if one is patched, the outputs of all layers to which it writes change, each by
    the feature's change times its row of this layer's decoder. No error changes.

    With `error="zero"`, there are no error nodes. This is the replacement model, in which each
    transcoder's output replaces the MLP's output. `fidelity` measures how well it imitates the
    original model.

    Source: Dunefsky et al., "Transcoders Find Interpretable LLM Feature Circuits" (2024); error
    nodes as in Marks et al., "Sparse Feature Circuits" (2024), and Ameisen et al., "Circuit
    Tracing" (2025).

    Args:
        model: a `TransformerBridge` or a `HookedTransformer`, without exposed neuron-heads. It is
            changed in place.
        transcoders: {layer: transcoder} for one or more layers, for example from `load`. Their
            weights are converted to the dtype and moved to the device of the model; without such a
            change, the model shares their memory.
        error: "node" to add the errors, "zero" to leave them out.

    Returns:
        A context manager with `model` and `undo`.

    Raises:
        UnsupportedModelError: with every reason why the transcoders do not fit the model; for
            example, they read the MLP's input, and the gains of the norms were folded. The model is
            unchanged.

    Example:
        >>> import torch
        >>> from attn_only_lens import load, transcoders
        >>> model = load("small-english")
        >>> tokens = model.to_tokens("The keys near the cabinet")
        >>> before = model(tokens)
        >>> W_enc = torch.randn(128, 307) / 128**0.5
        >>> transcoder = transcoders.Transcoder(
        ...     W_enc, W_enc.T.clone(), torch.zeros(307), torch.zeros(128))
        >>> with transcoders.attach(model, {2: transcoder}):
        ...     bool(torch.allclose(model(tokens), before, atol=1e-4))
        True
    """
    UnsupportedModelError.raise_if(_reasons(model, transcoders, error), _PROBLEM)
    norms = _norms(model, transcoders.values())
    reasons, folded = list[str](), dict[int, Transcoder]()
    for layer, transcoder in sorted(transcoders.items()):
        try:
            folded[layer] = _folded(transcoder, model.blocks[layer], norms[layer])
        except (UnknownMLPError, InputError) as wrong:  # weights can overflow in the MLP's dtype
            reasons.append(f"layer {layer}: {wrong}")
    UnsupportedModelError.raise_if(reasons, _PROBLEM)
    swap = _Swap(model, error)
    try:
        for layer, transcoder in folded.items():
            swap.replace_mlp(model.blocks[layer], transcoder, norms[layer].neuron)
        swap.list_hook_points()
        expose_neuron_heads(model)
    except BaseException:  # even an interruption must leave the model as it was
        swap.undo()
        raise
    vars(model)[_SWAP] = swap
    return AttachedTranscoders(model, swap, tuple(folded))


def _reasons(model: Any, transcoders: Any, error: object) -> list[str]:
    """Return error messages for a wrong type of model, or for wrong types, widths or layers."""
    reasons = one_of(*get_args(OnError)).reasons(error=error)
    if type(model) not in (TransformerBridge, HookedTransformer):
        return [*(exposed_reasons(model) or [f"got {a_type(model)}; {_EXPECTED}"]), *reasons]
    if not isinstance(transcoders, Mapping) or not transcoders:
        return [f"got {transcoders!r:.80}; expected a dict {{layer: Transcoder}}", *reasons]
    n_layers, d_model = len(model.blocks), model.cfg.d_model
    for layer, transcoder in transcoders.items():
        if not is_count(layer, 0, n_layers - 1):
            reasons.append(f"got layer {layer!r}; expected a layer from 0 to {n_layers - 1}")
        if not isinstance(transcoder, Transcoder):
            reasons.append(f"layer {layer}: got {transcoder!r:.80}; expected a Transcoder")
        elif transcoder.d_model != d_model:
            reasons.append(
                f"layer {layer}: got a transcoder for d_model={transcoder.d_model}; the model has "
                f"d_model={d_model}"
            )
    if reasons or (reasons := _mlp_reasons(model, transcoders)):
        return reasons
    reasons = [*_gain_reasons(model, transcoders), *_mean_reasons(model, transcoders)]
    return [*reasons, *cross_layer_reasons(transcoders, n_layers)]


def _gain_reasons(model: Any, transcoders: Mapping[int, Transcoder]) -> list[str]:
    """Return [error message] if the MLPs read no gains, but transcoders were trained on them."""
    if isinstance(model, TransformerBridge):
        can_fold = getattr(model.adapter, "supports_fold_ln", True)
        folded = model._weights_processed and model.adapter._fold_ln_requested and can_fold
    else:
        folded = model.cfg.normalization_type in ("LNPre", "RMSPre")
    layers = sorted(layer for layer, x in transcoders.items() if x.reads == "input")
    if not folded or not layers:
        return []
    return [
        f"layers {layers}: got transcoders that read the MLP's input, but the gains of the norms "
        "were folded into the MLPs, so this input is not the one in training; attach them to the "
        "model with its own weights (a bridge before enable_compatibility_mode, or fold_ln=False). "
        "If the model never had gains, use reads='normalized'"
    ]


def _mean_reasons(model: Any, transcoders: Mapping[int, Transcoder]) -> list[str]:
    """Return [error message] if the model's stream has no mean, but transcoders read the mean."""
    layers = [
        layer
        for layer, transcoder in sorted(transcoders.items())
        if transcoder.reads == "stream"
        and _is_centred(model.blocks[layer].mlp.W_out)
        and not _is_centred(transcoder.W_enc.T)
    ]
    if not layers:
        return []
    return [
        f"layers {layers}: got transcoders that read the stream, but the weights that write to it "
        "were centred (center_writing_weights), so this stream is not the one in training; attach "
        "them to the model with its own weights. If the model always had them, subtract the mean "
        "of each column from W_enc"
    ]


def _is_centred(rows: Tensor) -> bool:
    error = rows.mean(dim=-1).abs().max() / rows.abs().max().clamp(min=1e-30)
    # TransformerLens may centre in float32, also if the weights have more digits.
    return bool(error < max(1e-6, torch.finfo(rows.dtype).eps / 4))


def _mlp_reasons(model: Any, layers: Iterable[int]) -> list[str]:
    """Return error messages for layers whose MLP is of an unknown kind."""
    reasons = []
    for layer in sorted(layers):
        try:
            if find_hook_points(getattr(model.blocks[layer], "mlp", None)).layer is not None:
                raise UnknownMLPError("its MLP is not a separate module of the model")
            if isinstance(model.blocks[layer].mlp, MoEBridge):
                raise UnknownMLPError("its MLP is a mixture of experts")
        except UnknownMLPError as unknown:
            reasons.append(f"layer {layer}: {unknown}")
    return reasons


def _norms(model: Any, transcoders: Iterable[Transcoder]) -> list[LayerNorms]:
    """Return the norms of each layer, or `NO_NORM` if the transcoders imitate only the MLPs."""
    if all(x.reads == "input" and not x.after_norm for x in transcoders):
        no_norms = NO_NORM, NO_NORM
        return [LayerNorms(no_norms, no_norms, *no_norms, parallel=False)] * len(model.blocks)
    return (bridge_norms if isinstance(model, TransformerBridge) else hooked_block_norms)(model)


def _folded(transcoder: Transcoder, block: Any, norms: LayerNorms) -> Transcoder:
    """Return the transcoder in the MLP's dtype; "normalized" is converted to "input"."""
    before = norms.neuron[0]
    _require_separate(transcoder, norms)
    if transcoder.reads == "normalized":
        transcoder = _without_gain(transcoder, before)
    like = block.mlp.W_out
    tensors: dict[str, Any] = {name: x.to(like) for name, x in transcoder.tensors().items()}
    return replace(transcoder, **tensors)


def _require_separate(transcoder: Transcoder, norms: LayerNorms) -> None:
    """Raise an error if the norm that the transcoder needs is missing or shared with attention."""
    before = norms.neuron[0].module
    if transcoder.reads == "stream" and before and before is norms.attention[0].module:
        raise UnknownMLPError(
            "got a transcoder that reads the stream, but attention reads the same norm as the MLP; "
            "expected a model in which only the MLP reads this norm"
        )
    if transcoder.reads == "normalized" and before is None:
        raise UnknownMLPError("got reads='normalized', but there is no norm before the MLP")


def _without_gain(transcoder: Transcoder, norm: Norm) -> Transcoder:
    """Convert a transcoder that reads "normalized" to one that reads "input", if they differ."""
    W_enc, W_skip = transcoder.W_enc, transcoder.W_skip
    b_enc, b_dec = transcoder.b_enc, transcoder.b_dec
    has_gain = norm.weight is not None and bool((norm.weight != 1).any())
    if not has_gain and (norm.bias is None or not norm.bias.any()):  # True after folding
        return transcoder
    if norm.weight is not None:
        gain = norm.weight.to(W_enc)
        if not gain.all():
            raise UnknownMLPError("the norm before its MLP has gains of 0")
        W_enc = W_enc / gain[:, None]
        W_skip = None if W_skip is None else W_skip / gain[:, None]
    if norm.bias is not None:
        bias = norm.bias.to(W_enc)
        b_enc = b_enc - bias @ W_enc
        b_dec = b_dec if W_skip is None else b_dec - bias @ W_skip
    return replace(transcoder, W_enc=W_enc, W_skip=W_skip, b_enc=b_enc, b_dec=b_dec, reads="input")


class _Swap:
    """The modules of a model that transcoders replace, and its hook points without transcoders."""

    def __init__(self, model: Any, error: OnError) -> None:
        self.error = error
        self._model = model
        self._registry = dict(getattr(model, "_hook_registry", {}))
        points = (module for module in model.modules() if isinstance(module, HookPoint))
        self._names = {point: point.name for point in points}
        self._replaced: list[tuple[Any, str, nn.Module, nn.Module]] = []  # block, name, old, new

    def replace_mlp(self, block: Any, transcoder: Transcoder, norms: tuple[Norm, Norm]) -> None:
        """Replace a block's MLP; identities replace the norms that move into the transcoder."""
        moves = transcoder.reads == "stream", transcoder.after_norm
        moved = [x.module if moving else None for x, moving in zip(norms, moves, strict=True)]
        names = {module: name for name, module in block.named_children()}
        for norm in moved:
            if norm is not None:
                self._replace(block, names[norm], _identity(norm))
        before, after = ([] if norm is None else [norm] for norm in moved)
        mlp = block.mlp
        original = nn.Sequential(*before, mlp, *after)
        name = getattr(mlp, "name", None)
        new = FeatureMLP(transcoder, original, self.error == "node", name)
        self._replace(block, "mlp", new.train(mlp.training))

    def _replace(self, block: Any, name: str, module: nn.Module) -> None:
        self._replaced.append((block, name, getattr(block, name), module))
        _put(block, name, module)

    def list_hook_points(self) -> None:
        """Update the model's list of hook points."""
        if not isinstance(self._model, TransformerBridge):
            self._model.setup()
            return
        for block in self._model.blocks:
            block._register_aliases()
        self._model.clear_hook_registry()
        self._model._initialize_hook_registry()
        for point, name in self._names.items():  # the new list has aliases for some names
            point.name = name
        mlps = [block.mlp for block in self._model.blocks if isinstance(block.mlp, FeatureMLP)]
        added = {module for mlp in mlps for module in mlp.modules()}
        for path, point in reversed(self._model._hook_registry.items()):
            if point in added:
                point.name = path

    def undo(self) -> None:
        """Restore the old modules and the old list of hook points."""
        for block, name, module, _ in reversed(self._replaced):
            _put(block, name, module)
        self.list_hook_points()
        if self._registry:
            self._model.clear_hook_registry()
            self._model._hook_registry |= self._registry
            self._model._hook_registry_initialized = True

    def redo(self) -> None:
        """Replace the modules again, after `undo`."""
        for block, name, _, module in self._replaced:
            _put(block, name, module)
        self.list_hook_points()


def _swap_of(model: Any) -> _Swap | None:
    swap: _Swap | None = getattr(model, "__dict__", {}).get(_SWAP)
    return swap


def _put(block: Any, name: str, module: nn.Module) -> None:
    """Replace a module of a block and, in a bridge, of the layer that the block wraps."""
    path = getattr(getattr(block, name), "name", None)
    if path and "_original_component" in block._modules:
        *owners, attribute = path.split(".")
        owner = block._modules["_original_component"]
        for step in owners:
            owner = owner._modules[step]
        owner._modules[attribute] = module
        block.submodules[name] = module
    block._modules[name] = module


def _identity(norm: Any) -> nn.Module:
    """Return a module that takes the place of a norm and returns its input unchanged."""
    if not hasattr(norm, "original_component"):
        return nn.Identity()
    identity = LinearBridge(norm.name)
    identity.set_original_component(nn.Identity())
    return identity
