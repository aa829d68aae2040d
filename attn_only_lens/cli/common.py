"""The typer application, and functions that several commands use, for example to report errors.

Commands import torch and pandas only when they run, so that --help is quick.
"""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import is_dataclass
from inspect import Parameter, Signature, getdoc, isroutine, signature
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast, get_args

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from attn_only_lens.arguments import POSITIVE, Allowed, file_reasons, one_of
from attn_only_lens.engine.directions import ABLATIONS, DIRECTIONS
from attn_only_lens.errors import AttnOnlyLensError, InputError, InputWarning

if TYPE_CHECKING:
    import pandas as pd


class _Output:
    """A stream that discards what is written after its reader has ended, for example `| head`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._until_closed(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._until_closed(self._stream.flush)

    def _until_closed(self, act: Callable[..., object], *args: str) -> None:
        try:
            act(*args)
        except BrokenPipeError:  # the command goes on, because it may have files to write
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class _App(typer.Typer):
    """The application; it does not fail if the reader of its output ends first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, err = (cast(TextIO, _Output(stream)) for stream in (sys.stdout, sys.stderr))
        with redirect_stdout(out), redirect_stderr(err):
            return super().__call__(*args, **kwargs)


app = _App(pretty_exceptions_enable=False)

Panel = Literal["Start here", "Find what matters", "Look at a model", "Make models, and compare"]
PROMPTS, OUTPUT, MODEL = "Prompts and metric", "Output", "Model and device"
"""Names of option groups in the help texts."""
CHOICES = MappingProxyType(
    {
        "metric": ("logit_diff", "probability", "log_probability", "kl", "loss"),
        "dtype": ("float32", "float64", "bfloat16", "float16"),
        "part": ("z", "pattern", "value", "q", "k"),
        "direction": (*DIRECTIONS, *ABLATIONS),
        "gate": ("exact", "bilinear"),
        "rows": ("layer", "name"),
        "stack": ("encoder", "decoder"),
    }
)
"""The values of each option that takes one of a few words."""
PROBLEM = "the command cannot start"
_OUTPUTS = ("out", "save_circuit", "resume")
_FILES = (".html", ".json", ".csv", ".parquet", ".safetensors", ".svg", ".txt")
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_QUOTES = "'\""
_ASSIGNMENT = re.compile(r"\b(\w+)=('[^']*'|\"[^\"]*\"|-?[\w.]*\w)")
_LABEL = re.compile(r"(^(?: *- )?)(\w+)(?=(?:, prompt \d+)?: )", re.MULTILINE)
_LINE = 74  # characters per line of an example, without the help text's margin and " \\"

_START = """\
Which heads and neurons make the difference between the answers to two prompts?
Start here:

  attn-only-lens explain MODEL --clean "The keys near the cabinet" \\
    --corrupted "The key near the cabinet" --answer " are" --wrong " is" \\
    --out explanation.html

MODEL is the Hugging Face name of your model, or its folder. small-english ships
with this package: use it as MODEL to try the command.

  attn-only-lens demo                             draw a circuit of small-english
  attn-only-lens verify MODEL --text "The keys"   check that your model, with
                                                  neurons as attention heads, has
                                                  the same logits
  attn-only-lens --help                           list all commands
  attn-only-lens COMMAND --help                   show options and examples
"""


def option(help_text: str, panel: str | None = None, *names: str) -> Any:
    """Declare a command-line option, which the help text lists under the heading `panel`."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel)


@app.callback(
    invoke_without_command=True,
    help="See the MLP neurons of a TransformerLens model as attention heads.",
)
def start(context: typer.Context) -> None:
    """Print a short introduction if no command is given."""
    # Otherwise, torch's idle threads spin, which makes small matrix products up to 20 times as slow
    # if other programs use the same cores. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if context.invoked_subcommand is None:
        typer.echo(_START, nl=False)


class _Command(TyperCommand):
    """A command that rejects repeated options; typer alone would keep only the last value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for parameter in self.get_params(ctx):
            options = [name for name in parameter.opts if name.startswith("-")]
            uses = [arg for arg in args if arg.split("=")[0] in options]
            if len(uses) > 1 and not getattr(parameter, "multiple", True):
                reason = f"got {parameter.opts[0]} {len(uses)} times; expected it once"
                raise typer.BadParameter(reason, ctx=ctx)
        return super().parse_args(ctx, args)


def command(
    panel: Panel, *examples: str, renamed: Mapping[str, str] = _NO_NAMES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that turns a function into a command of the application.

    List the command under the heading `panel`, and append `examples` to the command's help text. If
    the type of a parameter is a dataclass, each of its fields becomes an option, and its method
    `reasons` checks them. Before the function is called, `value_reasons` checks every option.
    Errors are printed by `clear_errors`, which uses `renamed`.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, Any] = {}
        parameters: list[Parameter] = []
        # Python 3.10's get_type_hints wraps Annotated[…] in Optional if the default is None.
        for name, parameter in signature(function, eval_str=True).parameters.items():
            if is_dataclass(parameter.annotation):
                groups[name] = parameter.annotation
                parameters += signature(groups[name]).parameters.values()
            else:
                parameters.append(parameter)

        @clear_errors(parameters, renamed)
        def run(**options: Any) -> None:
            reasons = value_reasons(parameters, options) + same_path_reasons(parameters, options)
            built = {}
            for name, group in groups.items():
                built[name] = group(
                    **{key: options.pop(key) for key in signature(group).parameters}
                )
                reasons += built[name].reasons()
            # Not with `renamed`, whose words are the arguments of functions of the library.
            InputError.raise_if([in_shell_words(x, parameters) for x in reasons], PROBLEM)
            function(**options, **built)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        parameters.sort(key=lambda parameter: parameter.default is not parameter.empty)
        keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        for hint in run.__annotations__.values():
            kind, *declarations = get_args(hint)
            if kind in (Path, Path | None):
                declarations[0].parser = path
        # In click, \b keeps the line breaks of a paragraph.
        shown = "\n \n".join(map(_in_80_columns, examples))
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", str(getdoc(function)))
        help_text = f"{text}\n\n\b\nExamples:\n{shown}"
        return app.command(rich_help_panel=panel, help=help_text, cls=_Command)(run)

    return add


def _in_80_columns(example: str) -> str:
    """Break a command line before some of its options, so that no line exceeds 80 columns."""
    start, *options = re.split(r" (?=--)", example)
    lines = [f"  {start}"]
    for option_text in options:
        if len(lines[-1]) + len(option_text) > _LINE:
            lines.append(f"    {option_text}")
        else:
            lines[-1] += f" {option_text}"
    return " \\\n".join(lines)


def path(value: str | Path) -> Path:
    """Convert an option's value to a path; reject an empty value, which `Path` reads as "."."""
    if str(value) and "\0" not in str(value):
        return Path(value)
    here = ", '.' for the current folder" if not str(value) else ""
    raise typer.BadParameter(f"got {value!r}; expected a path{here}")


def sort_commands() -> None:
    """Sort the commands by panel, then by name; call this when all commands have been added."""
    panels = get_args(Panel)
    app.registered_commands.sort(
        key=lambda command: (
            panels.index(command.rich_help_panel),
            getattr(command.callback, "__name__", ""),
        )
    )


def in_shell_words(
    message: str, parameters: Iterable[Parameter], renamed: Mapping[str, str] = _NO_NAMES
) -> str:
    """Replace the names of Python's arguments in a message by the options of a command.

    `direction='zero'` becomes `--direction zero`; a line that begins with `correct:` begins with
    `--answer:`. Other names do not change. `renamed` maps names of arguments to names of the
    command's parameters, if they differ.
    """
    options = _option_names(parameters)
    others = {"correct": "answer", **renamed}
    options |= {word: options[name] for word, name in others.items() if name in options}

    def assignment(match: re.Match[str]) -> str:
        name, value = match.groups()
        return f"{options[name]} {value.strip(_QUOTES)}" if name in options else match[0]

    def label(match: re.Match[str]) -> str:
        return f"{match[1]}{options.get(match[2], match[2])}"

    message = _LABEL.sub(label, _ASSIGNMENT.sub(assignment, message))
    if any(parameter.name == "token_ids" for parameter in parameters):
        message = message.replace("give token IDs", "give token IDs and --token-ids")
    return message


def _option_names(parameters: Iterable[Parameter]) -> dict[str, str]:
    """Return the options that take a value, by their parameters' names: arguments are left out."""
    hints = {parameter.name: get_args(parameter.annotation) for parameter in parameters}
    return {
        name: _as_option(name)
        for name, (kind, *declarations) in hints.items()
        if kind is not bool and isinstance(declarations[0], OptionInfo)
    }


def _as_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@contextmanager
def clear_errors(
    parameters: Iterable[Parameter] = (), renamed: Mapping[str, str] = _NO_NAMES
) -> Iterator[None]:
    """Print this package's errors and warnings without a traceback; exit with code 2 on errors.

    The messages use the names of the command's options, as in `in_shell_words`.
    """
    from attn_only_lens.engine.input_warnings import warned_once

    show = warnings.showwarning

    def show_clearly(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if issubclass(category, InputWarning):
            typer.echo(f"warning: {in_shell_words(str(message), parameters, renamed)}", err=True)
        else:
            show(message, category, *place)

    with warnings.catch_warnings(), warned_once():
        # As in `tl.quiet`, whose import takes seconds.
        warnings.filterwarnings("ignore", "HookedTransformer.* is deprecated", DeprecationWarning)
        warnings.simplefilter("always", InputWarning)
        warnings.showwarning = show_clearly  # type: ignore[assignment]  # restored on exit
        try:
            yield
        except (AttnOnlyLensError, ImportError, OSError) as error:  # e.g., if the disk is full
            typer.echo(f"error: {in_shell_words(str(error), parameters, renamed)}", err=True)
            raise typer.Exit(2) from error


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a status message in the terminal during a step that has no progress bar."""
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):
        yield


def same_path_reasons(parameters: Iterable[Parameter], options: Mapping[str, Any]) -> list[str]:
    """Return a message for each output that would replace the file of another option."""
    names = _option_names(parameters)
    paths = {name: options[name] for name in names if isinstance(options[name], Path)}
    return [
        f"got {paths[output]} for {names[output]} and for {names[other]}; expected another path"
        for i, output in enumerate(_OUTPUTS)
        for other in paths
        if other not in _OUTPUTS[: i + 1]
        and output in paths
        and os.path.realpath(paths[output]) == os.path.realpath(paths[other])
    ]


def output_file(*endings: str) -> Callable[..., list[str]]:
    """Return a function that checks whether files with one of these endings can be written."""

    def check(**options: Path) -> list[str]:
        reasons = list[str]()
        for name, out in options.items():
            got = f"got {_as_option(name)} {out}"
            if out.suffix not in endings:
                reasons.append(f"{got}; expected a name that ends in {' or '.join(endings)}")
            elif not out.absolute().parent.is_dir():
                reasons.append(f"{got}; the folder {out.parent} does not exist")
            elif out.is_dir():
                reasons.append(f"{out} cannot be written: it is a folder; expected a file name")
            else:
                reasons += _access_reasons(out, out.parent)
        return reasons

    return check


def output_folder(**options: Path) -> list[str]:
    """Return every reason why a folder for several files cannot be written."""
    reasons = not_a_file(**options)
    for name, out in options.items():
        if out.suffix in _FILES and not out.exists():
            reasons.append(
                f"got {_as_option(name)} {out}, a file name; expected a folder name, because the "
                f"command writes several files: pass {_as_option(name)} {out.with_suffix('')}"
            )
    return reasons or output_model(**options)


def output_model(**options: Path) -> list[str]:
    """Return every reason why a folder cannot be written, whatever its name."""
    return [reason for out in options.values() for reason in _access_reasons(out, out)]


def not_a_file(**options: Path) -> list[str]:
    """Return a message for each folder that is a file."""
    return [
        f"got {_as_option(name)} {out}, which is a file; expected a folder name"
        for name, out in options.items()
        if out.exists() and not out.is_dir()
    ]


def resumed_folder(**options: Path) -> list[str]:
    """Return every reason why a job cannot be stored in a folder."""
    return not_a_file(**options) or output_model(**options)


def existing_file(**options: Path) -> list[str]:
    """Return a message for each file that is missing."""
    return [reason for path in options.values() for reason in file_reasons(path)]


def _access_reasons(out: Path, folder: Path) -> list[str]:
    """Return why `out` cannot be written to a folder, which may not exist yet."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        TemporaryFile(dir=existing).close()
    except OSError as error:  # os.access does not see that a file system is read-only to root
        return [f"{out} cannot be written: {error.strerror}"]
    return []


def value_reasons(parameters: Iterable[Parameter], options: Mapping[str, Any]) -> list[str]:
    """Return a message for each option whose value is invalid; None is valid.

    An option's annotation may name its values, as in `Annotated[int, option(…), COUNT]`, or a
    function that returns reasons. Otherwise, a word must be one of CHOICES, and a whole number
    positive.
    """
    reasons = list[str]()
    for parameter in parameters:
        name, (kind, *declarations) = parameter.name, get_args(parameter.annotation)
        checks = [x.reasons if isinstance(x, Allowed) else x for x in declarations]
        value, checks = options[name], [check for check in checks if isroutine(check)]
        if value is None:
            continue
        if type(value) is int and value >= 2**63:
            reasons.append(f"got {name}={value}; expected less than 2^63")
        elif name in CHOICES:
            reasons += one_of(*CHOICES[name]).reasons(**{name: value})
        elif checks:
            reasons += [reason for check in checks for reason in check(**{name: value})]
        elif kind in (int, int | None):
            reasons += POSITIVE.reasons(**{name: value})
    return reasons


def say_page(page: Path, what: str = "") -> None:
    """Print the path of a page that was written, and its file:// address for a browser."""
    typer.echo(f"{page}{what and ': '}{what}\nOpen it in a browser: {page.resolve().as_uri()}")


def print_frame(title: str, frame: "pd.DataFrame") -> None:
    """Print a title line, then a frame whose lines have at most 80 columns."""
    import pandas as pd

    with pd.option_context("display.precision", 4):
        rows = frame.to_string(index=False, line_width=80)
    typer.echo(f"{title}\n{rows}")
