"""HookedTransformers, converted or exposed: their blocks are called one by one."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attn_only_lens.axes import Residual
from attn_only_lens.runs.metrics import BoundMetric
from attn_only_lens.runs.recording import Recording
from attn_only_lens.runs.replay.key_values import after
from attn_only_lens.runs.replay.replay import Replay, Variants, adding
from attn_only_lens.tl import TransformerBlock

__all__ = ["HookedReplay"]


class HookedReplay(Replay):
    """Block by block, for HookedTransformers, converted or exposed."""

    def __init__(
        self,
        model: Any,
        recording: Recording,
        metric: BoundMetric,
        judge: Replay | None = None,
    ) -> None:
        super().__init__(model, recording, metric, judge)
        cfg = model.cfg
        self._causal = cfg.attention_dir == "causal"
        # Shortformers add positions in every block. The model may make a mask where none is given.
        embedded = model.input_to_embed(recording.tokens, attention_mask=recording.mask)
        _, _, self._positions, self._mask = embedded
        self._past = self._keys_and_values() if self._causal else {}

    def _keys_and_values(self) -> dict[int, "_Kept"]:
        """Keys and values of each attention block, by running it on what entered it."""
        past = {}
        for index, block in enumerate(self.model.blocks):
            if isinstance(block, TransformerBlock):
                kept = _Kept()
                self._call(index, self.recording.streams[index], 0, kept)
                past[index] = kept
        return past

    def _call(self, index: int, x: Residual, first: int, past: Any) -> Residual:
        repeats = x.shape[0] // self.batch
        mask, positions = self._mask, self._positions
        if mask is not None:
            mask = mask.repeat(repeats, 1)
        if positions is not None:
            positions = positions[:, first:].repeat(repeats, 1, 1)
        out: Residual = self.model.blocks[index](
            x,
            shortformer_pos_embed=positions,
            past_kv_cache_entry=past,
            attention_mask=mask,
        )
        return out

    @property
    def kept_of_token(self) -> int:
        """How many numbers a block holds at once, for its keys and values of a token."""
        rotary = self.model.cfg.positional_embedding_type == "rotary"  # keys are rotated each time
        d_head = max((each.d_head for each in self._past.values()), default=0)
        # Grouped keys and values are repeated for each head.
        return (6 if rotary else 3) * max(self.host.n_heads) * d_head

    def apart(self, block: int, position: int) -> bool:
        """Whether a block and those after it can be run from a position on, by themselves."""
        return self._causal

    def leaving(self, variants: Variants) -> Residual:
        """What leaves the first block, from `first` on."""
        with (
            self.first_block(variants),
            self.model.hooks(fwd_hooks=list(variants.hooks)),
            adding(variants),
        ):
            return self._block(variants.block, variants.entering, variants.first)

    def first_block(self, variants: Variants) -> AbstractContextManager[None]:
        """Hold for the first block what it needs besides the stream: nothing."""
        return nullcontext()

    def _block(self, index: int, x: Residual, first: int) -> Residual:
        past = None
        if first and index in self._past:
            past = self._past[index].before(first)
        return self._call(index, x, first, past)

    def logits(self, variants: Variants) -> Float[Tensor, "row position column"]:
        """The logits that the metric reads."""
        first, x = variants.first, variants.entering
        if variants.block < self.n_blocks:
            x = self.leaving(variants)
        for index in range(variants.block + 1, self.n_blocks):
            x = self._block(index, x, first)
        return self._read(x, first)

    def _read(self, x: Residual, first: int) -> Float[Tensor, "row position column"]:
        repeats, positions = x.shape[0] // self.batch, self.metric.positions
        if positions is not None:
            where = (positions - first).repeat(repeats)
            x = x[torch.arange(x.shape[0], device=x.device), where].unsqueeze(1)
        return self.completed(self._unembedded(x), first)

    def _unembedded(self, x: Residual) -> Float[Tensor, "row position column"]:
        model, cfg, columns = self.model, self.model.cfg, self.metric.columns
        if cfg.normalization_type is not None:
            x = model.ln_final(x)
        if columns is None:
            logits = model.unembed(x)
        else:
            logits = x @ model.unembed.W_U[:, columns] + model.unembed.b_U[columns]
        cap = cfg.output_logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap > 0.0 else logits


class _Kept:
    """Keys and values of one block, in the place of a cache entry: takes them, or gives them."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.past_keys = torch.empty(0, 0, device="cpu")

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = keys, values
        return keys, values

    @property
    def d_head(self) -> int:
        """Of the keys."""
        assert self.keys is not None
        return self.keys.shape[-1]

    def before(self, first: int) -> "_Past":
        assert self.keys is not None
        assert self.values is not None
        return _Past(self.keys[:, :first], self.values[:, :first])


@dataclass(frozen=True)
class _Past:
    past_keys: Float[Tensor, "batch pos head d_head"]
    past_values: Float[Tensor, "batch pos head d_head"]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return after(self.past_keys, keys, 1), after(self.past_values, values, 1)
