"""`attn-only-lens grow`: make a model larger without changing the function that it computes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from attn_only_lens.arguments import COUNT
from attn_only_lens.cli.common import command, option, working
from attn_only_lens.cli.options import ModelOptions, OutFolder, parse_numbers
from attn_only_lens.errors import AttnOnlyLensError

_SIZES, _LAYERS = "Sizes of the grown model", "New layers"


@command(
    "Make models, and compare",
    "attn-only-lens grow gpt2 out/larger --d-mlp 4096 --n-layers 14",
    "attn-only-lens grow gpt2 out/deeper --insert 4,9 --copy",
    "attn-only-lens grow small-english out/wider --d-model 256 --seed 1",
)
def grow(
    model: ModelOptions,
    out: OutFolder,
    d_mlp: Annotated[int | None, option("neurons in each layer", _SIZES)] = None,
    n_heads: Annotated[int | None, option("attention heads in each layer", _SIZES)] = None,
    d_head: Annotated[int | None, option("width of queries, keys and values", _SIZES)] = None,
    d_model: Annotated[int | None, option("width of the residual stream", _SIZES)] = None,
    n_layers: Annotated[int | None, option("layers; new ones come last", _SIZES)] = None,
    insert: Annotated[
        str | None,
        option(
            "positions of new layers in the grown model: 4,9 (cannot be combined with sizes)",
            _LAYERS,
        ),
    ] = None,
    copy: Annotated[
        bool,
        option(
            "new layers start as copies of the layer before, with zero outputs", _LAYERS, "--copy"
        ),
    ] = False,
    stack: Annotated[
        str | None, option("of T5: the stack of the new layers, encoder or decoder", _LAYERS)
    ] = None,
    seed: Annotated[int, option("seed of the new weights"), COUNT] = 0,
) -> None:
    """Make a larger model that computes the same function.

    The folder OUT can be passed as MODEL to every command. It contains the grown model, without
    neuron-heads, and provenance.json, which says where each head and neuron of MODEL is in the
    grown model. To grow a converted model, grow the original model, then `convert` the grown model.
    """
    name = model.model
    if Path(name).resolve() == out.resolve():
        raise AttnOnlyLensError(f"got {out} for both MODEL and OUT; expected different folders")
    if copy and insert is None:
        raise AttnOnlyLensError("--copy needs --insert, the positions of the new layers")
    if stack is not None and insert is None:
        raise AttnOnlyLensError("--stack needs --insert, the positions of the new layers")
    depths = [] if insert is None else sorted(parse_numbers(insert, "--insert", least=0))
    sizes: dict[str, Any] = {
        "d_mlp": d_mlp,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_model": d_model,
    }
    if bool(depths) == any(size is not None for size in (*sizes.values(), n_layers)):
        raise AttnOnlyLensError("give either sizes, such as --d-mlp 4096, or --insert")
    from attn_only_lens import grow as grow_model
    from attn_only_lens.growth import Axis, InsertLayer
    from attn_only_lens.heads.host import transcoder_reasons
    from attn_only_lens.models.in_place import hide
    from attn_only_lens.models.two_blocks import AttentionOnlyTransformer

    loaded = model.load()
    if isinstance(loaded, AttentionOnlyTransformer):
        raise AttnOnlyLensError(
            f"{name} is converted; grow the original model, then convert the grown model"
        )
    if transcoder_reasons(loaded):
        raise AttnOnlyLensError(
            f"{name} was saved with transcoders, which imitate the MLPs of this model, not "
            "those of a larger model; grow the model that you saved before you attached them"
        )
    hide(loaded)  # a model that was saved with neuron-heads is loaded with neuron-heads
    of_stack: Any = stack
    layers = [InsertLayer(depth, copy=copy, stack=of_stack) for depth in depths] or None
    with working("growing"):
        grown = grow_model(loaded, layers, **sizes, n_layers=n_layers, seed=seed)
        grown.save_pretrained(out)
    provenance = grown.provenance
    heads, width, neurons = (
        provenance.sizes.get(Axis(label, 0), 0) for label in ("head", "d_query", "d_mlp")
    )
    typer.echo(
        f"{out}: {provenance.layers.size} layers of {heads} attention heads of width {width} "
        f"and {neurons} neurons, d_model {provenance.sizes[Axis('d_model')]}"
    )
    for note in grown.notes:
        typer.echo(note)
