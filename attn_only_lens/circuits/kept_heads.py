"""Run small circuits fast: compute only the heads that the circuits keep.

Suppose that every head of a sublayer is a site at every position. If all of them are ablated, the
sublayer writes a constant C, whatever it reads. If circuits keep neurons K of an MLP, it writes

    C + Σ_{i ∈ K} (z_i(x) - ablated z_i) W_out[i]        q_i(x) = q_i(x0) + (x - x0) W[:, i]

where x0 is the MLP's input when all sites are ablated. So the matrices' other columns are not used.
Attention runs as usual if any circuit keeps one of its heads, and is skipped otherwise. Sublayers
with other sites, and those of which a large part is kept, run as usual, with hooks at z. In every
analysis, MLPs must first compute q and u with their matrices, and two circuits must have the same
logits as with hooks alone, on a noisy residual stream.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attn_only_lens.axes import Residual
from attn_only_lens.circuits.ablated_points import AblatedPoint, AblatedPoints, KeptSites, Rows
from attn_only_lens.devices import normal_numbers, read_all
from attn_only_lens.engine.gradients import as_leaf
from attn_only_lens.engine.model_state import once
from attn_only_lens.engine.replay import Replay, Variants
from attn_only_lens.engine.replay.base import suppress_refusals
from attn_only_lens.engine.replay.faster import FINE
from attn_only_lens.engine.writes import sublayer_input
from attn_only_lens.heads import logit_tolerance
from attn_only_lens.heads.bilinear import BilinearHeads
from attn_only_lens.precision import full_precision

_ALL = slice(None)
_FEW = 4  # if more than a fourth of an MLP's neurons are kept, all neurons are computed
_TESTED = 5  # the number of heads of each sublayer in a test


@dataclass(frozen=True, eq=False)
class _Sublayer:
    """A sublayer whose output is constant if all of its heads are ablated.

    Attributes:
        heads: the neuron-heads; None for attention.
        entered: the input if all sites of the model are ablated.
        returned: what the module returns then.
    """

    point: AblatedPoint
    first: int
    module: nn.Module
    heads: Any
    entered: Residual
    returned: Any

    @property
    def is_mlp(self) -> bool:
        """Whether the heads are neuron-heads."""
        return self.heads is not None

    def runs(self, kept: KeptSites) -> bool:
        """Return whether the module itself must run."""
        if not self.is_mlp:
            return len(kept.heads) > 0
        return len(kept.heads) * _FEW > self.point.replacement.shape[2]

    def forward(self, kept: KeptSites) -> Callable[..., Any]:
        """Return a function that computes the module's output from its input."""
        if not len(kept.heads):
            return partial(self._constant, kept.n_circuits)
        index = kept.heads_there
        gone = self.point.ablated(kept, self.first, only_kept_heads=True).squeeze(-1)
        ablated = self.point.replacement[:, self.first :, index, 0]
        z, W_out = self.outputs(index), self.heads.decoders[0][index]

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x = sublayer_input(args, kwargs).unflatten(0, (kept.n_circuits, -1))
            change = torch.where(gone, 0.0, z(x) - ablated)
            return (self.returned + change @ W_out).flatten(0, 1)

        return forward

    def outputs(self, index: Any = _ALL) -> Callable[[Tensor], Tensor]:
        """Return a function that computes z of some neurons from the MLP's input."""
        before = [x[..., index] for x in self._projections]
        matrices = [matrix[:, index] for matrix in self.heads.read_matrices]

        def outputs(x: Float[Tensor, "*any pos d_model"]) -> Float[Tensor, "*any pos neuron"]:
            pairs = zip(before, matrices, strict=True)
            q, *up = (at_start + (x - self.entered) @ matrix for at_start, matrix in pairs)
            which = None if index is _ALL else index
            weight, v = self.heads.weights_and_values(q, up[0] if up else None, which)
            return weight * v

        return outputs

    @cached_property
    def _projections(self) -> list[Tensor]:
        with torch.no_grad():
            return self._projected(self.entered)

    def _projected(self, x: Residual) -> list[Tensor]:
        """Return q and, in a gated MLP, u, as the MLP itself computes them."""
        return [y for y in self.heads.projections(x) if y is not None]

    def reads_alike(self, allowed: float) -> Bool[Tensor, ""]:
        """Return whether the MLP itself computes q and u from another input with its matrices."""
        noise = normal_numbers(self.entered.shape).to(self.entered) * self.entered.std()
        seen = self._projected(self.entered + noise)
        parts = zip(self._projections, seen, self.heads.read_matrices, strict=True)
        errors = [
            (at_start + noise @ matrix - x).abs().max() / x.abs().max()
            for at_start, x, matrix in parts
        ]
        return torch.stack(errors).max() <= allowed

    def _constant(self, n_circuits: int, *args: Any, **kwargs: Any) -> Any:
        def repeated(x: Tensor) -> Tensor:
            return x.repeat(n_circuits, *(1,) * (x.ndim - 1))

        if isinstance(self.returned, Tensor):
            return repeated(self.returned)
        return repeated(self.returned[0]), *(None,) * (len(self.returned) - 1)


class TracedMLP:
    """An MLP of which a run of a circuit computes the kept neurons, with a gradient.

    Attributes:
        z: in the run, the outputs of all neurons before the ablation, without a gradient.
        output: in the run, what the MLP wrote, a node of the autograd graph.
    """

    z: Float[Tensor, "batch pos head_index d_head=1"]
    output: Residual

    def __init__(self, sublayer: _Sublayer, kept: KeptSites) -> None:
        self.module = sublayer.module
        self._heads, self._forward = sublayer.heads, sublayer.forward(kept)
        self._outputs = sublayer.outputs()

    def forward(self, *args: Any, **kwargs: Any) -> Residual:
        """Return the MLP's output, and set `z` and `output`."""
        with torch.no_grad():
            self.z = self._outputs(sublayer_input(args, kwargs)).unsqueeze(-1)
        output = self._forward(*args, **kwargs)
        self.output = output.view_as(output) if output.requires_grad else as_leaf(output)
        return self.output

    def back(self, gradient: Residual) -> Float[Tensor, "batch pos head_index d_head=1"]:
        """Return the gradient at z after the ablation, given the gradient at `output`."""
        return (gradient @ self._heads.decoders[0].detach().T).unsqueeze(-1)


class KeptHeads:
    """The sublayers of an ablated model of which only kept heads need to run.

    Attributes:
        sublayers: these sublayers, by the hook name of z; empty if a test failed.
    """

    def __init__(self, replay: Replay, points: AblatedPoints, first: int) -> None:
        """Run the model once with all sites ablated, and test the faster runs of circuits."""
        self._replay, self._points, self._first = replay.precise, points, first
        self.sublayers = dict[str, _Sublayer]()
        fits = False
        with torch.no_grad(), full_precision(), suppress_refusals():
            if replay.recording.streams[0].dtype in FINE:
                self.sublayers = self._recorded()
                name = f"kept heads of {list(self.sublayers)} from {min(first, 1)}"
                # A test of an earlier call could miss later changes of matrices through `.data`.
                fits = once(replay.model, name, self._passes)
        if not fits:
            self.sublayers = {}

    def _recorded(self) -> dict[str, _Sublayer]:
        host = self._replay.host
        modules = dict[nn.Module, tuple[AblatedPoint, Any]]()
        for point in self._points:
            # The last layer may run on only the tokens that the metric reads.
            if point.layer == host.n_layers - 1 or not point.covers_all(self._first):
                continue
            heads = host.neurons[point.layer]
            each_alone = not heads.experts[0] and not isinstance(heads, BilinearHeads)
            if point.kind == "attention":
                modules[host.attention(point.layer)] = point, None
            elif point.kind == "neuron" and each_alone:
                modules[heads.module] = point, heads
        sublayers = dict[str, _Sublayer]()

        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            point, heads = modules[module]
            entered = sublayer_input(args, kwargs)
            sublayers[point.name] = _Sublayer(point, self._first, module, heads, entered, output)

        with ExitStack() as stack:
            for module in modules:
                if "forward" not in vars(module):  # accelerate moves the module's weights
                    handle = module.register_forward_hook(look, with_kwargs=True)
                    stack.callback(handle.remove)
            nothing = [np.empty(0, dtype=np.int64)]
            stream = self._replay.recorded_stream(0, self._first, 1)
            hooks = self._points.hooks(nothing, self._first)
            self._replay.logits(Variants(0, self._first, stream, hooks))
        return sublayers

    def _passes(self) -> bool:
        """Return whether runs from a noisy stream are the same as with hooks alone.

        Noise gives every sublayer another input than the run without any site.
        """
        replay, first = self._replay, self._first
        recorded = replay.recorded_stream(0, first, 1)
        noisy = recorded + normal_numbers(recorded.shape).to(recorded) * recorded.std()
        allowed = logit_tolerance(replay.host.neurons, recorded.dtype)
        agree = [one.reads_alike(allowed) for one in self.sublayers.values() if one.is_mlp]
        # Both circuits keep neurons in all layers, and heads in every second layer.
        tested: tuple[list[Rows], list[Rows]] = [], []
        for sublayer in self.sublayers.values():
            point = sublayer.point
            n_heads = point.replacement.shape[2]
            heads = np.linspace(0, n_heads - 1, max(1, min(_TESTED, n_heads // _FEW))).round()
            for number, rows in enumerate(tested):
                if sublayer.is_mlp or point.layer % 2 == number:
                    rows.append(point.rows[np.isin(point.index, heads)])
        circuits = [np.concatenate([np.empty(0, dtype=np.int64), *rows]) for rows in tested]
        hooks = self._points.hooks(circuits, first)
        expected = replay.logits(Variants(0, first, noisy.repeat(2, 1, 1), hooks))
        got = torch.cat([replay.logits(self.variants([circuit], noisy)) for circuit in circuits])
        agree.append((got - expected).abs().max() <= allowed * expected.abs().max())
        return all(read_all(agree))

    def variants(self, circuits: Sequence[Rows], stream: Residual) -> Variants:
        """Return runs of circuits from the stream that enters the first block."""
        hooks, replaced = list[Any](), list[tuple[nn.Module, Any]]()
        for point, kept, sublayer in self._faster(circuits):
            if sublayer is None:
                hooks.append(point.hook(kept, self._first))
            else:
                replaced.append((sublayer.module, sublayer.forward(kept)))
        return Variants(0, self._first, stream, hooks, replaced=replaced)

    def traced(self, circuit: Rows) -> dict[str, TracedMLP]:
        """Return MLPs through which gradients flow only along a circuit's neurons.

        The keys are the hook names of z. Hooks at their z do not run.
        """
        return {
            point.name: TracedMLP(sublayer, kept)
            for point, kept, sublayer in self._faster([circuit])
            if sublayer is not None and sublayer.is_mlp
        }

    def _faster(
        self, circuits: Sequence[Rows]
    ) -> Iterator[tuple[AblatedPoint, KeptSites, _Sublayer | None]]:
        """Yield hook points and kept sites, with the sublayer if its module need not run."""
        for point, kept in zip(self._points, self._points.kept(circuits), strict=True):
            sublayer = self.sublayers.get(point.name)
            yield point, kept, None if sublayer is None or sublayer.runs(kept) else sublayer
