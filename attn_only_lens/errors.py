"""The package's exceptions; each message says what was given, what was expected, and what to do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = [
    "AttnOnlyLensError",
    "CheckpointError",
    "ComparisonError",
    "InputError",
    "InputWarning",
    "UnsupportedCallError",
    "UnsupportedModelError",
]


class AttnOnlyLensError(Exception):
    """The base class of all errors that this package raises deliberately.

    Example:
        >>> from attn_only_lens.errors import AttnOnlyLensError, InputError
        >>> issubclass(InputError, AttnOnlyLensError)
        True
    """


class InputError(AttnOnlyLensError, ValueError):
    """Prompts, names, weights or options are invalid; the error lists every reason at once.

    A model that cannot be grown, and a head that the model does not have, are such errors, too.

    Attributes:
        reasons: every reason to refuse the input.
        problem: what cannot be done.

    Example:
        >>> from attn_only_lens.errors import InputError
        >>> print(InputError(["they are identical"], "these prompts cannot be compared"))
        these prompts cannot be compared:
          - they are identical
    """

    def __init__(self, reasons: Sequence[str], problem: str) -> None:
        self.reasons = tuple(reasons)
        self.problem = problem
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{problem}:{lines}")

    @classmethod
    def raise_if(cls, reasons: Sequence[str], *problem: str) -> None:
        """Raise this error if `reasons` is not empty."""
        if reasons:
            raise cls(reasons, *problem)

    @classmethod
    @contextmanager
    def collected(cls, reasons: list[str]) -> Iterator[None]:
        """Context manager that catches this error and adds its reasons to a list."""
        try:
            yield
        except cls as error:
            reasons += error.reasons

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...], str]]:
        """Pickle the `reasons` and `problem` attributes, not only the message."""
        return type(self), (self.reasons, self.problem)


class InputWarning(UserWarning):
    """Prompts or answers are valid, but probably not what the user intended.

    For example, the tokenizer does not know a word of a prompt, or the model expects an answer with
    (or without) a space before it. To get errors instead, call
    `warnings.filterwarnings("error", category=InputWarning)`.

    Example:
        >>> import warnings
        >>> from attn_only_lens import Contrast, load, patching as p
        >>> from attn_only_lens.errors import InputWarning
        >>> contrast = Contrast("The kezs near", "The key near", p.logit_diff(" are", " is"))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     pair = contrast.pair(load("small-english"))
        >>> [x.category is InputWarning and "'kezs'" in str(x.message) for x in caught]
        [True]
    """


class ComparisonError(InputError):
    """Two models cannot be compared part by part on these prompts or with this mapping of parts.

    Attributes:
        so_far: a `Comparison` of the batches before the error, without patching results, or None.

    Example:
        >>> from attn_only_lens.errors import ComparisonError
        >>> print(ComparisonError(["L0N5 and L0N7 both went to L0N5"], "these do not fit"))
        these do not fit:
          - L0N5 and L0N7 both went to L0N5
    """

    so_far: Any = None


class UnsupportedModelError(InputError):
    """A model cannot be converted or analysed exactly; the model is left unchanged.

    Example:
        >>> from attn_only_lens.errors import UnsupportedModelError
        >>> UnsupportedModelError(["its act_fn is 'solu'"]).reasons
        ("its act_fn is 'solu'",)
    """

    def __init__(
        self, reasons: Sequence[str], problem: str = "this model cannot be converted exactly"
    ) -> None:
        super().__init__(reasons, problem)


class UnsupportedCallError(AttnOnlyLensError, RuntimeError):
    """A TransformerLens method or attribute has no correct result for a converted model.

    The error message names the call to use instead.

    Example:
        >>> from attn_only_lens import convert, load
        >>> from attn_only_lens.errors import UnsupportedCallError
        >>> converted = convert(load("modular-addition"))
        >>> try:
        ...     converted.W_Q
        ... except UnsupportedCallError as error:
        ...     print("neuron_heads.W_Q" in str(error))
        True
    """


class CheckpointError(AttnOnlyLensError, ValueError):
    """A saved file or folder is missing, damaged or modified, or has an unsupported format version.

    Example:
        >>> from attn_only_lens import load
        >>> from attn_only_lens.errors import CheckpointError
        >>> try:
        ...     load("./no-such-folder")
        ... except CheckpointError as error:
        ...     print("no-such-folder" in str(error))
        True
    """
