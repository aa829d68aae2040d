"""The report of how much a model with neuron-heads differs from its source."""

from dataclasses import dataclass

import pandas as pd
import torch

_ROUNDING = 1e-14  # a tolerance on top of an activation's certified error bound


@dataclass(frozen=True)
class Verification:
    """The differences between a converted or exposed model and its source, on some input.

    `convert(check=…)` and `expose_neuron_heads(check=…)` return it as `verification`.

    The converted model is run with hooks on all hook points of its neurons' heads, except that
    `bitwise` is measured without hooks and, for bilinear gates, `rounding` with and without hooks.

    Attributes:
        bitwise: True if the logits without hooks equal the logits of the source bit for bit.
        rounding: for bilinear gates, the largest |Δ logit| if the source is run with the same
            approximated activations, divided by that run's largest |logit|; for exact gates,
            `relative`.
        max_abs_logit: the largest |Δ logit| between the converted model and the source.
        relative: `max_abs_logit` divided by the largest |logit| of the source.
        mean_kl: KL(source ‖ converted) in nats, the mean over tokens.
        max_kl: the largest KL(source ‖ converted) at any token.
        top1_agreement: the fraction of tokens at which both models predict the same next token.
        by_layer: a frame with one row for each point of the stream (`0_mid`: before the neurons of
            layer 0, `1_pre`: after them, …). `max_abs` is the largest |Δ|; `relative` is `max_abs`
            divided by the largest |entry| of the original's stream at that point.
        n_tokens: the number of tokens compared.
        dtype: the dtype of both models.
        tolerance: the bound on `rounding` for that dtype (`attn_only_lens.tolerances`); for
            bilinear gates of gated MLPs, it is multiplied by the gates' amplification of rounding
            errors.
        activations: for bilinear gates, a frame with one row for each original layer: `bound`, the
            certified largest error of the activation; `measured`, its largest error on this input;
            `largest`, the largest |pre-activation|; `range`, the largest |pre-activation| for which
            the bound holds (∞ for plain MLPs). For exact gates, the frame is empty.

    Example:
        >>> from attn_only_lens import expose_neuron_heads, load, pretrained
        >>> tokens = pretrained.modular_addition_tokens()[:101]
        >>> exposed = expose_neuron_heads(load("modular-addition"), check=tokens)
        >>> exposed.verification.bitwise, exposed.verification.top1_agreement
        (True, 1.0)
        >>> list(exposed.verification.by_layer["point"])
        ['0_pre', '0_mid', 'final_post']
    """

    bitwise: bool
    rounding: float
    max_abs_logit: float
    relative: float
    mean_kl: float
    max_kl: float
    top1_agreement: float
    by_layer: pd.DataFrame
    n_tokens: int
    dtype: torch.dtype
    tolerance: float
    activations: pd.DataFrame

    @property
    def ok(self) -> bool:
        """True if all tested differences are within their bounds.

        With exact gates, the logits must equal the original's: bitwise without hooks, and within
        the tolerance with hooks on all neuron-heads. With bilinear gates, the logits must equal, up
        to rounding, those of the source with approximated activations, and the error of each
        activation must be within the certified bound. The effect of the approximation on the logits
        is reported, but has no bound.
        """
        if self.activations.empty:
            return self.bitwise and self.relative <= self.tolerance
        within = (self.activations["measured"] <= self.activations["bound"] + _ROUNDING).all()
        return bool(within) and self.rounding <= self.tolerance

    def __str__(self) -> str:
        name, exact = str(self.dtype).removeprefix("torch."), self.activations.empty
        lines = [f"{'ok' if self.ok else 'DIFFERENT'}: {self.n_tokens} tokens in {name}"]
        if exact:
            lines.append(f"no hooks:   logits {'' if self.bitwise else 'NOT '}bitwise equal")
        else:
            lines += [
                f"the source with approximated activations: logits within {self.rounding:.2g} of "
                f"the largest (bound {self.tolerance:.0e})",
                "activations, bilinear against exact:",
                _text(self.activations),
            ]
        bound = f"; bound {self.tolerance:.0e}" if exact else ""
        lines.append(
            f"all hooks:  max |Δ logit| {self.max_abs_logit:.3g} ({self.relative:.2g} of the "
            f"largest logit{bound}), KL mean {self.mean_kl:.2g} max "
            f"{self.max_kl:.2g} nats, same top token {self.top1_agreement:.2%}"
        )
        return "\n".join([*lines, _text(self.by_layer)])


def _text(table: pd.DataFrame) -> str:
    return table.to_string(index=False, float_format=lambda x: f"{x:.2e}")
