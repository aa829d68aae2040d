"""The rest of a forward pass, from a stream in the middle of it, for many variants at once.

Rows are variants × prompts, prompts inmost: row r is prompt r mod batch of variant r // batch. A
variant says with what stream a block is entered, at which hooks of that block it is edited, and
what is added to what its MLP puts out; every later block then runs as it would.

What a variant cannot reach is not computed:

    blocks before the one that is entered   their output is on record
    positions before `first`                in a causal model they stay what they are; later ones
                                            attend to keys and values on record (`bridge.py` says
                                            of which bridges)
    positions and columns of the logits     but those that the metric reads

so a variant that enters block b at position t costs 2 (n_pos - t) Σ_{blocks ≥ b} parameters flops
and its attention, where a whole forward costs 2 n_pos (Σ parameters + d_model · d_vocab).

Every replay is held against the recorded logits before it is used, and every kind of edit that a
sweep makes of it against hooks (`runs/replay/trials.py`). Where products of matrices are rounded to
TF32 a model run in parts differs from itself by that; then what is tried is another replay of the
run, its judge, in full precision.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attn_only_lens.errors import UnsupportedModelError
from attn_only_lens.heads import host_of, logit_tolerance
from attn_only_lens.numerics import full_precision, normal_numbers
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Hooks, Recording

__all__ = ["Replay", "Variants", "adding"]

PROBLEM = "this model cannot be patched"
_ROUNDINGS = 8
# Numbers at once, as torch's profiler counts what is allocated (`test_memory.py`): several copies
# of the widest activation, or of attention scores; of the logits that a loss reads.
_WIDEST, _SCORES, _LOGITS = 6, 4, 8


@dataclass(frozen=True)
class Variants:
    """How some forward passes differ from the recorded one.

    Attributes:
        block: the first block that they run.
        first: the first position at which they differ.
        entering: what enters that block, from `first` on.
        hooks: edits at hook points of that block, which see rows from `first` on.
        mlp: the module of that block, or hook point, whose output they add `added` to, if any.
        added: what they add there.
    """

    block: int
    first: int
    entering: Float[Tensor, "row pos d_model"]
    hooks: Hooks = ()
    mlp: nn.Module | None = None
    added: Float[Tensor, "row pos d_model"] | None = None


class Replay(ABC):
    """A model, one recorded forward pass of it, and what a metric reads of its logits."""

    def __init__(
        self,
        model: Any,
        recording: Recording,
        metric: BoundMetric,
        judge: "Replay | None" = None,
    ) -> None:
        self.model = model
        self.host = host_of(model)
        self.judge = judge or self  # the replay that is tried in place of this one
        self.recording = recording
        self.metric = metric
        self.n_blocks = len(model.blocks)
        self.batch, self.n_pos = recording.tokens.shape
        self._adds: dict[int, bool] = {}

    @abstractmethod
    def logits(self, variants: Variants) -> Float[Tensor, "row position column"]:
        """The logits that the metric reads."""

    @abstractmethod
    def leaving(self, variants: Variants) -> Float[Tensor, "row pos d_model"]:
        """What leaves the first block, from `first` on."""

    @torch.no_grad()
    def values(self, variants: Variants) -> Float[Tensor, "site"]:
        """The metric of each variant."""
        logits = self.logits(variants)
        return self.metric.value(logits.unflatten(0, (-1, self.batch)))

    def unchanged(self, block: int, first: int, n: int) -> Float[Tensor, "row pos d_model"]:
        """What entered a block, for n variants."""
        return self.recording.streams[block][:, first:].repeat(n, 1, 1)

    @abstractmethod
    def apart(self, block: int, position: int) -> bool:
        """Whether a block and those after it can be run from a position on, by themselves."""

    def start(self, block: int, position: int) -> int:
        """Where variants of that block begin that differ from a position on."""
        first = min(position, self.earliest())
        return first if self.apart(block, first) else 0

    def earliest(self) -> int:
        """The last position from which variants still tell the metric everything."""
        positions = self.metric.positions
        return self.n_pos - 1 if positions is None else int(positions.min())

    @property
    def numbers_of_token(self) -> int:
        """How many numbers a forward pass holds at once for a token, at the most: an estimate."""
        widest = max(max(p.shape) for p in self.model.blocks.parameters())
        d_model = self.recording.streams[0].shape[-1]
        n_heads = max(self.host.n_heads)
        return 5 * d_model + max(_WIDEST * widest, _SCORES * n_heads * self.n_pos)

    def numbers_from(self, first: int) -> int:
        """How many numbers one variant holds at once, at the most: an estimate.

        A variant of a few tokens reads the keys and values of all those before, and one block
        after the other has a copy of them for each variant.
        """
        tokens = self.batch * (self.n_pos - first)
        kept = self.kept_of_token * self.batch * self.n_pos if first else 0
        return tokens * self.numbers_of_token + kept + _LOGITS * self.logits_of_variant

    @property
    @abstractmethod
    def kept_of_token(self) -> int:
        """How many numbers a block holds at once, for its keys and values of a token."""

    @property
    def logits_of_variant(self) -> int:
        """How many logits are computed of one variant."""
        return self.metric.select(self.recording.logits).numel()

    def seen(self, block: int) -> Bool[Tensor, "batch pos"]:
        """Where the metric can feel a change of what enters a block."""
        device, positions = self.recording.tokens.device, self.metric.positions
        everywhere = torch.arange(self.n_pos, device=device).expand(self.batch, -1)
        if positions is None or block < self.n_blocks:
            return torch.ones_like(everywhere, dtype=torch.bool)
        # The logits of a token are all that is left to compute.
        return everywhere == positions.to(device)[:, None]

    def adds(self, block: int, mlp: nn.Module) -> bool:
        """Whether what the MLP of a block puts out is added to the stream as it is: tried once."""
        if self.judge is not self:
            with full_precision():
                return self.judge.adds(block, mlp)
        if block not in self._adds:
            entering, after = self.recording.streams[block : block + 2]
            added = normal_numbers(after.shape).to(after) * after.std()
            out = self.leaving(Variants(block, 0, entering, mlp=mlp, added=added))
            error = float((out - after - added).abs().max())
            scale = float(after.abs().max() + added.abs().max())
            # A sum of a few terms: no tolerance for what later layers make of its roundings.
            # Where it is missed, patches run the block, which is right in any case.
            self._adds[block] = error <= _ROUNDINGS * torch.finfo(out.dtype).eps * scale
        return self._adds[block]

    def check(self) -> None:
        """Hold the replay of nothing against the recorded logits, from every block.

        Raises:
            UnsupportedModelError: they differ.
        """
        whole = self.metric.select(self.recording.logits)
        largest = float(self.recording.logits.abs().max())
        bound = logit_tolerance(self.host.neurons, whole.dtype) * largest
        for block in sorted({0, self.n_blocks // 2, self.n_blocks}):
            for first in {0, self.start(block, self.n_pos)}:
                entering = self.unchanged(block, first, 2)
                again = self.logits(Variants(block, first, entering))
                error = float((again - whole.repeat(2, 1, 1)).abs().max())
                if not error <= bound:
                    raise UnsupportedModelError(
                        [
                            f"run again from block {block}, position {first}, its logits differ by "
                            f"{error:.2g} from those of a whole run (largest: {largest:.2g})"
                        ],
                        PROBLEM,
                    )

    def completed(
        self, logits: Float[Tensor, "row position column"], first: int
    ) -> Float[Tensor, "row position column"]:
        """With those of the positions before `first`, where the metric reads all."""
        if self.metric.positions is not None or not first:
            return logits
        before = self.metric.select(self.recording.logits)[:, :first]
        return torch.cat([before.repeat(len(logits) // self.batch, 1, 1), logits], dim=1)


@contextmanager
def adding(variants: Variants) -> Iterator[None]:
    """Add to what the MLP of the first block puts out."""
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
