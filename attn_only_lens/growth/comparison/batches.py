"""The prompts of a comparison, in batches: circuits and drops use the first one, patterns use all.

To compute the effect of a head on a metric, the head's output in a first run is replaced by its
output in a second run. Without corrupted prompts, the second run is on the *next text*: as many
tokens, from the next prompt of the batch that differs (the first prompt follows the last) and, if
that is too short, from the prompts after it. This is resample ablation. Unlike zeros and means,
these outputs come from a run on a real text. Prompts may have different lengths.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_only_lens.arguments import a_type
from attn_only_lens.engine.contrast import Contrast
from attn_only_lens.engine.prompts import PromptPair, require_ignored_padding, single_prompts
from attn_only_lens.errors import ComparisonError

_PROBLEM = "models cannot be compared on these prompts"
_EXPECTED = "expected Contrast(clean, corrupted, metric)"


@dataclass(frozen=True, eq=False)
class Batches:
    """The first batch, with corrupted prompts; the clean prompts of all batches; their number.

    `prompts` can be read once, and `n` is None if the number of batches is unknown.
    """

    first: Contrast
    prompts: Iterator[PromptPair]
    n: int | None


def batches(model: Any, contrast: Contrast | Iterable[Contrast], batch_size: int) -> Batches:
    """Return the batches of a contrast, which is cut, or of a stream, which is read lazily."""
    if isinstance(contrast, Contrast):
        n = -(-len(contrast) // batch_size)
        parts = np.array_split(np.arange(len(contrast)), n)
        first = contrast if n == 1 else contrast[parts[0].tolist()]
        rest = (_prompts_of(model, contrast[part.tolist()]) for part in parts[1:])
    elif isinstance(contrast, Iterable):
        stream = iter(contrast)
        n, first = None, _checked(next(stream, None))
        rest = (_prompts_of(model, _checked(other)) for other in stream)
    else:
        got = f"got {a_type(contrast)}; {_EXPECTED}, or an iterable of contrasts"
        raise ComparisonError([got], _PROBLEM)
    first = _with_next_texts(model, first) if first.corrupted is None else first
    first.pair(model)  # checks the prompts before anything is run
    return Batches(first, chain([_prompts_of(model, first)], rest), n)


def on_device(model: Any, prompts: PromptPair) -> PromptPair:
    """Move prompts to a model's device; raise InputError if their padding changes its logits."""
    require_ignored_padding(model, prompts.mask, _PROBLEM)
    device = next(model.parameters()).device
    mask = None if prompts.mask is None else prompts.mask.to(device)
    return replace(
        prompts,
        clean=prompts.clean.to(device),
        corrupted=prompts.corrupted.to(device),
        mask=mask,
    )


def _checked(contrast: object) -> Contrast:
    if contrast is None:
        raise ComparisonError(["got no contrasts; expected at least one"], _PROBLEM)
    if not isinstance(contrast, Contrast):
        raise ComparisonError([f"got {a_type(contrast)} as a batch; {_EXPECTED}"], _PROBLEM)
    return contrast


def _prompts_of(model: Any, contrast: Contrast) -> PromptPair:
    return single_prompts(model, contrast.clean, contrast.mask)


def _with_next_texts(model: Any, contrast: Contrast) -> Contrast:
    """Return the contrast with the next text as the corrupted prompt of each prompt."""
    prompts = _prompts_of(model, contrast)
    texts = [tokens[real] for tokens, real in zip(prompts.clean, prompts.real, strict=True)]
    # A text that continues another one does not repeat BOS.
    n_shared = int(len({int(text[0]) for text in texts}) == 1)
    corrupted, reasons = prompts.clean.clone(), list[str]()
    for i, real in enumerate(prompts.real):
        text = _next_text(texts[i], [*texts[i + 1 :], *texts[:i]], n_shared)
        if text is None:
            reasons.append(
                f"got no other text for prompt {i}; expected corrupted prompts, or 2 or more "
                "prompts that differ in their first tokens"
            )
        else:
            corrupted[i, real] = text
    ComparisonError.raise_if(reasons[:1], _PROBLEM)
    return replace(contrast, clean=prompts.clean, corrupted=corrupted, mask=prompts.mask)


def _next_text(text: Tensor, others: Sequence[Tensor], n_shared: int) -> Tensor | None:
    """Return as many tokens of the texts that follow, from the first with which they differ."""
    for start, first in enumerate(others):
        following = [other[n_shared:] for other in (*others[start + 1 :], *others[:start])]
        some = torch.cat([first, *following])
        some = some.repeat(-(-len(text) // len(some)))[: len(text)]
        if not torch.equal(some, text):
            return some
    return None
