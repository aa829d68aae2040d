"""What a comparison of two models has measured, and what it says of them."""

from dataclasses import dataclass

import pandas as pd
import torch

__all__ = ["Verification"]

_ROUNDING = 1e-14  # of an activation evaluated in float64: silu's bound is 0


@dataclass(frozen=True)
class Verification:
    """What `verify` measured.

    Attributes:
        bitwise: whether the logits are bit for bit the source's when no hook is live.
        rounding: for bilinear gates, largest |Δ logit| from the source with its activations
            replaced by the gates' approximation, over the largest |logit|, without hooks or with
            every hook live; for exact gates the same as `relative`.
        max_abs_logit: largest |Δ logit| with every hook of every neuron-head live.
        relative: the same over the largest |logit| of the source.
        mean_kl: KL(source ‖ converted) in nats, the mean over tokens, hooks live.
        max_kl: its largest value over tokens.
        top1_agreement: fraction of tokens whose most likely next token is the same, hooks live.
        by_layer: a row for each point of the stream (`0_mid`: before the neurons of layer 0,
            `1_pre`: after them, …) with `max_abs` = largest |Δ| and `relative` = that over the
            largest |entry| of the source's stream there, hooks live.
        n_tokens: tokens compared.
        dtype: the dtype both models ran in.
        tolerance: the bound on rounding for that dtype (`attn_only_lens.tolerances`); for bilinear
            gates of gated MLPs, times what their heads amplify it by.
        activations: for bilinear gates, a row for each source layer: `bound`, certified largest
            error of the activation; `measured`, its largest error on this input; `largest`, the
            largest |pre-activation|; `range`, what the bound holds for (∞ for plain MLPs). Empty
            for exact gates.

    Example:
        >>> from attn_only_lens import convert, pretrained, verify
        >>> model = pretrained.modular_addition()
        >>> report = verify(model, convert(model), pretrained.modular_addition_tokens()[:101])
        >>> report.bitwise, report.ok
        (True, True)
        >>> list(report.by_layer["point"])
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
        """Whether the conversion is what it promises.

        With exact gates: bitwise without hooks, and within the tolerance with every hook live.
        With bilinear gates: to rounding the source with approximated activations, and each of
        those within its certified bound; what that makes of the logits is reported, not judged.
        """
        if self.activations.empty:
            return self.bitwise and self.relative <= self.tolerance
        within = (self.activations["measured"] <= self.activations["bound"] + _ROUNDING).all()
        return bool(within) and self.rounding <= self.tolerance

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        exact = self.activations.empty
        lines = [f"{'ok' if self.ok else 'DIFFERENT'}: {self.n_tokens} tokens in {name}"]
        if exact:
            equal = "bitwise equal" if self.bitwise else "NOT bitwise equal"
            lines.append(f"no hooks:   logits {equal}")
        else:
            lines.append(
                f"the source with approximated activations: logits within {self.rounding:.2g} of "
                f"the largest (bound {self.tolerance:.0e})"
            )
            lines.append("activations, bilinear against exact:")
            lines.append(_text(self.activations))
        bound = f"; bound {self.tolerance:.0e}" if exact else ""
        lines.append(
            f"all hooks:  max |Δ logit| {self.max_abs_logit:.3g} ({self.relative:.2g} of the "
            f"largest logit{bound}), KL mean {self.mean_kl:.2g} max "
            f"{self.max_kl:.2g} nats, same top token {self.top1_agreement:.2%}"
        )
        return "\n".join([*lines, _text(self.by_layer)])


def _text(table: pd.DataFrame) -> str:
    return table.to_string(index=False, float_format=lambda x: f"{x:.2e}")
