"""Run the Python examples of a text together and in order, with only the package's requirements.

    python -I tests/examples.py README.md docs/growth.md

`make wheel` does this with an installed wheel. With `-I`, no repository file can be imported.
"""

import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


HOOKED = "An attention-only model"
"""The title of sections that need HookedTransformer, on any page."""
NEWER = "An example with transformer-lens 4"
"""The title of sections that need transformer-lens 4, on any page."""


def run(text, name):
    """Run the examples in a text that the installed version supports, and return their number."""
    title = HOOKED if int(version("transformer-lens").split(".")[0]) >= 4 else NEWER
    if f"\n## {title}\n" in text:
        text = text.replace(section(text, title), "")
    blocks = EXAMPLE.findall(text)
    namespace = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{name}, example {number}", "exec"), namespace)
    return len(blocks)


def section(text, title):
    """Return the section of a text under a second-level title."""
    [section] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return section


def main(pages):
    for page in pages:
        n = run(Path(page).read_text("utf-8"), page)
        assert n, f"{page} has no example"
        print(f"{n} examples of {page} ran")
    path = Path(find_spec("attn_only_lens").origin)
    assert path.is_relative_to(sys.prefix), f"{path} is not what was installed in {sys.prefix}"
    versions = {name: version(name) for name in ("attn-only-lens", "transformer-lens", "torch")}
    print(f"with Python {sys.version.split()[0]}, {versions}, in {path.parent}")


if __name__ == "__main__":
    main(sys.argv[1:])
