"""The direction of a patch; without torch, so that commands check the words at once."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

DIRECTIONS = ("denoise", "noise")
"""Patch clean activations into the corrupted run, or corrupted activations into the clean run."""
AblationKind = Literal["zero", "mean", "resample", "bias"]
ABLATIONS: tuple[str, ...] = get_args(AblationKind)


@dataclass(frozen=True)
class Ablation:
    """What replaces z in the clean run, for the argument `direction`.

    Attributes:
        kind: "zero", 0; "mean", the mean over all non-padding tokens of all prompts; "resample", z
            of the next prompt at the same position (for the last prompt, of the first prompt);
            "bias", z with all of a neuron-head's attention on the bias token.
        reference: a text, or tokens [batch, pos] without padding, for "mean" and "resample" (prompt
            i is resampled from row i); None for the clean prompts. `direction="mean"` is short for
            `direction=Ablation("mean")`.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.Ablation("mean", reference="The cat sat near the old lamp")
        Ablation(kind='mean', reference='The cat sat near the old lamp')
    """

    kind: str
    reference: Any = None

    @classmethod
    def of(cls, direction: "str | Ablation") -> "Ablation":
        """Return an ablation unchanged; convert the word of a direction."""
        return direction if isinstance(direction, Ablation) else cls(direction)

    def reasons(self, has_corrupted: bool, part: object) -> list[str]:
        """Return every reason why a part of these prompts' runs cannot be patched like this."""
        kind, reasons = self.kind, list[str]()
        if not has_corrupted and kind not in ABLATIONS:
            words = " or ".join(f"direction={name!r}" for name in ABLATIONS)
            reasons.append(
                f"got no corrupted prompt with direction={kind!r}; expected a corrupted prompt, or "
                f"an ablation: {words}"
            )
        if kind in ABLATIONS and part != "z":
            reasons.append(f"got part={part!r} with direction={kind!r}; expected part='z'")
        if self.reference is not None and kind not in ("mean", "resample"):
            reasons.append(f"got a reference with direction={kind!r}; expected no reference")
        return reasons
