"""`attn-only-lens convert` and `verify`."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
from jaxtyping import Int
from torch import Tensor

from attn_only_lens.cli import options
from attn_only_lens.cli.common import app, clear_errors, load_source_model
from attn_only_lens.errors import AttnOnlyLensError
from attn_only_lens.models import checkpoint
from attn_only_lens.models.calibrate import calibrate
from attn_only_lens.models.checkpoint import is_saved, read_manifest
from attn_only_lens.models.convert import convert as convert_model
from attn_only_lens.models.gate_option import Bilinear
from attn_only_lens.models.verify import verify as verify_models
from attn_only_lens.storage import open_folder, read_tensors
from attn_only_lens.tl import HookedTransformer, require_hooked_transformer


@app.command()
def convert(
    model: options.SourceModel,
    out: options.OutFolder,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, float64, bfloat16, float16; default: float32, or as saved"),
    ] = None,
    device: options.Device = "cpu",
    gate: Annotated[str, typer.Option(help="exact, or bilinear")] = "exact",
    heads_per_neuron: Annotated[int | None, typer.Option(help="of bilinear gates")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="largest activation error of bilinear gates")
    ] = None,
    text: Annotated[str | None, typer.Option(help="to calibrate gated MLPs on")] = None,
    tokens: Annotated[Path | None, typer.Option(help="the same, as for `verify`")] = None,
) -> None:
    """Convert a model and save it; a folder that `convert` wrote is loaded and saved again."""
    with clear_errors():
        require_hooked_transformer()
        if gate not in ("exact", "bilinear"):
            raise AttnOnlyLensError(f"got --gate {gate}; expected exact or bilinear")
        if gate == "exact" and any(
            option is not None for option in (heads_per_neuron, tolerance, text, tokens)
        ):
            raise AttnOnlyLensError(
                "--heads-per-neuron, --tolerance, --text and --tokens are of bilinear gates; give "
                "--gate bilinear with them"
            )
        if is_saved(model):
            manifest = read_manifest(open_folder(model))
            name = manifest["source_name"]
            if manifest["layout"] == "in place":
                raise AttnOnlyLensError(f"{model} holds a model in place: give its source")
            converted = checkpoint.load(model, device=device)
            if gate != "exact":
                raise AttnOnlyLensError(f"{model} is converted already: give its source")
            saved = str(converted.cfg.dtype).removeprefix("torch.")
            if dtype not in (None, saved):
                raise AttnOnlyLensError(
                    f"got --dtype {dtype} for a model saved in {saved}: convert its source with "
                    "that --dtype instead, so that its tables are computed in it"
                )
        else:
            name, source = model, load_source_model(model, dtype or "float32", device)
            given = text is not None or tokens is not None
            calibration = calibrate(source, _input(source, text, tokens)) if given else None
            option = Bilinear(heads_per_neuron, tolerance, calibration)
            converted = convert_model(source, gate="exact" if gate == "exact" else option)
        checkpoint.save(converted, out, source_name=name)
        heads = [block.cfg.n_heads for block in converted.blocks]
        counts = Counter(zip(heads[::2], heads[1::2], strict=True))
        layers = [
            f"{many} layers of {n_heads} attention heads and {n_neuron_heads} neuron-heads"
            for (n_heads, n_neuron_heads), many in counts.items()
        ]
        typer.echo(f"{out}: {', '.join(layers)}")


@app.command()
def verify(
    model: options.SourceModel,
    converted: Annotated[Path, typer.Argument(help="the folder that `convert` wrote")],
    text: Annotated[str | None, typer.Option(help="a text to run both models on")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="a safetensors file with `tokens`, integers [batch, pos]")
    ] = None,
) -> None:
    """Compare a saved conversion with its source; exit with code 1 if they differ."""
    with clear_errors():
        require_hooked_transformer()
        loaded = checkpoint.load(converted)
        dtype = str(loaded.cfg.dtype).removeprefix("torch.")
        source = load_source_model(model, dtype, "cpu")
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
    return read_tokens(tokens)


def read_tokens(tokens: Path) -> Int[Tensor, "batch pos"]:
    """Read the `tokens` of a safetensors file."""
    found, _ = read_tensors(tokens)
    if "tokens" not in found:
        raise AttnOnlyLensError(f"{tokens} holds {sorted(found)}; expected `tokens`")
    given = found["tokens"]
    if given.ndim != 2 or given.dtype not in (torch.int32, torch.int64) or not given.numel():
        raise AttnOnlyLensError(
            f"`tokens` in {tokens} is {given.dtype} {list(given.shape)}; expected int32 or int64 "
            "[batch, pos]"
        )
    return given.long()
