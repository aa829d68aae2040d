"""Contrasts for well-known tasks, or from templates and files."""

from attn_only_lens.tasks._agreement import agreement
from attn_only_lens.tasks._brackets import brackets
from attn_only_lens.tasks._custom import from_jsonl, from_templates
from attn_only_lens.tasks._from_pair import from_pair
from attn_only_lens.tasks._greater_than import greater_than
from attn_only_lens.tasks._induction import induction
from attn_only_lens.tasks._ioi import ioi

__all__ = [
    "agreement",
    "brackets",
    "from_jsonl",
    "from_pair",
    "from_templates",
    "greater_than",
    "induction",
    "ioi",
]
