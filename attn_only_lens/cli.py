"""The command line: one command a verb."""

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import torch
import typer
from jaxtyping import Int
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from attn_only_lens import checkpoint
from attn_only_lens.calibrate import calibrate
from attn_only_lens.convert import convert as convert_model
from attn_only_lens.demo import PERIODIC, run
from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.files import write_text
from attn_only_lens.manifest import MANIFEST, read_manifest
from attn_only_lens.source_folder import device_named, dtype_named, load_source, quiet
from attn_only_lens.tl import HookedTransformer, require_hooked_transformer
from attn_only_lens.verify import verify as verify_models
from attn_only_lens.viz import demo_page

__all__ = ["app"]

app = typer.Typer(
    help="See the MLP neurons of a TransformerLens model as attention heads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_MODEL = "a TransformerLens name, or a folder with config.json and model.safetensors"


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder for the table and the picture")] = Path("out"),
) -> None:
    """Convert the shipped model, verify it, show what its neuron-heads attend to."""
    with _clear_errors():
        found = run()
        console = Console()
        console.print("Addition modulo 113, one layer: its 512 neurons as attention heads.\n")
        typer.echo(f"{found.verification}\n")
        clearest = found.clearest()
        table = Table(title="Neuron-heads attend to themselves in waves over (a, b)")
        for heading in ("frequency", "period", "neuron-heads", "clearest", "explained", "self"):
            table.add_column(heading, justify="right")
        for row in clearest.to_dict("records"):
            table.add_row(
                str(row["frequency"]),
                f"{row['period']:.2f}",
                str(row["neuron_heads"]),
                row["name"],
                f"{row['explained']:.1%}",
                f"{row['lowest']:.2f} to {row['highest']:.2f}",
            )
        console.print(table)
        share = (found.neuron_heads["explained"] > PERIODIC).mean()
        control = (found.untrained["explained"] > PERIODIC).mean()
        typer.echo(
            f"{share:.1%} of neuron-heads have over {PERIODIC:.0%} of the variance of their self "
            f"weight in one frequency; with random weights, {control:.1%}.\n"
        )
        write_text(out / "neuron_heads.csv", found.neuron_heads.to_csv(index=False))
        write_text(out / "neuron_heads.html", demo_page(found))
        typer.echo(f"table:   {out / 'neuron_heads.csv'}\npicture: {out / 'neuron_heads.html'}")


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help=_MODEL)],
    out: Annotated[Path, typer.Argument(help="folder to write; a model saved there is replaced")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, float64, bfloat16, float16; default: float32, or as saved"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps")] = "cpu",
    gate: Annotated[str, typer.Option(help="exact, or bilinear")] = "exact",
    heads_per_neuron: Annotated[int | None, typer.Option(help="of bilinear gates")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="largest activation error of bilinear gates")
    ] = None,
    text: Annotated[str | None, typer.Option(help="to calibrate gated MLPs on")] = None,
    tokens: Annotated[Path | None, typer.Option(help="the same, as for `verify`")] = None,
) -> None:
    """Convert a model and save it; a folder that `convert` wrote is loaded and saved again."""
    with _clear_errors():
        if (Path(model) / MANIFEST).is_file():
            manifest = read_manifest(Path(model))
            name = manifest["source_name"]
            if manifest["layout"] == "in place":
                raise AttnOnlyLensError(f"{model} holds a model in place: give its source")
            converted = checkpoint.load(model, device=device)
            asked = (heads_per_neuron, tolerance, text, tokens)
            if gate != "exact" or any(option is not None for option in asked):
                raise AttnOnlyLensError(f"{model} is converted already: give its source")
            saved = str(converted.cfg.dtype).removeprefix("torch.")
            if dtype not in (None, saved):
                raise AttnOnlyLensError(
                    f"got --dtype {dtype} for a model saved in {saved}: convert its source with "
                    "that --dtype instead, so that its tables are computed in it"
                )
        else:
            name, source = model, _source(model, dtype or "float32", device)
            given = text is not None or tokens is not None
            converted = convert_model(
                source,
                gate=gate,
                heads_per_neuron=heads_per_neuron,
                tolerance=tolerance,
                calibration=calibrate(source, _input(source, text, tokens)) if given else None,
            )
        checkpoint.save(converted, out, source_name=name)
        typer.echo(
            f"{out}: {converted.source_cfg.n_layers} layers of {converted.source_cfg.n_heads} "
            f"attention heads and {converted.cfg.n_neuron_heads} neuron-heads"
        )


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help=_MODEL)],
    converted: Annotated[Path, typer.Argument(help="the folder that `convert` wrote")],
    text: Annotated[str | None, typer.Option(help="a text to run both models on")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="a safetensors file with `tokens`, integers [batch, pos]")
    ] = None,
) -> None:
    """Compare a saved conversion with its source; exit code 1 where they differ."""
    with _clear_errors():
        loaded = checkpoint.load(converted)
        dtype = str(loaded.cfg.dtype).removeprefix("torch.")
        source = _source(model, dtype, "cpu")
        report = verify_models(source, loaded, _input(source, text, tokens))
        typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)


def _input(
    source: HookedTransformer, text: str | None, tokens: Path | None
) -> str | Int[Tensor, "batch pos"]:
    if (text is None) == (tokens is None):
        raise AttnOnlyLensError("give either --text or --tokens, to run both models on")
    if text is not None:
        if source.tokenizer is None:
            raise AttnOnlyLensError("the model has no tokenizer: use --tokens instead of --text")
        return text
    assert tokens is not None
    try:
        found = load_file(tokens)
    except (OSError, SafetensorError) as error:
        raise AttnOnlyLensError(f"{tokens} is not a readable safetensors file: {error}") from error
    if "tokens" not in found:
        raise AttnOnlyLensError(f"{tokens} holds {sorted(found)}; expected `tokens`")
    given = found["tokens"]
    if given.ndim != 2 or given.dtype not in (torch.int32, torch.int64) or not given.numel():
        raise AttnOnlyLensError(
            f"`tokens` in {tokens} is {given.dtype} {list(given.shape)}; expected int32 or int64 "
            "[batch, pos]"
        )
    return given.long()


def _source(model: str, dtype: str, device: str) -> HookedTransformer:
    """A source model by TransformerLens name, or from a folder."""
    device_named(device)
    with redirect_stdout(sys.stderr):  # TransformerLens prints its progress
        if Path(model).is_dir():
            return load_source(Path(model), dtype=dtype, device=device)
        try:
            return HookedTransformer.from_pretrained(
                model, dtype=str(dtype_named(dtype)).removeprefix("torch."), device=device
            )
        except (OSError, ValueError, RuntimeError) as error:
            # What the hub raises offline derives from these; its own text runs over many lines.
            reason = textwrap.shorten(str(error).strip().splitlines()[0], 200, placeholder=" …")
            raise AttnOnlyLensError(
                f"could not load {model!r}: {reason} Expected {_MODEL}; offline, only a folder "
                "will do"
            ) from error


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Errors of ours as one message and exit code 2, without a traceback."""
    with quiet():
        try:
            require_hooked_transformer()  # every command converts a model, or loads a converted one
            yield
        except AttnOnlyLensError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
