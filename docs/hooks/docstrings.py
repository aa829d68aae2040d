"""Rename the section `Example:` of docstrings to `Examples:`, the only name that griffe knows.

Without this, griffe shows an example as a note, and its prompts as nested quotations.
"""

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^(\s*)Example:$", re.M)


class Examples(Extension):
    """The extension of griffe that renames the section."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rename the section in the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", obj.docstring.value)
