"""Run only a model's last blocks, for many patched copies of a run (variants) at once.

Each row of the batch is one prompt of one variant. With n prompts, row r holds prompt r mod n of
variant r // n. Variants that start at different blocks can run together (`Joined`). A replay
computes only the activations that its variants can change and that the metric needs. Earlier
blocks, and logits that the metric does not read, are skipped. Causal models also skip positions
before `first`, and use the recorded keys and values. Before its first use, a replay must reproduce
the recorded logits, and its edits must have the same effects as hooks (`edit_checks.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attn_only_lens.axes import Residual
from attn_only_lens.devices import normal_numbers, read_all
from attn_only_lens.engine.metrics import BoundMetric
from attn_only_lens.engine.model_checks import modules_of
from attn_only_lens.engine.passed_tests import PassedTests, passed_tests
from attn_only_lens.engine.recording import Hooks, Recording, record_streams
from attn_only_lens.engine.replay.faster import FusedActivations, only_where_read, replaced_forward
from attn_only_lens.errors import AttnOnlyLensError, UnsupportedModelError
from attn_only_lens.heads import host_of, logit_tolerance
from attn_only_lens.precision import full_precision

PROBLEM = "this model cannot be patched"
_UNFIT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_ROUNDINGS = 8
_BEFORE_OUTPUT = "q", "k", "v", "pattern", "z"  # hook points before attention's output projection
# The number of copies of the widest activation, of attention scores, and of the logits for a loss
# that are in memory at once, according to torch's profiler.
_WIDEST, _SCORES, _LOGITS = 6, 4, 8
_LOGITS_AT_ONCE = 2**26  # floats, including copies; enough for 170 tokens with 49,152 logits each
_CALL_FLOPS = 3e10  # an estimate for GPUs: 90 kernels of 10 µs per block, at 30 Tflop/s


@dataclass(frozen=True)
class Variants:
    """Patched copies of a run that was recorded, computed in one batch.

    Attributes:
        block: the first block that these passes run.
        first: the first position at which they differ; all tensors begin there.
        stream: the stream that enters this block.
        hooks: edits at hook points in this block and later blocks.
        added: tensors to add to the outputs of modules or hook points, in this block and later
            blocks.
        replaced: functions that these modules run in place of their forward pass. Such variants are
            not joined with others.
    """

    block: int
    first: int
    stream: Float[Tensor, "row pos d_model"]
    hooks: Hooks = ()
    added: Sequence[tuple[nn.Module, Float[Tensor, "row pos d_model"]]] = ()
    replaced: Sequence[tuple[nn.Module, Callable[..., Any]]] = ()


class Joined:
    """Variants that run together, sorted by their first block; all start at the same position.

    Attributes:
        first: the first position at which the variants differ from the unpatched run.
        block: the first block that any variant runs.
        n_rows: the number of rows of all variants.
    """

    def __init__(self, *members: Variants) -> None:
        blocks = [variants.block for variants in members]
        assert blocks == sorted(blocks)
        assert len({variants.first for variants in members}) == 1
        assert len(members) == 1 or not any(variants.replaced for variants in members)
        self.members, self.first, self.block = members, members[0].first, blocks[0]
        self.n_rows = sum(len(variants.stream) for variants in members)

    def entering(self, block: int) -> list[Variants]:
        """Return the variants that start at a block."""
        return [variants for variants in self.members if variants.block == block]

    def stream(self, block: int, x: Residual | None) -> Residual:
        """Return a block's input stream for all variants that start at this block or earlier."""
        streams = [] if x is None else [x]
        streams += [variants.stream for variants in self.entering(block)]
        return streams[0] if len(streams) == 1 else torch.cat(streams)

    def _slices(self) -> Iterator[tuple[Variants, slice]]:
        start = 0
        for variants in self.members:
            yield variants, slice(start, start + len(variants.stream))
            start += len(variants.stream)

    @property
    def hooks(self) -> list[tuple[str, Callable[..., Any]]]:
        """The hooks of all variants; each hook edits only the rows of its own variants."""
        if len(self.members) == 1:
            return list(self.members[0].hooks)
        return [
            (name, partial(_edit_rows, edit, rows))
            for variants, rows in self._slices()
            for name, edit in variants.hooks
        ]

    @contextmanager
    def edits(self) -> Iterator[None]:
        """Context manager that replaces forward passes, and adds tensors to modules' outputs."""
        with ExitStack() as stack:
            for variants, rows in self._slices():
                for module, forward in variants.replaced:
                    stack.enter_context(replaced_forward(module, forward))
                for module, tensor in variants.added:
                    add = partial(_add_to_rows, tensor, rows)
                    stack.callback(module.register_forward_hook(add).remove)
            yield


@contextmanager
def suppress_refusals() -> Iterator[None]:
    """Context manager that suppresses a model's errors, but not memory or package errors."""
    try:
        yield
    except _UNFIT as error:
        memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if memory or isinstance(error, AttnOnlyLensError):
            raise


def stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Stack scalars on any devices into one tensor, so that one transfer reads all scalars."""
    return torch.stack([number.to(numbers[0].device) for number in numbers])


def _edit_rows(edit: Callable[..., Any], rows: slice, value: Tensor, hook: Any) -> Tensor | None:
    edited: Tensor | None = edit(value[rows], hook=hook)
    if edited is None:
        return None
    return torch.cat([value[: rows.start], edited, value[rows.stop :]])


def _add_to_rows(tensor: Tensor, rows: slice, module: nn.Module, args: Any, output: Any) -> Any:
    stream: Tensor = output[0] if isinstance(output, tuple | list) else output
    added = stream[rows] + tensor.to(stream.device)
    if len(added) < len(stream):
        added = torch.cat([stream[: rows.start], added, stream[rows.stop :]])
    return (added, *output[1:]) if isinstance(output, tuple | list) else added


@dataclass(eq=False)
class Replay(ABC):
    """A partial rerun of a recorded forward pass, for only the logits that a metric reads.

    Attributes:
        other: if float32 products are rounded to TF32, the precise replay that is tested instead of
            this one, because a run of only some blocks changes results by that rounding.
        call_flops_on_cpu: the fixed cost of calling a block, in flops of matrix products (measured
            on two cores of an EPYC).
    """

    call_flops_on_cpu: ClassVar[float]
    model: Any
    recording: Recording
    metric: BoundMetric
    other: "Replay | None" = None

    def __post_init__(self) -> None:
        self.host = host_of(self.model)
        self.tested: PassedTests = self.other.tested if self.other else passed_tests(self.model)
        self.n_blocks = len(self.model.blocks)
        self.batch, self.n_pos = self.recording.tokens.shape
        # `check` sets `joins` or `trims` to False if blocks need all rows or all tokens.
        # What features write to later layers has the rows and tokens of the first block.
        self.joins: bool = not self.recording.later and (self.other is None or self.other.joins)
        self.trims: bool = not self.recording.later and (self.other is None or self.other.trims)
        self.trims = self.trims and self.metric.positions is not None
        modules = [module for _, module in modules_of(self.model)]
        self._fused = FusedActivations(modules, self.recording.streams[0].dtype)
        self._adds: dict[int, bool] = {}
        self._past: Any = None  # the recorded keys and values; None if runs start at position 0
        self._tested: dict[int, int] = {}  # for each position, the first block that can start there
        shapes = [[p.shape for p in block.parameters()] for block in self.model.blocks]
        self._parameters = [sum(x.numel() for x in block if len(x) > 1) for block in shapes]
        self._widest = max(max(shape) for block in shapes for shape in block)

    def logits(self, *variants: Variants) -> Float[Tensor, "row position column"]:
        """Return the logits that the metric reads."""
        return self._faster(self.joined_logits, variants)

    def _faster(self, run: Callable[[Joined], Tensor], variants: Sequence[Variants]) -> Tensor:
        """Run variants together, or one by one if the model needs all rows in every block."""
        if self.joins:
            return self._run_faster(run, Joined(*variants))
        return torch.cat([self._run_faster(run, Joined(single)) for single in variants])

    def _run_faster(self, run: Callable[[Joined], Tensor], joined: Joined) -> Tensor:
        positions = self.metric.positions
        with ExitStack() as stack:
            stack.enter_context(self._fused.used())
            trims = self.trims and not any(map(self._edits_trimmed, joined.members))
            if trims and positions is not None:
                modules = self.trimmed_modules()
                stack.enter_context(only_where_read(modules, positions - joined.first))
            return run(joined)

    def _edits_trimmed(self, variants: Variants) -> bool:
        """Return whether an edit needs all tokens at a module that would run on only one token."""
        last, layer = f"blocks.{self.n_blocks - 1}.", self.host.n_layers - 1
        before = {self.host.hook_name(layer, "attention", point) for point in _BEFORE_OUTPUT}
        names = {name for name, _ in variants.hooks if name.startswith(last)}
        at_mlp = variants.added and variants.block == self.n_blocks - 1
        return bool(at_mlp) or not names <= before

    def trimmed_modules(self) -> list[nn.Module]:
        """Return the last block's modules that can run on only the tokens that the metric reads."""
        return [self.host.neurons[-1].module]

    @abstractmethod
    def joined_logits(self, joined: Joined) -> Float[Tensor, "row position column"]:
        """Return the logits that the metric reads, for joined variants."""

    @abstractmethod
    def last_stream(self, joined: Joined) -> Float[Tensor, "row pos d_model"]:
        """Return the last block's output, which is correct only where the metric reads it."""

    @abstractmethod
    def block_output(self, variants: Variants) -> Float[Tensor, "row pos d_model"]:
        """Return the output of the variants' first block, starting at position `first`."""

    @property
    def precise(self) -> "Replay":
        """The replay for tests: `other` if it is not None, otherwise this replay."""
        return self.other or self  # a reference to itself would delay garbage collection

    def can_start_at(self, block: int, position: int) -> bool:
        """Test whether `block` and later blocks can run without positions before `position`.

        After one failed test, all variants start at position 0.
        """
        if not position:
            return True
        if self.precise is not self:
            with full_precision():
                return self.precise.can_start_at(block, position)
        if self._past is None:
            return False
        if self._is_untested(block, position):
            earlier = [p for p, b in self._tested.items() if p < position and b <= block]
            self._tested[position] = block
            if self._test_start(block, position, max(earlier, default=0)):
                self.tested.add(("start", block, position), self.recording)
            else:
                self._past = None
        return self._past is not None

    def _is_untested(self, block: int, position: int) -> bool:
        """Return whether a start at this block and position has not been tested yet."""
        return block < self._tested.get(position, self.n_blocks + 1) and not any(
            self.tested.covers(("start", earlier, position), self.recording)
            for earlier in range(block + 1)
        )

    @property
    @abstractmethod
    def cached_numbers_per_token(self) -> int:
        """The number of floats that one token's keys and values occupy while a block runs."""

    @torch.no_grad()
    def values(self, *variants: Variants) -> Float[Tensor, "site prompt"]:
        """Return the metric for each prompt of each variant (`BoundMetric.on_cpu`).

        The logits of many rows would fill the memory, so they are computed for a few rows at once.
        """
        at_once = max(1, _LOGITS_AT_ONCE // (_LOGITS * self.logits_per_variant)) * self.batch
        if sum(len(some.stream) for some in variants) <= at_once:
            logits = self.logits(*variants)
            return self.metric.on_cpu(logits.unflatten(0, (-1, self.batch)))
        stream, first = self._faster(self.last_stream, variants), variants[0].first
        return torch.cat(
            [self.values(Variants(self.n_blocks, first, rows)) for rows in stream.split(at_once)]
        )

    @contextmanager
    def skipped_writes(self, joined: Joined) -> Iterator[None]:
        """Supply what features of the layers that are skipped wrote to later layers."""
        passing, recorded = self.host.passing, self.recording.later
        if not recorded:
            yield
            return
        n, first = joined.n_rows // self.batch, joined.first
        passing.skipped = {
            (layer, source): (x[:, first:].repeat(n, 1, 1), unedited[:, first:].repeat(n, 1, 1))
            for (layer, source), (x, unedited) in recorded.items()
            if source < joined.block <= layer
        }
        try:
            with passing.model_pass():
                yield
        finally:
            passing.skipped = {}

    def recorded_stream(self, block: int, first: int, n: int) -> Float[Tensor, "row pos d_model"]:
        """Return n copies, as rows, of a block's recorded input, starting at position `first`."""
        return self.recording.streams[block][:, first:].repeat(n, 1, 1)

    def start(self, block: int, position: int) -> int:
        """Return the first position to run for variants whose patches begin at `position`."""
        positions = self.metric.positions
        latest = self.n_pos - 1 if positions is None else int(positions.min())
        first = min(position, latest)
        return first if self.can_start_at(block, first) else 0

    def flops_per_token(self, block: int) -> int:
        """Return the flops per token of the matrix products in `block` and all later blocks."""
        return 2 * sum(self._parameters[block:])

    @property
    def flops_of_forward(self) -> int:
        """The flops of the matrix products in a full run."""
        cfg = self.model.cfg
        per_token = self.flops_per_token(0) + 2 * cfg.d_model * cfg.d_vocab
        return int(self.batch * self.n_pos * per_token)

    def share_of_forward(self, block: int, first: Int[Tensor, "row"]) -> Float[Tensor, "row"]:
        """Return the cost of variants as a fraction of a full run's, given their start."""
        flops = self.batch * (self.n_pos - first).double() * self.flops_per_token(block)
        return flops / self.flops_of_forward

    def flops_per_run(self, block: int, position: int) -> float:
        """Return the fixed cost of a run, and of the test of its start if that has not run yet."""
        on_cpu = self.recording.tokens.device.type == "cpu"
        flops = (self.n_blocks - block) * (self.call_flops_on_cpu if on_cpu else _CALL_FLOPS)
        if not position or not self._is_untested(block, position):
            return flops
        tokens = self.batch * 2 * (self.n_pos - position)
        return 3 * flops + tokens * self.flops_per_token(block)

    @property
    def numbers_per_token(self) -> int:
        """An estimate of the largest number of floats per token during a forward pass."""
        d_model = self.recording.streams[0].shape[-1]
        n_heads = max(self.host.n_heads)
        later = 2 * len(self.recording.later) * d_model
        return 5 * d_model + later + max(_WIDEST * self._widest, _SCORES * n_heads * self.n_pos)

    def numbers_per_variant(self, first: int) -> int:
        """Estimate the largest number of floats in memory for one variant, without logits."""
        tokens = self.batch * (self.n_pos - first)
        # A running block copies the recorded keys and values for each variant.
        cached = self.cached_numbers_per_token * self.batch * self.n_pos if first else 0
        return tokens * self.numbers_per_token + cached

    @property
    def logits_per_variant(self) -> int:
        """The number of logits that a run computes for one variant."""
        return self.metric.select(self.recording.logits).numel()

    def effective(
        self,
        changed: Bool[Tensor, "*any batch pos"],
        block: int,
        positions: slice | Int[Tensor, "pos"] = slice(None),
    ) -> Bool[Tensor, "*any batch pos"]:
        """Return which changed tokens of a block's input can affect the metric."""
        if self.metric.positions is None or block < self.n_blocks:
            return changed
        # After the last block, tokens do not affect each other.
        columns = torch.arange(self.n_pos, device=changed.device)[positions]
        return changed & (columns == self.metric.positions.to(changed.device)[:, None])

    def adds_mlp_output(self, block: int, mlp: nn.Module) -> bool:
        """Test whether a block adds its MLP's output to the stream unchanged."""
        self.test_mlp_outputs({block: mlp})
        return self.precise._adds[block]

    def test_mlp_outputs(self, mlps: Mapping[int, nn.Module]) -> None:
        """Test for each block whether it adds its MLP's output to the stream unchanged."""
        if self.precise is not self:
            with full_precision():
                return self.precise.test_mlp_outputs(mlps)
        tests = {block: ("adds the MLP output", block) for block in mlps}
        for block, test in tests.items():
            if self.tested.covers(test, self.recording):
                self._adds.setdefault(block, True)
        untested = [block for block in mlps if block not in self._adds]
        largest = list[Tensor]()
        for block in untested:
            before, after = self.recording.streams[block : block + 2]
            added = normal_numbers(after.shape).to(after) * after.std()
            out = self.block_output(Variants(block, 0, before, added=[(mlps[block], added)]))
            scale = torch.finfo(out.dtype).eps * (after.abs().max() + added.abs().max())
            largest.append((out - after - added).abs().max() / scale)
        for block, error in zip(untested, read_all(largest), strict=True):
            # Use a small tolerance: no later layer amplifies the rounding errors of this sum.
            # If the test fails, patches run the whole block, which is always correct.
            self._adds[block] = error <= _ROUNDINGS
            if self._adds[block]:
                self.tested.add(tests[block], self.recording)
        return None

    def check(self) -> None:
        """Raise an error if replays without edits do not reproduce the recorded logits."""
        tests, run = self.tested, self.recording
        could_trim = self.trims = self.trims and not tests.covers("whole last block", run)
        blocks = [self.n_blocks]  # always test the unembedding of logits that the metric reads
        if not tests.covers(("replay", self.trims), run):
            blocks = sorted({0, self.n_blocks // 2, self.n_blocks})
        # Later positions are tested before their first use (`can_start_at`).
        self.trims = self.trims and self._agrees(0, blocks)
        if not self.trims:
            self.joins = self.joins and self._agrees(0, blocks)
            for block in blocks if not self.joins else ():
                self._require_agreement(0, block)
        if self.joins:
            tests.add(("replay", self.trims), run)
        if could_trim and not self.trims:
            tests.add("whole last block", run)

    def _agrees(self, first: int, blocks: Sequence[int]) -> bool:
        with suppress_refusals():  # a model may need all rows, or all tokens, in every block
            difference, allowed, _ = self._difference(first, blocks)
            return difference <= allowed
        return False

    def _require_agreement(self, first: int, block: int) -> None:
        difference, allowed, size = self._difference(first, [block])
        if not difference <= allowed:
            reason = (
                f"in a run that starts at block {block}, position {first}, the logits differ by "
                f"{difference:.2g} from the logits of a full run (largest logit: {size:.2g})"
            )
            raise UnsupportedModelError([reason], PROBLEM)

    def _difference(self, first: int, blocks: Sequence[int]) -> tuple[float, float, float]:
        """Return the largest error of the logits, the allowed error, and the largest logit."""
        unedited = (Variants(b, first, self.recorded_stream(b, first, 1)) for b in blocks)
        whole, largest = (
            self.metric.select(self.recording.logits),
            self.recording.logits.abs().max(),
        )
        difference = (self.logits(*unedited) - whole.repeat(len(blocks), 1, 1)).abs().max()
        error, size = stacked([difference, largest]).tolist()
        return error, logit_tolerance(self.host.neurons, whole.dtype) * size, size

    @torch.no_grad()
    def _test_start(self, block: int, first: int, earlier: int) -> bool:
        """Return whether runs that start at `first` and at `earlier` agree from `first` onwards."""
        recorded, mask = self.recording.streams[block], self.recording.mask
        noise = normal_numbers(recorded.shape)
        noise[:, :first] = 0
        stream = recorded + noise.to(recorded) * recorded.std()
        whole, logits = self._streams_and_logits(Variants(block, earlier, stream[:, earlier:]))
        later, again = list[Residual](), logits
        with suppress_refusals():  # the model may be unable to run on cached keys and values
            later, again = self._streams_and_logits(Variants(block, first, stream[:, first:]))
        if not later:
            return False
        agree = [self._agree(again, logits, self.recording.logits.abs().max())]
        for got, expected in zip(later, whole, strict=True):
            expected = expected[:, first - earlier :]
            # Use one scale per token: a token with large activations would hide errors in others.
            scale = expected.abs().amax(-1, keepdim=True)
            if mask is not None:  # patches do not change padding, and no token attends to it
                padding = ~mask[:, first:, None].bool().to(scale.device)
                scale = scale.masked_fill(padding, torch.inf)
            agree.append(self._agree(got, expected, scale))
        return bool(stacked(agree).all())

    def _streams_and_logits(self, variants: Variants) -> tuple[list[Residual], Tensor]:
        """Return the first block's input, the outputs of this and later blocks, and the logits."""
        with record_streams(self.model) as (streams, _):
            logits = self.joined_logits(Joined(variants))
        # In a bridge, the blocks before the variants' first block pass the stream on.
        return [variants.stream, *streams[variants.block - self.n_blocks :]], logits

    def _agree(self, got: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
        if got.shape != expected.shape:
            return torch.zeros((), dtype=torch.bool, device=expected.device)
        allowed = logit_tolerance(self.host.neurons, expected.dtype) * scale
        return ((got - expected).abs() <= allowed).all()

    def with_earlier_logits(
        self, logits: Float[Tensor, "row position column"], first: int
    ) -> Float[Tensor, "row position column"]:
        """If the metric reads all positions, prepend the recorded logits from before `first`."""
        if self.metric.positions is not None or not first:
            return logits
        before = self.metric.select(self.recording.logits)[:, :first]
        return torch.cat([before.repeat(len(logits) // self.batch, 1, 1), logits], dim=1)
