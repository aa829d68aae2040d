"""Tell a model's name from a folder, without importing torch, which takes seconds."""

import os
from pathlib import Path

from attn_only_lens.errors import CheckpointError

EXPECTED = (
    "a Hugging Face name or folder, small-english, modular-addition, a folder that `save` or "
    "`grow` wrote, or the folder of a HookedTransformer (transformer-lens 3.9)"
)


def is_path(model: str) -> bool:
    """Return whether a string is an existing path, or cannot be the name of a hub model."""
    if not model or "\0" in model or Path(model).is_absolute() or model.startswith((".", "~")):
        return True
    return model.count("/") > 1 or os.path.lexists(model)


def no_folder(model: str | os.PathLike[str]) -> CheckpointError:
    """Return the error for a folder that does not exist."""
    return CheckpointError(f"there is no folder {model}; expected {EXPECTED}")


def model_reasons(model: str | Path) -> list[str]:
    """Return a message if a folder does not exist, otherwise []; a string may be a model's name."""
    if not str(model) or "\0" in str(model) or (isinstance(model, str) and not is_path(model)):
        return []
    path = Path(model)
    # A process that was killed while it wrote the folder may have left the old one next to it.
    if os.path.lexists(path) or any(path.parent.glob(".attn_only_lens-*")):
        return []
    return [str(no_folder(model))]
