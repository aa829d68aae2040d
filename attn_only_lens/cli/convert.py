"""The commands `attn-only-lens convert` and `attn-only-lens verify`."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from attn_only_lens.arguments import file_reasons
from attn_only_lens.cli.common import (
    PROBLEM,
    PROMPTS,
    command,
    option,
    working,
)
from attn_only_lens.cli.options import (
    Chat,
    ModelOptions,
    OutFolder,
    SourceOptions,
    load_model,
    text_reasons,
)
from attn_only_lens.errors import AttnOnlyLensError, InputError
from attn_only_lens.models.names import model_reasons, no_folder
from attn_only_lens.versions import require_hooked_transformer

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

_GATES = "Gates"


@command(
    "Make models, and compare",
    "attn-only-lens convert small-english attention-only/",
    "attn-only-lens convert gpt2 attention-only/ --dtype float64",
    "attn-only-lens convert gpt2 bilinear/ --gate bilinear --heads 4",
)
def convert(
    model: SourceOptions,
    out: OutFolder,
    gate: Annotated[str, option("exact or bilinear", _GATES)] = "exact",
    heads: Annotated[
        int | None, option("heads for each neuron of MODEL, for bilinear gates", _GATES)
    ] = None,
    tolerance: Annotated[
        float | None, option("largest error of the activation function, for bilinear gates", _GATES)
    ] = None,
    text: Annotated[str | None, option("a text that calibrates gated MLPs", _GATES)] = None,
    tokens_file: Annotated[
        Path | None,
        option("tokens that calibrate gated MLPs: a safetensors file, as for `verify`", _GATES),
    ] = None,
) -> None:
    """Convert a model to an attention-only HookedTransformer, and save the result.

    If MODEL is a folder that `convert` wrote, copy it. This command needs transformer-lens 3.9.
    """
    require_hooked_transformer()
    is_set = [x is not None for x in (heads, tolerance, text, tokens_file)]
    if gate == "exact" and any(is_set):
        raise AttnOnlyLensError(
            "--heads, --tolerance, --text and --tokens-file need --gate bilinear"
        )
    calibrates = text is not None or tokens_file is not None
    inputs = _read_input(text, tokens_file) if calibrates else None
    from attn_only_lens.models import checkpoint
    from attn_only_lens.models.convert import convert as convert_model
    from attn_only_lens.models.gate_option import Bilinear
    from attn_only_lens.storage import open_folder

    name = model.model
    manifest = checkpoint.read_manifest(open_folder(name)) if checkpoint.is_saved(name) else {}
    layout = manifest.get("layout", "plain")
    if layout == "in place":
        raise AttnOnlyLensError(f"{name} has exposed neuron-heads; pass the original model")
    if layout == "two blocks a layer":
        converted = load_model(name, None, model.device)
        if gate != "exact":
            raise AttnOnlyLensError(f"{name} is already converted; pass the original model")
        saved_dtype = str(converted.cfg.dtype).removeprefix("torch.")
        if model.dtype not in (None, saved_dtype):
            raise AttnOnlyLensError(
                f"got --dtype {model.dtype} for a model saved in {saved_dtype}; convert the "
                f"original model with --dtype {model.dtype} to get tensors of this dtype"
            )
        name = manifest["source_name"]
    else:
        source = load_model(name, model.dtype, model.device, hooked=True)
        bilinear = Bilinear(heads, tolerance)
        if inputs is not None:
            measured = Bilinear.calibrated(source, _input_of(source, inputs))
            bilinear = replace(bilinear, calibration=measured.calibration)
        converted = convert_model(source, gate="exact" if gate == "exact" else bilinear)
    checkpoint.save(converted, out, source_name=name)
    n_heads = [block.cfg.n_heads for block in converted.blocks]
    counts = Counter(zip(n_heads[::2], n_heads[1::2], strict=True))
    layers = [
        f"{many} layers of {n_attention} attention heads and {n_neurons} neuron-heads"
        for (n_attention, n_neurons), many in counts.items()
    ]
    typer.echo(f"{out}: {', '.join(layers)}")


@command(
    "Start here",
    'attn-only-lens verify small-english --text "The keys near the cabinet"',
    'attn-only-lens verify gpt2 attention-only/ --text "The keys near the cabinet"',
    "attn-only-lens verify gpt2 --tokens-file tokens.safetensors --dtype float64",
)
def verify(
    model: ModelOptions,
    converted: Annotated[
        Path | None,
        typer.Argument(
            help="a folder that `convert` or `save` wrote; default: MODEL with exposed neuron-heads"
        ),
    ] = None,
    text: Annotated[str | None, option("a text to run on", PROMPTS)] = None,
    tokens_file: Annotated[
        Path | None, option("a safetensors file with `tokens`, integers [batch, pos]", PROMPTS)
    ] = None,
    chat: Chat = False,
) -> None:
    """Check that converting neurons to attention heads keeps the logits; if not, exit with code 1.

    If CONVERTED is given, compare the logits of MODEL with those of CONVERTED. Otherwise, compare
    the logits of MODEL before and after attention heads replace its neurons.
    """
    inputs = _read_input(text, tokens_file, chat, "MODEL" if converted is None else "both models")
    if converted is not None:
        InputError.raise_if(model_reasons(converted), PROBLEM)
    from transformer_lens.model_bridge import TransformerBridge

    from attn_only_lens.models import checkpoint
    from attn_only_lens.models.two_blocks import AttentionOnlyTransformer
    from attn_only_lens.models.verify import verify as verify_models
    from attn_only_lens.storage import open_folder

    if converted is None:
        loaded = source = model.with_neuron_heads()
        if isinstance(source, AttentionOnlyTransformer):
            raise AttnOnlyLensError(f"{model.model} is converted; pass the original model")
    else:
        if not open_folder(converted).is_dir():
            raise no_folder(converted)
        if not checkpoint.is_saved(converted):
            raise AttnOnlyLensError(
                f"{converted} was written neither by `convert` nor by `save`. "
                f"`attn-only-lens verify {converted}` checks it with exposed neuron-heads; "
                f"`attn-only-lens compare {model.model} {converted}` compares a grown model with "
                "its original"
            )
        manifest = checkpoint.read_manifest(open_folder(converted))
        is_bridge = manifest["model"] == "TransformerBridge"
        loaded = load_model(str(converted), model.dtype, model.device)
        saved_dtype = str(loaded.cfg.dtype).removeprefix("torch.")
        source = load_model(model.model, saved_dtype, model.device, hooked=not is_bridge)
        if is_bridge and isinstance(source, TransformerBridge):
            checkpoint.process_as_saved(source, manifest)
    with working("comparing"):
        report = verify_models(source, loaded, _input_of(source, inputs, chat))
    typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)


_Input: TypeAlias = "str | Int[Tensor, 'batch pos']"


def _read_input(
    text: str | None, tokens: Path | None, chat: bool = False, reader: str = "MODEL"
) -> _Input:
    if (text is None) == (tokens is None):
        raise AttnOnlyLensError(f"pass either --text or --tokens-file, which {reader} will read")
    if text is not None:
        InputError.raise_if(text_reasons([text], "--text", False), PROBLEM)
        return text
    if chat:
        raise AttnOnlyLensError("got --chat and --tokens-file; expected --text, which is a message")
    assert tokens is not None
    return read_tokens(tokens)


def _input_of(source: Any, inputs: _Input, chat: bool = False) -> _Input:
    if not isinstance(inputs, str):
        return inputs
    import torch

    from attn_only_lens.engine.prompts import chat_tokens

    if source.tokenizer is None:
        raise AttnOnlyLensError("the model has no tokenizer: use --tokens-file instead of --text")
    return torch.stack(chat_tokens(source, inputs)) if chat else inputs


def read_tokens(tokens: Path) -> "Int[Tensor, 'batch pos']":
    """Read the tensor `tokens` from a safetensors file."""
    InputError.raise_if(file_reasons(tokens), PROBLEM)
    import torch

    from attn_only_lens.storage import read_tensors

    tensors, _ = read_tensors(tokens)
    if "tokens" not in tensors:
        raise AttnOnlyLensError(f"{tokens} has the tensors {sorted(tensors)}; expected `tokens`")
    inputs = tensors["tokens"]
    if inputs.ndim != 2 or inputs.dtype not in (torch.int32, torch.int64) or not inputs.numel():
        raise AttnOnlyLensError(
            f"`tokens` in {tokens} has dtype {inputs.dtype} and shape {list(inputs.shape)}; "
            "expected int32 or int64 and shape [batch, pos]"
        )
    return inputs.long()
