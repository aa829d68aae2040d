"""The rest of a forward pass, from a stream in the middle of it, for many variants at once.

Rows are variants × prompts, prompts inmost: row r is prompt r mod batch of variant r // batch. A
variant states the stream that enters a block, edits at hooks of that block or later ones, and an
addition to the output of the first one's MLP; all else then runs as it would.

Nothing is computed that a variant cannot change:

    blocks before the first one             their output is recorded
    positions before `first`                in a causal model they stay the same; later ones attend
                                            to recorded keys and values (`bridge.py` tests which
                                            bridges can do that)
    positions and columns of the logits     other than those that the metric reads

so a variant that enters block b at position t costs 2 (n_pos - t) Σ_{blocks ≥ b} parameters flops
and its attention, where a whole forward costs 2 n_pos (Σ parameters + d_model · d_vocab).

Every replay is compared with the recorded logits before it is used, and every kind of edit that a
sweep makes of it with hooks (`edit_checks.py`). Where products of matrices are rounded to TF32, a
model run in parts differs from itself by that; then these tests run on a second, precise replay.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of, logit_tolerance
from attn_only_lens.numerics import full_precision, normal_numbers
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Hooks, Recording

PROBLEM = "this model cannot be patched"
_ROUNDINGS = 8
# Numbers at once, as torch's profiler counts allocations (`test_memory.py`): several copies
# of the widest activation, or of attention scores; of the logits that a loss reads.
_WIDEST, _SCORES, _LOGITS = 6, 4, 8
# The flops of matrix products in the time that a call of a block takes, whatever its size. On two
# cores of an EPYC, beside other jobs, 0.9e8 in a converted model and 2.8e8 in a bridge. On GPUs it
# is an estimate: 90 kernels at 10 µs, and 30 Tflop/s.
_CALL_FLOPS = {"cpu": 1e8, "cuda": 3e10}


@dataclass(frozen=True)
class Variants:
    """Forward passes that differ from the recorded one.

    Attributes:
        block: the first block that they run.
        first: the first position at which they differ.
        stream: the stream that enters that block, from `first` on.
        hooks: edits at hook points of that block and later ones, which see rows from `first` on.
        mlp: the module of that block, or hook point, to whose output `added` is added, if any.
        added: the addition.
    """

    block: int
    first: int
    stream: Float[Tensor, "row pos d_model"]
    hooks: Hooks = ()
    mlp: nn.Module | None = None
    added: Float[Tensor, "row pos d_model"] | None = None


@dataclass(eq=False)
class Replay(ABC):
    """A model, one recorded forward pass of it, and the logits that a metric reads.

    Attributes:
        model: converted, or with exposed neuron-heads.
        recording: the forward pass.
        metric: the metric.
        precise: the replay that is tested in place of this one.
    """

    model: Any
    recording: Recording
    metric: BoundMetric
    precise: "Replay" = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.precise = self.precise or self
        self.host = host_of(self.model)
        self.n_blocks = len(self.model.blocks)
        self.batch, self.n_pos = self.recording.tokens.shape
        self._adds: dict[int, bool] = {}
        self._parameters = [
            sum(p.numel() for p in block.parameters() if p.ndim > 1) for block in self.model.blocks
        ]

    @abstractmethod
    def logits(self, variants: Variants) -> Float[Tensor, "row position column"]:
        """Return the logits that the metric reads."""

    @abstractmethod
    def block_output(self, variants: Variants) -> Float[Tensor, "row pos d_model"]:
        """Return the output of the first block, from `first` on."""

    @abstractmethod
    def can_start_at(self, block: int, position: int) -> bool:
        """Return whether a block and those after it can run from a position on, by themselves."""

    @property
    @abstractmethod
    def cached_numbers_per_token(self) -> int:
        """The numbers that a block holds at once for the keys and values of a token."""

    @torch.no_grad()
    def values(self, variants: Variants) -> Float[Tensor, "site prompt"]:
        """Return the metric of each prompt of each variant (`BoundMetric.of_prompts`)."""
        logits = self.logits(variants)
        return self.metric.of_prompts(logits.unflatten(0, (-1, self.batch)))

    def recorded_stream(self, block: int, first: int, n: int) -> Float[Tensor, "row pos d_model"]:
        """Return the recorded stream that entered a block, for n variants."""
        return self.recording.streams[block][:, first:].repeat(n, 1, 1)

    def start(self, block: int, position: int) -> int:
        """Return where to start variants of a block that differ from a position on."""
        positions = self.metric.positions
        latest = self.n_pos - 1 if positions is None else int(positions.min())
        first = min(position, latest)
        return first if self.can_start_at(block, first) else 0

    def flops_per_token(self, block: int) -> int:
        """Return the flops of a block and those after it, of their matrices alone, for a token."""
        return 2 * sum(self._parameters[block:])

    def share_of_forward(self, block: int, first: Int[Tensor, "row"]) -> Float[Tensor, "row"]:
        """Return the flops of variants that enter a block at positions, over a whole run's."""
        cfg = self.model.cfg
        whole = self.n_pos * (self.flops_per_token(0) + 2 * cfg.d_model * cfg.d_vocab)
        return (self.n_pos - first).double() * self.flops_per_token(block) / whole

    def tokens_per_run(self, block: int, position: int) -> float:
        """Return how many tokens a run from a block on costs, beside those that it runs.

        Args:
            block: the block.
            position: where the run would start.
        """
        if block >= self.n_blocks:
            return math.inf
        calls = _CALL_FLOPS["cuda" if self.recording.tokens.is_cuda else "cpu"]
        return (self.n_blocks - block) * calls / self.flops_per_token(block)

    @property
    def numbers_per_token(self) -> int:
        """Estimated maximum of the numbers that a forward pass holds at once for a token."""
        widest = max(max(p.shape) for p in self.model.blocks.parameters())
        d_model = self.recording.streams[0].shape[-1]
        n_heads = max(self.host.n_heads)
        return 5 * d_model + max(_WIDEST * widest, _SCORES * n_heads * self.n_pos)

    def numbers_per_variant(self, first: int) -> int:
        """Estimate the maximum of the numbers that one variant holds at once.

        A variant of a few tokens reads the keys and values of all those before, and one block
        after the other has a copy of them for each variant.
        """
        tokens = self.batch * (self.n_pos - first)
        cached = self.cached_numbers_per_token * self.batch * self.n_pos if first else 0
        return tokens * self.numbers_per_token + cached + _LOGITS * self.logits_per_variant

    @property
    def logits_per_variant(self) -> int:
        """The number of logits that are computed for one variant."""
        return self.metric.select(self.recording.logits).numel()

    def effective_positions(self, block: int) -> Bool[Tensor, "batch pos"]:
        """Return where a change of the stream that enters a block can affect the metric."""
        device, positions = self.recording.tokens.device, self.metric.positions
        everywhere = torch.arange(self.n_pos, device=device).expand(self.batch, -1)
        if positions is None or block < self.n_blocks:
            return torch.ones_like(everywhere, dtype=torch.bool)
        # The logits of a token are all that is left to compute.
        return everywhere == positions.to(device)[:, None]

    def adds_mlp_output(self, block: int, mlp: nn.Module) -> bool:
        """Test whether a block adds the output of its MLP to the stream unchanged."""
        if self.precise is not self:
            with full_precision():
                return self.precise.adds_mlp_output(block, mlp)
        if block not in self._adds:
            before, after = self.recording.streams[block : block + 2]
            added = normal_numbers(after.shape).to(after) * after.std()
            out = self.block_output(Variants(block, 0, before, mlp=mlp, added=added))
            error = float((out - after - added).abs().max())
            scale = float(after.abs().max() + added.abs().max())
            # A sum of a few terms, whose roundings no later layer has amplified.
            # If it is not met, patches run the block, which is right in any case.
            self._adds[block] = error <= _ROUNDINGS * torch.finfo(out.dtype).eps * scale
        return self._adds[block]

    def check(self) -> None:
        """Compare replays without any edit, from several blocks, with the recorded logits.

        Raises:
            UnsupportedModelError: they differ.
        """
        whole = self.metric.select(self.recording.logits)
        largest = float(self.recording.logits.abs().max())
        bound = logit_tolerance(self.host.neurons, whole.dtype) * largest
        for block in sorted({0, self.n_blocks // 2, self.n_blocks}):
            for first in {0, self.start(block, self.n_pos)}:
                again = self.logits(Variants(block, first, self.recorded_stream(block, first, 2)))
                error = float((again - whole.repeat(2, 1, 1)).abs().max())
                if not error <= bound:
                    raise UnsupportedModelError(
                        [
                            f"run again from block {block}, position {first}, its logits differ by "
                            f"{error:.2g} from those of a whole run (largest: {largest:.2g})"
                        ],
                        PROBLEM,
                    )

    def with_earlier_logits(
        self, logits: Float[Tensor, "row position column"], first: int
    ) -> Float[Tensor, "row position column"]:
        """Prepend the recorded logits before `first`, if the metric reads all positions."""
        if self.metric.positions is not None or not first:
            return logits
        before = self.metric.select(self.recording.logits)[:, :first]
        return torch.cat([before.repeat(len(logits) // self.batch, 1, 1), logits], dim=1)


@contextmanager
def add_to_mlp_output(variants: Variants) -> Iterator[None]:
    """Make the addition of variants to the output of their MLP."""
    if variants.mlp is None:
        yield
        return

    def add(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return (output[0] + variants.added, *output[1:])
        return output + variants.added

    handle = variants.mlp.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
