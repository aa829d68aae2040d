"""A tokenizer of whole words, built on the spot, with the words of the tasks' prompts.

Like GPT-2's, it has the space before a word in the word's token, and splits years in two.
"""

import re

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from attn_only_lens.tasks import _agreement, _brackets, _greater_than, _ioi, words

TOKEN = r""" ?[A-Za-z]+| ?\d\d| ?["(\[]|[^\sA-Za-z\d]"""


def task_tokenizer(unknown=()):
    """Return the tokenizer, without some unknown words."""
    known = {f"{space}{year:02}" for year in range(100) for space in ("", " ")}
    known |= {" is", " are", " was", " were", " has", " have", " he", " she", " one", "the"}
    for module in (_agreement, _brackets, _greater_than, _ioi, words):
        # Skip names that Python adds to a module, such as the path of its file.
        values = [value for name, value in vars(module).items() if not name.startswith("__")]
        for text in _texts(values):
            known |= {*re.findall(TOKEN, text), *re.findall(TOKEN, f" {text}")}
    known |= {f" {word}s" for word in (*words.THINGS, *words.PEOPLE)}
    known -= set(unknown)
    every = ["<bos>", "<pad>", "<unk>", *sorted(known)]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(every)}, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex(TOKEN), "isolated")
    core.decoder = decoders.Fuse()
    special = {"bos_token": "<bos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def _texts(constants):
    """Yield all texts among constants and in their items."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, list | tuple):
            yield from _texts(constant)
        elif isinstance(constant, dict):
            yield from _texts(constant.values())
