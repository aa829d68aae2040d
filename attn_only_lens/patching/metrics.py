"""What a patch is measured by: one number of the logits of a batch of prompts.

Unless said otherwise a metric is read at each prompt's last real token and is the mean over the
batch. With ℓ the logits there, c and w the answers, P = softmax ℓ and C the clean run's softmax:

    logit_diff         ℓ[c] - ℓ[w]
    probability        P[c]
    log_probability    log P[c]
    kl                 KL(C ‖ P) = Σ_v C[v] (log C[v] - log P[v]): 0 on the clean run
    loss               -log P_t[x_{t+1}], the mean over all real tokens x_{t+1} of the clean prompts
    custom             any function of the logits [batch, pos, d_vocab]

Logits in half precision are summed up in float32, except those handed to a custom function.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from attn_only_lens.axes import Logits
from attn_only_lens.errors import PatchingError
from attn_only_lens.patching.answers import Answer, answer_tokens, described, run_shape
from attn_only_lens.patching.bound import BoundMetric, Metric
from attn_only_lens.patching.custom_metric import AnyMetric, as_metric
from attn_only_lens.patching.prompts import PromptPair

__all__ = [
    "bind",
    "kl",
    "log_probability",
    "logit_diff",
    "loss",
    "probability",
]

_Selected: TypeAlias = Float[Tensor, "site batch position column"]
_PROBLEM = "this metric does not fit the model or its prompts"


def logit_diff(correct: Answer, wrong: Answer) -> Metric:
    """The logit of a correct answer less that of a wrong one.

    Args:
        correct: a text that is one token, a token, or a list or tensor of one for each prompt.
        wrong: the same.

    Returns:
        The metric, for any model and prompts.

    Raises:
        PatchingError: when bound: answers that are not one token each, or the same.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.logit_diff(correct=" Mary", wrong=" John")
        Metric(name="logit_diff(' Mary', ' John')", needs_reference=False)
    """
    name = f"logit_diff({described(correct)}, {described(wrong)})"

    def bound(model: Any, pair: PromptPair, reference: Logits | None) -> BoundMetric:
        reasons: list[str] = []
        right = answer_tokens(model, pair, correct, "correct", reasons)
        left = answer_tokens(model, pair, wrong, "wrong", reasons)
        same = (right == left).nonzero().flatten().tolist()
        if same and not reasons:
            reasons.append(f"correct and wrong are the same token for prompts {same}")
        _refuse(reasons)
        columns, at = torch.cat([right, left]).unique(return_inverse=True)
        right_at, left_at = at.chunk(2)

        def compute(logits: _Selected) -> Float[Tensor, "site"]:
            logits = _wide(logits)
            return (_pick(logits, right_at) - _pick(logits, left_at)).mean(dim=-1)

        return BoundMetric(name, pair.last, columns, run_shape(model, pair), compute)

    return Metric(name, bound)


def probability(answer: Answer) -> Metric:
    """The probability of an answer.

    Args:
        answer: a text that is one token, a token, or a list or tensor of one for each prompt.

    Returns:
        The metric, for any model and prompts.

    Raises:
        PatchingError: when bound: answers that are not one token each.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.probability(" Mary").name
        "probability(' Mary')"
    """
    return _of_answer("probability", answer, lambda logs: logs.exp().mean(dim=-1))


def log_probability(answer: Answer) -> Metric:
    """The natural logarithm of the probability of an answer.

    Args:
        answer: a text that is one token, a token, or a list or tensor of one for each prompt.

    Returns:
        The metric, for any model and prompts.

    Raises:
        PatchingError: when bound: answers that are not one token each.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.log_probability([17, 19]).name
        'log_probability([17, 19])'
    """
    return _of_answer("log_probability", answer, lambda logs: logs.mean(dim=-1))


def _of_answer(
    kind: str, answer: Answer, finish: Callable[[Float[Tensor, "site batch"]], Tensor]
) -> Metric:
    name = f"{kind}({described(answer)})"

    def bound(model: Any, pair: PromptPair, reference: Logits | None) -> BoundMetric:
        reasons: list[str] = []
        tokens = answer_tokens(model, pair, answer, "answer", reasons)
        _refuse(reasons)

        def compute(logits: _Selected) -> Float[Tensor, "site"]:
            return finish(_pick(_wide(logits).log_softmax(dim=-1), tokens))

        return BoundMetric(name, pair.last, None, run_shape(model, pair), compute)

    return Metric(name, bound)


def kl(to: str = "clean") -> Metric:
    """KL(clean ‖ patched): how far the next-token distribution is from the clean run's, in nats.

    It is 0 on the clean run, where its gradient is 0 too, and grows to its value on the corrupted
    run. For the distance to the other run, swap the prompts.

    Args:
        to: "clean", the only one.

    Returns:
        The metric, for any model and prompts.

    Raises:
        PatchingError: another `to`; when bound: no reference, or one that does not fit.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.kl(to="clean").needs_reference
        True
    """
    if to != "clean":
        raise PatchingError(
            [f"got to={to!r}; expected 'clean': for the other run, swap the prompts"], _PROBLEM
        )

    def bound(model: Any, pair: PromptPair, reference: Logits | None) -> BoundMetric:
        shape = run_shape(model, pair)
        if reference is None or tuple(reference.shape) != shape:
            got = None if reference is None else list(reference.shape)
            _refuse([f"kl: got reference {got}; expected the clean run's logits {list(shape)}"])
        assert reference is not None
        rows = torch.arange(len(pair.last), device=reference.device)
        last = reference.detach()[rows, pair.last.to(reference.device)]
        clean = _wide(last).log_softmax(dim=-1)

        def compute(logits: _Selected) -> Float[Tensor, "site"]:
            patched = _wide(logits).squeeze(-2).log_softmax(dim=-1)
            # Where the clean run gives no probability at all, a term is 0, not 0 · ∞.
            terms = torch.where(clean == -torch.inf, 0.0, clean.exp() * (clean - patched))
            return terms.sum(dim=-1).mean(dim=-1)

        return BoundMetric("kl", pair.last, None, shape, compute)

    return Metric("kl", bound, needs_reference=True)


def loss() -> Metric:
    """Cross-entropy of the clean prompts' next tokens, in nats: the mean over real tokens.

    Every token that follows a real one in the clean prompts is a target, whichever run is patched.

    Returns:
        The metric, for any model and prompts.

    Raises:
        PatchingError: when bound: prompts of one token, or tokens that the model cannot put out.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.loss()
        Metric(name='loss', needs_reference=False)
    """

    def bound(model: Any, pair: PromptPair, reference: Logits | None) -> BoundMetric:
        shape = run_shape(model, pair)
        counts = pair.real[:, :-1] & pair.real[:, 1:]
        targets = pair.clean[:, 1:]
        reasons = []
        if not counts.any():
            reasons.append("loss: no prompt has a second token to be predicted")
        elif targets[counts].max() >= shape[2]:
            reasons.append(
                f"loss: the prompts hold token {targets[counts].max()}, and the model puts out "
                f"logits of tokens 0 to {shape[2] - 1} only"
            )
        _refuse(reasons)
        rows, columns = counts.nonzero(as_tuple=True)
        wanted = targets[rows, columns]

        def compute(logits: _Selected) -> Float[Tensor, "site"]:
            logs = _wide(logits[:, rows, columns]).log_softmax(dim=-1)
            return -logs[:, torch.arange(len(wanted), device=wanted.device), wanted].mean(dim=-1)

        return BoundMetric("loss", None, None, shape, compute)

    return Metric("loss", bound)


def bind(
    metric: AnyMetric, model: Any, pair: PromptPair, reference: Logits | None = None
) -> BoundMetric:
    """A metric of given prompts.

    Args:
        metric: a metric, or a function of logits [batch, pos, d_vocab].
        model: whose tokenizer and vocabulary answers are of.
        pair: the prompts.
        reference: the clean run's logits [batch, pos, d_vocab], for `kl`.

    Returns:
        What it reads, and how.

    Raises:
        PatchingError: with every reason why it does not fit.

    Example:
        >>> import torch
        >>> from attn_only_lens import patching as p, pretrained
        >>> model = pretrained.modular_addition()
        >>> pair = p.prompt_pair(model, torch.tensor([3, 4, 113]), torch.tensor([3, 5, 113]))
        >>> metric = p.bind(p.logit_diff(correct=7, wrong=8), model, pair)
        >>> metric.positions, metric.columns
        (tensor([2]), tensor([7, 8]))
        >>> metric.of(model(pair.clean)) > 0 > metric.of(model(pair.corrupted))
        True
    """
    return as_metric(metric).bound(model, pair, reference)


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise PatchingError(reasons, _PROBLEM)


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _pick(logits: _Selected, columns: Int[Tensor, "batch"]) -> Float[Tensor, "site batch"]:
    """One column of each prompt, at its one position."""
    prompts = torch.arange(len(columns), device=columns.device)
    return logits[:, prompts, 0, columns]
