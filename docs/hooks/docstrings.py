"""Rename the docstring section `Example:` to `Examples:`, the only name that griffe knows.

Without this extension, griffe shows an example as a note, and its `>>>` prompts as nested quotes.
"""

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^(\s*)Example:$", re.M)


class Examples(Extension):
    """A griffe extension that renames `Example:` sections."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in an object's docstring."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
