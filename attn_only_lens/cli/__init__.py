"""The command-line interface, with one module per command."""

# Importing a command's module adds the command to the typer application.
from attn_only_lens.cli import (  # noqa: F401
    atlas,
    circuit,
    compare,
    convert,
    demo,
    grow,
    pairs,
    patch,
    picture,
)
from attn_only_lens.cli.common import app, sort_commands

sort_commands()

__all__ = ["app"]
