"""The texts of the prompts' tokens, which results and pictures show next to positions."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_only_lens.engine.prompts import PromptPair
from attn_only_lens.engine.tokens import token_texts_of_prompts
from attn_only_lens.patching.site_groups import SiteGroup, roles

_SHOWN_TOKENS, _LONGEST_TOKEN = 2, 16


@dataclass(frozen=True)
class PromptTokens:
    """The token texts of all prompts.

    Attributes:
        clean: for each clean prompt, the token text at each position; None for padding.
        corrupted: token texts of the corrupted prompts; empty without corrupted prompts.
        roles: the position of each role in each prompt; -1 in prompts without a token of the role.

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
        """Return the token texts of all prompts, and the position of each role in the groups."""
        clean = token_texts_of_prompts(model, pair.clean, pair.real)
        single = pair.corrupted is pair.clean
        corrupted = [] if single else token_texts_of_prompts(model, pair.corrupted, pair.real)
        columns = torch.arange(pair.clean.shape[1], device="cpu")
        positions = {
            str(role.label): columns.where(role.chosen, -1).amax(dim=1).tolist()
            for role in roles(groups)
        }
        return cls(clean, corrupted, positions)

    def text(
        self,
        position: int | str,
        prompts: Iterable[int] | None = None,
        shown: Callable[[str], str] = repr,
    ) -> str:
        """Return the clean token at a position, and the corrupted token if it differs.

        If the prompts have different tokens at the position, return the two most frequent clean
        tokens, followed by "…" if there are more than two.
        """
        chosen = range(len(self.clean)) if prompts is None else prompts
        pairs = Counter(pair for i in chosen if (pair := self._pair(position, i)) is not None)
        if len(pairs) == 1:
            ((clean, corrupted),) = pairs
            return _cut(shown(clean)) + f" / {_cut(shown(corrupted))}" * (clean != corrupted)
        texts = Counter[str]()
        for (clean, _), count in pairs.items():
            texts[clean] += count
        most = ", ".join(_cut(shown(text)) for text, _ in texts.most_common(_SHOWN_TOKENS))
        return most + ", …" * (len(texts) > _SHOWN_TOKENS)

    def clean_text(self, position: int | str, prompts: Iterable[int]) -> str:
        """Return the clean token at a position, or "" if prompts have different tokens."""
        pairs = [self._pair(position, prompt) for prompt in prompts]
        texts = {pair and pair[0] for pair in pairs}
        return (texts.pop() or "") if len(texts) == 1 else ""

    def _pair(self, position: int | str, prompt: int) -> tuple[str, str] | None:
        """Return a prompt's clean and corrupted token at a position; None if it is padding."""
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
    return text if len(text) <= _LONGEST_TOKEN else f"{text[: _LONGEST_TOKEN - 1]}…"
