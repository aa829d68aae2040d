"""Measure how well transcoders imitate the MLPs of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from attn_only_lens.axes import Tokens
from attn_only_lens.devices import to_float64_device
from attn_only_lens.engine.model_checks import hook_reasons, mode_reasons
from attn_only_lens.engine.one_thread import one_thread_per_model
from attn_only_lens.engine.prompts import Prompts, single_prompts
from attn_only_lens.engine.recording import record, run
from attn_only_lens.errors import InputError
from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.models.attach import attach
from attn_only_lens.precision import full_precision
from attn_only_lens.work import Work, work_reasons

_PROBLEM = "the fidelity cannot be measured"
_AT_ONCE = 16  # texts per batch


@dataclass(frozen=True)
class Fidelity:
    """How well a replacement model imitates the original model; padding is not counted.

    In a replacement model, transcoders replace MLPs, and their errors are left out.

    Attributes:
        kl: the mean of KL(original ‖ replacement) between next-token distributions, in nats.
        top_token: the share of tokens at which both models predict the same next token.
        loss: the mean cross-entropy loss of the original model, in nats per token.
        replacement_loss: the same loss of the replacement model.
        loss_recovered: (zero_loss - replacement_loss) / (zero_loss - loss), where zero_loss is the
            loss if the outputs of these MLPs are set to 0. It is 1 if the replacement model has the
            loss of the original, and 0 if it has zero_loss.
        layers: one row per transcoder. Columns: `layer`; `fvu`, the fraction of the variance of the
            MLP's output that the transcoder does not explain; `l0`, the mean number of active
            features per token; `dead`, the share of features that are never active in these texts.
            They are measured in the original model, so each transcoder reads the MLP's own input.
        n_tokens: the number of tokens. `kl`, `top_token` and the losses leave out the last token of
            each text, because no token follows it.
    """

    kl: float
    top_token: float
    loss: float
    replacement_loss: float
    loss_recovered: float
    layers: pd.DataFrame
    n_tokens: int


@one_thread_per_model
@torch.no_grad()
@full_precision()
def fidelity(
    model: Any,
    transcoders: Mapping[int, Transcoder],
    texts: Prompts,
    *,
    mask: Tensor | None = None,
    work: Work = Work(),
) -> Fidelity:
    """Compare the replacement model, in which transcoders replace MLPs, with the original model.

    Args:
        model: a `TransformerBridge` or a `HookedTransformer`, without exposed neuron-heads and
            without hooks. It is changed while the function runs, and then restored.
        transcoders: {layer: transcoder}, as in `attach`.
        texts: texts, or tokens [batch, pos]; use texts that are not in the training data.
        mask: for tokens with padding: 1 for real tokens, 0 for padding.
        work: how the work is run; by default, 16 texts run as one batch.

    Raises:
        InputError: the texts are invalid, or all texts have fewer than two tokens; `work` has an
            option other than `prompts_at_once` and `progress`; or the model has hooks or active
            dropout.
        UnsupportedModelError: the transcoders do not fit the model; see `attach`.

    Example:
        >>> import torch
        >>> from attn_only_lens import load, pretrained, transcoders
        >>> model, W = load("small-english"), torch.eye(128)
        >>> nothing = transcoders.Transcoder(W, 0 * W, torch.zeros(128), torch.zeros(128))
        >>> result = transcoders.fidelity(model, {2: nothing}, pretrained.small_english_texts()[:3])
        >>> result.loss_recovered
        0.0
    """
    with attach(model, transcoders):  # raises an error for misfits before any run
        pass
    reasons = hook_reasons(model, "would change some of the runs") + mode_reasons(model)
    InputError.raise_if(reasons + work_reasons(work, "batch_size", "resume", "share"), _PROBLEM)
    pair = single_prompts(model, texts, mask)
    if not _next(pair.clean, pair.mask)[1].any():
        raise InputError(["got no text with two or more tokens"], _PROBLEM)
    size = work.prompts_at_once or _AT_ONCE
    chunks = [
        pair.of_prompts(range(first, min(first + size, len(pair.clean))))
        for first in range(0, len(pair.clean), size)
    ]
    totals = _Totals(sorted(transcoders))
    with tqdm(total=3 * len(chunks), unit="pass", disable=not work.progress) as bar:
        for chunk in chunks:
            original = run(model, chunk.clean, chunk.mask)
            bar.update()
            with attach(model, transcoders) as exact:
                totals.add_layers(exact, chunk.clean, chunk.mask)
                logits = [
                    run(exact, chunk.clean, chunk.mask, [(name, _zero) for name in names])
                    for names in (totals.errors.values(), totals.outputs.values())
                ]
            totals.add_logits(chunk.clean, chunk.mask, original, *logits)
            bar.update(2)
    return totals.result()


def _zero(value: Tensor, hook: Any) -> Tensor:
    return torch.zeros_like(value)


def _next(
    tokens: Tokens, mask: Int[Tensor, "batch pos"] | None
) -> tuple[Int[Tensor, "batch next"], Tensor]:
    """Return each next token, and whether neither token is padding; omit the last position."""
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    return tokens[:, 1:], real[:, :-1] & real[:, 1:]


class _Totals:
    """The sums over tokens from which a `Fidelity` is computed."""

    def __init__(self, layers: list[int]) -> None:
        self._layers = layers
        # Without the errors, the model is the replacement model.
        self.errors, self.outputs = (
            {layer: f"blocks.{layer}.mlp.hook_{point}" for layer in layers}
            for point in ("error", "out")
        )
        self._logits = torch.zeros(5, dtype=torch.float64, device="cpu")
        self._n_next = self._n_tokens = 0
        self._sums: dict[tuple[int, str], Any] = {}

    def add_layers(self, model: Any, tokens: Tokens, mask: Tensor | None) -> None:
        """Run the model with error nodes, and add its errors and its counts of active features."""
        names = [*self.errors.values(), *self.outputs.values()]
        seen = record(model, tokens, mask, layers=self._layers, names=names, gates=False)
        real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
        self._n_tokens += int(real.sum())
        for layer in self._layers:
            z, error, output = (
                to_float64_device(x[real.to(x.device)]).double()
                for x in (
                    seen.neurons[layer].z,
                    seen.hooked[self.errors[layer]].squeeze(-2),
                    seen.hooked[self.outputs[layer]],
                )
            )
            self._add(layer, "error", error.square().sum())
            self._add(layer, "output", output.sum(0))
            self._add(layer, "square", output.square().sum())
            self._add(layer, "active", (z != 0).sum(0))

    def _add(self, layer: int, name: str, value: Tensor) -> None:
        value = value.cpu().double()
        self._sums[layer, name] = self._sums.get((layer, name), 0.0) + value

    def add_logits(
        self,
        tokens: Tokens,
        mask: Tensor | None,
        original: Float[Tensor, "batch pos d_vocab"],
        replacement: Float[Tensor, "batch pos d_vocab"],
        without: Float[Tensor, "batch pos d_vocab"],
    ) -> None:
        """Add the losses of the original, the replacement and the ablated model, and their KL."""
        following, real = _next(tokens, mask)
        log_p, log_q, log_0 = (
            to_float64_device(x[:, :-1][real]).double().log_softmax(-1)
            for x in (original, replacement, without)
        )
        labels = following[real].to(log_p.device)[:, None]
        kl = (log_p.exp() * (log_p - log_q)).sum()
        same = (log_p.argmax(-1) == log_q.argmax(-1)).double().sum()
        losses = [-x.gather(-1, labels).sum() for x in (log_p, log_q, log_0)]
        self._logits += torch.stack([kl, same, *losses]).cpu()
        self._n_next += len(labels)

    def result(self) -> Fidelity:
        """Return the fidelity over all texts that were added."""
        kl, same, loss, replaced, without = (self._logits / self._n_next).tolist()
        rows = []
        for layer in self._layers:
            error, output, square, active = (
                self._sums[layer, name] for name in ("error", "output", "square", "active")
            )
            variance = square - output.square().sum() / self._n_tokens
            l0, dead = active.sum() / self._n_tokens, (active == 0).double().mean()
            rows.append((layer, float(error / variance), float(l0), float(dead)))
        frame = pd.DataFrame(rows, columns=["layer", "fvu", "l0", "dead"])
        recovered = (without - replaced) / (without - loss)
        return Fidelity(kl, same, loss, replaced, recovered, frame, self._n_tokens)
