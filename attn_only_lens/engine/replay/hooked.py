"""A replay for HookedTransformers whose MLP neurons are attention heads (neuron-heads)."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import Residual
from attn_only_lens.engine.recording import StopForward
from attn_only_lens.engine.replay.base import Joined, Replay, Variants
from attn_only_lens.engine.replay.faster import at_columns
from attn_only_lens.engine.replay.key_values import extend
from attn_only_lens.tl import TransformerBlock


class HookedReplay(Replay):
    """A replay that calls one block after another."""

    call_flops_on_cpu = 1e8

    def __post_init__(self) -> None:
        super().__post_init__()
        model, cfg = self.model, self.model.cfg
        # Shortformer models add position embeddings in every block. The model may also make a mask.
        tokens, mask = self.recording.tokens, self.recording.mask
        _, _, self._positions, self._mask = model.input_to_embed(tokens, attention_mask=mask)
        if cfg.attention_dir == "causal":
            self._past = dict[int, _Past]()
            for index, block in enumerate(model.blocks):
                if isinstance(block, TransformerBlock):
                    recorder = _Recorder()
                    with suppress(StopForward):
                        self._call(index, self.recording.streams[index], 0, recorder)
                    self._past[index] = recorder.recorded

    def _call(self, index: int, x: Residual, first: int, past: Any) -> Residual:
        repeats = x.shape[0] // self.batch
        mask, positions = self._mask, self._positions
        if mask is not None:
            mask = mask.repeat(repeats, 1)
        if positions is not None:
            positions = positions[:, first:].repeat(repeats, 1, 1)
        out: Residual = self.model.blocks[index](
            x, shortformer_pos_embed=positions, past_kv_cache_entry=past, attention_mask=mask
        )
        return out

    @property
    def cached_numbers_per_token(self) -> int:
        """The number of floats that one token's keys and values occupy while a block runs."""
        rotary = self.model.cfg.positional_embedding_type == "rotary"  # each run rotates keys
        tensors = (tensor for past in (self._past or {}).values() for tensor in vars(past).values())
        width = max((tensor.shape[-1] for tensor in tensors), default=0)
        return (6 if rotary else 3) * max(self.host.n_heads) * width  # repeated for each head

    def block_output(self, variants: Variants) -> Residual:
        """Return the output of the variants' first block, starting at position `first`."""
        return self._run(Joined(variants), variants.block + 1)

    def _run(self, joined: Joined, end: int) -> Residual:
        """Run the blocks before `end`; return the stream that enters `end` for all variants."""
        x = None
        hooks = self.model.hooks(fwd_hooks=joined.hooks)
        with hooks, joined.edits(), self.skipped_writes(joined):
            for index in range(joined.block, end):
                self.enter(joined, index)
                x = self._block(index, joined.stream(index, x), joined.first)
        return joined.stream(end, x)

    def enter(self, joined: Joined, block: int) -> None:
        """Prepare a block for the rows that enter it; this class has nothing to prepare."""

    def _block(self, index: int, x: Residual, first: int) -> Residual:
        past = self._past[index].before(first) if first and index in self._past else None
        return self._call(index, x, first, past)

    def joined_logits(self, joined: Joined) -> Float[Tensor, "row position column"]:
        """Return the logits that the metric reads, for joined variants."""
        return self._read_logits(self.last_stream(joined), joined.first)

    def last_stream(self, joined: Joined) -> Residual:
        """Return the last block's output, which is correct only where the metric reads it."""
        return self._run(joined, self.n_blocks)

    def _read_logits(self, x: Residual, first: int) -> Float[Tensor, "row position column"]:
        if self.metric.positions is not None:
            x = at_columns(x, self.metric.positions - first)
        return self.with_earlier_logits(self._unembed(x), first)

    def _unembed(self, x: Residual) -> Float[Tensor, "row position column"]:
        model, cfg, columns = self.model, self.model.cfg, self.metric.columns
        if cfg.normalization_type is not None:
            x = model.ln_final(x)
        if columns is None:
            logits = model.unembed(x)
        else:
            logits = x @ model.unembed.W_U[:, columns] + model.unembed.b_U[columns]
        cap = cfg.output_logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap > 0.0 else logits


@dataclass(frozen=True)
class _Past:
    """One block's recorded keys and values, used as a cache entry."""

    past_keys: Float[Tensor, "batch pos head d_head"]
    past_values: Float[Tensor, "batch pos head d_head"]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return extend(self.past_keys, keys, 1), extend(self.past_values, values, 1)

    def before(self, first: int) -> "_Past":
        return _Past(self.past_keys[:, :first], self.past_values[:, :first])


class _Recorder:
    """An empty cache entry that records one block's keys and values, and stops the block."""

    recorded: _Past

    def __init__(self) -> None:
        self.past_keys = torch.empty(0, 0, device="cpu")

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.recorded = _Past(keys, values)
        raise StopForward
