"""Recognise MLPs whose neurons can be exposed as attention heads, by running them on test inputs.

An MLP with pre-activations q and u is recognised if the input of hook_post is act(q), act(q) · u or
act(q) · u + b_in, where act is an activation function that a gate represents exactly (`GATES`). The
check runs the MLP with random u, with q from -12 to 12, and with a few q of up to ±10^4, which
would reveal a clipped activation. Dropout and later changes are not detected, so the heads
(`InPlace`) repeat the check whenever they replace activations.

In BERT, no module runs the whole MLP: the bridge's `mlp` only refers to modules of the layer, so
the layer must run for the MLP's hook points to fire.
"""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from attn_only_lens.arguments import a_type
from attn_only_lens.devices import keep_random_state, normal_numbers, on_cpu, read_all
from attn_only_lens.engine.model_checks import evaluation_without_hooks
from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.gates import GeneralizedSiLU
from attn_only_lens.gates.exact import GATES, Gate
from attn_only_lens.heads import host_of
from attn_only_lens.heads.feature_mlp import FeatureMLP
from attn_only_lens.models.in_place.bridge_components import component_reasons
from attn_only_lens.models.in_place.exposed import exposed_heads
from attn_only_lens.models.in_place.hook_points import find_hook_points
from attn_only_lens.models.in_place.mixtures import expert_activation, is_mixture
from attn_only_lens.models.in_place.mlp_hooks import (
    MLPHookPoints,
    UnknownMLPError,
    activation_error,
)
from attn_only_lens.models.two_blocks.known_modules import reasons_against
from attn_only_lens.tl import GatedMLP, HookedTransformer

_SHOWN = 5
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_BATCH, _POS = 2, 7
_FAR = 1e4  # the largest |q| in the test; q · u still fits in float16


@dataclass(frozen=True)
class KnownMLP:
    """An MLP whose neurons can be exposed as heads.

    `act_fn` is a key of `GATES`, a generalized SiLU's name, or the activation of a transcoder.
    """

    mlp: nn.Module
    points: MLPHookPoints
    act_fn: str


def known_mlps(model: Any, problem: str, silu: GeneralizedSiLU | None = None) -> list[KnownMLP]:
    """Return the MLP of every layer, or raise UnsupportedModelError if one is not recognised.

    If `silu` is given, it must be the activation function of every MLP. `problem` is the first line
    of the error message.
    """
    if exposed := exposed_heads(model):
        UnsupportedModelError.raise_if(host_of(model).reasons(), problem)
        return [KnownMLP(heads.mlp, heads.mlp_points, heads.act_fn) for heads in exposed]
    blocks: list[Any] = []
    if type(model) is TransformerBridge:
        blocks = list(getattr(model, "blocks", ()))
        reasons = [] if blocks else ["it has no blocks (an encoder-decoder?)"]
    elif isinstance(model, TransformerBridge) or not isinstance(model, HookedTransformer):
        reasons = [
            f"got {a_type(model, with_module=True)}; expected a TransformerBridge or, with "
            "transformer-lens 3.9, a HookedTransformer"
        ]
    else:
        reasons = reasons_against(model, silu=silu)  # attached hooks are allowed
        blocks = [] if reasons else list(model.blocks)
    known: dict[int, KnownMLP] = {}
    transcoders: dict[int, KnownMLP] = {}
    mlps: list[Any] = [getattr(block, "mlp", None) for block in blocks]
    ran: list[tuple[int, Any, MLPHookPoints, Tensor]] = []
    gates = GATES if silu is None else {silu.gate.name: silu.gate}
    with evaluation_without_hooks(mlps):
        for layer, mlp in enumerate(mlps):
            try:
                if any(mlp is earlier for _, earlier, *_ in ran):
                    raise UnknownMLPError("it shares its MLP with an earlier layer")
                points = find_hook_points(mlp)
                if is_mixture(mlp):
                    act_fn = expert_activation(mlp, model.cfg.act_fn, gates)
                    known[layer] = KnownMLP(mlp, points, act_fn)
                elif isinstance(mlp, FeatureMLP):
                    transcoders[layer] = KnownMLP(mlp, points, mlp.transcoder_activation)
                else:
                    ran.append((layer, mlp, points, _activations(mlp, points)))
            except UnknownMLPError as error:
                reasons.append(f"layer {layer}: {error}")
    for (layer, mlp, points, _), post in zip(ran, on_cpu([x for *_, x in ran]), strict=True):
        try:
            known[layer] = KnownMLP(mlp, points, _name(post, mlp, points, model.cfg, gates))
        except UnknownMLPError as error:
            reasons.append(f"layer {layer}: {error}")
    if type(model) is TransformerBridge and not reasons:
        reasons = component_reasons(model)
    names = {mlp.act_fn for mlp in known.values()}
    if len(names) > 1:
        reasons.append(f"its layers have different activations: {', '.join(sorted(names))}")
    UnsupportedModelError.raise_if(reasons, problem)
    return [mlp for _, mlp in sorted((known | transcoders).items())]


def non_finite_weights(model: Any) -> list[str]:
    """Return error messages for parameters with NaN or infinite entries (five at most)."""
    named = {
        name.replace("._original_component", ""): parameter.detach()
        for name, parameter in model.named_parameters()
        if not parameter.is_meta and parameter.dtype in _FLOATS and parameter.numel()
    }
    # Copy all parameter norms to the CPU in one transfer, since each transfer synchronises. A norm
    # can overflow although all entries are finite, so check the entries if a norm is not finite.
    devices = {parameter.device for parameter in named.values()}
    by_device = ([x for x in named.values() if x.device == device] for device in devices)
    norms = [norm for parameters in by_device for norm in torch._foreach_norm(parameters)]
    if all(map(math.isfinite, read_all(norms))):
        return []
    counts = {name: int((~parameter.isfinite()).sum()) for name, parameter in named.items()}
    wrong = [
        f"its parameter {name} has {count} entries that are NaN or infinite"
        for name, count in counts.items()
        if count
    ]
    more = len(wrong) - _SHOWN
    return [*wrong[:_SHOWN], *[f"and {more} more of its parameters have such entries"] * (more > 0)]


@torch.no_grad()
def run_mlp(mlp: Any, points: MLPHookPoints, x: Tensor) -> Tensor:
    """Run an MLP, or its layer if the MLP is no separate module, and return the MLP's output."""
    if points.layer is None:
        output = _run(mlp, x)
        if is_mixture(mlp) and isinstance(output, tuple):  # the second entry has router scores
            output = output[0]
        if not isinstance(output, Tensor):
            raise UnknownMLPError(f"its MLP returns {a_type(output)}, not a tensor")
        return output
    assert points.out is not None
    seen: list[Tensor] = []
    handle = points.out.register_forward_hook(lambda module, args, out: seen.append(out))
    try:
        _run(points.layer, x)
    finally:
        handle.remove()
    if len(seen) != 1:
        raise UnknownMLPError(
            f"its W_out ran {len(seen)} times in one forward pass of its layer; expected once"
        )
    return seen[0]


def _run(module: nn.Module, x: Tensor) -> Any:
    try:
        with keep_random_state(x.device):
            return module(x)
    except UnknownMLPError:
        raise
    except Exception as error:  # custom code may raise any exception
        raise UnknownMLPError(f"its MLP cannot be run separately: {error}") from error


def _activations(mlp: Any, points: MLPHookPoints) -> Tensor:
    """Run an MLP on the pre-activations from `_inputs`, and return its activations."""
    d_mlp, d_model = mlp.W_out.shape
    shape = (_BATCH, _POS, d_mlp)
    q, u = (x.to(mlp.W_out.device) for x in _inputs(shape, mlp.W_out.dtype, points))
    seen: dict[HookPoint, list[Tensor]] = {}
    with ExitStack() as stack:
        for point, value in ((points.pre, q), (points.pre_linear, u), (points.post, None)):
            if point is None:
                continue
            seen[point] = []

            def hook(module: Any, args: Any, output: Tensor, value: Tensor | None = value) -> Any:
                seen[module].append(output.clone())
                return None if value is None else value.clone()

            stack.callback(point.register_forward_hook(hook).remove)
        run_mlp(mlp, points, normal_numbers((_BATCH, _POS, d_model)).to(mlp.W_out))

    fired = [len(outputs) for outputs in seen.values()]
    if set(fired) != {1}:
        raise UnknownMLPError(
            f"the hook points of its mlp fired {fired} times in one forward pass; expected once"
        )
    shapes = {tuple(output.shape) for (output,) in seen.values()}
    if shapes != {shape}:
        raise UnknownMLPError(f"its activations have shapes {shapes}; expected {shape}")
    return seen[points.post][0]


def _inputs(
    shape: tuple[int, ...], dtype: torch.dtype, points: MLPHookPoints
) -> tuple[Tensor, Tensor]:
    """Return test inputs for an MLP: q from -12 to 12, with a few larger values, and random u."""
    q = torch.linspace(-12, 12, math.prod(shape), dtype=torch.float64, device="cpu")
    far = torch.logspace(1.2, math.log10(_FAR), 5, dtype=torch.float64, device="cpu")
    q[:5], q[-5:] = -far.flip(0), far
    u = normal_numbers(shape, 1) if points.pre_linear else torch.ones_like(q)
    return q.reshape(shape).to(dtype), u.reshape(shape).to(dtype)


def _name(
    post: Tensor, mlp: Any, points: MLPHookPoints, cfg: Any, gates: Mapping[str, Gate]
) -> str:
    """Return the name of the activation function that computed `post`; prefer `cfg.act_fn`."""
    q, u = _inputs(post.shape, mlp.W_out.dtype, points)
    q = q.double()
    b_in = mlp.b_in.cpu().double() if isinstance(mlp, GatedMLP) else 0.0
    errors = {name: activation_error(gate, post, q, u, b_in).item() for name, gate in gates.items()}
    best = min(errors, key=errors.__getitem__)
    name = cfg.act_fn if errors.get(cfg.act_fn, math.inf) <= 1.0 else best
    if errors[name] <= 1.0:
        return str(name)
    raise UnknownMLPError(
        "its MLP's activations are not q times a weight p(q) in [0, 1]: expected one of "
        f"{', '.join(sorted(gates))}"
    )
