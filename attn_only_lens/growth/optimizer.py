"""The state of an optimizer, taken along when a model grows.

Where growth multiplied a parameter by s (p' = s p), the loss is as it was, so its gradient is
g / s: a moment of the gradient becomes m / s, one of its square v / s². For the next step to be the
old one, in the old units (p' then s times what p would be), it must be s times the old:

    SGD            s lr g = lr' g'                    lr' = s² lr
    Adam, AdamW    s lr m / (√v + ε) = lr' m' / (√v' + ε')    lr' = s lr,  ε' = ε / s

and weight decay, where it adds λ p to the gradient (SGD, Adam), λ' = λ / s², where it takes lr λ p
off the parameter (AdamW), λ' = λ / s. So parameters that were scaled get a group of their own.

New entries start with moments of zero, at the step count of the tensor that they are in: where β₂
is .999, Adam's first updates of them are up to 3.2 lr, as its correction for a new start is over by
then. Parameters of new layers have no state yet, as in a new optimizer.

All this is exact, but for d_model under LayerNorm. What is written along the constant vector over
d_model was not seen before; now the norm's mean is over new coordinates too, so that gradients by
old writing weights differ by a number that all old coordinates share. SGD's step is then the old
one up to such a number, of which the original would have seen nothing. Adam divides each entry by
its own √v, so there the step differs besides: in tests by up to a tenth of lr, and by .4 lr where
Adam decays weights that were not centred.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from attn_only_lens.errors import GrowthError
from attn_only_lens.expansion import Moved, Provenance
from attn_only_lens.growth.growable import Parameter, Rim

__all__ = ["OptimizerT", "grown_optimizer"]

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
_PROBLEM = "this optimizer cannot be grown"
# By which power of 1 / s a number goes: moments, and what a group sets.
_MOMENTS = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_SETTINGS: dict[type[Optimizer], dict[str, int]] = {
    SGD: {"lr": -2, "initial_lr": -2, "weight_decay": 2},
    Adam: {"lr": -1, "initial_lr": -1, "eps": 1, "weight_decay": 2},
    AdamW: {"lr": -1, "initial_lr": -1, "eps": 1, "weight_decay": 1},
}


def grown_optimizer(
    optimizer: OptimizerT, model: nn.Module, grown: nn.Module, rim: Rim, provenance: Provenance
) -> OptimizerT:
    """An optimizer for the grown model that goes on where this one is; it is not touched.

    Raises:
        GrowthError: with all reasons.
    """
    theirs, ours = dict(model.named_parameters()), dict(grown.named_parameters())
    was, now = rim.parameters(model), rim.parameters(grown)
    if reasons := _reasons_against(optimizer, theirs):
        raise GrowthError(reasons, _PROBLEM)
    name_of = {parameter: name for name, parameter in theirs.items()}
    named = {layout.name: name for name, layout in now.items()}  # of the grown model's, by tensor
    of_layers = _new_of(provenance, was, named)
    groups: list[dict[str, Any]] = []
    state: dict[nn.Parameter, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        by_scale: dict[float, list[str]] = {}
        for parameter in group["params"]:
            name = name_of[parameter]
            moved = provenance.moved(was[name].name)
            new = named[moved.name]
            by_scale.setdefault(moved.scale, []).append(new)
            by_scale.setdefault(1.0, []).extend(of_layers.get(name, []))
            if parameter in optimizer.state:
                state[ours[new]] = {
                    key: _moved_state(key, value, was[name], now[new], moved)
                    for key, value in optimizer.state[parameter].items()
                }
        groups += [
            _settings(optimizer, group, scale) | {"params": [(name, ours[name]) for name in names]}
            for scale, names in by_scale.items()
            if names
        ]
    if not any("param_names" in group for group in optimizer.param_groups):
        groups = [g | {"params": [parameter for _, parameter in g["params"]]} for g in groups]
    kind: Any = type(optimizer)
    made: OptimizerT = kind(groups, lr=optimizer.defaults["lr"])  # each group says all it sets
    made.defaults = dict(optimizer.defaults)
    made.state.update(state)  # type: ignore[arg-type]
    return made


def _reasons_against(optimizer: Optimizer, theirs: Mapping[str, nn.Parameter]) -> list[str]:
    kind = type(optimizer)
    if kind not in _SETTINGS:
        known = ", ".join(each.__name__ for each in _SETTINGS)
        return [
            f"got a {kind.__module__}.{kind.__qualname__}; expected one of torch's {known}: what a "
            "moment becomes when its parameter is scaled is known of these"
        ]
    known_ids = set(theirs.values())
    stray = [p for group in optimizer.param_groups for p in group["params"] if p not in known_ids]
    reasons = []
    if stray:
        shapes = ", ".join(str(tuple(p.shape)) for p in stray[:5])
        reasons.append(
            f"{len(stray)} of its parameters (of shapes {shapes} …) are not the model's: give the "
            "model that was grown, and the optimizer that trains it"
        )
    odd = {key for state in optimizer.state.values() for key in state} - {*_MOMENTS, "step"}
    if odd:
        reasons.append(f"its state has {sorted(odd)}; expected {[*_MOMENTS, 'step']}")
    return reasons


def _new_of(
    provenance: Provenance, was: Mapping[str, Parameter], named: Mapping[str, str]
) -> dict[str, list[str]]:
    """The parameters of new layers, by the old parameter that each is like."""
    old_of = {layout.name: name for name, layout in was.items()}
    found: dict[str, list[str]] = {}
    for tensor, name in named.items():
        if provenance.old_name(tensor) is None:
            found.setdefault(old_of[provenance.source_of(tensor)], []).append(name)
    return found


def _settings(optimizer: Optimizer, group: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """A group's settings for parameters that were multiplied by `scale`."""
    powers = dict(_SETTINGS[type(optimizer)])
    if group.get("decoupled_weight_decay"):  # of Adam: as AdamW's
        powers["weight_decay"] = 1
    return {
        key: value * scale ** -powers[key] if key in powers and scale != 1.0 else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _moved_state(key: str, value: Any, was: Parameter, now: Parameter, moved: Moved) -> Any:
    """One entry of a parameter's state, for the grown parameter."""
    if key not in _MOMENTS or value is None:
        return value.clone() if isinstance(value, Tensor) else value
    old = was.taken_apart(value)
    if moved.scale != 1.0:
        old = old / moved.scale ** _MOMENTS[key]
    return now.put_together(moved.put(old, old.new_zeros(moved.shape)))
