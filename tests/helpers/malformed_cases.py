"""Malformed calls as data: the call, the error that it must raise (or None), and a part of the message.

`test_malformed.py` runs them. A valid call may have to equal plain `generate` with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tiny import PAD, VOCAB_SIZE, build, left_pad, make_prompts
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import CompileConfig, GenerationConfig, PreTrainedTokenizerFast

from hf_parallel import SharedPrefixConfig

PROMPTS = make_prompts([7, 4])
ONE = PROMPTS[0][None]
BATCH, MASK = left_pad(PROMPTS)
ONES = torch.ones_like(ONE)
HOLE = torch.tensor([[1, 1, 0, 1, 0, 0, 1]])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of `VOCAB_SIZE` tokens: printable characters, the newline, and a few words."""
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
DEFAULTS: dict[str, dict[str, Any]] = {
    "plain": {"input_ids": ONE, "max_new_tokens": 4, "do_sample": False},
}
DEFAULTS["shared_prefix"] = {**DEFAULTS["plain"], "generation_mode": "shared_prefix"}
DEFAULTS["hogwild"] = {
    **DEFAULTS["plain"],
    "generation_mode": "hogwild",
    "tokenizer": TOKENIZER,
    "history_header": "\nAll:\n",
    "others_header": "\nOthers:\n",
    "own_header": "\nI:\n",
    "finisher_prompt": "\nIt is \\boxed{",
    "finisher_tokens": 2,
}
DROP = object()
"""Value that removes an argument of the mode's defaults."""


@dataclass(frozen=True)
class Fresh:
    """An argument that is created for each call, because it counts its own calls."""

    make: Callable[[], Any]


Errors = type[BaseException] | tuple[type[BaseException], ...] | None


@dataclass(frozen=True)
class Case:
    """One call.

    `call` receives the enabled model. It must raise `error` with `says` in its message. None: the call is valid, and
    plain `generate` must return the same with the arguments `like`.
    """

    name: str
    call: Callable[[Any], Any]
    error: Errors = None
    says: str = ""
    like: dict[str, Any] | None = None


def _generate(mode: str, name: str, error: Errors, says: str, given: dict[str, Any], like: bool) -> Case:
    arguments = {k: v for k, v in {**DEFAULTS[mode], **given}.items() if v is not DROP}
    positional = arguments.pop("args", ())

    def call(model: Any) -> Any:
        made = {k: v.make() if isinstance(v, Fresh) else v for k, v in arguments.items()}
        return model.generate(*positional, **made)

    if not like:
        return Case(f"{mode}: {name}", call, error, says)
    by_name = {**arguments, **dict(zip(("inputs", "generation_config"), positional, strict=False))}
    return Case(f"{mode}: {name}", call, like={k: v for k, v in by_name.items() if k not in _MODE_ARGUMENTS})


_MODE_ARGUMENTS = {"generation_mode", "parallel_config", *SharedPrefixConfig.fields()}


def shared(name: str, error: Errors = None, says: str = "", /, **given: Any) -> Case:
    """A call of shared_prefix; if it works it gives what plain `generate` gives."""
    return _generate("shared_prefix", name, error, says, given, like=error is None)


def plain(name: str, error: Errors = None, says: str = "", /, **given: Any) -> Case:
    """A call without a mode unless `given` has one; a valid one equals plain `generate`."""
    return _generate("plain", name, error, says, given, like=error is None)


def hogwild(name: str, error: Errors = None, says: str = "", /, **given: Any) -> Case:
    """A call of hogwild."""
    return _generate("hogwild", name, error, says, given, like=False)


def both(name: str, error: Errors = None, says: str = "", /, **given: Any) -> list[Case]:
    """The same call in both modes."""
    return [shared(name, error, says, **given), hogwild(name, error, says, **given)]


INPUTS = [
    *both("input_ids as lists", TypeError, "Tensor", input_ids=ONE.tolist()),
    *both("input_ids as text", TypeError, "Tensor", input_ids="some text"),
    shared("input_ids as numpy", TypeError, "ndarray", input_ids=ONE.numpy()),
    shared("a whole encoding as input_ids", TypeError, "Tensor", input_ids=TOKENIZER("a b", return_tensors="pt")),
    *both("input_ids of floats", ValueError, "int64", input_ids=ONE.float()),
    shared("input_ids of bools", ValueError, "int64", input_ids=ONE.bool()),
    shared("input_ids of int16", ValueError, "int64", input_ids=ONE.to(torch.int16)),
    shared("input_ids of complex numbers", ValueError, "int64", input_ids=ONE.to(torch.complex64)),
    shared("input_ids of int32", input_ids=ONE.int()),
    *both("input_ids of one dimension", ValueError, "[rows, length]", input_ids=ONE[0]),
    shared("input_ids of three dimensions", ValueError, "[rows, length]", input_ids=ONE[None]),
    shared("input_ids of no dimension", ValueError, "[rows, length]", input_ids=ONE[0, 0]),
    *both("an empty prompt", ValueError, "at least one token", input_ids=ONE[:, :0]),
    shared("no rows", ValueError, "at least one token", input_ids=ONE[:0]),
    *both("a token outside the vocabulary", ValueError, "vocabulary", input_ids=ONE + VOCAB_SIZE),
    *both("a negative token", ValueError, "vocabulary", input_ids=-ONE),
    shared("the largest int64 as a token", ValueError, "vocabulary", input_ids=torch.full((1, 3), 2**63 - 1)),
    *both("input_ids on the meta device", ValueError, "meta", input_ids=ONE.to("meta")),
    shared("sparse input_ids", ValueError, "sparse", input_ids=ONE.to_sparse()),
    shared("inputs and input_ids", ValueError, "input_ids", inputs=ONE),
    shared("inputs twice", TypeError, "inputs", args=(ONE,), inputs=ONE, input_ids=DROP),
    shared("inputs by position", args=(ONE,), input_ids=DROP),
    shared("inputs as lists by position", TypeError, "inputs", args=(ONE.tolist(),), input_ids=DROP),
    shared("no input_ids: it begins with bos", input_ids=None),
    hogwild("no input_ids: it begins with bos", input_ids=None),
    shared("input_ids that lie column by column", input_ids=BATCH.T.contiguous().T, attention_mask=MASK),
    shared("input_ids of stride 0", input_ids=ONE.expand(3, -1)),
    shared("a prompt of one token", input_ids=ONE[:, :1]),
    hogwild("a prompt of one token", input_ids=ONE[:, :1]),
    shared("nothing but padding, no mask", ValueError, "empty", input_ids=torch.full((1, 4), PAD)),
    shared("padding on the right, no mask", ValueError, "right", input_ids=torch.cat((ONE, ONE * 0), dim=1)),
    shared("inputs_embeds", ValueError, "inputs_embeds", inputs_embeds=torch.zeros(1, 7, 64)),
    shared("inputs_embeds alone", ValueError, "inputs_embeds", inputs_embeds=torch.zeros(1, 7, 64), input_ids=DROP),
]

MASKS = [
    *both("attention_mask as a list", TypeError, "attention_mask", attention_mask=[[1] * 7]),
    shared("attention_mask as numpy", TypeError, "attention_mask", attention_mask=ONES.numpy()),
    shared("attention_mask as text", TypeError, "attention_mask", attention_mask="causal"),
    *both("attention_mask of another length", ValueError, "attention_mask", attention_mask=ONES[:, :5]),
    shared("attention_mask of more rows", ValueError, "attention_mask", attention_mask=ONES.expand(3, -1)),
    shared("attention_mask of one dimension", ValueError, "attention_mask", attention_mask=ONES[0]),
    shared("attention_mask of four dimensions", ValueError, "attention_mask", attention_mask=ONES[None, None]),
    shared("attention_mask without ids", ValueError, "attention_mask", input_ids=None, attention_mask=ONES),
    *both("all is masked", ValueError, "empty", attention_mask=ONES * 0),
    shared("one row is masked", ValueError, "row 1", input_ids=BATCH, attention_mask=MASK * torch.tensor([[1], [0]])),
    shared("holes in the mask", attention_mask=HOLE),
    hogwild("holes in the mask", attention_mask=HOLE),
    shared("holes in one row of two", input_ids=BATCH, attention_mask=torch.cat((HOLE, MASK[1:]))),
    shared("only the last token is seen", attention_mask=torch.tensor([[0] * 6 + [1]])),
    shared("a mask of floats", input_ids=BATCH, attention_mask=MASK.float()),
    shared("a mask of bools", input_ids=BATCH, attention_mask=MASK.bool()),
    shared("a mask of int8", input_ids=BATCH, attention_mask=MASK.to(torch.int8)),
    shared("an additive mask", ValueError, "0 and 1", attention_mask=(ONES - 1.0).masked_fill(ONES < 0, -1e9) - 1e9),
    shared("a mask of segment numbers", ValueError, "0 and 1", attention_mask=torch.tensor([[1, 1, 1, 2, 2, 2, 2]])),
    shared("a mask with NaN", ValueError, "0 and 1", attention_mask=ONES * torch.nan),
    shared("a mask on the meta device", ValueError, "meta", attention_mask=ONES.to("meta")),
]

POSITIONS = [
    shared("the right position_ids", position_ids=torch.arange(7)[None]),
    shared("one row of position_ids for two", input_ids=ONE.expand(2, -1), position_ids=torch.arange(7)[None]),
    *both("shifted position_ids", ValueError, "position_ids", position_ids=torch.arange(7)[None] + 3),
    shared("position_ids as a list", TypeError, "position_ids", position_ids=[list(range(7))]),
    shared("position_ids of another length", ValueError, "position_ids", position_ids=torch.arange(5)[None]),
    shared("position_ids of no dimension", ValueError, "position_ids", position_ids=torch.tensor(3)),
    shared("position_ids of three dimensions", ValueError, "position_ids", position_ids=torch.arange(7)[None, None]),
    shared("position_ids of floats", ValueError, "position_ids", position_ids=torch.arange(7.0)[None]),
    shared("position_ids of too many rows", ValueError, "position_ids", position_ids=torch.zeros(3, 7).long()),
    shared("position_ids on the meta device", ValueError, "meta", position_ids=torch.zeros(1, 7).long().to("meta")),
]


def _custom_generate(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return input_ids


REFUSED_ARGUMENTS = [
    *both("beams", ValueError, "num_beams", num_beams=4),
    shared("beams with sampling", ValueError, "num_beams", num_beams=2, do_sample=True),
    shared("beams as text", ValueError, "num_beams", num_beams="two"),
    shared("beam groups", ValueError, "num_beam_groups", num_beam_groups=2),
    shared("contrastive search", ValueError, "penalty_alpha", penalty_alpha=0.6, top_k=4),
    shared("DoLa", ValueError, "dola_layers", dola_layers="high"),
    shared("constraints", ValueError, "constraints", constraints=[object()]),
    shared("forced words", ValueError, "force_words_ids", force_words_ids=[[5]]),
    *both("prompt lookup", ValueError, "prompt_lookup_num_tokens", prompt_lookup_num_tokens=3),
    shared("an assistant model", ValueError, "assistant_model", assistant_model=build("llama")),
    shared("an early exit", ValueError, "assistant_early_exit", assistant_early_exit=2),
    *both("guidance", ValueError, "guidance_scale", guidance_scale=1.5),
    shared("a negative prompt", ValueError, "negative_prompt_ids", negative_prompt_ids=ONE),
    shared("a negative mask", ValueError, "negative_prompt_attention_mask", negative_prompt_attention_mask=ONES),
    shared("a static cache", cache_implementation="static"),
    shared("a hybrid cache", cache_implementation="hybrid"),
    shared("an offloaded cache", ValueError, "cache_implementation", cache_implementation="offloaded"),
    shared("a paged cache", ValueError, "cache_implementation", cache_implementation="paged"),
    shared("an unknown cache", ValueError, "cache_implementation", cache_implementation="magic"),
    *both("no cache", use_cache=False),
    shared("logits_to_keep by default", logits_to_keep=0),
    shared("processors by position", args=(ONE, None, []), input_ids=DROP),
    *both("attentions", ValueError, "output_attentions", output_attentions=True, return_dict_in_generate=True),
    shared("attentions that are not returned", output_attentions=True),
    shared("hidden states that are not returned", output_hidden_states=True),
    shared(
        "hidden states", ValueError, "generation_mode=None", output_hidden_states=True, return_dict_in_generate=True
    ),
    shared("multi-token prediction", ValueError, "use_mtp", use_mtp=True),
    shared("a compiled model", ValueError, "compile_config", compile_config=CompileConfig()),
    shared("token healing", ValueError, "token_healing", token_healing=True, tokenizer=TOKENIZER),
    *both("several GPUs in step", ValueError, "synced_gpus", synced_gpus=True),
    shared("custom_generate from the Hub", ValueError, "custom_generate", custom_generate="someone/something"),
    shared("custom_generate of the caller's", ValueError, "custom_generate", custom_generate=_custom_generate),
    shared("labels", ValueError, "labels", labels=ONE),
    shared("logits_to_keep", ValueError, "logits_to_keep", logits_to_keep=3),
    shared("encoder outputs", ValueError, "encoder_outputs", encoder_outputs=(torch.zeros(1, 7, 64),)),
    shared("images", ValueError, "'pixel_values' (got a tensor [1, 3, 4, 4])", pixel_values=torch.zeros(1, 3, 4, 4)),
    *both("an adapter per row", ValueError, "adapter_names", adapter_names=["a"]),
    shared("token types", ValueError, "token_type_ids", token_type_ids=ONES),
    shared("synced_gpus by position", ValueError, "by name", args=(ONE, None, [], [], None, False), input_ids=DROP),
    shared("beams in the generation config", ValueError, "num_beams", generation_config=GenerationConfig(num_beams=3)),
]

NUMBERS = [
    *both("no new tokens", ValueError, "max_new_tokens", max_new_tokens=0),
    *both("fewer than no new tokens", ValueError, "max_new_tokens", max_new_tokens=-1),
    *both("new tokens as text", (TypeError, ValueError), "max_new_tokens", max_new_tokens="8"),
    shared("two and a half new tokens", ValueError, "max_new_tokens", max_new_tokens=2.5),
    shared("as many new tokens as True", ValueError, "max_new_tokens", max_new_tokens=True),
    shared("a numpy integer of new tokens", max_new_tokens=np.int64(3)),
    *both("max_length below the prompt", ValueError, "max_length", max_new_tokens=None, max_length=3),
    shared("max_length of the prompt", ValueError, "max_length", max_new_tokens=None, max_length=7),
    shared("max_length as text", ValueError, "max_length", max_new_tokens=None, max_length="long"),
    shared("fewer tokens than none at least", ValueError, "min_new_tokens", min_new_tokens=-2),
    shared("min_new_tokens as text", ValueError, "min_new_tokens", min_new_tokens="x"),
    shared("min_length as text", ValueError, "min_length", min_length="x"),
    shared("more tokens at least than at most", min_new_tokens=9),
    *both("no sequences", ValueError, "num_return_sequences", num_return_sequences=0, do_sample=True),
    shared("less than no sequences", ValueError, "num_return_sequences", num_return_sequences=-1, do_sample=True),
    shared("sequences as text", ValueError, "num_return_sequences", num_return_sequences="2", do_sample=True),
    shared("two and a half sequences", ValueError, "num_return_sequences", num_return_sequences=2.5, do_sample=True),
    *both("two greedy sequences", ValueError, "num_return_sequences", num_return_sequences=2),
    hogwild("two sampled problems", num_return_sequences=2, do_sample=True),
    *both("temperature 0", ValueError, "temperature", do_sample=True, temperature=0.0),
    shared("temperature 0 without sampling", temperature=0.0),
    *both("negative temperature", ValueError, "temperature", do_sample=True, temperature=-1.0),
    shared("temperature as text", ValueError, "temperature", do_sample=True, temperature="hot"),
    shared("top_k below 0", ValueError, "top_k", do_sample=True, top_k=-1),
    shared("top_k as text", ValueError, "top_k", do_sample=True, top_k="x"),
    shared("top_p above 1, which keeps all", do_sample=True, top_p=2.0),
    shared("top_p below 0", ValueError, "top_p", do_sample=True, top_p=-0.5),
    shared("top_p as text", ValueError, "top_p", do_sample=True, top_p="x"),
    shared("min_p below 0", ValueError, "min_p", do_sample=True, min_p=-0.5),
    shared("min_p as text", ValueError, "min_p", do_sample=True, min_p="x"),
    shared("typical_p as text", ValueError, "typical_p", do_sample=True, typical_p="x"),
    shared("repetition_penalty 0", ValueError, "penalty", repetition_penalty=0.0),
    shared("repetition_penalty as text", ValueError, "penalty", repetition_penalty="x"),
    shared("no_repeat_ngram_size as text", ValueError, "no_repeat_ngram_size", no_repeat_ngram_size="x"),
    *both("do_sample as text", ValueError, "do_sample", do_sample="yes"),
    shared("output_scores as text", ValueError, "output_scores", output_scores="all"),
    shared("return_dict_in_generate as text", ValueError, "return_dict", return_dict_in_generate="yes"),
    shared("eos as text", ValueError, "eos_token_id", eos_token_id="</s>"),
    shared("eos of floats", ValueError, "eos_token_id", eos_token_id=[1.5]),
    shared("eos outside the vocabulary", eos_token_id=10**6),
    shared("negative eos", eos_token_id=-1),
    shared("no eos", eos_token_id=[]),
    shared("pad as text", ValueError, "pad_token_id", pad_token_id="<pad>"),
    shared("pad as a list", ValueError, "pad_token_id", pad_token_id=[0, 1]),
    shared("no pad and no eos", pad_token_id=None, eos_token_id=None),
    shared("bos as text", ValueError, "bos_token_id", bos_token_id="<s>", input_ids=None),
    shared("prefill chunks of 0", ValueError, "prefill_chunk_size", prefill_chunk_size=0),
    shared("prefill chunks below 0", ValueError, "prefill_chunk_size", prefill_chunk_size=-3),
    shared("prefill chunks as text", ValueError, "prefill_chunk_size", prefill_chunk_size="x"),
    shared("prefill chunks of 1", prefill_chunk_size=1),
    shared("max_time as text", ValueError, "max_time", max_time="soon"),
    shared("max_time that is over", max_time=-1.0),
    shared("stop_strings without a tokenizer", ValueError, "tokenizer", stop_strings=["x"]),
    shared("stop_strings of another type", ValueError, "stop_strings", stop_strings=5, tokenizer=TOKENIZER),
    shared("bad_words_ids of another type", ValueError, "bad_words_ids", bad_words_ids="x"),
    *both(
        "a forced eos outside the vocabulary",
        ValueError,
        "forced_eos_token_id must be token ids below",
        forced_eos_token_id=10**6,
    ),
    shared("a negative forced eos", ValueError, "forced_eos_token_id", forced_eos_token_id=[5, -1]),
    shared("a forced eos as text", ValueError, "forced_eos_token_id", forced_eos_token_id="</s>"),
    shared("forced eos tokens", forced_eos_token_id=torch.tensor([5, 6])),
    shared("a forced bos outside the vocabulary, which is not used", forced_bos_token_id=10**6),
    shared(
        "a forced bos outside the vocabulary",
        ValueError,
        "forced_bos_token_id",
        forced_bos_token_id=10**6,
        input_ids=ONE[:, :1],
    ),
    shared("suppressed tokens as an array", suppress_tokens=np.array([5, 6])),
    shared("suppressed tokens as text", ValueError, "suppress_tokens", suppress_tokens="x"),
    shared("one token to suppress at the beginning", ValueError, "begin_suppress_tokens", begin_suppress_tokens=5),
    *both(
        "a length penalty as text",
        ValueError,
        "exponential_decay_length_penalty must be a pair",
        exponential_decay_length_penalty="x",
    ),
    shared(
        "a length penalty of one number",
        ValueError,
        "exponential_decay_length_penalty",
        exponential_decay_length_penalty=(1,),
    ),
    shared(
        "a length penalty of texts",
        ValueError,
        "exponential_decay_length_penalty",
        exponential_decay_length_penalty=(2, "b"),
    ),
    shared("a length penalty", exponential_decay_length_penalty=(2, 1.1)),
    shared("a length penalty from a float", exponential_decay_length_penalty=(2.0, 1.1)),
    *both("a number as watermark", ValueError, "watermarking_config must be a Watermark", watermarking_config=5),
    shared("a watermark as a dict", watermarking_config={"bias": 1.0}),
    shared(
        "encoder_no_repeat_ngram_size as text",
        ValueError,
        "encoder_no_repeat_ngram_size",
        encoder_no_repeat_ngram_size="x",
    ),
    shared("generation_config as a dict", TypeError, "generation_config", generation_config={"max_new_tokens": 3}),
    hogwild("generation_config as text", TypeError, "generation_config", generation_config="greedy"),
    shared("generation_config as a class", TypeError, "generation_config", generation_config=GenerationConfig),
]

CASES = [*INPUTS, *MASKS, *POSITIONS, *REFUSED_ARGUMENTS, *NUMBERS]
