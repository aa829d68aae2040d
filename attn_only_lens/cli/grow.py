"""`attn-only-lens grow`."""

from pathlib import Path
from typing import Annotated

import typer

from attn_only_lens.cli import options
from attn_only_lens.cli.common import clear_errors, command, load_model, working
from attn_only_lens.cli.options import parse_numbers
from attn_only_lens.errors import AttnOnlyLensError

_DMlp = Annotated[int | None, typer.Option(help="neurons in each layer")]
_NHeads = Annotated[int | None, typer.Option(help="attention heads in each layer")]
_DHead = Annotated[int | None, typer.Option(help="width of queries, keys and values")]
_DModel = Annotated[int | None, typer.Option(help="width of the residual stream")]
_NLayers = Annotated[int | None, typer.Option(help="layers; new ones come last")]
_Insert = Annotated[
    str | None,
    typer.Option(
        help="positions of new layers in the grown model: 4,9 (cannot be combined with sizes)"
    ),
]
_Copy = Annotated[
    bool, typer.Option(help="new layers start as copies of the layer before, with zero output")
]
_Seed = Annotated[int, typer.Option(help="seed of the new weights")]


@command(
    "Make models, and compare",
    "attn-only-lens grow gpt2 out/larger --d-mlp 4096 --n-layers 14",
)
def grow(
    model: options.Model,
    out: options.OutFolder,
    d_mlp: _DMlp = None,
    n_heads: _NHeads = None,
    d_head: _DHead = None,
    d_model: _DModel = None,
    n_layers: _NLayers = None,
    insert: _Insert = None,
    copy: _Copy = False,
    seed: _Seed = 0,
    hooked: options.Hooked = False,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
) -> None:
    """Make a larger model that computes the same function.

    The folder is a MODEL to every command. It holds a plain model, and provenance.json, which says
    where every head and neuron went. For a converted one, grow the source and `convert` that.
    """
    from attn_only_lens.expansion import InsertLayer, compose
    from attn_only_lens.growth import grow as grow_model
    from attn_only_lens.models.in_place import hide
    from attn_only_lens.models.two_blocks import AttentionOnlyTransformer

    with clear_errors():
        if Path(model).resolve() == out.resolve():
            raise AttnOnlyLensError(f"got {out} for both MODEL and OUT; expected another folder")
        if copy and insert is None:
            raise AttnOnlyLensError("--copy needs --insert, the positions of the new layers")
        depths = [] if insert is None else sorted(parse_numbers(insert, "--insert"))
        loaded = load_model(model, dtype, device, hooked)
        if isinstance(loaded, AttentionOnlyTransformer):
            raise AttnOnlyLensError(
                f"{model} is converted; grow its source, and convert that: it is the same model"
            )
        hide(loaded)  # neuron-heads that `save` wrote
        with working("growing"):
            grown = grow_model(
                loaded,
                compose(*(InsertLayer(depth, copy=copy) for depth in depths)) if depths else None,
                d_mlp=d_mlp,
                n_heads=n_heads,
                d_head=d_head,
                d_model=d_model,
                n_layers=n_layers,
                seed=seed,
            )
            grown.save_pretrained(out)
        cfg = grown.model.cfg
        typer.echo(
            f"{out}: {cfg.n_layers} layers of {cfg.n_heads} attention heads of width {cfg.d_head} "
            f"and {cfg.d_mlp} neurons, d_model {cfg.d_model}"
        )
        for note in grown.notes:
            typer.echo(note)
