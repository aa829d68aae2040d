"""A tokenizer of a few words, built on the spot: nothing is downloaded and no test is skipped."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SPECIAL = ["<bos>", "<eos>", "<pad>", "<unk>"]


def tiny_tokenizer(d_vocab, folder):
    """Return a tokenizer saved in `folder`, because TransformerLens reloads it from there."""
    words = SPECIAL + [f"w{i}" for i in range(d_vocab - len(SPECIAL))]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
