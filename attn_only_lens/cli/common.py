"""The application; how its commands load models, report errors and print tables."""

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from attn_only_lens.cli.options import MODEL
from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.models import checkpoint
from attn_only_lens.models.checkpoint import is_saved
from attn_only_lens.models.expose import expose_neuron_heads
from attn_only_lens.models.source_folder import load_source, parse_device, parse_dtype
from attn_only_lens.tl import HookedTransformer, no_remote_code, quiet

app = typer.Typer(
    help="See the MLP neurons of a TransformerLens model as attention heads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Print errors of this package as one message, without a traceback, and exit with code 2."""
    with quiet():
        try:
            yield
        except (AttnOnlyLensError, ImportError, OSError) as error:  # OSError: a path, a full disk
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


def load_source_model(model: str, dtype: str, device: str) -> HookedTransformer:
    """Load a source model by TransformerLens name, or from a folder."""
    parse_device(device)
    with redirect_stdout(sys.stderr):  # TransformerLens prints its progress
        if Path(model).exists():
            return load_source(Path(model), dtype=dtype, device=device)
        if Path(model).is_absolute() or model.startswith((".", "~")):
            raise AttnOnlyLensError(f"there is no folder {model}; expected {MODEL}")
        try:
            with no_remote_code():
                return HookedTransformer.from_pretrained(
                    model,
                    dtype=str(parse_dtype(dtype)).removeprefix("torch."),
                    device=device,
                    trust_remote_code=False,
                )
        except (OSError, ValueError, RuntimeError) as error:
            # The hub's errors derive from these; their text runs over many lines.
            reason = textwrap.shorten(str(error).strip().splitlines()[0], 200, placeholder=" …")
            reason = reason.partition(" Valid official model names")[0]  # hundreds
            if "trust_remote_code" in str(error):
                reason = "it needs code of its own, which is never run here."
            raise AttnOnlyLensError(
                f"could not load {model!r}: {reason} Expected {MODEL}; offline, only a folder "
                "will do"
            ) from error


def load_any_model(model: str, dtype: str, device: str) -> Any:
    """Load a model with neuron-heads: a saved one, or a source model with its neurons exposed."""
    if is_saved(model):
        return checkpoint.load(model, device=device)
    source = load_source_model(model, dtype, device)
    expose_neuron_heads(source)
    return source


def require_writable(out: Path, endings: tuple[str, ...], top: int = 1) -> None:
    """Validate output options before computing."""
    if out.suffix not in endings:
        expected = " or ".join(endings)
        raise AttnOnlyLensError(f"got --out {out}; expected a name that ends in {expected}")
    if not out.absolute().parent.is_dir():
        raise AttnOnlyLensError(f"got --out {out}; there is no folder {out.parent}")
    if top < 1:
        raise AttnOnlyLensError(f"got --top {top}; expected 1 or more")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], number: str = ".4g"
) -> None:
    """Print a table: numbers in that format, texts as they are, names on the left."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in rows:
        table.add_row(*(format(x, number) if isinstance(x, float) else str(x) for x in row))
    Console().print(table)
