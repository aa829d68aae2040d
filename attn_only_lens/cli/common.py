"""What all commands share: the application, how errors are shown, what a model is."""

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import typer

from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.source_folder import device_named, dtype_named, load_source
from attn_only_lens.tl import HookedTransformer, no_remote_code, quiet

__all__ = ["MODEL", "app", "clear_errors", "source_model"]

app = typer.Typer(
    help="See the MLP neurons of a TransformerLens model as attention heads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

MODEL = "a TransformerLens name, or a folder with config.json and model.safetensors"


def source_model(model: str, dtype: str, device: str) -> HookedTransformer:
    """A source model by TransformerLens name, or from a folder."""
    device_named(device)
    with redirect_stdout(sys.stderr):  # TransformerLens prints its progress
        if Path(model).exists():
            return load_source(Path(model), dtype=dtype, device=device)
        if Path(model).is_absolute() or model.startswith((".", "~")):
            raise AttnOnlyLensError(f"there is no folder {model}; expected {MODEL}")
        try:
            with no_remote_code():
                return HookedTransformer.from_pretrained(
                    model,
                    dtype=str(dtype_named(dtype)).removeprefix("torch."),
                    device=device,
                    trust_remote_code=False,
                )
        except (OSError, ValueError, RuntimeError) as error:
            # What the hub raises offline derives from these; its own text runs over many lines.
            reason = textwrap.shorten(str(error).strip().splitlines()[0], 200, placeholder=" …")
            reason = reason.partition(" Valid official model names")[0]  # hundreds
            if "trust_remote_code" in str(error):
                reason = "it needs code of its own, which is never run here."
            raise AttnOnlyLensError(
                f"could not load {model!r}: {reason} Expected {MODEL}; offline, only a folder "
                "will do"
            ) from error


@contextmanager
def clear_errors() -> Iterator[None]:
    """Errors of ours as one message and exit code 2, without a traceback."""
    with quiet():
        try:
            yield
        except (AttnOnlyLensError, OSError) as error:  # OSError: a path, a full disk, …
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
