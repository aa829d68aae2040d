"""Write files completely or not at all, and validate files when they are read."""

from attn_only_lens.storage.atomic import (
    atomic_folder,
    atomic_write,
    open_folder,
    require_replaceable,
    write_text,
)
from attn_only_lens.storage.checks import (
    limit_size,
    out_of_range,
    require_few_layers,
    type_mismatches,
)
from attn_only_lens.storage.documents import (
    Document,
    FileDigest,
    check_files,
    file_digests,
    listed_files,
    path_inside,
    read_json,
)
from attn_only_lens.storage.tensors import read_tensors, tensor_digest, write_tensors

__all__ = [
    "Document",
    "FileDigest",
    "atomic_folder",
    "atomic_write",
    "check_files",
    "file_digests",
    "limit_size",
    "listed_files",
    "open_folder",
    "out_of_range",
    "path_inside",
    "read_json",
    "read_tensors",
    "require_few_layers",
    "require_replaceable",
    "tensor_digest",
    "type_mismatches",
    "write_tensors",
    "write_text",
]
