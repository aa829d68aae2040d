"""Files that are edited and sealed again, as by an attacker or a careless program."""

import json
import random

from attn_only_lens.storage.documents import _digest, _seal


def rewrite(path, change=None, /, **changes):
    """Change the JSON in a file, by a function or key by key, and update its digest."""
    whole = json.loads(path.read_text("utf-8"))
    if change is not None:
        change(whole)
    whole |= changes
    whole["sha256"] = _seal(whole)
    path.write_text(json.dumps(whole), "utf-8")


def digest_again(manifest, name):
    """Update a manifest after a file was replaced."""
    rewrite(manifest, lambda whole: whole["files"].update({name: _digest(manifest.parent / name)}))


def flips(folder, n=40, seed=0):
    """Flip a random bit in a random file of a folder, `n` times, and restore it each time."""
    numbers = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(n):
        path = numbers.choice(files)
        whole = path.read_bytes()
        broken = bytearray(whole)
        # The first bytes define how to read the rest.
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
    """Return a copy of JSON data with one value replaced, removed or added, and a description."""
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
