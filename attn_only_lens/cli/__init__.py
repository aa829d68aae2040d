"""The command line: one file for each command."""

# Each module adds its commands.
from attn_only_lens.cli import (  # noqa: F401
    atlas,
    circuit,
    compare,
    convert,
    demo,
    grow,
    patch,
    picture,
)
from attn_only_lens.cli.common import app, sort_commands

sort_commands()

__all__ = ["app"]
