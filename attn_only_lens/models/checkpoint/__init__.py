"""Save models whose MLP neurons act as attention heads (neuron-heads), and load them."""

from attn_only_lens.models.checkpoint.bridge import process_as_saved
from attn_only_lens.models.checkpoint.save_load import (
    MANIFEST,
    is_saved,
    load_saved,
    read_manifest,
    save,
    write_manifest,
)

__all__ = [
    "MANIFEST",
    "is_saved",
    "load_saved",
    "process_as_saved",
    "read_manifest",
    "save",
    "write_manifest",
]
