"""How a computation is run: how much at once, whether it can be resumed, and its progress bar."""

from dataclasses import dataclass
from pathlib import Path

from attn_only_lens.arguments import POSITIVE, a_type
from attn_only_lens.errors import InputError

_PROBLEM = "this cannot be run in this way"


@dataclass(frozen=True)
class Work:
    """How a computation is run. None of these options changes a result.

    Attributes:
        batch_size: how many sites (or texts) run in one forward pass; None for as many as fit in
            memory.
        prompts_at_once: how many prompt pairs have their activations in memory at once; None for as
            many as fit in a fifth of the memory, or the number in the folder `resume`. A custom
            metric and mean ablation need all prompts at once.
        resume: a checkpoint folder: results are written to the folder as they are computed, and an
            interrupted computation resumes from the folder. A custom metric then needs a version
            (see `custom`). If processes share the work, only the first one uses the folder.
        share: whether the processes that torchrun or `accelerate launch` started together share the
            work of `activation_patch`, `attribution` and `path_patch`. All of them must then make
            the same call, and all get the whole result. By default, processes are independent.
        progress: whether to show a progress bar; a string is its label.

    Raises:
        InputError: a size is not a whole number, 1 or more.

    Example:
        >>> from attn_only_lens import Work
        >>> Work(batch_size=64, progress="layer 3")
        Work(batch_size=64, prompts_at_once=None, resume=None, share=False, progress='layer 3')
    """

    batch_size: int | None = None
    prompts_at_once: int | None = None
    resume: str | Path | None = None
    share: bool = False
    progress: bool | str = True

    def __post_init__(self) -> None:
        reasons = POSITIVE.or_none.reasons(
            batch_size=self.batch_size, prompts_at_once=self.prompts_at_once
        )
        if not isinstance(self.resume, str | Path | None):
            reasons.append(
                f"got {a_type(self.resume)} as resume; expected a folder's path, or None"
            )
        if not isinstance(self.share, bool):
            reasons.append(f"got share={self.share!r}; expected True or False")
        InputError.raise_if(reasons, _PROBLEM)


def work_reasons(work: object, *unused: str) -> list[str]:
    """Return an error message if this is not a `Work`, or for each given option without a use."""
    if not isinstance(work, Work):
        return [f"got {a_type(work)} as work; expected Work(…)"]
    return [
        f"got {name}={value!r} in work; this function does not use {name}: leave it out"
        for name in unused
        if (value := getattr(work, name)) not in (None, False)
    ]
