"""Adapt an optimizer, with its state, to a grown model.

If growth multiplies a parameter by s (p' = s p), its gradient becomes g / s, its first moment m / s
and its second moment v / s². To keep p' = s p, the new step must be s times the old step:

    SGD            s lr g = lr' g'                    lr' = s² lr
    Adam, AdamW    s lr m / (√v + ε) = lr' m' / (√v' + ε')    lr' = s lr,  ε' = ε / s

Weight decay becomes λ' = λ / s² if it adds λ p to the gradient (SGD, Adam), and λ' = λ / s if it
subtracts lr λ p from the parameter (AdamW). Scaled parameters thus need separate groups.

New parameter entries start with zero moments and share the step count of their tensor's old
entries. Because Adam's step count does not restart, its first updates of new entries can be as
large as 3.2 lr (for β₂ = .999). The parameters of new layers start without optimizer state. If
units were split (`expansion.init.splits`), the moments of these units are split in the same way.

The transfer is exact, with three exceptions. If gains are stored as gain - 1 (Gemma), weight decay
moves the stored value towards 0 (a gain of 1), not -1 (a gain of 0). If growth unties embeddings,
both matrices start with the moments of the tied matrix. If d_model grows in a model with LayerNorm,
the gradients of old weights that write to the residual stream change by a constant (equal for all
old coordinates), and so does SGD's step. Adam's step changed by up to 0.1 lr in tests, or 0.4 lr if
weight decay acted on uncentred weights.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from attn_only_lens.arguments import a_type
from attn_only_lens.errors import InputError
from attn_only_lens.growth.expansion.provenance import Provenance, TensorMap
from attn_only_lens.growth.expansion.weights import axes_of
from attn_only_lens.growth.models.growable import Growable, Parameter

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
_PROBLEM = "this optimizer cannot be grown"
# Moments and group options are multiplied by 1 / s to the power of these exponents.
_MOMENTS = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_SETTINGS: dict[type[Optimizer], dict[str, int]] = {
    SGD: {"lr": -2, "initial_lr": -2, "weight_decay": 2},
    Adam: {"lr": -1, "initial_lr": -1, "eps": 1, "weight_decay": 2},
    AdamW: {"lr": -1, "initial_lr": -1, "eps": 1, "weight_decay": 1},
}


def grown_optimizer(
    optimizer: OptimizerT, source: Growable, grown: Growable, provenance: Provenance
) -> OptimizerT:
    """Return an optimizer for the grown model that continues `optimizer`, which stays unchanged."""
    old_parameters, new_parameters = source.named_parameters(), grown.named_parameters()
    old_layouts, new_layouts = source.parameters(), grown.parameters()
    InputError.raise_if(_reasons_against(optimizer, source.model), _PROBLEM)
    names_of = defaultdict(list)
    for name, parameter in old_parameters.items():
        names_of[parameter].append(name)
    new_names = {layout.name: name for name, layout in new_layouts.items()}  # by tensor
    old_names = {layout.name: name for name, layout in old_layouts.items()}
    of_new_layers = defaultdict(list)  # for each parameter, its copies in new layers
    for tensor, name in new_names.items():
        if provenance.old_name(tensor) is None:
            of_new_layers[old_names[provenance.source_of(tensor)]].append(name)
    groups: list[dict[str, Any]] = []
    state: dict[nn.Parameter, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        by_scale: defaultdict[float, list[str]] = defaultdict(list)
        # A tied embedding has two names, and an unused parameter has none.
        for parameter, name in [(p, name) for p in group["params"] for name in names_of[p]]:
            tensor_map = provenance.tensor_map(old_layouts[name].name)
            new = new_names[tensor_map.name]
            names = by_scale[tensor_map.scale]
            if any(new_parameters[new] is new_parameters[same] for same in names):
                continue
            names.append(new)
            by_scale[1.0] += of_new_layers[name]
            if parameter in optimizer.state:
                layouts = old_layouts[name], new_layouts[new]
                state[new_parameters[new]] = {
                    key: _grown_state(key, value, *layouts, tensor_map, provenance)
                    for key, value in optimizer.state[parameter].items()
                }
        for scale, names in by_scale.items():
            params = [(name, new_parameters[name]) for name in names]
            if params:
                groups.append(_settings(optimizer, group, scale) | {"params": params})
    if not any("param_names" in group for group in optimizer.param_groups):
        groups = [g | {"params": [parameter for _, parameter in g["params"]]} for g in groups]
    kind: Any = type(optimizer)
    made: OptimizerT = kind(groups, lr=optimizer.defaults["lr"])  # torch requires lr
    made.defaults = dict(optimizer.defaults)
    made.state.update(state)  # type: ignore[arg-type]
    return made


def _reasons_against(optimizer: Optimizer, model: nn.Module) -> list[str]:
    kind = type(optimizer)
    if kind not in _SETTINGS:
        known = ", ".join(setting.__name__ for setting in _SETTINGS)
        return [
            f"got {a_type(optimizer, with_module=True)}; expected one of torch's {known}, whose "
            "moments can be scaled with their parameters"
        ]
    known_ids = set(model.parameters())
    stray = [p for group in optimizer.param_groups for p in group["params"] if p not in known_ids]
    reasons = []
    if stray:
        shapes = ", ".join(str(tuple(p.shape)) for p in stray[:5])
        reasons.append(
            f"{len(stray)} of the parameters (with shapes {shapes} …) do not belong to the model; "
            "pass the model before growth, and the optimizer that trains it"
        )
    odd = {key for state in optimizer.state.values() for key in state} - {*_MOMENTS, "step"}
    if odd:
        reasons.append(f"the optimizer's state has {sorted(odd)}; expected {[*_MOMENTS, 'step']}")
    return reasons


def _settings(optimizer: Optimizer, group: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return a group's options, adapted to parameters that growth multiplied by `scale`."""
    powers = dict(_SETTINGS[type(optimizer)])
    if group.get("decoupled_weight_decay"):  # Adam with this flag is identical to AdamW
        powers["weight_decay"] = 1
    return {
        key: value * scale ** -powers[key] if key in powers and scale != 1.0 else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _grown_state(
    key: str,
    value: Any,
    old: Parameter,
    new: Parameter,
    tensor_map: TensorMap,
    provenance: Provenance,
) -> Any:
    """Return a value from a parameter's optimizer state, adapted to the grown parameter."""
    if key not in _MOMENTS or value is None:
        return value.clone() if isinstance(value, Tensor) else value
    moment = old.to_weights(value)
    if tensor_map.scale != 1.0:  # moments are only scaled; gains may also be shifted by a constant
        moment = moment / tensor_map.scale ** _MOMENTS[key]
    moment = tensor_map.put(moment, moment.new_zeros(tensor_map.shape))
    return new.from_weights(_shared_out(moment, tensor_map.name, _MOMENTS[key], provenance))


def _shared_out(moment: Tensor, name: str, power: int, provenance: Provenance) -> Tensor:
    """Divide the moments of each split unit among the unit and its copies."""
    axes = axes_of(name, provenance.constants)
    for shares in provenance.shares:
        if shares.axis not in axes:
            continue
        dim = axes.index(shares.axis)
        new, of, factors = list(shares.new), list(shares.of), [1.0] * len(shares.new)
        if name not in shares.written:
            kept = shares.kept()
            new, of = [*new, *kept], [*of, *kept]
            factors = [*shares.share, *kept.values()]
        indices, sources = (torch.tensor(units, device=moment.device) for units in (new, of))
        shape = [-1 if axis == dim else 1 for axis in range(moment.ndim)]
        scale = moment.new_tensor([factor**power for factor in factors]).reshape(shape)
        moment = moment.index_copy(dim, indices, moment.index_select(dim, sources) * scale)
    return moment
