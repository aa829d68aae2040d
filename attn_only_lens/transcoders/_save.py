"""Save transcoders to a folder, with one safetensors file per layer."""

import os
from collections.abc import Mapping
from pathlib import Path

from attn_only_lens.arguments import is_count
from attn_only_lens.errors import InputError
from attn_only_lens.heads.transcoder import Transcoder, cross_layer_reasons
from attn_only_lens.models.checkpoint.transcoders import FILES, write_transcoders
from attn_only_lens.storage import atomic_folder, open_folder

_PROBLEM = "these transcoders cannot be saved"


def save(folder: str | os.PathLike[str], transcoders: Mapping[int, Transcoder]) -> Path:
    """Save transcoders to a folder; if an error occurs, the folder is not changed.

    `layer_3.transcoder.safetensors` contains the transcoder of layer 3, with a digest. All earlier
    transcoders in this folder are replaced or removed.

    Args:
        folder: the folder. It must be new or empty, or contain only files that `save` wrote.
        transcoders: {layer: transcoder}.

    Returns:
        The folder.

    Raises:
        InputError: there is no transcoder, a layer is not an int ≥ 0, or a value is not a
            `Transcoder`; or a cross-layer transcoder lacks layers.
        CheckpointError: the folder contains other files, or cannot be written.

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
        f"got {layer!r}: {transcoder!r:.80}; expected a layer number, and a Transcoder"
        for layer, transcoder in transcoders.items()
        if not is_count(layer) or not isinstance(transcoder, Transcoder)
    ]
    reasons += ["got no transcoder"] * (not transcoders)
    reasons += [] if reasons else cross_layer_reasons(transcoders)
    InputError.raise_if(reasons, _PROBLEM)
    folder = open_folder(folder)
    saved = sorted(path.name for path in folder.glob(FILES))
    with atomic_folder(folder, saved, saved[0] if saved else "") as new:
        write_transcoders(new, transcoders)
    return folder
