"""Run a model again with the patterns and norm scales of a recorded run, as a linear map.

With these constants, only linear maps and biases are left between the embedding and the logits
before any soft cap. A gate of a neuron-head is constant too; in a gated MLP, the value v = g u is a
product, so one factor is constant, or each factor in one half of the product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attn_only_lens.axes import Tokens
from attn_only_lens.engine.gradients import Tape, as_leaf, edit_input, uncapped_logits
from attn_only_lens.engine.linear_rules import Held, HeldSteps, Steps
from attn_only_lens.engine.metrics import BoundMetric
from attn_only_lens.engine.recording import Hooks, run
from attn_only_lens.engine.secants import FunctionRules
from attn_only_lens.engine.writes import Decomposition, SublayerWrites, decompose
from attn_only_lens.heads import host_of
from attn_only_lens.heads.host import HeadKind
from attn_only_lens.precision import full_precision

_Stream: TypeAlias = Callable[[Tensor], Tensor]


class HeldPass(NamedTuple):
    """A forward pass with held patterns and norm scales.

    Attributes:
        steps: the held steps, with nodes of the autograd graph.
        nodes: the activations z, q and k, by hook name.
        uncapped: the unembedding's output, before any soft cap.
        logits: the logits.
    """

    steps: HeldSteps
    nodes: dict[str, Tensor]
    uncapped: Tensor
    logits: Tensor


@dataclass(frozen=True, eq=False)
class HeldRun:
    """A recorded run, whose patterns and norm scales later forward passes hold.

    With these constants, a forward pass is a linear map plus constants.

    Attributes:
        model: the model.
        run: the run's writes to the residual stream.
        steps: the nonlinear steps in this run.
        held: which factor of gated neurons' values is constant.
    """

    model: Any
    run: Decomposition
    steps: Steps
    held: Held

    @classmethod
    @torch.no_grad()
    @full_precision()
    def record(
        cls,
        model: Any,
        tokens: Tokens,
        mask: Tensor | None,
        held: Held = "half",
        names: tuple[str, ...] = (),
    ) -> "HeldRun":
        """Run a model once, and record what later passes hold, and activations at hook points."""
        steps = Steps(model, FunctionRules(paused=True, widens=False))
        run = decompose(model, tokens, mask, names=names, watch=steps.recorded())
        return cls(model, run, steps, held)

    def forward(
        self,
        *,
        copies: int = 1,
        start: _Stream = lambda stream: stream,
        read: _Stream = lambda stream: stream,
        hooks: Hooks = (),
    ) -> HeldPass:
        """Run the linear map.

        Args:
            copies: how many copies of the prompts are in the batch.
            start: changes the embedding.
            read: changes the residual stream that each sublayer, and the last norm, reads.
            hooks: hooks that edit z.
        """
        recording, host = self.run.recording, host_of(self.model)
        mask = None if recording.mask is None else recording.mask.repeat(copies, 1)
        errors = [
            (name, partial(_constant, recording.hooked[name], copies))
            for name in host.hook_names("z", ("error",))
        ]
        around = [norm for x in self.run.sublayers for norm in (x.reads, x.writes)]
        norms = {x.norm.module: x for x in (*around, self.run.final) if x.norm.module is not None}
        readers = readers_of(host, self.run)
        steps = HeldSteps(self.model, self.steps, norms, readers, self.held, read)
        tape = Tape(node_points(host).values())
        edited, caught = edit_input(self.model, start), uncapped_logits(self.model)
        with edited, caught as uncapped, steps.replaced():
            tokens = recording.tokens.repeat(copies, 1)
            logits = run(self.model, tokens, mask, [*errors, *hooks, *tape.hooks])
        return HeldPass(steps, tape.nodes, uncapped[-1], logits)

    def projection(
        self, layer: int, kind: HeadKind, choose: Callable[[HeldPass], Tensor]
    ) -> tuple[Float[Tensor, "n pos d_model"], Float[Tensor, "n"], Float[Tensor, "n"]]:
        """Return how n numbers of the first prompt depend on the stream that a sublayer reads.

        Args:
            layer: the layer of the original model.
            kind: the kind of heads.
            choose: returns the numbers, for example the query of one head, given a pass.

        Returns:
            The numbers' derivatives, their values without a stream, and their values in the run.
        """
        with torch.enable_grad():
            held = self.forward(start=as_leaf)
            numbers = choose(held)
        with torch.no_grad():
            constant = choose(self.forward(read=torch.zeros_like))
        writes = self.run.of(layer, kind)
        read = held.steps.reads[reader_of(host_of(self.model), writes)]

        def back(row: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(numbers, read, row, retain_graph=True)
            return gradient[0]

        rows = torch.eye(len(numbers), dtype=numbers.dtype, device=numbers.device)
        return torch.func.vmap(back)(rows), constant, numbers.detach()

    @torch.enable_grad()
    def logit_gradient(self, metric: BoundMetric) -> Float[Tensor, "batch pos d_vocab"]:
        """Return the metric's gradient at the recorded run's logits."""
        logits = self.run.recording.logits.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(metric.of_logits(logits), logits)
        return gradient


def node_points(host: Any) -> dict[tuple[int, HeadKind, str], str]:
    """Return a dict from (layer, kind, "q", "k" or "z") to the name of the hook point."""
    return {
        (layer, kind, point): host.hook_name(layer, kind, point)
        for layer in range(host.n_layers)
        for kind in host.kinds(layer)
        for point in ("qkz" if kind == "attention" else "z")
    }


def reader_of(host: Any, writes: SublayerWrites) -> nn.Module:
    """Return the module that reads the residual stream for a sublayer: its norm, or itself."""
    if writes.reads.norm.module is not None:
        module: nn.Module = writes.reads.norm.module
    elif writes.kind == "attention":
        module = host.attention(writes.layer)
    else:
        module = host.neurons[writes.layer].module
    return module


def readers_of(host: Any, run: Decomposition) -> list[nn.Module]:
    """Return the modules that read the residual stream without a norm."""
    alone = [reader_of(host, x) for x in run.sublayers if x.reads.norm.module is None]
    last = [host.model.unembed] if run.final.norm.module is None else []
    return [*dict.fromkeys(alone), *last]


def _constant(recorded: Tensor, copies: int, value: Tensor, hook: Any) -> Tensor:
    """Hold an error node at its output in the run."""
    held = recorded.repeat(copies, 1, 1, 1).to(value)
    return held.requires_grad_(torch.is_grad_enabled())
