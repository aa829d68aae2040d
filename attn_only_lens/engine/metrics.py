"""Metrics: one number per prompt, computed from the logits and averaged over prompts.

Let ℓ be the logits at a prompt's last non-padding token, c the correct answers, w the wrong
answers, P = softmax ℓ, and C the clean run's P:

    logit_diff         ℓ[c] - ℓ[w]
    probability_diff   Σ P[c] - Σ P[w], over several answers c and w
    probability        P[c]
    log_probability    log P[c]
    kl                 KL(C ‖ P) = Σ_v C[v] (log C[v] - log P[v])
    loss               -log P_t[x_{t+1}], the mean over all real tokens of the clean prompts
    custom             any function of the logits [batch, pos, d_vocab]

A `BoundMetric` lists the positions and vocabulary entries whose logits it reads, so that a patching
sweep computes only these logits. Half-precision logits are converted to float32, except for
`custom` metrics.
"""

import inspect
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attn_only_lens.arguments import a_type
from attn_only_lens.axes import Logits
from attn_only_lens.devices import float32_if_half, on_cpu, to_float64_device
from attn_only_lens.engine.answers import (
    PROBLEM,
    AnswerRows,
    Answers,
    answer_rows,
    answer_tokens,
    answers_label,
)
from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import d_vocab_out
from attn_only_lens.errors import InputError

_Selected: TypeAlias = Float[Tensor, "site batch position column"]
_Compute: TypeAlias = Callable[[_Selected], Float[Tensor, "site prompt"]]
_Columns: TypeAlias = Int[Tensor, "column"] | None

_NO_NUMBER = "this metric does not return one number, or one number per prompt"
_NO_GRADIENT = "this metric cannot be attributed"
_ROUNDINGS = 8  # a tolerance, in units of eps, for rounding of inputs, differences and means
_NO_SLOPE = 64  # sums of gradients below this many eps are rounding errors
_MOVED = 1e-3  # the largest relative change of a custom metric that moves with its prompts
_VERSION = "1"  # the version of all metrics in this file; change it whenever a metric changes


@dataclass(frozen=True, eq=False)
class BoundMetric:
    """A metric that is bound to a model and its prompts, as a function of the model's logits.

    Attributes:
        name: the name of the metric, with its answers.
        positions: the position that it reads in each prompt; None if it reads all positions.
        columns: the tokens of the vocabulary that it reads; None if it reads all.
        shape: the shape [batch, pos, d_vocab] of a full run's logits.
        compute: the formula, which maps the selected logits to one number per prompt, or to one
            number for all prompts, [site, 1].
        weights: the weight of each prompt in the mean over prompts; the weights sum to 1. None if
            all weights are equal.
    """

    name: str
    positions: Int[Tensor, "batch"] | None
    columns: _Columns
    shape: tuple[int, int, int]
    compute: _Compute = field(repr=False)
    weights: tuple[float, ...] | None = None

    def value(self, logits: _Selected) -> Float[Tensor, "site"]:
        """Return the metric's mean over prompts for every site, as a differentiable tensor."""
        return self.mean(self.of_prompts(logits))

    def of_prompts(self, logits: _Selected) -> Float[Tensor, "site prompt"]:
        """Return every prompt's metric for every site, as a differentiable tensor."""
        values = self.compute(logits)
        self._require_finite(values)
        return values

    def on_cpu(self, logits: _Selected) -> Float[Tensor, "site prompt"]:
        """Return the same on the CPU, without gradients. The host waits for the device once."""
        values = self.compute(logits).detach().cpu()
        self._require_finite(values)
        return values

    def _require_finite(self, values: Float[Tensor, "site prompt"]) -> None:
        bad = (~values.isfinite()).any(dim=1).sum().item()
        if bad:
            self._refuse(f"not finite for {bad} of {len(values)} sites")

    def shares(self, n: int) -> tuple[float, ...]:
        """Return n weights for the mean over prompts (n is 1 or the number of prompts)."""
        return self.weights if self.weights and n > 1 else (1 / n,) * n

    def mean(self, values: Float[Tensor, "*site prompt"]) -> Float[Tensor, "*site"]:
        """Return the weighted mean over prompts, summed in the same order for all sites."""
        weighted = zip(self.shares(values.shape[-1]), values.unbind(-1), strict=True)
        return sum((share * term for share, term in weighted), torch.zeros_like(values[..., 0]))

    def select(
        self, logits: Float[Tensor, "*site batch pos d_vocab"]
    ) -> Float[Tensor, "*site batch position column"]:
        """Select the logits that this metric reads from the logits of full runs."""
        if logits.shape[-3:] != self.shape:
            self._refuse(
                f"got logits of shape {list(logits.shape)}; expected [..., batch, pos, d_vocab] "
                f"ending in {list(self.shape)}"
            )
        if self.positions is not None:
            rows = torch.arange(self.shape[0], device=logits.device)
            logits = logits[..., rows, self.positions.to(logits.device), :].unsqueeze(-2)
        return logits if self.columns is None else logits[..., self.columns.to(logits.device)]

    def of(self, logits: Logits) -> float:
        """Return the metric's mean over prompts in one full run; see `of_run`."""
        return self.mean(self.of_run(logits)).item()

    @torch.no_grad()
    def of_run(self, logits: Logits) -> Float[Tensor, "prompt"]:
        """Return each prompt's metric in a full run, in float64; check that it is deterministic."""
        selected = self.select(logits)[None]
        copy = selected.clone()
        both = [self.compute(selected)[0] for _ in range(2)]
        once, again, unchanged = on_cpu([*both, (selected == copy).all().float()])  # one transfer
        once, again = once.double(), again.double()
        for values in (once, again):
            self._require_finite(values[None])
        if not unchanged:
            self._refuse("it changes the logits in place; let it work on a copy")
        if not torch.equal(once, again):
            self._refuse(
                f"got {self.mean(once):.6g} and then {self.mean(again):.6g} for the same logits; "
                "expected a function of the logits, without randomness or state"
            )
        return once

    @torch.enable_grad()
    def of_logits(self, logits: Logits) -> Float[Tensor, ""]:
        """Return the metric of one full run, differentiable with respect to the logits."""
        return self.value(self.select(logits)[None])[0]

    @torch.enable_grad()
    def gradient(self, logits: Logits) -> Float[Tensor, "batch position column"] | None:
        """Return the metric's gradient at the logits that it reads, or None if there is none."""
        leaf = self.select(logits.detach()).clone().requires_grad_()
        value = self.value(leaf[None])[0]
        return torch.autograd.grad(value, leaf)[0] if value.requires_grad else None

    def _refuse(self, reason: str) -> None:
        raise InputError([f"{self.name}: {reason}"], "this metric cannot be computed")


@dataclass(frozen=True)
class Metric:
    """A metric that is not yet bound to prompts, for example the result of `logit_diff`.

    Attributes:
        name: the name of the metric, with its answers.
        bound: a function that binds the metric to a model, prompts and the clean run's logits;
            `bind` calls it.
        needs_reference: whether the metric compares with the clean run's logits.
        version: a version, which distinguishes metrics that have the same name but compute
            different values; None if there is no version.
        answers: the answers that the metric compares.
        source: the source text of a user's function; None if the metric is not a user's function.
        by_prompt: whether a prompt's value depends only on that prompt's logits, so that the
            metric can be computed on some of the prompts.
        make: the function that makes the metric from its answers; None if the metric is not one of
            this package.
    """

    name: str
    bound: Callable[[Any, PromptPair, Logits | None], BoundMetric] = field(repr=False)
    needs_reference: bool = False
    version: str | None = field(default=_VERSION, repr=False)
    answers: tuple[AnswerRows, ...] = field(default=(), repr=False)
    source: str | None = field(default=None, repr=False)
    by_prompt: bool = field(default=True, repr=False)
    make: "Callable[..., Metric] | None" = field(default=None, repr=False)

    def of_prompts(self, prompts: Sequence[int]) -> "Metric":
        """Return the metric of some of the prompts, given by their numbers.

        Raises:
            InputError: the metric is a user's function, which may know the number of prompts.
        """
        if self.make is None:
            reason = (
                f"got {self.name}, your own function; expected logit_diff or another metric of "
                "this package, or a contrast for these prompts, with a function for them"
            )
            raise InputError([reason], "this metric cannot be computed for some of the prompts")
        some = [rows if len(rows) == 1 else [rows[i] for i in prompts] for rows in self.answers]
        has_own_name = self.name != self.make(*self.answers).name
        metric = self.make(*some)
        return replace(metric, name=self.name) if has_own_name else metric

    def identity(self) -> list[Any]:
        """Return JSON data that identifies this metric, for jobs that are resumed or shared."""
        if self.version is None:
            reason = (
                f"{self.name} is your own function, without a version; expected "
                "p.custom(fn, version='1'): change the version whenever fn changes"
            )
            raise InputError([reason], "a resumed or shared job must have the same metric")
        return [self.name, self.version, self.answers, self.source]


AnyMetric: TypeAlias = Metric | Callable[[Logits], Tensor | float]


def as_metric(metric: AnyMetric) -> Metric:
    """Return a metric unchanged; convert a plain function of the logits to a `custom` metric."""
    return metric if isinstance(metric, Metric) else custom(metric)


def bind(
    metric: AnyMetric, model: Any, pair: PromptPair, reference: Logits | None = None
) -> BoundMetric:
    metric = as_metric(metric)
    return replace(metric.bound(model, pair, reference), name=metric.name)


# The metrics


def logit_diff(correct: Answers, wrong: Answers) -> Metric:
    """Return a metric that is the logit of a correct answer minus the logit of a wrong answer.

    Args:
        correct: a token, a string that is one token, or a list or tensor with one answer for each
            prompt.
        wrong: the wrong answers, in the same form as `correct`.

    Raises:
        InputError: when the metric is bound, answers are not one token, are unknown to the
            tokenizer, or are the same.

    Warns:
        InputWarning: on the clean run, an answer is at least ten times as probable with its leading
            space added or removed. All metrics with answers give this warning.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.logit_diff(correct=" Mary", wrong=" John")
        Metric(name="logit_diff(' Mary', ' John')", needs_reference=False)
    """

    return _of_answers(logit_diff, {"correct": correct, "wrong": wrong}, None)


def probability_diff(correct: Answers, wrong: Answers) -> Metric:
    """Return a metric that is Σ P[correct answers] - Σ P[wrong answers], with probabilities P.

    Hanna et al. (2023) use this metric for the greater-than task, where every later year is
    correct.

    Args:
        correct: answers as for `logit_diff`; or several answers to a prompt, in a list or tensor
            with a row of answers for each prompt, or one row for all prompts, such as `[[33, 34]]`.
        wrong: the wrong answers, in the same form as `correct`.

    Raises:
        InputError: see `logit_diff`; or there are answers for a different number of prompts, or a
            prompt has the same answer twice.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.probability_diff([[33, 34], [98]], [[31, 32], [7]]).name
        'probability_diff([[33, 34], 98], [[31, 32], 7])'
    """

    answers = {"correct": correct, "wrong": wrong}
    return _of_answers(probability_diff, answers, torch.softmax, several=True)


def probability(answer: Answers) -> Metric:
    """Return a metric that is the probability of an answer.

    Args:
        answer: a token, a string that is one token, or a list or tensor with one answer for each
            prompt.

    Raises:
        InputError: see `logit_diff`.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.probability(" Mary").name
        "probability(' Mary')"
    """
    return _of_answers(probability, {"answer": answer}, torch.softmax)


def log_probability(answer: Answers) -> Metric:
    """Return a metric that is the natural logarithm of an answer's probability.

    Args:
        answer: a token, a string that is one token, or a list or tensor with one answer for each
            prompt.

    Raises:
        InputError: see `logit_diff`.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.log_probability([17, 19]).name
        'log_probability([17, 19])'
    """
    return _of_answers(log_probability, {"answer": answer}, torch.log_softmax)


def _of_answers(
    make: Callable[..., Metric],
    answers: Mapping[str, Answers],
    scale: Callable[[Tensor, int], Tensor] | None,
    *,
    several: bool = False,
) -> Metric:
    """Return a metric that is Σ scale(ℓ) over correct answers minus Σ scale(ℓ) over wrong answers.

    Here, ℓ are the logits at each prompt's last non-padding token. If `scale` is None, the metric
    uses the logits themselves and reads only the answers' logits.
    """
    rows = {role: answer_rows(of_role) for role, of_role in answers.items()}
    name = f"{make.__name__}({', '.join(map(answers_label, rows.values()))})"
    bound = partial(_bound_answers, name, rows, scale, several)  # unlike a closure, it is pickled
    return Metric(name, bound, answers=tuple(rows.values()), make=make)


def _bound_answers(
    name: str,
    rows: Mapping[str, AnswerRows],
    scale: Callable[[Tensor, int], Tensor] | None,
    several: bool,
    model: Any,
    pair: PromptPair,
    reference: Logits | None,
) -> BoundMetric:
    shape, device = _logits_shape(model, pair), pair.clean.device
    tokens = answer_tokens(model, pair, rows, reference, several=several)
    index, signs = _index_and_signs(tokens.values(), device)
    columns, index = (None, index) if scale else index.unique(return_inverse=True)

    def compute(logits: _Selected) -> Float[Tensor, "site prompt"]:
        scaled = float32_if_half(logits).squeeze(-2)
        scaled = scaled if scale is None else scale(scaled, -1)
        answers = scaled.gather(-1, index.expand(len(scaled), -1, -1))
        return (answers * signs).sum(dim=-1)

    return BoundMetric(name, pair.last, columns, shape, compute)


def _index_and_signs(
    tokens: Collection[list[tuple[int, ...]]], device: torch.device
) -> tuple[Int[Tensor, "batch answer"], Int[Tensor, "batch answer"]]:
    """Return each prompt's answers and their signs: 1 if correct, -1 if wrong, 0 for padding."""
    rows = [
        [(token, sign) for sign, answers in zip((1, -1), roles, strict=False) for token in answers]
        for roles in zip(*tokens, strict=True)
    ]
    of_prompts = [torch.tensor(row, device="cpu") for row in rows]
    table = pad_sequence(of_prompts, batch_first=True).to(device)
    return table[..., 0], table[..., 1]


def kl() -> Metric:
    """Return a metric that is KL(clean ‖ patched) between next-token distributions, in nats.

    Both the metric and its gradient are 0 on the clean run. To measure the distance to the
    corrupted run, swap the clean and the corrupted prompts.

    Raises:
        InputError: when the metric is bound, the clean run's logits are missing or have another
            shape.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.kl().needs_reference
        True
    """
    return Metric("kl", _bound_kl, needs_reference=True, make=kl)


def _bound_kl(model: Any, pair: PromptPair, reference: Logits | None) -> BoundMetric:
    shape = _logits_shape(model, pair)
    if reference is None or tuple(reference.shape) != shape:
        got = None if reference is None else list(reference.shape)
        reason = f"kl: got reference {got}; expected the clean run's logits {list(shape)}"
        raise InputError([reason], PROBLEM)
    rows = torch.arange(len(pair.last), device=reference.device)
    last = reference.detach()[rows, pair.last.to(reference.device)]
    clean = float32_if_half(last).log_softmax(dim=-1)

    def compute(logits: _Selected) -> Float[Tensor, "site prompt"]:
        patched = float32_if_half(logits).squeeze(-2).log_softmax(dim=-1)
        # A token with clean probability 0 contributes 0; without `where`, 0 · ∞ would give nan.
        terms = torch.where(clean == -torch.inf, 0.0, clean.exp() * (clean - patched))
        return terms.sum(dim=-1)

    return BoundMetric("kl", pair.last, None, shape, compute)


def loss() -> Metric:
    """Return a metric that is the cross-entropy of the clean prompts' next tokens, in nats.

    The targets are the clean prompts' tokens, except padding and each prompt's first token. The
    metric is the mean over all targets, so longer prompts have larger weights.

    Raises:
        InputError: when the metric is bound, all prompts have only one token, or tokens are outside
            the output vocabulary.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.loss()
        Metric(name='loss', needs_reference=False)
    """
    return Metric("loss", _bound_loss, make=loss)


def _bound_loss(model: Any, pair: PromptPair, reference: Logits | None) -> BoundMetric:
    shape = _logits_shape(model, pair)
    counts = pair.real[:, :-1] & pair.real[:, 1:]
    rows, columns = counts.nonzero(as_tuple=True)
    targets = pair.clean[:, 1:][rows, columns]
    reasons = []
    if not len(targets) and pair.among is None:
        reasons.append("loss: no prompt has a second token for the first token to predict")
    elif len(targets) and targets.max() >= shape[2]:
        reasons.append(
            f"loss: the prompts have token {targets.max()}, but the model has logits only for "
            f"tokens 0 to {shape[2] - 1}"
        )
    InputError.raise_if(reasons, PROBLEM)
    n_targets = counts.sum(dim=1).tolist()

    def compute(logits: _Selected) -> Float[Tensor, "site prompt"]:
        logs = float32_if_half(logits[:, rows, columns]).log_softmax(dim=-1)
        losses = -logs[:, torch.arange(len(targets), device=targets.device), targets]
        by_prompt = losses.split(n_targets, 1)
        # A prompt without targets has loss 0 and weight 0.
        means = [terms.sum(dim=-1) / max(1, terms.shape[1]) for terms in by_prompt]
        return torch.stack(means, dim=-1)

    weights = tuple(n / max(1, len(targets)) for n in n_targets)
    return BoundMetric("loss", None, None, shape, compute, weights)


def custom(
    fn: Callable[[Logits], Tensor | float], name: str | None = None, version: str | None = None
) -> Metric:
    """Return a metric that is your own function of the logits of a full run.

    The function is called once per site and reads all logits, so this metric is slower than the
    others. For attribution, the function must return a differentiable tensor. Results have standard
    errors if the function returns one number per prompt, as a tensor [batch].

    The logits have no padding, on either side: `logits[:, -1]` is each prompt's last token, and if
    prompts differ in length, rows of nan come before shorter prompts, so count positions from the
    end.

    Args:
        fn: a function that maps logits [batch, pos, d_vocab] to one number, or to one number per
            prompt.
        name: the name in results; by default the name of `fn`.
        version: a version, needed for `resume` and by several processes, where name, version and
            source text identify `fn`; give another version whenever `fn` changes.

    Raises:
        InputError: `fn` cannot be called. When the metric is computed: `fn` does not return finite
            numbers, returns different numbers for the same logits, changes the logits, or counts
            positions from the start of prompts that differ in length.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.custom(lambda logits: logits[:, -1].max(), name="largest logit").name
        'largest logit'
    """
    if not callable(fn):
        reason = (
            f"got {a_type(fn)} as metric; expected a metric such as logit_diff(correct, wrong), or "
            "a function of the logits"
        )
        raise InputError([reason], _NO_NUMBER)
    if globals().get(getattr(fn, "__name__", "")) is fn:  # a function of this module
        called = f"{fn.__name__}({', '.join(inspect.signature(fn).parameters)})"
        reason = f"{fn.__name__} was not called; expected {called} as metric"
        raise InputError([reason], _NO_NUMBER)
    label = str(name or getattr(fn, "__name__", type(fn).__name__))
    try:
        source = inspect.getsource(fn)
    except (OSError, TypeError):
        source = None
    bound = partial(_bound_function, fn, label)
    return Metric(label, bound, version=version, source=source, by_prompt=False)


def _bound_function(
    fn: Callable[..., Any], name: str, model: Any, pair: PromptPair, reference: Logits | None
) -> BoundMetric:
    padded = not bool(pair.real.all())

    def compute(logits: Float[Tensor, "site batch pos d_vocab"], extra: int = 0) -> Tensor:
        rows = (_without_padding(x, pair, extra) if padded else x for x in logits)
        return torch.stack([_as_numbers(fn(x), len(x), name) for x in rows])

    differ = pair.real.sum(dim=1).unique().numel() > 1
    if differ and reference is not None and reference[pair.real].isfinite().all():
        _require_counts_from_end(partial(compute, reference[None]), pair, name)
    return BoundMetric(name, None, None, _logits_shape(model, pair), compute)


def _without_padding(logits: Logits, pair: PromptPair, extra: int) -> Logits:
    """Return logits whose last row is each prompt's last token, and which are nan before a prompt.

    They have as many rows as the longest prompt has tokens, and `extra` rows more.
    """
    lengths = pair.real.sum(dim=1)
    from_end = torch.arange(-int(lengths.max()) - extra, 0, device=lengths.device)
    positions = (pair.last[:, None] + 1 + from_end).clamp(min=0).to(logits.device)
    is_token = (from_end >= -lengths[:, None]).to(logits.device)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    # The gradient of `where` is 0 where it is nan, so no nan reaches the gradient of a token.
    return torch.where(is_token[..., None], logits[rows, positions], torch.nan)


@torch.no_grad()
def _require_counts_from_end(
    compute: Callable[[int], Float[Tensor, "1 prompt"]], pair: PromptPair, name: str
) -> None:
    """Raise an error if a custom metric depends on `compute`'s extra rows before all prompts."""
    values = compute(0).cpu().double()
    try:
        moved = compute(1).cpu().double()
        once, again = (reprlib.repr(x[0].tolist()) for x in (values, moved))
        got = f"{once}, and {again} after one more row before each prompt"
    except Exception as error:  # a user's function may raise any error
        moved, got = values + torch.nan, f"an error after one more row before each prompt: {error}"
    if (values - moved).abs().max() <= _MOVED * values.abs().max():
        return
    lengths = pair.real.sum(dim=1)
    reason = (
        f"{name}: got {got}. The prompts have {lengths.min()} to {lengths.max()} tokens. Shorter "
        "prompts begin with rows of nan, and every prompt ends in the last row: expected a "
        "function that counts positions from the end, such as logits[:, -1]"
    )
    raise InputError([reason], _NO_NUMBER)


def _as_numbers(value: Any, batch: int, name: str) -> Float[Tensor, "prompt"]:
    """Return a custom function's result as a tensor of one number, or one number per prompt."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.shape in ((), (batch,)):
        return value.reshape(-1)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor([value], dtype=torch.float64, device="cpu")
    is_tensor = isinstance(value, Tensor)
    got = f"a {value.dtype} tensor {list(value.shape)}" if is_tensor else repr(value)
    reason = (
        f"{name}: got {got} from the function; expected one number (such as a batch mean) or a "
        f"tensor of {batch} numbers, one for each prompt"
    )
    raise InputError([reason], _NO_NUMBER)


def _logits_shape(model: Any, pair: PromptPair) -> tuple[int, int, int]:
    """Return the shape [batch, pos, d_vocab] of a full run's logits."""
    batch, pos = pair.clean.shape
    return batch, pos, d_vocab_out(model)


# Requirements


def require_distinct(clean_value: float, corrupted_value: float, dtype: torch.dtype) -> None:
    """Raise an error if the metric's values in the two runs are equal up to rounding."""
    scale = max(abs(clean_value), abs(corrupted_value))
    within = _ROUNDINGS * torch.finfo(dtype).eps * scale
    if not abs(clean_value - corrupted_value) > within or scale == float("inf"):
        reason = (
            f"got {clean_value} for the clean run and {corrupted_value} for the corrupted run, "
            f"which are equal up to rounding in {dtype}; choose prompts or a metric "
            "for which they differ, because scores are fractions of this difference"
        )
        raise InputError([reason], "this metric is constant")


def one_run_reasons(metric: AnyMetric) -> list[str]:
    """Return [error message] if a metric needs a second run, otherwise []."""
    if not as_metric(metric).needs_reference:
        return []
    return [
        f"{as_metric(metric).name} compares with another run, but there is only one run here; "
        "expected a metric that needs the logits of only one run"
    ]


def no_gradient_reasons() -> list[str]:
    """Return [error message] if torch is in inference mode, otherwise []."""
    if not torch.is_inference_mode_enabled():
        return []
    return ["torch.inference_mode() allows no gradient; use torch.no_grad()"]


def require_differentiable(metric: BoundMetric, logits: Logits) -> None:
    """Raise an error if a metric's gradient at the logits is missing or not finite."""
    gradient = metric.gradient(logits)
    reasons = []
    if gradient is None:
        reasons.append(
            f"{metric.name}: the value is detached from the logits (a Python number, argmax, "
            "or torch.no_grad?); expected a differentiable function of the logits"
        )
    elif not gradient.isfinite().all():
        reasons.append(f"{metric.name}: the gradient is not finite")
    InputError.raise_if(reasons, _NO_GRADIENT)


def require_slope(metric: BoundMetric, logits: Logits, reference: Logits, span: float) -> None:
    """Raise an error if a metric's gradient is 0 on the patched run, as for `kl` on the clean run.

    If Σ |∂metric/∂logits · (reference - logits)| is tiny compared with `span`, the metric's change
    between the runs, every estimate from gradients is zero or a rounding error.
    """
    gradient = metric.gradient(logits)
    assert gradient is not None
    terms = gradient * (metric.select(reference.detach()) - metric.select(logits.detach()))
    eps = min(torch.finfo(dtype).eps for dtype in (logits.dtype, torch.float32))
    if float(to_float64_device(terms).double().abs().sum()) <= _NO_SLOPE * eps * abs(span):
        reason = (
            f"{metric.name}: the gradient is zero on the run that is patched, so every "
            "estimate would be zero; expected a nonzero gradient on this run: use the other "
            "direction, another metric, or method='integrated'"
        )
        raise InputError([reason], _NO_GRADIENT)
