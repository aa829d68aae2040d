"""`attn-only-lens convert` and `verify`."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from attn_only_lens.cli import options
from attn_only_lens.cli.common import (
    clear_errors,
    command,
    load_model,
    load_with_neuron_heads,
    working,
)
from attn_only_lens.errors import AttnOnlyLensError

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

_BRIDGE = "TransformerBridge"  # in a manifest


_Gate = Annotated[str, typer.Option(help="exact or bilinear")]
_HeadsPerNeuron = Annotated[
    int | None, typer.Option(help="number of heads per neuron, for bilinear gates")
]
_Tolerance = Annotated[
    float | None, typer.Option(help="largest error of an activation, for bilinear gates")
]
_Text = Annotated[str | None, typer.Option(help="a text for the calibration of gated MLPs")]
_Tokens = Annotated[
    Path | None,
    typer.Option(help="tokens for the calibration: a safetensors file, as for `verify`"),
]


@command("Make models, and compare", "attn-only-lens convert small-english attention-only/")
def convert(
    model: options.Model,
    out: options.OutFolder,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    gate: _Gate = "exact",
    heads_per_neuron: _HeadsPerNeuron = None,
    tolerance: _Tolerance = None,
    text: _Text = None,
    tokens: _Tokens = None,
) -> None:
    """Convert a model to an attention-only HookedTransformer, and save it (transformer-lens 3.9).

    A folder that `convert` wrote is saved again.
    """
    from attn_only_lens.models import checkpoint
    from attn_only_lens.models.convert import convert as convert_model
    from attn_only_lens.models.gate_option import Bilinear, calibrate
    from attn_only_lens.storage import open_folder
    from attn_only_lens.tl import require_hooked_transformer

    with clear_errors():
        require_hooked_transformer()
        if gate not in ("exact", "bilinear"):
            raise AttnOnlyLensError(f"got --gate {gate}; expected exact or bilinear")
        if gate == "exact" and any(
            option is not None for option in (heads_per_neuron, tolerance, text, tokens)
        ):
            raise AttnOnlyLensError(
                "--heads-per-neuron, --tolerance, --text and --tokens need --gate bilinear"
            )
        if checkpoint.is_saved(model):
            manifest = checkpoint.read_manifest(open_folder(model))
            name = manifest["source_name"]
            if manifest["layout"] == "in place":
                raise AttnOnlyLensError(f"{model} holds a model in place: give its source")
            converted = load_model(model, None, device)
            if gate != "exact":
                raise AttnOnlyLensError(f"{model} is converted already: give its source")
            saved = str(converted.cfg.dtype).removeprefix("torch.")
            if dtype not in (None, saved):
                raise AttnOnlyLensError(
                    f"got --dtype {dtype} for a model saved in {saved}: convert its source with "
                    "that --dtype instead, so that its tables are computed in it"
                )
        else:
            name, source = model, load_model(model, dtype, device, hooked=True)
            calibration = None
            if text is not None or tokens is not None:
                calibration = calibrate(source, _input_of(source, _read_input(text, tokens)))
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


_Converted = Annotated[
    Path | None,
    typer.Argument(
        help="a folder that `convert` or `save` wrote; default: MODEL with exposed neuron-heads"
    ),
]
_VerifiedText = Annotated[str | None, typer.Option(help="a text that both models run on")]
_VerifiedTokens = Annotated[
    Path | None, typer.Option(help="a safetensors file with `tokens`, integers [batch, pos]")
]


@command("Start here", 'attn-only-lens verify small-english --text "The keys near the cabinet"')
def verify(
    model: options.Model,
    converted: _Converted = None,
    text: _VerifiedText = None,
    tokens: _VerifiedTokens = None,
    chat: options.Chat = False,
    hooked: options.Hooked = False,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
) -> None:
    """Check that a model with neuron-heads computes the same logits; exit with 1 if it does not.

    MODEL alone is run without neuron-heads and with them. CONVERTED is compared with MODEL.
    """
    from transformer_lens.model_bridge import TransformerBridge

    from attn_only_lens.models import checkpoint
    from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
    from attn_only_lens.models.verify import verify as verify_models
    from attn_only_lens.storage import open_folder

    with clear_errors():
        inputs = _read_input(text, tokens, chat)
        if converted is None:
            loaded = source = load_with_neuron_heads(model, dtype, device, hooked)
            if isinstance(source, AttentionOnlyTransformer):
                raise AttnOnlyLensError(f"{model} is converted: give its source before it")
        else:
            if not checkpoint.is_saved(converted):
                raise AttnOnlyLensError(
                    f"no saved model in {converted}: neither `convert` nor `save` wrote it; "
                    f"`attn-only-lens verify {converted}` exposes its neurons, and "
                    f"`attn-only-lens compare {model} {converted}` holds a grown model against its "
                    "original"
                )
            manifest = checkpoint.read_manifest(open_folder(converted))
            loaded = load_model(str(converted), dtype, device)
            saved_in = str(loaded.cfg.dtype).removeprefix("torch.")
            source = load_model(model, saved_in, device, hooked=manifest["model"] != _BRIDGE)
            if manifest["model"] == _BRIDGE and isinstance(source, TransformerBridge):
                checkpoint.process_as_saved(source, manifest)
        with working("comparing"):
            report = verify_models(source, loaded, _input_of(source, inputs, chat))
        typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)


_Input: TypeAlias = "str | Int[Tensor, 'batch pos']"


def _read_input(text: str | None, tokens: Path | None, chat: bool = False) -> _Input:
    if (text is None) == (tokens is None):
        raise AttnOnlyLensError("give either --text or --tokens, to run both models on")
    if text is not None:
        return text
    if chat:
        raise AttnOnlyLensError("got --chat and --tokens; expected --text, which is a message")
    assert tokens is not None
    return read_tokens(tokens)


def _input_of(source: Any, inputs: _Input, chat: bool = False) -> _Input:
    if not isinstance(inputs, str):
        return inputs
    import torch

    from attn_only_lens.engine.prompts import chat_tokens

    if source.tokenizer is None:
        raise AttnOnlyLensError("the model has no tokenizer: use --tokens instead of --text")
    return torch.stack(chat_tokens(source, inputs)) if chat else inputs


def read_tokens(tokens: Path) -> "Int[Tensor, 'batch pos']":
    """Read the `tokens` of a safetensors file."""
    import torch

    from attn_only_lens.storage import read_tensors

    tensors, _ = read_tensors(tokens)
    if "tokens" not in tensors:
        raise AttnOnlyLensError(f"{tokens} holds {sorted(tensors)}; expected `tokens`")
    inputs = tensors["tokens"]
    if inputs.ndim != 2 or inputs.dtype not in (torch.int32, torch.int64) or not inputs.numel():
        raise AttnOnlyLensError(
            f"`tokens` in {tokens} is {inputs.dtype} {list(inputs.shape)}; expected int32 or int64 "
            "[batch, pos]"
        )
    return inputs.long()
