"""The application: its commands load models, report errors and print tables with this code.

Functions of the command line import torch and what needs it when they run, so that --help is quick.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from attn_only_lens.errors import AttnOnlyLensError, CheckpointError, InputWarning

app = typer.Typer(
    help="See the MLP neurons of a TransformerLens model as attention heads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_TEXT = ("name", "site", "does")
SHIPPED = "small-english"
"""The name of the shipped language model on the command line."""
Panel = Literal["Start here", "Look at a model", "Find what matters", "Make models, and compare"]
_FILES = (".html", ".json", ".csv", ".parquet", ".safetensors", ".svg", ".txt")
_Function = TypeVar("_Function", bound=Callable[..., None])


def command(panel: Panel, *example: str) -> Callable[[_Function], _Function]:
    """Add a command to a group of the help, with an example of it."""

    def add(function: _Function) -> _Function:
        for hint in get_type_hints(function, include_extras=True).values():
            kind, *options = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            if kind in (Path, Path | None):
                for option in options:
                    option.parser = path
        # \b keeps the lines of a paragraph as they are.
        shown = "\b\nExample:\n  " + " \\\n    ".join(example)
        return app.command(rich_help_panel=panel, help=f"{getdoc(function)}\n\n{shown}")(function)

    return add


def path(value: str | Path) -> Path:
    """Return the path that a user gave in a shell; refuse '', which is the current folder."""
    from attn_only_lens.storage.atomic import as_path

    try:
        return as_path(value)
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error


def sort_commands() -> None:
    """Sort the groups of commands, once all are added."""
    panels = get_args(Panel)
    app.registered_commands.sort(
        key=lambda command: (
            panels.index(command.rich_help_panel),
            getattr(command.callback, "__name__", ""),
        )
    )


def say_page(path: Path, what: str = "") -> None:
    """Print where a page was written, and the address that opens it."""
    typer.echo(f"{path}{what and ': '}{what}\nOpen it in a browser: {path.resolve().as_uri()}")


@contextmanager
def clear_errors() -> Iterator[None]:
    """Print errors and warnings of this package as one message each; errors exit with code 2."""
    from attn_only_lens.engine.input_warnings import warned_once
    from attn_only_lens.tl import quiet

    show = warnings.showwarning

    def show_clearly(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if issubclass(category, InputWarning):
            typer.echo(f"warning: {message}", err=True)
        else:
            show(message, category, *place)

    with quiet(), warned_once():
        warnings.simplefilter("always", InputWarning)
        warnings.showwarning = show_clearly  # type: ignore[assignment]  # `quiet` restores it
        try:
            yield
        except (AttnOnlyLensError, ImportError, OSError) as error:  # OSError: a path, a full disk
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


def load_model(model: str, dtype: str | None, device: str, hooked: bool = False) -> Any:
    """Load a model by name or from a folder, and say what it is."""
    from attn_only_lens.models.load import load
    from attn_only_lens.pretrained import small_english

    with redirect_stdout(sys.stderr):  # TransformerLens prints its progress
        if model == SHIPPED and not Path(model).exists():
            loaded = small_english(device, dtype or "float32", hooked=hooked)
        else:
            loaded = load(model, dtype=dtype, device=device, hooked=hooked)
    typer.echo(f"{model}: {_describe(loaded)}", err=True)
    return loaded


def load_with_neuron_heads(model: str, dtype: str | None, device: str, hooked: bool = False) -> Any:
    """Load a model; if it has no neuron-heads, expose them."""
    from attn_only_lens.heads import has_neuron_heads
    from attn_only_lens.models.expose import expose_neuron_heads

    loaded = load_model(model, dtype, device, hooked)
    if not has_neuron_heads(loaded):
        expose_neuron_heads(loaded)
    return loaded


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a message on a terminal while something without a progress bar runs."""
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):
        yield


def _describe(model: Any) -> str:
    from transformer_lens.model_bridge import TransformerBridge

    from attn_only_lens.heads import has_neuron_heads, host_of
    from attn_only_lens.models.two_blocks import AttentionOnlyTransformer

    cfg, parameter = model.cfg, next(model.parameters())
    if isinstance(model, TransformerBridge):
        kind = f"TransformerBridge ({cfg.architecture})"
    elif isinstance(model, AttentionOnlyTransformer):
        kind = "attention-only HookedTransformer"
    else:
        kind = "HookedTransformer"
    n_layers = host_of(model).n_layers if has_neuron_heads(model) else cfg.n_layers
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{kind}, {n_layers} layers, {dtype}, {parameter.device}, {_describe_texts(model)}"


def _describe_texts(model: Any) -> str:
    if model.tokenizer is None:
        return "no tokenizer"
    alone = model.tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = model.to_tokens("a")[0].tolist()
    if len(ids) > len(alone) and ids[0] == model.tokenizer.bos_token_id:
        return f"texts begin with {model.tokenizer.bos_token}"
    return "texts without BOS"


def require_writable(out: Path, endings: tuple[str, ...], top: int = 1) -> None:
    """Validate output options before computing."""
    if out.suffix not in endings:
        expected = " or ".join(endings)
        raise AttnOnlyLensError(f"got --out {out}; expected a name that ends in {expected}")
    if not out.absolute().parent.is_dir():
        raise AttnOnlyLensError(f"got --out {out}; there is no folder {out.parent}")
    if top < 1:
        raise AttnOnlyLensError(f"got --top {top}; expected 1 or more")


def require_folder(out: Path) -> None:
    """Refuse --out before computing if it is a file, or has the name of a file."""
    if out.exists() and not out.is_dir():
        raise AttnOnlyLensError(f"--out: {out} is a file; expected a folder, or a new name")
    if out.suffix in _FILES and not out.is_dir():
        raise AttnOnlyLensError(
            f"got --out {out}, the name of a file; expected that of a folder, as several files are "
            f"written: pass --out {out.with_suffix('')}"
        )


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], number: str = ".4g"
) -> None:
    """Print a table: numbers in that format (-0 as 0), names on the left."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT else "right")
    for row in rows:
        table.add_row(*(format(x + 0.0, number) if isinstance(x, float) else str(x) for x in row))
    Console().print(table)
