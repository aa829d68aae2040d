"""The texts of the tokens that a sweep was run on, so that its positions can be read."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.token_texts import token_texts_of_prompts
from attn_only_lens.patching.site_groups import SiteGroup

_MOST_SHOWN = 2
_LONGEST = 16  # characters of a token


@dataclass(frozen=True)
class PromptTokens:
    """The texts of the tokens of every prompt.

    Attributes:
        clean: of each clean prompt a text for each position; None where it is padding.
        corrupted: the same of the corrupted prompts; empty where there are none.
        roles: the position of each role in each prompt.

    Example:
        >>> from attn_only_lens.patching.prompt_tokens import PromptTokens
        >>> tokens = PromptTokens([["The", " keys", " of"]], [["The", " key", " of"]],
        ...                       {"subject": [1]})
        >>> tokens.text(0), tokens.text(-2), tokens.text("subject"), tokens.text("all")
        ("'The'", "' keys' / ' key'", "' keys' / ' key'", '')
    """

    clean: list[list[str | None]]
    corrupted: list[list[str | None]]
    roles: dict[str, list[int]]

    @classmethod
    def of_groups(cls, model: Any, pair: PromptPair, groups: Sequence[SiteGroup]) -> "PromptTokens":
        """Return the tokens of prompts, and where the roles of some sites are in them."""
        clean = token_texts_of_prompts(model, pair.clean, pair.real)
        single = pair.corrupted is pair.clean
        corrupted = [] if single else token_texts_of_prompts(model, pair.corrupted, pair.real)
        sets = dict.fromkeys(position for group in groups for position in group.positions)
        roles = {
            position_set.label: position_set.where.int().argmax(dim=1).tolist()
            for position_set in sets
            if isinstance(position_set.label, str) and position_set.label != "all"
        }
        return cls(clean, corrupted, roles)

    def text(
        self,
        position: int | str,
        prompts: Iterable[int] | None = None,
        shown: Callable[[str], str] = repr,
    ) -> str:
        """Return what stands at a position: the clean token, and the corrupted one if it differs.

        Of prompts that differ there, the two most frequent clean tokens, and "…" for others.
        """
        chosen = range(len(self.clean)) if prompts is None else prompts
        pairs = Counter(each for i in chosen if (each := self._pair(position, i)) is not None)
        if not pairs:
            return ""
        if len(pairs) == 1:
            ((clean, corrupted),) = pairs
            return _cut(shown(clean)) + f" / {_cut(shown(corrupted))}" * (clean != corrupted)
        texts = Counter[str]()
        for (clean, _), count in pairs.items():
            texts[clean] += count
        most = ", ".join(_cut(shown(text)) for text, _ in texts.most_common(_MOST_SHOWN))
        return most + ", …" * (len(texts) > _MOST_SHOWN)

    def _pair(self, position: int | str, prompt: int) -> tuple[str, str] | None:
        """Return the clean and the corrupted token at a position of a prompt, if it has one."""
        row = self.clean[prompt]
        if isinstance(position, str):
            if position not in self.roles:
                return None
            column = self.roles[position][prompt]
        elif position < 0:
            column = max(i for i, token in enumerate(row) if token is not None) + position + 1
        else:
            column = position
        clean = row[column] if 0 <= column < len(row) else None
        if clean is None:
            return None
        return clean, str(self.corrupted[prompt][column]) if self.corrupted else clean


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
