"""The files of transcoders: safetensors with the weights, and the options as metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from attn_only_lens.heads.transcoder import OPTIONS, Transcoder
from attn_only_lens.models.source_folder import checkpoint_errors
from attn_only_lens.storage import Document, read_tensors, write_tensors

FILES = "layer_*.transcoder.safetensors"


class TranscoderFields(TypedDict):
    """The metadata in a transcoder's file."""

    layer: int
    activation: str
    k: int | None
    reads: str
    after_norm: bool
    name: str
    tensors: str


DOCUMENT = Document("attn_only_lens.Transcoder", 1, TranscoderFields)


def write_transcoders(folder: Path, transcoders: Mapping[int, Transcoder]) -> None:
    """Write one file per layer to a folder that no other process reads yet."""
    for layer, transcoder in transcoders.items():
        options = transcoder.options()
        if options["k"] is not None:
            options["k"] = int(options["k"])  # k may be an integer of NumPy
        write_tensors(
            folder / FILES.replace("*", str(int(layer))),
            {name: tensor.detach().cpu() for name, tensor in transcoder.tensors().items()},
            DOCUMENT,
            layer=int(layer),
            **options,
        )


def read_transcoder(path: Path) -> tuple[int, Transcoder]:
    """Read the layer and the transcoder from a file."""
    tensors, fields = read_tensors(path, DOCUMENT)
    values: dict[str, Any] = {**tensors, **{name: fields[name] for name in OPTIONS}}
    with checkpoint_errors(f"{path} is not a transcoder"):
        return fields["layer"], Transcoder(**values)
