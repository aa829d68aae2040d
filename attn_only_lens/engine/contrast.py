"""The contrast: two prompts (or two lists of prompts) and a metric that differs between them."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from pathlib import Path
from reprlib import Repr
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from attn_only_lens.arguments import a_type, as_plain, is_count
from attn_only_lens.engine.contrast_file import DOCUMENT, as_body, fields_of, metric_of
from attn_only_lens.engine.metrics import AnyMetric, as_metric, bind
from attn_only_lens.engine.positions import role_reasons
from attn_only_lens.engine.prompts import (
    PromptPair,
    Prompts,
    Roles,
    are_prompts,
    prompt_pair,
    require_ignored_padding,
    single_prompts,
)
from attn_only_lens.engine.recording import run
from attn_only_lens.engine.tokens import array_as_tensor, require_model
from attn_only_lens.errors import CheckpointError, InputError
from attn_only_lens.storage.atomic import AnyPath

NOT_SOLVED = "the model does not prefer the right answer on both prompts"
_AT_ONCE = 16  # pairs in one forward pass
_PROBLEM = "this is no contrast"
_REPR = Repr()
_REPR.maxstring, _REPR.maxlist = 200, 20


@dataclass(frozen=True, eq=False, repr=False)
class Contrast:
    """Clean prompts, corrupted prompts, and the metric that compares the model's two runs.

    It is the question that all analyses answer: why does the metric differ between these runs?
    Prompts of different lengths are padded on the tokenizer's padding side, and the padding is
    masked. A contrast belongs to no model; the prompts are checked again with the tokenizer of the
    model that they are used with, which also warns about unknown words, once for each model.

    Attributes:
        clean: a text, a list of texts, tokens [batch, pos], one row of tokens [pos], or a list of
            rows, such as `chat_tokens` returns. Tokens are a tensor or a NumPy array. A BOS token
            is added to a text if `model.to_tokens` adds one, unless the text begins with BOS.
        corrupted: the prompts of the other run, in the same form and order, each with as many
            tokens as its clean prompt. None for analyses of one run.
        metric: `logit_diff(...)` or another metric, or a function of logits [batch, pos, d_vocab].
        roles: tokens by name, such as {"subject": [2, 4], "end": -1}: one number for all prompts or
            one for each prompt, counted without padding, from the start or, if negative, from the
            end. Names in `Sites(positions=…)` refer to them.
        mask: for prompts that are tokens, 1 or True for tokens and 0 or False for padding, in the
            shape of the tokens.
        name: a name for tables and pages.
        dropped: for a task, the number of drawn pairs that were left out, by reason.

    Raises:
        InputError: the prompts, the metric or the roles have another type, or the numbers of
            prompts differ. The error lists every reason.

    Example:
        >>> from attn_only_lens import Contrast, patching as p
        >>> Contrast("The keys near the cabinet", "The key near the cabinet",
        ...          p.logit_diff(" are", " is"))
        Contrast(1 pair; logit_diff(' are', ' is'))
          'The keys near the cabinet'
          'The key near the cabinet'
    """

    clean: Prompts
    corrupted: Prompts | None
    metric: AnyMetric
    _: KW_ONLY
    roles: Roles = field(default_factory=dict)
    mask: Tensor | None = None
    name: str = ""
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reasons: list[str] = []
        sizes = {}
        for side in ("clean", "corrupted"):
            given = getattr(self, side)
            prompts = array_as_tensor(given)
            prompts = tuple(prompts) if isinstance(prompts, list) else prompts
            object.__setattr__(self, side, _copied(prompts))
            if side == "corrupted" and prompts is None:
                continue
            if isinstance(prompts, str | Tensor) or are_prompts(prompts):
                sizes[side] = _count(prompts)
                reasons += [f"{side}: got no prompts; expected at least one"] * (not sizes[side])
            else:
                expected = "expected a text, a list of texts, or tokens in a tensor"
                reasons.append(f"{side}: got {a_type(given)}; {expected}")
        if len({*sizes.values()}) > 1:
            counts = f"{sizes['clean']} clean and {sizes['corrupted']} corrupted"
            reasons.append(f"got {counts} prompts; expected the same number")
        object.__setattr__(self, "mask", _copied(array_as_tensor(self.mask)))
        with InputError.collected(reasons):
            as_metric(self.metric)
        if not isinstance(self.roles, Mapping):
            expected = "expected a dict from names to positions, such as {'subject': 2, 'end': -1}"
            reasons.append(f"roles: got {a_type(self.roles)}; {expected}")
        elif "clean" in sizes:
            reasons += role_reasons(self.roles, sizes["clean"])
        InputError.raise_if(reasons, _PROBLEM)

    def __len__(self) -> int:
        return _count(self.clean)

    def __getitem__(self, chosen: int | slice | Sequence[int]) -> "Contrast":
        """Return the contrast of some of the pairs: `pairs[3]`, `pairs[:8]` or `pairs[[3, 5]]`.

        Raises:
            InputError: no pairs are left, a pair does not exist, or the metric is a user's
                function.
        """
        n = len(self)
        some = as_plain(range(n)[chosen] if isinstance(chosen, slice) else chosen)
        if is_count(some) and some >= n:  # where a loop over the pairs ends
            raise IndexError(f"got pair {some}; expected 0 to {n - 1}")
        some = [some] if is_count(some, -n) else some
        is_list = isinstance(some, list | tuple | range)
        if not is_list or not some or not all(is_count(number, -n, n - 1) for number in some):
            expected = f"expected a slice or a list of numbers from {-n} to {n - 1}"
            raise InputError([f"got {chosen!r} of {n} pairs; {expected}"], _PROBLEM)
        some, metric = [range(n)[as_plain(number)] for number in some], as_metric(self.metric)
        reasons = [
            f"got {len(rows)} answers for {n} pairs; expected 1, or as many"
            for rows in metric.answers
            if len(rows) not in (1, n)
        ]
        if _is_one(self.clean) and len(some) > 1:
            reasons.append(f"got {chosen!r} of a single pair; expected 0, or a list of texts")
        InputError.raise_if(reasons, _PROBLEM)

        def of_pairs(values: Any) -> Any:
            """Return the chosen items of a value for every pair; leave other values unchanged."""
            if values is None or isinstance(values, str | int) or getattr(values, "ndim", 2) < 2:
                return values
            return values[some] if isinstance(values, Tensor) else tuple(values[i] for i in some)

        return replace(
            self,
            **{name: of_pairs(getattr(self, name)) for name in ("clean", "corrupted", "mask")},
            metric=metric.of_prompts(some),
            roles={role: of_pairs(as_plain(numbers)) for role, numbers in self.roles.items()},
        )

    def __repr__(self) -> str:
        unit = "prompt" if self.corrupted is None else "pair"
        named = f"{self.name}: " * bool(self.name)
        roles = f"; {', '.join(map(str, self.roles))}" * bool(self.roles)
        dropped = "".join(f"; {count} dropped: {why}" for why, count in self.dropped.items())
        title = f"{named}{len(self)} {unit}{'s' * (len(self) > 1)}; {as_metric(self.metric).name}"
        sides = [side for side in (self.clean, self.corrupted) if side is not None]
        return "\n  ".join([f"Contrast({title}{roles}{dropped})", *map(_first, sides)])

    @property
    def answers(self) -> tuple[tuple[Any, ...], ...]:
        """The right answers of each prompt, or one row for all prompts; () without answers."""
        return next(iter(as_metric(self.metric).answers), ())

    @property
    def wrong(self) -> tuple[tuple[Any, ...], ...]:
        """The wrong answers of each prompt, or one row for all prompts; () without them."""
        return next(iter(as_metric(self.metric).answers[1:]), ())

    def pair(self, model: Any) -> PromptPair:
        """Return the tokens of both runs, aligned, padded and checked, on the model's device.

        The prompts of a contrast without corrupted prompts are paired with themselves.

        Raises:
            InputError: as in `prompt_pair`.
        """
        require_model(model)
        reading = *_reading(model), *self._changes()
        pairs = _pairs.setdefault(self, WeakKeyDictionary())
        kept, pair = pairs.get(model, (None, None))
        if pair is None or kept != reading:
            sides = (self.clean,) if self.corrupted is None else (self.clean, self.corrupted)
            paired: Any = prompt_pair if len(sides) > 1 else single_prompts
            with torch.inference_mode(False):  # later analyses may need gradients
                pair = paired(model, *sides, self.mask, roles=self.roles)
            pairs[model] = reading, pair
        else:  # the model may have changed
            require_ignored_padding(model, pair.mask, _PROBLEM)
        return pair

    def _changes(self) -> list[object]:
        """Return torch's counts of changes of the tensors, which a user may change in place.

        Inference tensors do not count changes, so they are always treated as changed.
        """
        given = self.clean, self.corrupted, self.mask
        parts = chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in given)
        tensors = [x for x in parts if isinstance(x, Tensor)]
        return [object() if x.is_inference() else x._version for x in tensors]

    def solved_by(self, model: Any) -> "Contrast":
        """Return the pairs that a model solves: it prefers the right answer on both prompts.

        The metric, a difference of two answers (`logit_diff` or `probability_diff`), is above 0 on
        the clean prompt and below 0 on the corrupted prompt. A circuit that is found on other pairs
        explains little about the answers.

        Returns:
            The pairs that are left; `Contrast.dropped` counts the others.

        Raises:
            InputError: the metric is not a difference of two answers, or no pairs are left.

        Example:
            >>> from attn_only_lens import Contrast, load, patching as p
            >>> clean, corrupted = ["The keys", "The key"], ["The key", "The keys"]
            >>> pairs = Contrast(clean, corrupted, p.logit_diff([" are"] * 2, [" is"] * 2))
            >>> pairs.solved_by(load("small-english")).clean
            ('The keys',)
        """
        reasons = contrast_reasons(self)
        if not reasons and len(as_metric(self.metric).answers) != 2:
            name = as_metric(self.metric).name
            reasons.append(f"got {name}; expected logit_diff or probability_diff")
        problem = "a model cannot solve these pairs"
        InputError.raise_if(reasons, problem)
        left = solved_pairs(model, self)
        if not left:
            reason = f"got {len(self)} pairs, and {NOT_SOLVED} for any of them; expected others"
            raise InputError([reason], problem)
        n_dropped = len(self) - len(left)
        dropped = {**self.dropped, NOT_SOLVED: n_dropped} if n_dropped else self.dropped
        return replace(self[left], dropped=dropped)

    def save(self, path: str | Path) -> None:
        """Write the contrast to a JSON file atomically.

        If the metric is your own function, the file has only its name, and `load` needs `metric`.

        Raises:
            CheckpointError: the file cannot be written.

        Example:
            >>> import tempfile
            >>> from attn_only_lens import Contrast, load, patching as p
            >>> keys = Contrast("The keys", "The key", p.logit_diff(" are", " is"))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     keys.save(f"{folder}/contrast.json")
            ...     again = load(f"{folder}/contrast.json")
            >>> again.clean, again.metric.name
            ('The keys', "logit_diff(' are', ' is')")
        """
        DOCUMENT.write(path, contrast=as_body(vars(self)))


_pairs = WeakKeyDictionary[Contrast, WeakKeyDictionary[Any, tuple[Any, PromptPair]]]()
"""The pair of each contrast and model; a contrast is copied and pickled without it."""


def read_contrast(path: AnyPath, metric: AnyMetric | None = None) -> Contrast:
    """Read a contrast from a file; `metric` is the file's metric, if it is a user's function.

    Raises:
        CheckpointError: the file is missing, damaged, newer than this package, or not a contrast.
        InputError: the metric is missing, or has another name than the metric of the file.
    """
    body = DOCUMENT.read(path)["contrast"]
    metric = metric_of(body["metric"], metric, path)
    try:
        return Contrast(**fields_of(body) | {"metric": metric})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no contrast: {error}") from error


@torch.no_grad()
def solved_pairs(model: Any, contrast: Contrast) -> list[int]:
    """Return the numbers of the pairs that a model solves."""
    left = list[int]()
    contrast.pair(model)  # its errors name the prompts by their numbers among all pairs
    for start in range(0, len(contrast), _AT_ONCE):
        some = contrast[start : start + _AT_ONCE]
        pair = some.pair(model)
        metric = bind(some.metric, model, pair)
        clean, corrupted = (metric.of_run(logits) for logits in run(model, *pair.together).chunk(2))
        left += [start + i for i in ((clean > 0) & (corrupted < 0)).nonzero()[:, 0].tolist()]
    return left


def contrast_reasons(contrast: object, *, both: bool = True) -> list[str]:
    """Return an error message if this is not a contrast, or, with `both`, has only one run."""
    if not isinstance(contrast, Contrast):
        return [f"got {a_type(contrast)}; expected Contrast(clean, corrupted, metric)"]
    if both and contrast.corrupted is None:
        return ["got a contrast without corrupted prompts; expected both runs"]
    return []


def _reading(model: Any) -> tuple[object, ...]:
    """Return what decides which tokens a model reads in a text, and on which device."""
    tokenizer = getattr(model, "tokenizer", None)
    options = ("padding_side", "pad_token_id", "bos_token_id")
    settings = ("default_prepend_bos", "tokenizer_prepends_bos")
    return (
        tokenizer,
        *(getattr(tokenizer, name, None) for name in options),
        *(getattr(model.cfg, name, None) for name in settings),
        next(model.parameters()).device,
    )


def _copied(prompts: Any) -> Any:
    """Return a copy of the tensors in prompts, which users may later change in place."""
    if isinstance(prompts, tuple):
        return tuple(map(_copied, prompts))
    if isinstance(prompts, Tensor):
        with torch.inference_mode(False):
            return prompts.clone()
    return prompts.copy() if isinstance(prompts, np.ndarray) else prompts


def _is_one(prompts: Prompts) -> bool:
    """Return whether prompts are a single text or row of tokens, and not a list."""
    return isinstance(prompts, str) or (isinstance(prompts, Tensor) and prompts.ndim < 2)


def _count(prompts: Prompts) -> int:
    return 1 if _is_one(prompts) else len(prompts)


def _first(prompts: Prompts) -> str:
    first: Any = prompts if _is_one(prompts) else prompts[0]
    text = _REPR.repr(as_plain(first))
    return text if isinstance(first, str) else f"tokens {text}"
