"""How an attribution estimates effects, and how many estimates are replaced."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from attn_only_lens.arguments import POSITIVE, as_plain, one_of
from attn_only_lens.engine.directions import ABLATIONS
from attn_only_lens.patching.repairs import (
    Budget,
    budget_reasons,
)

Method = Literal["gradient", "exact_gate", "integrated", "secant"]
METHODS: tuple[str, ...] = get_args(Method)
_STEPS = 5  # the number of steps in the EAP-IG paper's experiments


@dataclass(frozen=True)
class Estimate:
    """How effects are estimated, and how many estimates are replaced with exact values.

    Attributes:
        method: "gradient", "exact_gate", "integrated" or "secant"; see `_attribution.py`.
        budget: the cost of exact patches, in forward passes (counted in flops), or "auto". "auto"
            spends at least 2 forward passes or 0.2 GFLOP. "auto" then continues until the top 20
            rows and the sites before a switch are exact and the expected correlations are .99, or
            until it has spent 7 forward passes (10 with the estimates) or 4 GFLOP. Of the two
            limits, the larger one applies. It is 2.5 times as large if one of the top 20
            estimates has the wrong sign, or if the top 20 rows need more. Tests of a new model cost
            about ten passes.
        steps: for "integrated", how many gradients to average; None for 5.
        split: with method "secant" and budget=0, also return each head's effect through its pattern
            and through its values: columns `by_pattern` and `by_value`, which add up to the effect
            on the score.

    Example:
        >>> from attn_only_lens import patching as p
        >>> p.Estimate("secant", budget=0)
        Estimate(method='secant', budget=0, steps=None, split=False)
    """

    method: Method = "exact_gate"
    budget: Budget = "auto"
    steps: int | None = None
    split: bool = False

    @classmethod
    def of(cls, method: "Method | Estimate") -> "Estimate":
        """Return an estimate unchanged; convert the word of a method."""
        return method if isinstance(method, Estimate) else cls(method)

    @property
    def n_steps(self) -> int:
        """The number of gradients that "integrated" averages."""
        return self.steps or _STEPS

    @property
    def traces_target(self) -> bool:
        """Whether estimates are made of gradients in the target run."""
        return self.method in ("gradient", "exact_gate")

    @property
    def needs_tangents(self) -> bool:
        """Whether gradients in the target run are needed, for estimates or for repairs."""
        return self.traces_target or bool(self.budget)

    def settings(self) -> dict[str, Any]:
        """Return all options that affect stored results."""
        return {
            "method": self.method,
            "steps": self.steps,
            "budget": as_plain(self.budget),
            "split": self.split,
        }

    def reasons(self, part: str, direction: str, per_prompt: bool) -> list[str]:
        """Return every reason why an attribution cannot have these options."""
        method, steps = self.method, self.steps
        reasons = one_of(*METHODS).reasons(method=method)
        if direction in ABLATIONS and method == "integrated":
            reasons.append(
                f"got direction={direction!r} with method='integrated', which interpolates between "
                "the clean and the corrupted run; expected 'denoise' or 'noise', or another method"
            )
        if method == "secant" and (part != "z" or direction in ABLATIONS):
            reasons.append(
                f"got part={part!r}, direction={direction!r} with method='secant'; expected "
                "part='z' (split=True divides it into pattern and value) and 'denoise' or 'noise', "
                "or another method"
            )
        if steps is not None and method != "integrated":
            reasons.append(f"got steps={steps!r} with method={method!r}; expected steps=None")
        else:
            reasons += POSITIVE.or_none.reasons(steps=steps)
        reasons += budget_reasons(self.budget)
        if self.split and (method != "secant" or self.budget != 0 or per_prompt):
            reasons.append(
                f"got split=True with method={method!r}, budget={self.budget!r}, "
                f"per_prompt={per_prompt}; expected method='secant', budget=0 (an exact patch "
                "cannot be split) and per_prompt=False"
            )
        return reasons
