"""Tokenizers of several kinds, trained on a few lines of text, and a small random model for any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CORPUS = [
    "Let us look at each student. ####Anna Berg:......\n####Tom Hill:......\n####%%%% So Anna wins.",
    "Question: which city is colder, Oslo or Rome? Answer:\nOslo. GPA 4.09, 2.45 and 3.68 in 2024.",
    "Grüße aus Köln, 東京と大阪, and smileys 😀😀. Cost: 10:30, noise: none.\n\n#### Heading\n* one\n* two",
] * 4
SPECIAL = ["<pad>", "<s>", "</s>"]


class Fixed:
    """A tokenizer with given tokens."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.texts.index(text)]}

    def decode(self, tokens: Sequence[int], **kwargs: Any) -> str:
        return "".join(self.texts[token] for token in tokens)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)


def _byte_level(*before: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    """Like GPT-2's: tokens are byte sequences, which may end inside a character."""
    return _byte_level()


def single_digits() -> Tokenizer:
    """Like Llama 3's: every digit is a token."""
    return _byte_level(pre_tokenizers.Digits(individual_digits=True))


def sentencepiece() -> Tokenizer:
    """Like Llama 2's: a space is part of the next word, a text begins with one, unknown characters are bytes."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:#%,?*", "\n"]
    merges = [("#", "#"), ("##", "##"), ("▁", "####"), (".", "."), ("..", "."), ("...", "..."), ("▁", "......")]
    merges += [("%", "%"), ("%%", "%%"), ("▁", "A"), ("▁A", "n"), ("▁An", "n"), ("▁", "t"), ("▁", ":"), ("e", "r")]
    for piece in [*pieces, *("".join(pair) for pair in merges)]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def _characters(*merges: tuple[str, str]) -> Tokenizer:
    """Make a tokenizer of ASCII characters and some merges."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, "\n", *map(chr, range(32, 127))])}
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, list(merges)))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def split_marker() -> Tokenizer:
    """Splits `####` into `##` `##`, and `......` into two tokens."""
    return _characters(("#", "#"), (".", "."), ("..", "."), ("%", "%"), ("%%", "%"))


def merged_colon() -> Tokenizer:
    """Merges a colon with the next newline or the previous letter, and a comma with a `#`."""
    merges = [(",", "#"), (":", "\n"), ("r", ":"), (" ", "A"), (":", "."), (":.", "."), (".", "\n"), (".", ".")]
    return _characters(*merges, ("\n", "#"), ("#", "#"), ("##", "#"), (":", ":"), ("%", "\n"))


def wordpiece() -> Tokenizer:
    """Like BERT's: a token continues a word only if its name begins with `##`; unknown words are one token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = [byte_level, sentencepiece, split_marker, merged_colon, single_digits]
"""Five tokenizers of different kinds."""


@cache
def make(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of that name."""
    return _wrap({kind.__name__: kind for kind in (*KINDS, wordpiece)}[name]())


def small_llama(tokenizer: Any, **settings: Any) -> LlamaForCausalLM:
    """Return a random model of two layers for a tokenizer, with its special tokens; `settings` as of `LlamaConfig`."""
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        **tokens,
        **settings,
    )
    return LlamaForCausalLM(config).eval()
