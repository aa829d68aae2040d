"""TransformerBridges: the bridged model's own forward pass, whatever it is, past some blocks.

A model of transformers that takes a cache runs on the tokens from a patch on alone, as if it
generated them after those before, whose keys and values are on record (`past.py`). Whether it may
is found out for each position before it is first used: noise is added to what enters a block from
there on, and all positions are run, and those from there on alone. Every block and the logits must
come out alike, within the tolerance for the dtype. Where positions before the noise can see it, and
hand it on, they do not: what is on record of them is no longer so.

Where they differ, all positions are run at each patch: right in any case, and slower. So run
models that are not causal, or have no such cache (those of `boot_native`, encoders, recurrent
ones), and all in half precision, whose roundings could hide a difference.

A metric that reads two columns of the vocabulary has the others left out of the unembedding, which
would else cost a short suffix as much as its blocks; that too is tried, and left where it fails.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attn_only_lens.axes import Residual
from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.heads import logit_tolerance
from attn_only_lens.numerics import full_precision, normal_numbers
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import (
    Recording,
    returned_stream,
    run,
    stream_of,
    watched_streams,
)
from attn_only_lens.runs.replay.key_values import UNFIT, Past, is_refusal, past_of
from attn_only_lens.runs.replay.replay import Replay, Variants, adding

__all__ = ["BridgeReplay"]

_FINE = (torch.float32, torch.float64)


class BridgeReplay(Replay):
    """Through the bridged model's own forward pass."""

    def __init__(
        self,
        model: Any,
        recording: Recording,
        metric: BoundMetric,
        judge: Replay | None = None,
    ) -> None:
        super().__init__(model, recording, metric, judge)
        self._past: Past | None = None
        if all(stream.dtype in _FINE for stream in recording.streams):
            self._past = past_of(model, recording)
        self._tried: dict[int, int] = {}  # by position, the first block to run apart from there
        self._narrow: bool = judge._narrow if isinstance(judge, BridgeReplay) else self._narrows()

    def apart(self, block: int, position: int) -> bool:
        """Whether a block and those after it can be run from a position on, by themselves.

        Tried. A model that fails once is not tried again.
        """
        if not position:
            return True
        if self.judge is not self:
            with full_precision():
                return self.judge.apart(block, position)
        if self._past is None:
            return False
        if block < self._tried.get(position, self.n_blocks + 1):
            self._tried[position] = block
            if not self._try(block, position):
                self._past = None
        return self._past is not None

    @torch.no_grad()
    def _try(self, block: int, first: int) -> bool:
        recorded, mask = self.recording.streams[block], self.recording.mask
        moved = normal_numbers(recorded.shape)
        moved[:, :first] = 0
        entering = recorded + moved.to(recorded) * recorded.std()
        whole, logits = self._watched(Variants(block, 0, entering))
        try:
            later, again = self._watched(Variants(block, first, entering[:, first:]))
        except UNFIT as error:  # a model that cannot take up where a cache ends
            if not is_refusal(error):
                raise
            return False
        for mine, theirs in zip(later, whole, strict=True):
            theirs = theirs[:, first:]
            # Token by token: the largest would hide what is wrong with others.
            scale = theirs.abs().amax(-1, keepdim=True)
            if mask is not None:  # no token attends to padding, and none is patched
                scale = scale.masked_fill(~mask[:, first:, None].bool(), torch.inf)
            if not self._close(mine, theirs, scale):
                return False
        return self._close(again, logits, self.recording.logits.abs().max())

    def _watched(self, variants: Variants) -> tuple[list[Residual], Tensor]:
        """What enters the first block, what leaves it and the others, and the logits."""
        with watched_streams(self.model) as streams:
            logits = self.logits(variants)
        return [variants.entering, *streams[variants.block + 1 :]], logits

    @property
    def kept_of_token(self) -> int:
        """How many numbers a block holds at once, for its keys and values of a token."""
        if self._past is None:
            return 0
        d_head = max(keys.shape[-1] for keys, _ in self._past.layers)
        return 3 * max(self.host.n_heads) * d_head  # repeated, where they are grouped

    @property
    def logits_of_variant(self) -> int:
        """How many logits are computed of one variant."""
        if self._narrow or self.metric.columns is None:
            return super().logits_of_variant
        return self.metric.select(self.recording.logits)[..., 0].numel() * self.metric.shape[-1]

    def _as_returned(self, block: int, stream: Residual) -> Any:
        beside = self.recording.beside[block]
        return stream if beside is None else (stream, *(None,) * beside)

    def logits(self, variants: Variants) -> Float[Tensor, "row position column"]:
        """The logits that the metric reads."""
        with self._read(variants.first):
            logits = self._run(variants)
        if self.metric.columns is not None and not self._narrow:
            logits = logits[..., self.metric.columns]
        return self.completed(logits, variants.first)

    @torch.no_grad()
    def _narrows(self) -> bool:
        """Whether columns of the vocabulary can be unembedded, and the others left out: tried."""
        if self.metric.columns is None:
            return False
        linear = self.model.unembed.original_component
        if type(linear) is not nn.Linear or "forward" in vars(linear):  # quantised, or placed
            return False
        nothing = Variants(self.n_blocks, 0, self.unchanged(self.n_blocks, 0, 1))
        try:
            with self._narrowed():
                mine = self._run(nothing)
        except UNFIT as error:  # a model that counts its vocabulary
            if not is_refusal(error):
                raise
            return False
        theirs = self.recording.logits
        return self._close(mine, theirs[..., self.metric.columns], theirs.abs().max())

    def leaving(self, variants: Variants) -> Residual:
        """What leaves the first block, from `first` on."""
        found: list[Residual] = []

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            found.append(returned_stream(output))
            raise _Enough

        handle = self.model.blocks[variants.block].register_forward_hook(stop)
        try:
            self._run(variants)
        except _Enough:
            return found[0]
        finally:
            handle.remove()
        raise AssertionError("the block did not run")

    def _run(self, variants: Variants) -> Float[Tensor, "row pos d_vocab"]:
        recording, first = self.recording, variants.first
        repeats = variants.entering.shape[0] // self.batch
        mask = None if recording.mask is None else recording.mask.repeat(repeats, 1)
        tokens = recording.tokens[:, first:].repeat(repeats, 1)
        cached: dict[str, Any] = {}
        if first:
            assert self._past is not None
            cached["past_key_values"] = self._past.before(first)
        with self._passed_by(variants), adding(variants):
            return run(self.model, tokens, mask, variants.hooks, **cached)

    @contextmanager
    def _passed_by(self, variants: Variants) -> Iterator[None]:
        """The blocks before the first hand on what they get; the last of them, the stream."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            if args:
                return (variants.entering, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": variants.entering}

        def hand_on(index: int, *args: Any, **kwargs: Any) -> Any:
            last = index == self.n_blocks - 1
            return self._as_returned(index, variants.entering if last else stream_of(args, kwargs))

        with ExitStack() as stack:
            for index in range(min(variants.block, self.n_blocks)):
                stack.enter_context(_forward(self.model.blocks[index], partial(hand_on, index)))
            if variants.block < self.n_blocks:
                block = self.model.blocks[variants.block]
                handle = block.register_forward_pre_hook(enter, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    @contextmanager
    def _narrowed(self) -> Iterator[None]:
        """Unembed the columns that the metric reads, and no others."""
        linear, columns = self.model.unembed.original_component, self.metric.columns
        bias = None if linear.bias is None else linear.bias[columns]
        own = partial(functional.linear, weight=linear.weight[columns], bias=bias)
        with _forward(linear, own):
            yield

    @contextmanager
    def _read(self, first: int) -> Iterator[None]:
        """Unembed what the metric reads, and nothing else."""
        positions = self.metric.positions

        def pick(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if positions is None:
                return args
            x = args[0]
            where = (positions - first).repeat(x.shape[0] // self.batch)
            return (x[torch.arange(x.shape[0], device=x.device), where].unsqueeze(1), *args[1:])

        handle = self.model.unembed.register_forward_pre_hook(pick)
        try:
            with self._narrowed() if self._narrow else nullcontext():
                yield
        finally:
            handle.remove()

    def _close(self, one: Tensor, other: Tensor, scale: Tensor) -> bool:
        if one.shape != other.shape:
            return False
        allowed = logit_tolerance(self.host.neurons, other.dtype) * scale
        return bool(((one - other).abs() <= allowed).all())


class _Enough(Exception):
    """A forward pass has shown what was wanted."""


class _Replaced(partial[Any]):
    """A forward pass that a replay has put in the place of a module's own."""


@contextmanager
def _forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Another forward pass for a module, for a while.

    Raises:
        UnsupportedCallError: it has another already: both would be put back in the wrong order.
    """
    own = vars(module).get("forward")  # as where accelerate has placed a model on its devices
    if isinstance(own, _Replaced):
        raise UnsupportedCallError(
            "this model is being patched, in another thread: patch one after the other, or a copy"
        )
    vars(module)["forward"] = _Replaced(forward)
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
