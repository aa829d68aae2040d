"""Files and folders: written whole, digested, sealed, and checked before they are used."""

from attn_only_lens.storage.sealed import (
    Document,
    FileDigest,
    check_files,
    digests_of,
    files_listed,
    inside,
    read_json,
)
from attn_only_lens.storage.tensors import digest_of, read_tensors, write_tensors
from attn_only_lens.storage.typed import misfits, out_of_range
from attn_only_lens.storage.writing import opened_folder, whole_folder, write_text, written_whole

__all__ = [
    "Document",
    "FileDigest",
    "check_files",
    "digest_of",
    "digests_of",
    "files_listed",
    "inside",
    "misfits",
    "opened_folder",
    "out_of_range",
    "read_json",
    "read_tensors",
    "whole_folder",
    "write_tensors",
    "write_text",
    "written_whole",
]
