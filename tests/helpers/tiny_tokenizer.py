"""A tokenizer for the tiny models: printable characters, the newline, and a few words."""

from __future__ import annotations

from tiny import VOCAB_SIZE
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of `VOCAB_SIZE` tokens."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    characters = [*map(chr, range(32, 127)), "\n"]
    words = [f"word{i}" for i in range(VOCAB_SIZE - len(special) - len(characters))]
    vocabulary = {token: i for i, token in enumerate([*special, *characters, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


TOKENIZER = make_tokenizer()
