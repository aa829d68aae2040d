"""circuitsvis' attention heads in a page that works offline and shows tokens as they are.

circuitsvis' own HTML loads its script from a content delivery network, and its notebook display
first asks a public server whether there is one. The bundle that it installs holds the same
components; a page has it written into it, once.

It sets the text of a token as HTML, so that a token "<b>" would be a tag. An invisible WORD JOINER
after "<" and "&" keeps both what they are: neither a tag nor an entity can begin so, and what is
seen is the token, in its tooltip too.
"""

from collections.abc import Sequence
from importlib.resources import files

from attn_only_lens.viz.checks import import_extra
from attn_only_lens.viz.page import visible_token

_JOINER = "\u2060"


def circuitsvis_bundle() -> str:
    """Return the script that defines `CircuitsVis`.

    Raises:
        ImportError: circuitsvis is not installed.
    """
    import_extra("circuitsvis")
    return files("circuitsvis").joinpath("dist/cdn/iife.js").read_text(encoding="utf-8")


def safe_tokens(tokens: Sequence[str]) -> list[str]:
    r"""Return tokens that circuitsvis shows as they are.

    Example:
        >>> safe_tokens(["<b>", " the"]) == ["<\u2060b>", "·the"]
        True
    """
    return [
        visible_token(token).replace("<", "<" + _JOINER).replace("&", "&" + _JOINER)
        for token in tokens
    ]
