"""A replay for TransformerBridges, which runs the bridged model without some of its blocks.

If a transformers model accepts a cache, only the first patched token and later tokens run; recorded
keys and values replace earlier tokens (`key_values.py`). Each start position is tested before its
first use. The test adds noise to the residual stream, starting at this position. A run on all
positions and a run that starts here must then agree, in every block and in the logits. All
positions run if this test fails, if the model is not causal or has no cache, or in half precision,
where rounding could hide a difference. Another test shows whether the model can compute the logits
of only some tokens of the vocabulary.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from attn_only_lens.axes import Residual
from attn_only_lens.engine.recording import (
    StopForward,
    input_stream,
    output_stream,
    run,
)
from attn_only_lens.engine.replay.base import (
    Joined,
    Replay,
    Variants,
    suppress_refusals,
)
from attn_only_lens.engine.replay.faster import FINE, at_columns, replaced_forward
from attn_only_lens.engine.replay.key_values import record_key_values


class BridgeReplay(Replay):
    """A replay through the bridged model's own forward pass."""

    call_flops_on_cpu = 3e8

    def __post_init__(self) -> None:
        super().__post_init__()
        if all(stream.dtype in FINE for stream in self.recording.streams):
            self._past = record_key_values(self.model, self.recording)
        self._few_columns: bool = (
            self.precise._few_columns
            if isinstance(self.precise, BridgeReplay) and self.precise is not self
            else self._can_unembed_columns()
        )

    def trimmed_modules(self) -> list[nn.Module]:
        """Return the last block's modules that can run on only the tokens that the metric reads."""
        attention = self.host.attention(self.host.n_layers - 1)
        projection = getattr(getattr(attention, "o", None), "original_component", None)
        modules = [] if projection is None else [projection]
        mlp = self.host.neurons[-1].module
        return modules if getattr(mlp, "name", None) is None else [*modules, mlp]

    @property
    def cached_numbers_per_token(self) -> int:
        """The number of floats that one token's keys and values occupy while a block runs."""
        if self._past is None:
            return 0
        d_head = max(keys.shape[-1] for keys, _ in self._past.layers)
        return 3 * max(self.host.n_heads) * d_head  # shared keys and values, copied for each head

    @property
    def logits_per_variant(self) -> int:
        """The number of logits that a run computes for one variant."""
        if self._few_columns or self.metric.columns is None:
            return super().logits_per_variant
        return self.metric.select(self.recording.logits)[..., 0].numel() * self.metric.shape[-1]

    def _block_return(self, block: int, stream: Residual) -> Any:
        extra = self.recording.extra_outputs[block]
        return stream if extra is None else (stream, *(None,) * extra)

    def joined_logits(self, joined: Joined) -> Float[Tensor, "row position column"]:
        """Return the logits that the metric reads, for joined variants."""
        with self._unembed_read(joined.first):
            logits = self._run(joined)
        if self.metric.columns is not None and not self._few_columns:
            logits = logits[..., self.metric.columns]
        return self.with_earlier_logits(logits, joined.first)

    @torch.no_grad()
    def _can_unembed_columns(self) -> bool:
        """Test whether the model can compute the logits of only some tokens of the vocabulary."""
        if self.metric.columns is None:
            return False
        linear = self.model.unembed.original_component
        if type(linear) is not nn.Linear:  # the unembedding is quantised
            return False
        placed = getattr(linear, "_hf_hook", None)  # set by accelerate, which moves weights
        if "forward" in vars(linear) and getattr(placed, "offload", True):
            return False
        test = "columns", *self.metric.columns.tolist()
        if self.tested.covers(test, self.recording):
            return True
        unedited = Variants(self.n_blocks, 0, self.recorded_stream(self.n_blocks, 0, 1))
        logits = self.recording.logits
        with suppress_refusals(), self._unembed_columns():  # the model may fail without all logits
            got = self._run(Joined(unedited))
            if self._agree(got, logits[..., self.metric.columns], logits.abs().max()):
                self.tested.add(test, self.recording)
                return True
        return False

    def last_stream(self, joined: Joined) -> Residual:
        """Return the last block's output, which is correct only where the metric reads it."""
        last = self.n_blocks - 1
        x = self._output(joined, last) if joined.block <= last else None
        return joined.stream(self.n_blocks, x)

    def block_output(self, variants: Variants) -> Residual:
        """Return the output of the variants' first block, starting at position `first`."""
        return self._output(Joined(variants), variants.block)

    def _output(self, joined: Joined, index: int) -> Residual:
        """Return the output of a block, without running later blocks."""
        outputs: list[Residual] = []

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output_stream(output))
            raise StopForward

        with suppress(StopForward), self.model.blocks[index].register_forward_hook(stop):
            self._run(joined)
        return outputs[0]

    def _run(self, joined: Joined) -> Float[Tensor, "row pos d_vocab"]:
        recording, first = self.recording, joined.first
        repeats = joined.n_rows // self.batch
        mask = None if recording.mask is None else recording.mask.repeat(repeats, 1)
        tokens = recording.tokens[:, first:].repeat(repeats, 1)
        cached: dict[str, Any] = {}
        if first:
            assert self._past is not None
            cached["past_key_values"] = self._past.before(first)
        with self._enter_blocks(joined), joined.edits(), self.skipped_writes(joined):
            return run(self.model, tokens, mask, joined.hooks, **cached)

    @contextmanager
    def _enter_blocks(self, joined: Joined) -> Iterator[None]:
        """Skip blocks until a variant starts; run later blocks on the variants that have started.

        The model computes masks and rotary embeddings for all rows; each block gets the entries of
        its own rows.
        """
        n_rows, n_blocks = joined.n_rows, self.n_blocks

        def enter(index: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            before = None if index == joined.block else input_stream(args, kwargs)
            stream = joined.stream(index, before)
            if len(stream) < n_rows:
                args, kwargs = tree_map(partial(_first_rows, n_rows, len(stream)), (args, kwargs))
            if args:
                return (stream, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": stream}

        def pass_on(index: int, *args: Any, **kwargs: Any) -> Any:
            return self._block_return(index, input_stream(args, kwargs))

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            before = None if joined.block == n_blocks else output_stream(output)
            stream = joined.stream(n_blocks, before)
            return (stream, *output[1:]) if isinstance(output, tuple | list) else stream

        with ExitStack() as stack:
            for index, block in enumerate(self.model.blocks):
                if index < joined.block:
                    stack.enter_context(replaced_forward(block, partial(pass_on, index)))
                elif index == joined.block or len(joined.members) > 1:
                    hook = partial(enter, index)
                    stack.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
            if joined.entering(n_blocks):
                stack.enter_context(self.model.blocks[-1].register_forward_hook(leave))
            yield

    @contextmanager
    def _unembed_columns(self) -> Iterator[None]:
        """Context manager that computes logits only for the tokens that the metric reads."""
        linear, columns = self.model.unembed.original_component, self.metric.columns
        assert columns is not None
        columns = columns.to(linear.weight.device)
        weight = linear.weight[columns]
        bias = None if linear.bias is None else linear.bias[columns]

        def unembed(x: Tensor) -> Tensor:
            return functional.linear(x.to(weight.device), weight, bias)

        with replaced_forward(linear, unembed):
            yield

    @contextmanager
    def _unembed_read(self, first: int) -> Iterator[None]:
        """Compute logits only at positions and, if possible, for tokens that the metric reads."""
        positions = self.metric.positions

        def pick(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            if positions is None:
                return args
            return (at_columns(args[0], positions - first), *args[1:])

        columns = self._unembed_columns() if self._few_columns else nullcontext()
        with self.model.unembed.register_forward_pre_hook(pick), columns:
            yield


def _first_rows(n_rows: int, n: int, x: Any) -> Any:
    """Return the first n rows of a tensor with n_rows rows; return other values unchanged."""
    return x[:n] if isinstance(x, Tensor) and x.ndim > 1 and len(x) == n_rows else x
