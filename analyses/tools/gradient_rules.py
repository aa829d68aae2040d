"""Today's attribution methods on models with neuron-heads: multipliers of each head's output z.

Every method estimates the effect of a patch of z by Σ g · Δz, where Δz is z of the run that the
patch comes from minus z of the patched run. The methods differ in the multipliers g:

    gradient               ∂m/∂z in the patched run: attribution patching (AtP)
    AtP*                   GradDrop: Σ |g · Δz| / (L - 1) over L gradients that skip one layer each;
                           g is 0 if this is the site's layer (Kramár et al., arXiv 2403.00745)
    EAP-IG                 the mean gradient over runs whose embeddings are interpolated between the
                           two runs (Hanna et al., arXiv 2403.17806)
    EAP-IG, activations    the mean gradient over runs in which all z of the site's sublayer are
                           interpolated between the two runs (Marks et al., arXiv 2403.19647,
                           equation 3)
    RelP                   patterns, norm scales and gates held, and half of each product of a gated
                           MLP: the linear map of one run (Rezaei Jafari et al., arXiv 2508.21258)
    GIM                    norm scales held; the softmax's gradient at temperature 2; half of the
                           gradient for each factor of a product (Edin et al., arXiv 2505.17630)
    secant                 exact multipliers of the difference of both runs (`multipliers.py`)

The two kinds of EAP-IG use the places (j - 1/2) / n. The code that was published with EAP-IG
multiplied the change of a whole MLP's output by the gradient at its input
(hannamw/EAP-IG, issue 22); here, both are of the same activation.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_only_lens import Contrast
from attn_only_lens.engine.gradients import Tape, start_graph
from attn_only_lens.engine.held_run import HeldRun
from attn_only_lens.engine.linear_map import of_held_run
from attn_only_lens.engine.metrics import BoundMetric, bind
from attn_only_lens.engine.multipliers import run_both, secant_multipliers
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.recording import Hooks, Recording, input_stream, run
from attn_only_lens.engine.writes import edited_input
from attn_only_lens.heads import host_of
from attn_only_lens.patching.integrated_gradients import integrated_gradients
from attn_only_lens.patching.results import Sweep

STEPS = 5
TEMPERATURE = 2.0
SHARES = {"q": 1 / 4, "k": 1 / 4, "v": 1 / 2}
GATED = 1 / 2
"""The shares of gradients that GIM passes on to the factors of a product."""

ByHook = Mapping[str, Float[Tensor, "batch pos head_index d_head"]]


@dataclass(frozen=True, eq=False)
class Runs:
    """The patched run, called target, and the run that patches come from, called source."""

    model: Any
    contrast: Contrast
    direction: str

    @cached_property
    def pair(self) -> PromptPair:
        """The prompts, first those of the target run."""
        pair = self.contrast.pair(self.model)
        if self.direction == "noise":
            return pair
        return replace(pair, clean=pair.corrupted, corrupted=pair.clean)

    @cached_property
    def recordings(self) -> tuple[Recording, Recording]:
        """The target run and the source run."""
        return run_both(self.model, self.pair).recordings()

    @cached_property
    def metric(self) -> BoundMetric:
        """The metric of the contrast, whose answers are those of the clean prompts."""
        return bind(self.contrast.metric, self.model, self.contrast.pair(self.model))

    @cached_property
    def change(self) -> ByHook:
        """Δz by hook name."""
        target, source = self.recordings
        return {name: source.hooked[name] - z for name, z in target.hooked.items()}

    @cached_property
    def names(self) -> list[str]:
        """The hook names of z, by sublayer."""
        return host_of(self.model).hook_names("z")

    def gradients(
        self,
        names: list[str] | None = None,
        hooks: Hooks = (),
        rules: AbstractContextManager[Any] | None = None,
    ) -> ByHook:
        """Return the gradients of the metric at z in the target run, under hooks and rules."""
        tape, target = Tape(names or self.names), self.recordings[0]
        with torch.enable_grad(), start_graph(self.model), rules or nullcontext():
            logits = run(self.model, target.tokens, target.mask, [*hooks, *tape.hooks])
            return tape.gradients(self.metric.of_logits(logits))


def gradient(runs: Runs) -> list[ByHook]:
    """Return the gradients in the target run."""
    return [runs.gradients()]


def dropped(runs: Runs) -> list[ByHook]:
    """Return gradients that skip one layer, for each layer in turn (AtP* with GradDrop)."""
    host = host_of(runs.model)
    every = list[ByHook]()
    for layer in range(host.n_layers):
        own = [host.hook_name(layer, kind, "z") for kind in host.kinds(layer)]
        by_hook = runs.gradients(hooks=[(name, _stop) for name in own])
        every.append(
            {
                name: torch.zeros_like(g) if name in own else g / max(host.n_layers - 1, 1)
                for name, g in by_hook.items()
            }
        )
    return every


def _stop(z: Tensor, hook: Any) -> Tensor:
    return z.detach()


def interpolated_embeddings(runs: Runs) -> list[ByHook]:
    """Return mean gradients over runs with interpolated embeddings (EAP-IG)."""
    tape = Tape(runs.names)
    return [
        integrated_gradients(
            *(runs.model, *runs.recordings, runs.metric, tape, STEPS), progress=False
        )
    ]


def interpolated_outputs(runs: Runs) -> list[ByHook]:
    """Return mean gradients at each z over runs that interpolate it (EAP-IG, activations)."""
    target, result = runs.recordings[0], dict[str, Tensor]()
    for name in runs.names:
        steps = [
            target.hooked[name] + (step + 0.5) / STEPS * runs.change[name] for step in range(STEPS)
        ]
        gradients = [runs.gradients([name], [(name, partial(_put, z))])[name] for z in steps]
        result[name] = torch.stack(gradients).mean(0)
    return [result]


def _put(z: Tensor, value: Tensor, hook: Any) -> Tensor:
    return z


def held(runs: Runs) -> list[ByHook]:
    """Return the multipliers of the target run's linear map (RelP)."""
    target = runs.recordings[0]
    recorded = HeldRun.record(runs.model, target.tokens, target.mask)
    linear = of_held_run(recorded, runs.metric, patterns=False)
    host, pairs = host_of(runs.model), zip(linear.sublayers, linear.multipliers, strict=True)
    return [{host.hook_name(x.layer, x.kind, "z"): g for x, g in pairs}]


def secants(runs: Runs) -> list[ByHook]:
    """Return the multipliers of the difference of both runs."""
    both = run_both(runs.model, runs.pair)
    return [secant_multipliers(runs.model, both, runs.metric, Tape(runs.names)).gradients]


def interactions(runs: Runs) -> list[ByHook]:
    """Return the gradients of GIM, whose forward pass is the model's.

    LayerNorm freeze: scales are constants. Temperature-adjusted softmax gradients: for p =
    softmax(s), the gradient at s is p' (g - Σ p' g) with p' = softmax(s / 2). Gradient
    normalisation: values get 1/2 of their gradient, queries and keys 1/4; in gated MLPs, both
    factors get 1/2.
    """
    host = host_of(runs.model)
    shares = [
        (host.hook_name(layer, "attention", point), partial(_share, share))
        for layer in range(host.n_layers)
        for point, share in SHARES.items()
    ]
    return [runs.gradients(hooks=shares, rules=_softened(runs))]


@contextmanager
def _softened(runs: Runs) -> Iterator[None]:
    """Context manager that changes the gradients of norms, softmaxes and gated MLPs."""
    model, target = runs.model, runs.recordings[0]
    host, writes = host_of(model), HeldRun.record(model, target.tokens, target.mask).run
    around = [norm for x in writes.sublayers for norm in (x.reads, x.writes)]
    norms = {x.norm.module: x for x in (*around, writes.final) if x.norm.module is not None}
    softmax = _Softmax()

    def hold(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        moved = norms[module].change(_change(input_stream(args, kwargs)))
        return output.detach() + moved.to(output.dtype)

    def halve(module: Any, args: Any, kwargs: Any) -> Any:
        return edited_input(args, kwargs, lambda x: _share(GATED, x, None))

    def switch(on: bool, *_: Any) -> None:
        softmax.on = on

    with ExitStack() as stack:
        for module in norms:
            stack.enter_context(module.register_forward_hook(hold, with_kwargs=True))
        for layer, heads in enumerate(host.neurons):
            attention = host.attention(layer)
            stack.enter_context(attention.register_forward_pre_hook(partial(switch, True)))
            stack.enter_context(attention.register_forward_hook(partial(switch, False)))
            if heads.value_is_product:
                module = heads.module
                stack.enter_context(module.register_forward_pre_hook(halve, with_kwargs=True))
        stack.enter_context(softmax)
        yield


class _Softmax(TorchFunctionMode):
    """Calls of softmax, whose gradients are those at a higher temperature while `on` is true."""

    on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self.on or func.__name__ != "softmax":
            return output
        soft = func(args[0] / TEMPERATURE, *args[1:], **(kwargs or {}))
        return output.detach() + TEMPERATURE * _change(soft)


def _share(share: float, x: Tensor, hook: Any) -> Tensor:
    return x.detach() + share * _change(x)


def _change(x: Tensor) -> Tensor:
    """Return 0 with the gradient of x."""
    return x - x.detach()


Method = Callable[[Runs], list[ByHook]]
METHODS: Mapping[str, Method] = {
    "gradient": gradient,
    "AtP*": dropped,
    "EAP-IG": interpolated_embeddings,
    "EAP-IG, activations": interpolated_outputs,
    "RelP": held,
    "GIM": interactions,
    "secant": secants,
}


@torch.no_grad()
def estimates(runs: Runs, method: Method) -> dict[str, Float[Tensor, "pos head_index"]]:
    """Return estimated effects on the mean metric by hook name; of several multipliers, Σ |g · Δz|.

    Gradients are of the mean over prompts, so effects are sums over prompts.
    """
    every = method(runs)
    by_prompt = [
        {name: (g * runs.change[name]).sum(-1) for name, g in some.items()} for some in every
    ]
    if len(every) == 1:
        return {name: x.sum(0) for name, x in by_prompt[0].items()}
    stacked = {name: torch.stack([x[name] for x in by_prompt]) for name in by_prompt[0]}
    return {name: x.abs().sum((0, 1)) for name, x in stacked.items()}


def sweep_of(runs: Runs, method: Method, like: Sweep) -> Sweep:
    """Return a sweep like another one, whose effects are estimated by a method."""
    host, frame = host_of(runs.model), like.frame
    by_hook = {name: x.numpy(force=True) for name, x in estimates(runs, method).items()}
    sites = zip(*(frame[x] for x in ("layer", "kind", "index", "position")), strict=True)
    effects = np.array([by_hook[host.hook_name(*of, "z")][pos, i] for *of, i, pos in sites])
    unpatched = like.corrupted_value if runs.direction == "denoise" else like.clean_value
    return replace(like, frame=frame.assign(value=unpatched + effects))
