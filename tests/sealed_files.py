"""Files that somebody edits and seals again, as an attacker would, or a careless program."""

import json

from attn_only_lens.storage.sealed import _digest, _seal


def rewrite(path, change=None, /, **changes):
    """Change the JSON in a file, by a function or key by key, so that its digest is right again."""
    whole = json.loads(path.read_text("utf-8"))
    if change is not None:
        change(whole)
    whole |= changes
    whole["sha256"] = _seal(whole)
    path.write_text(json.dumps(whole), "utf-8")


def digest_again(manifest, name):
    """Have a manifest say what is true of a file that was exchanged."""
    rewrite(manifest, lambda whole: whole["files"].update({name: _digest(manifest.parent / name)}))
