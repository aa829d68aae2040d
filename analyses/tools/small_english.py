"""Small English, the shipped language model: its sizes, tokenizer, texts, loss and questions.

A LLaMA from transformers (gated MLPs, RMS norm, rotary positions) read each text from
`small_english_grammar.py` once. No sentence in these texts begins with a prompt of the tasks on
which the model is evaluated. `analyses/tools/README.md` says how the model was trained; studies
train other models on the same texts.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from analyses.tools import small_english_grammar as grammar
from attn_only_lens import Contrast, load, tasks

BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
POOL = 32  # this many batches are written at once, so that each batch has texts of one length
SEED_OF_PROMPTS = 7
SEED_OF_HELD_OUT = 999_999


@dataclass(frozen=True)
class Recipe:
    """The settings that determine the result."""

    n_layers: int = 4
    d_model: int = 128
    n_heads: int = 4
    d_mlp: int = 344
    n_ctx: int = 128
    seed: int = 0
    steps: int = 4_000
    rows: int = 56
    lr: float = 4e-3
    weight_decay: float = 0.1
    prompts: int = 200  # the number of prompts per task
    held_out: int = 100_000  # the number of characters

    def config(self) -> LlamaConfig:
        """Return the configuration of the model."""
        return LlamaConfig(
            vocab_size=len(vocabulary()),
            hidden_size=self.d_model,
            intermediate_size=self.d_mlp,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            max_position_embeddings=self.n_ctx,
            bos_token_id=vocabulary()[BOS],
            eos_token_id=vocabulary()[EOS],
            pad_token_id=vocabulary()[EOS],
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            initializer_range=0.04,
            tie_word_embeddings=True,
        )

    def model(self) -> LlamaForCausalLM:
        """Return the untrained model."""
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(self.config())


@cache
def vocabulary() -> dict[str, int]:
    """Return every token with its index."""
    return {token: i for i, token in enumerate([BOS, EOS, UNKNOWN, *grammar.tokens()])}


LISTED = {vocabulary()[f" {word}"] for word in grammar.LISTED}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for words with the space before them, which adds BOS to a text."""
    core = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(grammar.TOKEN), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary()[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNKNOWN,
        padding_side="right",
    )


@cache
def _shipped_tokenizer() -> Any:
    """Return the same tokenizer with the name of its folder, which TransformerLens asks for."""
    return load("small-english").tokenizer


def bridged(model: PreTrainedModel) -> Any:
    """Return a bridge around a transformers model that reads Small English."""
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    bridge.tokenizer = _shipped_tokenizer()
    return bridge


def questions(n: int) -> dict[str, Contrast]:
    """Return the evaluation prompts, n per task; there are fewer of the shortest."""
    of, seed = tokenizer(), SEED_OF_PROMPTS
    return {
        "number, simple": tasks.agreement(of, min(n, 50), seed, structure="simple"),
        "number, prepositional": tasks.agreement(of, n, seed, structure="prepositional"),
        "number, relative": tasks.agreement(of, n, seed, structure="relative"),
        "gender": tasks.agreement(of, n, seed, feature="gender"),
        "brackets, simple": tasks.brackets(of, n, seed),
        "brackets, nested": tasks.brackets(of, n, seed, structure="nested"),
        "induction": tasks.induction(of, n, seed),
        "indirect object": tasks.ioi(of, n, seed),
    }


def held_out(n: int) -> frozenset[str]:
    """Return the prompts that begin no sentence; "The keys" has too few prompts to exclude any."""
    made = {task: question for task, question in questions(n).items() if task != "number, simple"}
    return frozenset(text for pairs in made.values() for text in (*pairs.clean, *pairs.corrupted))


def texts_of(write: grammar.Grammar, n: int) -> list[list[int]]:
    """Write n texts as tokens: BOS, the text, EOS."""
    ids = vocabulary()
    return [
        [ids[token] for token in (BOS, *re.findall(grammar.TOKEN, write.text()), EOS)]
        for _ in range(n)
    ]


def by_length(texts: list[list[int]], rows: int, n_ctx: int) -> list[Tensor]:
    """Sort texts by length into batches [batch, pos], padded with EOS, with little padding."""
    texts, end = sorted(texts, key=len), vocabulary()[EOS]
    batches = [texts[start : start + rows] for start in range(0, len(texts), rows)]
    return [
        torch.tensor([text + [end] * (len(batch[-1]) - len(text)) for text in batch])[:, :n_ctx]
        for batch in batches
    ]


def pool(recipe: Recipe, number: int, never: frozenset[str]) -> list[Tensor]:
    """Write POOL batches [batch, pos] to train on, each of texts of one length, in random order."""
    write = grammar.Grammar(recipe.seed * 1_000_000 + number, never)
    batches = by_length(texts_of(write, POOL * recipe.rows), recipe.rows, recipe.n_ctx)
    write.random.shuffle(batches)
    return batches


def held_out_texts(n: int, never: frozenset[str]) -> list[Tensor]:
    """Write the first n held-out texts, of all lengths, and sort them into batches afterwards.

    In contrast, a few batches from a pool would have only a few lengths, so they are no sample.
    """
    return by_length(texts_of(grammar.Grammar(SEED_OF_HELD_OUT, never), n), 64, Recipe.n_ctx)


def held_out_loss(model: LlamaForCausalLM, batches: list[Tensor]) -> float:
    """Return the mean of `losses_of` over all words, for batches of any size."""
    losses = [losses_of(model, tokens.to(model.device)) for tokens in batches]
    return torch.cat(losses).double().mean().item()


def loss_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the mean of `losses_of`."""
    return losses_of(model, tokens).mean()


def losses_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the cross-entropy [word] of every token after BOS, up to the first EOS.

    In a list, only tokens that follow a repeated word count, because the others are random.
    """
    read = tokens[:, :-1]
    again = (tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(-1)
    again = again[:, 1:] & again[:, :-1]
    listed = torch.isin(tokens[:, 1:2], torch.tensor(sorted(LISTED), device=tokens.device))
    scored = (read != vocabulary()[EOS]) & (again | ~listed)
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits[scored], tokens[:, 1:][scored], reduction="none")


@torch.no_grad()
def differences(model: LlamaForCausalLM, pairs: Contrast) -> Tensor:
    """Return the right answer's logit minus the wrong answer's, after each clean prompt."""
    batch = tokenizer()(list(pairs.clean), padding=True, return_tensors="pt").to(model.device)
    last = batch["attention_mask"].sum(1) - 1
    logits = model(**batch).logits[torch.arange(len(pairs)), last].cpu()
    right, wrong = torch.tensor(pairs.answers), torch.tensor(pairs.wrong)
    return (logits.gather(1, right) - logits.gather(1, wrong))[:, 0]
