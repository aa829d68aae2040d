"""The words for the direction of a patch; without torch, so that commands check them at once."""

from typing import Literal, get_args

DIRECTIONS = ("denoise", "noise")
"""Patch clean activations into the corrupted run, or corrupted activations into the clean run."""
Ablation = Literal["zero", "mean", "resample", "bias"]
ABLATIONS: tuple[str, ...] = get_args(Ablation)


def direction_reasons(corrupted: object, part: object, direction: object) -> list[str]:
    """Return every reason why a part of these prompts' runs cannot be patched in this direction."""
    reasons = []
    if corrupted is None and direction not in ABLATIONS:
        reasons.append(
            f"got no corrupted prompt with direction={direction!r}; expected a corrupted prompt, "
            f"or an ablation: {' or '.join(f'direction={name!r}' for name in ABLATIONS)}"
        )
    if direction in ABLATIONS and part != "z":
        reasons.append(f"got part={part!r} with direction={direction!r}; expected part='z'")
    return reasons
