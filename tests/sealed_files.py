"""Files that somebody edits and seals again, as an attacker would, or a careless program."""

import json
import random

from attn_only_lens.storage.documents import _digest, _seal


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


def flips(folder, n=40, seed=0):
    """Flip one bit somewhere in one of the files of a folder, `n` times, and put it back."""
    numbers = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(n):
        path = numbers.choice(files)
        whole = path.read_bytes()
        broken = bytearray(whole)
        # The first bytes say how the rest is to be read.
        index = numbers.randrange(len(whole) if numbers.random() < 0.7 else min(len(whole), 400))
        broken[index] ^= 1 << numbers.randrange(8)
        path.write_bytes(broken)
        yield f"{path.name}, byte {index}"
        path.write_bytes(whole)


DEEP = json.loads("[" * 300 + "]" * 300)
ODD = (
    *(None, True, False, -1, 0, 1, 3, 10**6, 10**9, 10**15, 2**63, 10**400, -0.5, 1e-300, 1e300),
    *("", "x", "../../x", "/etc/hostname", "\0", "float64", [], {}, [[]], DEEP, {"x": DEEP}),
    ["x"] * 1000,
)


def mutated(whole, seed):
    """A copy of what JSON holds with one value exchanged, left out or added; and a word on it."""
    numbers = random.Random(seed)
    whole = json.loads(json.dumps(whole))
    places = []

    def walk(inner, path):
        for key in inner if isinstance(inner, dict) else range(len(inner)):
            places.append((inner, key, (*path, key)))
            if isinstance(inner[key], dict | list):
                walk(inner[key], (*path, key))

    walk(whole, ())
    inner, key, path = numbers.choice(places)
    action = numbers.choice(["exchange"] * 6 + ["leave out", "add"])
    value = numbers.choice(ODD)
    if action == "leave out":
        del inner[key]
    elif action == "exchange":
        inner[key] = value
    elif isinstance(inner, dict):
        inner["x"] = value
    else:
        inner.append(value)
    return whole, f"{action} {path}: {value!r:.40}"
