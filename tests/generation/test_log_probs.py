"""Log-probabilities of outputs are those of the model: the log-softmax of its logits in one forward pass. Also
the bytes of tokens, with which the server returns them."""

from __future__ import annotations

from typing import Any

import pytest
import small_tokenizers
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from mode_cases import BUILT_IN, small_call
from workers import TOKENIZER

import hf_parallel
from hf_parallel.detokenizer import token_bytes
from hf_parallel.engine import Engine
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.sampling.log_probs import TopLogProbs

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "seed": None},
    "greedy with a bias": {"do_sample": False, "seed": None, "sequence_bias": [[[5], 9.0]]},
    "plain": {"top_k": 0},
    "cold": {"temperature": 0.3, "top_k": 0},
    "top-p": {"temperature": 1.5, "top_p": 0.6},
    "penalties": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
}
IDS, MASK = tiny.left_pad(tiny.make_prompts([6, 3], seed=3))


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_parallel.enable(tiny.build("llama"))


def expected(model: Any, output: Any) -> torch.Tensor:
    """Log-probabilities of the new tokens by a forward pass per row, NaN after its end."""
    values, begin = (
        torch.full((len(output.sequences), output.sequences.shape[1] - IDS.shape[1]), torch.nan),
        IDS.shape[1],
    )
    for row, end in enumerate(output.record.lengths):
        ids = torch.cat((torch.from_numpy(output.record.prompts[row]), output.sequences[row, begin:end]))
        log_probs = model(ids[None]).logits[0, begin - end - 1 : -1].log_softmax(-1)
        values[row, : end - begin] = log_probs.gather(1, ids[begin - end :, None])[:, 0]
    return values


@pytest.mark.parametrize("name", SETTINGS)
def test_log_probs_are_those_of_one_forward_pass(name: str, model: Any) -> None:
    """Of lone calls, replays with and without drafts, and requests that sample together."""
    call = {"do_sample": True, "seed": 2, "max_new_tokens": 7, "return_dict_in_generate": True, **SETTINGS[name]}
    call |= {"attention_mask": MASK, "num_return_sequences": 1 if name.startswith("greedy") else 2}
    cache, top = hf_parallel.LogitsCache(), TopLogProbs(3)
    outputs = [model.generate(IDS, generation_mode="shared_prefix", logits_processor=[top], **call)]
    for policy in ("stepwise", "stepwise", "hotspot"):
        settings = {"logits_cache": cache, "replay": policy, "draft_tokens": 4}
        outputs.append(model.generate(IDS, generation_mode="resample", **settings, **call))
    del call["attention_mask"], call["return_dict_in_generate"]
    with Engine(model) as engine:
        prompt = {"input_ids": IDS, "attention_mask": MASK}
        others = [{**call, **SETTINGS[other]} for other in SETTINGS if not other.startswith("greedy")]
        requests = [engine.submit(prompt, **one) for one in (call, *others)]
        outputs += [request.result() for request in requests]
    for output in outputs:
        values = expected(model, output)
        torch.testing.assert_close(output.log_probs, values, atol=2e-4, rtol=1e-4, equal_nan=True)
        found = output.record.sampled_log_probs()[1]
        assert sorted(found.tolist()) == sorted(output.log_probs[~output.log_probs.isnan()].tolist())
    first, begin = outputs[0], IDS.shape[1]
    for row, end in enumerate(first.record.lengths):
        found = [top.get(row, index) for index in range(end - begin)]
        assert [one.log_prob for one in found] == first.log_probs[row, : end - begin].tolist()
        logits = model(
            first.sequences[row : row + 1, :end], attention_mask=mask_of(row // call["num_return_sequences"], end)
        ).logits
        best = logits[0, begin - 1 : -1].log_softmax(-1).topk(3)
        assert [[token for token, _ in one.top] for one in found] == best.indices.tolist()
        assert [[value for _, value in one.top] for one in found] == [
            pytest.approx(one, abs=2e-4) for one in best.values.tolist()
        ]


@pytest.mark.parametrize("mode", BUILT_IN)
def test_records_and_sums_have_the_tokens_that_were_sampled(mode: str, model: Any) -> None:
    """A row that ends early has a sum, and inserted tokens have no value."""
    call = {**small_call(mode), "tokenizer": TOKENIZER, "attention_mask": MASK, "return_dict_in_generate": True}
    output = model.generate(IDS, **call)
    by_answer = [record["log_probs"] for record in output.to_records(log_probs=True)]
    merges = output.record.config.traits.merges_rows
    by_row = [row for rows in by_answer for row in rows] if merges else by_answer
    for row, values in enumerate(by_row):
        assert len(values) == output.record.lengths[row] - output.record.begin
        assert [value is not None for value in values] == output.log_probs_mask[row, : len(values)].tolist()
        assert not output.log_probs_mask[row, len(values) :].any()
        total = sum(value for value in values if value is not None)
        assert float(output.log_probs[row].nansum()) == pytest.approx(total, rel=1e-4)
    assert len(by_row) == len(output.sequences)
    assert all("log_probs" not in record for record in output.to_records())


def mask_of(prompt: int, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(MASK[prompt : prompt + 1], (0, length - MASK.shape[1]), value=1)


ALPHABETS = {"Latin": "aAnzß é.", "Cyrillic and Greek": "жЯшё ωΣή", "CJK": "東京大阪、가", "emoji": "😀🥨👩\u200d🇩 x"}


@pytest.mark.parametrize("alphabet", ALPHABETS.values(), ids=ALPHABETS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "wordpiece"])
@given(data=st.data())
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str, alphabet: str, data: st.DataObject) -> None:
    """Whole or parts of characters; special tokens have their names, and ids that the tokenizer lacks none."""
    tokenizer = small_tokenizers.make(kind)
    tokens = encode(tokenizer, data.draw(st.text(alphabet, min_size=1).filter(str.strip)))
    before = encode(tokenizer, "a")[-1:]
    found = token_bytes(tokenizer, tokens[:1], []) + token_bytes(tokenizer, tokens[1:], before)
    assert b"".join(found) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False).encode()
    assert token_bytes(tokenizer, [tokenizer.eos_token_id, len(tokenizer), 10**6], []) == [b"</s>", b"", b""]
