"""Save transcoders to a folder, one safetensors file for each layer."""

import os
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import TypedDict

from attn_only_lens.arguments import is_count
from attn_only_lens.errors import InputError
from attn_only_lens.heads.transcoder import Transcoder
from attn_only_lens.storage import Document, atomic_folder, open_folder, write_tensors


class TranscoderFields(TypedDict):
    """The fields of the document in a file of a transcoder."""

    layer: int
    activation: str
    k: int | None
    reads: str
    after_norm: bool
    name: str
    tensors: str


_PROBLEM = "these transcoders cannot be saved"
DOCUMENT = Document("attn_only_lens.Transcoder", 1, TranscoderFields)


def save(folder: str | os.PathLike[str], transcoders: Mapping[int, Transcoder]) -> Path:
    """Save transcoders to a folder, completely or not at all.

    `layer_3.transcoder.safetensors` holds the transcoder of layer 3, with a digest. Transcoders
    that `save` wrote to this folder before are replaced.

    Args:
        folder: the folder.
        transcoders: the transcoder of each layer.

    Returns:
        The folder.

    Raises:
        InputError: there is no transcoder, or a layer is not a number ≥ 0.
        CheckpointError: the folder holds other files, or cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from attn_only_lens import transcoders as t
        >>> transcoder = t.Transcoder(torch.eye(2, 3), torch.ones(3, 2), torch.zeros(3),
        ...     torch.zeros(2), "topk", k=1)
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     t.load(t.save(f"{parent}/features", {5: transcoder}))
        {5: <Transcoder of 3 features (topk, k=1), reads input>}
    """
    if not isinstance(transcoders, Mapping):
        reason = f"got {transcoders!r:.80}; expected a dict {{layer: Transcoder}}"
        raise InputError([reason], _PROBLEM)
    reasons = [
        f"got {layer!r}: {transcoder!r:.80}; expected the number of a layer, and a Transcoder"
        for layer, transcoder in transcoders.items()
        if not is_count(layer) or not isinstance(transcoder, Transcoder)
    ]
    reasons += ["got no transcoder"] * (not transcoders)
    InputError.raise_if(reasons, _PROBLEM)
    folder = open_folder(folder)
    saved = sorted(path.name for path in folder.glob("layer_*.transcoder.safetensors"))
    with atomic_folder(folder, saved, saved[0] if saved else "") as new:
        for layer, transcoder in transcoders.items():
            write_tensors(
                new / f"layer_{int(layer)}.transcoder.safetensors",
                {name: tensor.detach().cpu() for name, tensor in transcoder.tensors().items()},
                DOCUMENT,
                layer=int(layer),
                activation=transcoder.activation,
                k=None if transcoder.k is None else int(transcoder.k),
                reads=transcoder.reads,
                after_norm=transcoder.after_norm,
                name=transcoder.name,
            )
    return folder
