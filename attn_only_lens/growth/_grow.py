"""Grow a model: a new one, larger, that computes what the old one does.

From the sizes that somebody wants to the expansions that lead there.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens import expansion as ex
from attn_only_lens.errors import GrowthError
from attn_only_lens.expansion import Axis, Identity, Provenance, Weights
from attn_only_lens.expansion.initialise import Initialiser, own
from attn_only_lens.expansion.plan import reasons_against_bytes
from attn_only_lens.expansion.provenance import identity_of
from attn_only_lens.expansion.weights import in_layer
from attn_only_lens.growth.growable import Rim
from attn_only_lens.growth.hooked import HOOKED
from attn_only_lens.growth.native import NATIVE
from attn_only_lens.growth.optimizer import OptimizerT, grown_optimizer
from attn_only_lens.growth.two_blocks import TWO_BLOCKS
from attn_only_lens.models.in_place.known_mlps import non_finite_weights
from attn_only_lens.numerics import as_plain, is_count

__all__ = ["RIMS", "Grown", "grow", "identity", "read", "rim_of", "to_sizes"]

_BY_LAYER = (
    ("d_mlp", "d_mlp", ex.AddNeurons),
    ("n_heads", "head", ex.AddHeads),
    ("d_head", "d_value", ex.WidenValues),
    ("d_head", "d_query", ex.WidenQueriesAndKeys),
)


def to_sizes(weights: Weights, asked: dict[str, int]) -> tuple[ex.Expansion, list[str]]:
    """The expansions that lead to these sizes, the same in every layer; what is wrong with them."""
    steps: list[ex.Expansion] = []
    reasons: list[str] = []
    sizes, n_layers = weights.sizes, weights.constants.n_layers

    def missing(name: str, had: int) -> int:
        if asked[name] < had:
            reasons.append(f"got {name}={asked[name]}; it has {had}, and growth does not shrink")
        return asked[name] - had

    for name, label, expansion in _BY_LAYER:
        if name in asked:
            layers_by_n: dict[int, list[int]] = {}
            for layer in range(n_layers):
                n = missing(name, sizes.get(Axis(label, layer), 0))
                layers_by_n.setdefault(n, []).append(layer)
            steps += [expansion(n, layers) for n, layers in layers_by_n.items() if n > 0]
    if "d_model" in asked:
        n = missing("d_model", sizes[Axis("d_model")])
        steps += [ex.WidenStream(n)] if n > 0 else []
    if "n_layers" in asked:
        n = missing("n_layers", n_layers)
        last = (each for name, each in weights.tensors.items() if in_layer(name) == n_layers - 1)
        too_many = reasons_against_bytes(n * sum(x.numel() * x.element_size() for x in last))
        reasons += too_many
        steps += [] if too_many else map(ex.InsertLayer, range(n_layers, n_layers + n))
    if not steps and not reasons:
        reasons.append(f"got {asked}, which it has already; give at least one larger size")
    return ex.compose(*steps), list(dict.fromkeys(reasons))


RIMS: tuple[Rim, ...] = (HOOKED, TWO_BLOCKS, NATIVE)
_CENTRED = (
    "centred: everything that writes to the residual stream lost its mean over d_model, which "
    "LayerNorm does not see; shrink() gives it back"
)


@dataclass(frozen=True)
class _Kept:
    """A tensor that growth changed, to be given back as long as what it became is untouched."""

    original: Tensor
    became: str  # digest of its entries in the grown model


@dataclass(frozen=True)
class Grown:
    """A grown model, and the way back.

    Attributes:
        model: the grown model, of the class of the one it came from.
        provenance: where each old head, neuron, layer, coordinate and parameter went.
        notes: what was done besides, in sentences.
    """

    model: Any
    provenance: Provenance
    notes: tuple[str, ...] = ()
    _kept: dict[str, _Kept] = field(default_factory=dict, repr=False)

    def shrink(self, *, drop_new: bool = False) -> Any:
        """The model without what growth added; right after growth, bit for bit the original.

        After training, the old part as it is now, in the original's scale (centred where growth
        centred it).

        Args:
            drop_new: whether to leave out new parts that have an effect by now.

        Raises:
            GrowthError: what had to be zero is not any more: the old part alone computes
                something else than the model.
        """
        rim, moved = rim_of(self.model), self.provenance
        if reasons := [*rim.reasons_against(self.model), *rim.attached(self.model)]:
            raise GrowthError(reasons, "this model cannot be shrunk")
        now = rim.read(self.model)
        awake = [each.name for each in moved.zeros if each.of(now.tensors[each.name]).any()]
        if awake and not drop_new:
            raise GrowthError(
                [
                    f"{name}: entries that were zero are not any more; shrink(drop_new=True) "
                    "drops them, and the model then computes something else"
                    for name in dict.fromkeys(awake)
                ],
                "this model cannot be shrunk",
            )
        tensors = {}
        for new in now.tensors:
            old = moved.old_name(new)
            if old is None:
                continue
            move = moved.moved(old)
            part = move.old_part(now.tensors[new])
            kept = self._kept.get(old)
            if kept is not None and _digest(part) == kept.became:
                part = kept.original.to(part.device, copy=True)
            elif move.scale != 1.0:
                part = part / move.scale
            tensors[old] = part
        before = Weights(tensors, moved.constants)
        return rim.write(self.model, _apart(before, now), moved.name)

    def optimizer(self, optimizer: OptimizerT, model: Any) -> OptimizerT:
        """An optimizer for the grown model, in the state of one that trains the original.

        Right after growth its next step changes old parameters as the old one's would have, in the
        units of the original; exactly, but where d_model grew under LayerNorm (`optimizer.py` says
        by how much). Learning-rate schedulers are to be made anew, with `last_epoch`.

        Args:
            optimizer: `SGD`, `Adam` or `AdamW` of torch; it is not touched.
            model: the model that grew, whose parameters it has.

        Raises:
            GrowthError: another kind of optimizer, or of another model.

        Example:
            >>> import torch
            >>> from attn_only_lens import grow, pretrained
            >>> model = pretrained.modular_addition()
            >>> old = torch.optim.AdamW(model.parameters(), lr=1e-3)
            >>> grown = grow(model, d_mlp=640)
            >>> new = grown.optimizer(old, model)
            >>> new.param_groups[0]["lr"] == old.param_groups[0]["lr"]
            True
        """
        return grown_optimizer(optimizer, model, self.model, rim_of(model), self.provenance)


@torch.inference_mode(False)  # weights of inference mode could never be trained
def grow(
    model: Any,
    expansion: ex.Expansion | None = None,
    *,
    d_mlp: int | None = None,
    n_heads: int | None = None,
    d_head: int | None = None,
    d_model: int | None = None,
    n_layers: int | None = None,
    init: Initialiser | None = None,
    seed: int = 0,
) -> Grown:
    """Make a larger model that computes what `model` computes; `model` is not touched.

    Args:
        model: a `HookedTransformer`, or one that `convert` made attention-only.
        expansion: what to do, of `attn_only_lens.expansion`; or leave it out and give sizes.
        d_mlp: neurons in every layer of the grown model.
        n_heads: attention heads in every layer.
        d_head: width of queries, keys and values.
        d_model: width of the residual stream.
        n_layers: layers; new ones come last.
        init: what free entries start as, of `expansion.init`; by default as the model draws its
            own weights.
        seed: of those numbers.

    Returns:
        The grown model, on the device and in the dtype of `model`, with its tokenizer, modes and
        frozen parameters; and where everything went.

    Raises:
        GrowthError: with all reasons, before anything is made.

    Example:
        >>> import torch
        >>> from attn_only_lens import grow, pretrained
        >>> model = pretrained.modular_addition()
        >>> grown = grow(model, d_mlp=517, n_layers=2, seed=0)
        >>> grown.provenance["L0N17"], grown.provenance.new_layers
        ('L0N17', ('L1',))
        >>> tokens = pretrained.modular_addition_tokens()[:11]
        >>> torch.allclose(grown.model(tokens), model(tokens), atol=1e-4)
        True
        >>> torch.equal(grown.shrink()(tokens), model(tokens))
        True
    """
    rim = rim_of(model)
    if reasons := rim.reasons_against(model):
        raise GrowthError([*reasons, *rim.attached(model)])
    weights = rim.read(model)
    sizes = dict(d_mlp=d_mlp, n_heads=n_heads, d_head=d_head, d_model=d_model, n_layers=n_layers)
    asked = {name: as_plain(size) for name, size in sizes.items() if size is not None}
    if (expansion is None) == (not asked):
        raise GrowthError(["give either an expansion or sizes (d_mlp=1024, …)"])
    reasons = [*rim.attached(model), *non_finite_weights(model)]
    odd = [
        f"got {name}={size!r}; expected 1 or more"
        for name, size in asked.items()
        if not is_count(size, 1)
    ]
    seed = as_plain(seed)
    if type(seed) is not int:
        odd.append(f"got seed={seed!r}; expected a whole number")
    if expansion is not None and not hasattr(expansion, "reasons_against"):
        odd.append(
            f"got a {type(expansion).__name__}; expected an expansion of attn_only_lens.expansion"
        )
    if odd:
        raise GrowthError([*reasons, *odd])
    if expansion is None:
        expansion, wrong = to_sizes(weights, asked)
        reasons += wrong
    against = expansion.reasons_against(weights)
    if not against:
        sketch, _ = expansion(weights.sketch())
        against = rim.reasons_against_weights(sketch)
    if reasons or against:
        raise GrowthError([*reasons, *against])
    larger, provenance = expansion(weights, init or own(), seed)
    kept = {}
    for name, tensor in weights.tensors.items():
        moved = provenance.moved(name)
        became = moved.old_part(larger.tensors[moved.name])
        if not torch.equal(became, tensor):
            kept[name] = _Kept(tensor.clone(), _digest(became))
    notes = (_CENTRED,) if provenance.centred else ()
    provenance = replace(provenance, source=identity_of(weights.tensors))
    grown = rim.write(model, _apart(larger, weights), provenance.source_of)
    return Grown(grown, provenance, notes, kept)


def read(model: Any) -> Weights:
    """The weights of a model in the layout of `expansion`; its own tensors, not copies.

    Raises:
        GrowthError: the model cannot be grown.
    """
    rim = rim_of(model)
    if reasons := rim.reasons_against(model):
        raise GrowthError(reasons, "this model cannot be read")
    return rim.read(model)


def identity(model: Any) -> Identity:
    """Tell which model this is, by its weights as they are now.

    The identity is the same on every device, in every dtype and layout: of a model that was cast,
    converted, exposed, or saved and loaded. To training it is not blind.

    Args:
        model: any that `grow` or `compare` takes.

    Raises:
        GrowthError: it is no model.

    Example:
        >>> from attn_only_lens import convert, grow, pretrained
        >>> from attn_only_lens.growth import identity
        >>> model = pretrained.modular_addition()
        >>> source = grow(model, d_mlp=517).provenance.source
        >>> source.differences(identity(convert(model).double()))
        []
        >>> model.W_E.data[0] += 0.01
        >>> source.differences(identity(model))
        ['embed.W_E']
    """
    if not isinstance(model, nn.Module):
        raise GrowthError([f"got a {type(model).__name__}; expected a model"], "it has no weights")
    rim = next((rim for rim in RIMS if rim.takes(model)), None)
    try:
        tensors = dict(model.named_parameters()) if rim is None else rim.read(model).tensors
    except GrowthError:  # a bridge whose parts have other names by now
        tensors = dict(model.named_parameters())
    return identity_of(tensors)


def rim_of(model: Any) -> Rim:
    """What growth knows of this kind of model.

    Raises:
        GrowthError: growth knows nothing of it.
    """
    for rim in RIMS:
        if rim.takes(model):
            return rim
    kind = type(model)
    got = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(model, TransformerBridge):  # exposed, it is of a class of ours
        got = f"TransformerBridge of {model.cfg.architecture}"
    raise GrowthError(
        [
            f"got a {got}; expected a HookedTransformer, what convert makes of one, or a "
            "TransformerBridge of boot_native"
        ]
    )


def _apart(weights: Weights, source: Weights) -> Weights:
    """With copies of those tensors that are still the source's."""
    theirs = {tensor.data_ptr() for tensor in source.tensors.values()}
    tensors = {
        name: tensor.clone() if tensor.data_ptr() in theirs else tensor
        for name, tensor in weights.tensors.items()
    }
    return replace(weights, tensors=tensors)


def _digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()
