"""Training layouts: logits of a recorded run, gradients of trees, batches for `Trainer`."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from architectures import ARCHITECTURES
from ascii_tokenizer import AsciiTokenizer
from mode_cases import small_call
from small_tokenizers import make
from torch.nn import functional as F

import hf_parallel
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.decoding.host import LocalHost
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS
from hf_parallel.generation.sampling.sampler import SamplingTask
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.training import (
    DataCollatorForParallel,
    ParallelExample,
    prepare_model,
    teacher_forced_logits,
    tree_logprobs,
)
from hf_parallel.training.dialects import Dialect
from hf_parallel.training.layout import make_views
from hf_parallel.training.masks import stock_mask

pytestmark = [pytest.mark.filterwarnings("ignore")]

IDS = tiny.make_prompts([9], seed=4)[0][None]
SINGLE = (
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "longcat_flash"),
    *("gemma4_text-26b", "phimoe", "mimo_v2_flash", "minimax_m2", "glm4_moe", "hy_v3", "afmoe", "cohere2_moe", "dots1"),
    *("exaone_moe", "laguna", "solar_open", "llama4_text"),
)
"""Models whose experts have no kernel in float64."""
NO_BATCHES = ("llama4_text", "ministral3")  # attention in chunks; queries scaled by their position


def enabled(name: str = "llama") -> Any:
    """Return a tiny model in float64 where possible."""
    model = copy.deepcopy(tiny.build(name))
    return hf_parallel.enable(model if name in SINGLE else model.double())


@contextmanager
def computed_logits() -> Iterator[list[torch.Tensor]]:
    """Collect the logits from which tokens are sampled, in the model's dtype, unlike `output.logits`."""
    computed: list[torch.Tensor] = []
    plain = LocalHost._sample

    def spy(host: LocalHost, task: SamplingTask, logits: torch.Tensor) -> Any:
        computed.append(logits)
        return plain(host, task, logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalHost, "_sample", spy)
        yield computed


def run(model: Any, mode: str, **settings: Any) -> tuple[ParallelExample, torch.Tensor]:
    """Return a sampled run, and the logits that the model computed for each sampled token, `[N, vocabulary]`."""
    call = {**small_call(mode), "max_new_tokens": 30, "tokenizer": AsciiTokenizer(), "do_sample": True, **settings}
    with computed_logits() as computed:
        output = model.generate(IDS, return_dict_in_generate=True, **call)
    return ParallelExample.from_output(output), torch.cat(computed)


def hogwild(model: Any, **settings: Any) -> tuple[ParallelExample, torch.Tensor]:
    return run(model, "hogwild", **{"num_workers": 2, "finisher_tokens": 0, **settings})


def difference(model: Any, example: ParallelExample, expected: torch.Tensor) -> float:
    with torch.no_grad():
        logits = teacher_forced_logits(model, example)
    return float((logits[torch.from_numpy(example.target_queries)] - expected).abs().max())


@pytest.mark.parametrize("name", tiny.each(name for name in ARCHITECTURES if name not in NO_BATCHES))
def test_logits_of_a_run_of_workers_are_computed_again_in_one_pass(name: str) -> None:
    model = enabled(name)
    try:
        example, expected = hogwild(model, max_new_tokens=12)
    except UnsupportedModelError:
        pytest.skip("hogwild rotates keys")
    assert difference(model, example, expected) < (1e-4 if name in SINGLE else 1e-9)
    assert len(make_views(example)) == 3


def fork_join(positions: str) -> dict[str, Any]:
    """Return settings in whose dialect a random model opens forks, nested ones too."""
    dialect = {"region": ["a", "b"], "branch": ["c", "d"], "positions": positions, "gap": "\n"}
    return {
        "dialect": dialect,
        "opening": "a",
        "sequence_bias": {(ord("a"),): 4.0, (ord("d"),): 4.0},
        "max_new_tokens": 100,
        "seed": 3,
    }


PDOS = {"opening": "", "titles": ["a", "b"], "branch_max_new_tokens": 6, "max_new_tokens": 80}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{layout: ("hogwild", {"layout": layout, "num_workers": 3, "max_new_tokens": 60}) for layout in LAYOUTS},
    "steps computed again": ("hogwild", {"step_move": "reencode", "num_workers": 3, "max_new_tokens": 60}),
    "early finisher": ("hogwild", {"num_workers": 2, "max_new_tokens": 12, "finisher_tokens": 5}),
    **{join: ("pdos", {**PDOS, "join": join}) for join in ("reencode", "rotate")},
    **{mode: (mode, {}) for mode in ("self_consistency", "skeleton_of_thought")},
    **{f"forks, {name}": ("fork_join", fork_join(name)) for name in ("depth", "overlap", "reencode")},
}


@pytest.mark.parametrize(("mode", "settings"), RUNS.values(), ids=RUNS)
def test_logits_of_a_run_of_each_mode_are_computed_again(mode: str, settings: dict[str, Any]) -> None:
    model = enabled()
    example, expected = run(model, mode, **settings)
    assert difference(model, example, expected) < 1e-9
    if mode == "hogwild":
        assert len(make_views(example)) <= 1 + settings["num_workers"]


def test_an_example_survives_a_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    example, _ = hogwild(enabled())
    stored = datasets.Dataset.from_list([example.to_dict()])[0]
    assert all(
        np.array_equal(getattr(ParallelExample.from_dict(stored), name), values)
        for name, values in vars(example).items()
    )


TREE = ParallelExample.from_tree([[5, 6, 7]] * 2, [[8, 9], [10]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("position_ids", [0, 1]), ("view_blocks", [0, 0]), ("target_queries", [2, 9, 2]), ("view_stops", None)),
        ("input_ids", [5, 6, -1, 8]),
    ],
)
def test_damaged_examples_raise(name: str, value: list[int] | None) -> None:
    values = {**TREE.to_dict(), name: value}
    if value is None:
        del values[name]
    with pytest.raises(ValueError, match=name):
        ParallelExample.from_dict(values)


def test_a_run_that_was_partly_cached_before_has_no_trace() -> None:
    model = enabled()
    given = {"logits_cache": hf_parallel.LogitsCache()}, {"past_key_values": hf_parallel.SharedPrefixCache()}
    for settings in given:
        with pytest.raises(ValueError, match="a run of self_consistency can be traced only without"):
            run(model, "self_consistency", **settings)


# Trees

PROMPT = tiny.make_prompts([25], seed=1)[0]
COMPLETIONS = tiny.make_prompts([6, 1, 9, 4], seed=2)
COMPLETIONS.append(torch.cat((COMPLETIONS[0][:4], COMPLETIONS[1])))


def full_logprobs(model: Any, prompt: torch.Tensor, completion: torch.Tensor) -> torch.Tensor:
    row = torch.cat((prompt, completion))[None]
    logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]


def gradients(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", tiny.each(name for name in ARCHITECTURES if name not in SINGLE))
def test_log_probabilities_of_a_tree_equal_those_of_rows(name: str) -> None:
    model = copy.deepcopy(tiny.build(name)).double()
    with torch.no_grad():
        tree = tree_logprobs(model, PROMPT, COMPLETIONS)
        rows = [full_logprobs(model, PROMPT, completion) for completion in COMPLETIONS]
    tolerance = 1e-6 if model.config._attn_implementation == "eager" else 1e-9  # eager softmax is in float32
    torch.testing.assert_close(tree, rows, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("name", "checkpointing"), [("llama", True), ("gpt_neox", False)])
def test_gradients_of_a_tree_equal_those_of_rows(name: str, checkpointing: bool) -> None:
    model = copy.deepcopy(tiny.build(name)).double()
    weights = [torch.rand(len(completion), dtype=torch.float64) for completion in COMPLETIONS]
    rows = gradients(
        model, sum((full_logprobs(model, PROMPT, c) * w).sum() for c, w in zip(COMPLETIONS, weights, strict=True))
    )
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    tree = gradients(
        model, sum((p * w).sum() for p, w in zip(tree_logprobs(model, PROMPT, COMPLETIONS), weights, strict=True))
    )
    exact = 1e-9 if name == "gpt_neox" else 1e-6  # other models normalize in float32
    assert (tree - rows).abs().max() < exact * rows.abs().max()


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "checkpoints", "reentrant checkpoints"])
def test_an_enabled_model_computes_a_tree_by_kernels_with_the_gradients_of_pytorch(
    name: str, reentrant: bool | None
) -> None:
    weights = [torch.rand(len(completion)) for completion in COMPLETIONS]

    def compute(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = tree_logprobs(model, PROMPT, COMPLETIONS)
        loss = sum((p * w).sum() for p, w in zip(log_probs, weights, strict=True))
        return torch.cat(log_probs).detach(), gradients(model, loss)

    expected, of_rows = compute(copy.deepcopy(tiny.build(name)))
    model = hf_parallel.enable(copy.deepcopy(tiny.build(name)))
    if reentrant is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found, of_tree = compute(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (of_tree - of_rows).norm() < 1e-4 * of_rows.norm()


def test_gradients_of_gradients_of_kernels_raise() -> None:
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    (log_probs,) = tree_logprobs(model, PROMPT, COMPLETIONS[:1])
    weight = model.model.layers[0].input_layernorm.weight
    (gradient,) = torch.autograd.grad(log_probs.sum(), [weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_malformed_trees_raise() -> None:
    model = tiny.build("llama")
    for prompt, completions in (([[5, 6]], [[7], [8]]), ([5], []), ([], [[7]]), (IDS, [[7]]), ([5], [[0.5]])):
        with pytest.raises(ValueError, match="prompts|completion"):
            tree_logprobs(model, prompt, completions)
    with pytest.raises(ValueError, match="temperature"):
        tree_logprobs(model, [5], [[7]], temperature=0)
    assert [len(values) for values in tree_logprobs(model, np.array([5]), [[], [7, 8]])] == [0, 2]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_masks_give_the_same_logits_to_every_stock_attention(name: str) -> None:
    model = copy.deepcopy(tiny.build(name))
    workers = ParallelExample.from_tree([PROMPT.tolist()] * 5, [c.tolist() for c in COMPLETIONS])
    branches, _ = run(hf_parallel.enable(copy.deepcopy(model)), "pdos", **PDOS)  # tokens in several blocks
    for example in (workers, branches):
        ids, positions = (torch.from_numpy(values)[None] for values in (example.input_ids, example.position_ids))
        expected = teacher_forced_logits(hf_parallel.enable(copy.deepcopy(model)), example)
        for implementation in ("sdpa", "eager"):
            model.set_attn_implementation(implementation)
            mask = stock_mask(example, model.config, torch.float32)
            with torch.no_grad():
                logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits[0]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


# Batches

TOKENIZER = make("split_marker")


def examples(model: Any) -> list[ParallelExample]:
    tree = ParallelExample.from_tree([PROMPT.tolist()] * 5, [c.tolist() for c in COMPLETIONS])
    return [hogwild(model)[0], hogwild(model, num_workers=1, max_new_tokens=9)[0], tree]


def mean_loss(model: Any, given: list[ParallelExample]) -> torch.Tensor:
    parts = [
        F.cross_entropy(
            teacher_forced_logits(model, e)[torch.from_numpy(e.target_queries)].float(),
            torch.from_numpy(e.target_ids),
            reduction="sum",
        )
        for e in given
    ]
    return sum(parts) / sum(len(e.target_ids) for e in given)


@pytest.mark.parametrize(("name", "checkpointing"), [("llama", True), ("gpt_neox", False)])
def test_a_batch_gives_the_loss_of_its_examples(name: str, checkpointing: bool) -> None:
    model = enabled(name)
    given = examples(model)
    expected = mean_loss(model, given)
    of_examples = gradients(model, expected)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    batch = DataCollatorForParallel(TOKENIZER)(given)
    assert int((batch["labels"] != -100).sum()) == sum(len(e.target_ids) for e in given)
    assert int(batch["attention_mask"].sum()) == sum(len(e.with_one_target_each()) for e in given)
    loss = prepare_model(model)(**batch, use_cache=False).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients(model, loss), of_examples, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_batch_can_be_computed_under_autocast(name: str) -> None:
    """There, queries and keys may be in float32, and values in bfloat16."""
    model = prepare_model(hf_parallel.enable(copy.deepcopy(tiny.build(name))))
    batch = DataCollatorForParallel(TOKENIZER)(examples(model))
    expected = model(**batch, use_cache=False).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch, use_cache=False).loss
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0)
    assert gradients(model, loss).isfinite().all()


def test_packed_examples_do_not_see_each_other() -> None:
    model = enabled()
    given = examples(model)
    packed = ParallelExample.pack(given)
    assert len(packed) == sum(map(len, given))
    with torch.no_grad():
        expected = torch.cat([teacher_forced_logits(model, example) for example in given])
        assert (teacher_forced_logits(model, packed) - expected).abs().max() < 1e-9
    rows = DataCollatorForParallel(TOKENIZER, packing=True, max_length=max(map(len, given)) + 20)(given)["input_ids"]
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        ("hogwild", {"num_workers": 2, "finisher_tokens": 6, "max_new_tokens": 14}),
        ("pdos", PDOS),
        ("fork_join", fork_join("depth")),
        ("self_consistency", {}),
        ("skeleton_of_thought", {}),
    ],
)
def test_the_part_of_a_prompt_is_an_example_of_its_own(mode: str, settings: dict[str, Any]) -> None:
    model, prompts = enabled(), torch.stack(tiny.make_prompts([9, 9], seed=4))
    call = {**small_call(mode), "max_new_tokens": 30, "do_sample": True, "tokenizer": AsciiTokenizer(), **settings}
    with computed_logits() as computed:
        output = model.generate(prompts, return_dict_in_generate=True, **call)
    both, expected = ParallelExample.from_output(output), torch.cat(computed)
    of_prompts = np.array([output.record.place(row)[0] for row in both.target_rows.tolist()])
    parts = [both.of_rows(both.target_rows[of_prompts == prompt]) for prompt in range(2)]
    assert sum(map(len, parts)) <= len(both)
    for prompt, part in enumerate(parts):
        assert difference(model, part, expected[of_prompts == prompt]) < 1e-9


CHAT = [{"role": "user", "content": "Compare."}]
ANSWER = [{"role": "assistant", "content": "Two."}]
TEXT = "Two.\n####a: x\n####b: y\n####%%%%\nEnd."


def test_texts_of_a_dialect_become_batches(embedded: tuple[Any, Any]) -> None:
    tokenizer = embedded[1]
    collator = DataCollatorForParallel(tokenizer, "pdos")
    answer = [{**ANSWER[0], "content": TEXT}]
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    features = [
        {"prompt": CHAT, "completion": answer},
        {"prompt": prompt, "completion": TEXT},
        {"prompt": prompt, "text": TEXT + tokenizer.eos_token},
    ]
    batch = collator(features)
    assert len({tuple(row.tolist()) for row in batch["labels"]}) == 1
    example = ParallelExample.from_text(TEXT + tokenizer.eos_token, tokenizer, "pdos", prompt)
    assert ParallelExample.from_text(TEXT, tokenizer, "pdos", CHAT).input_ids[0] == example.input_ids[0]
    assert sorted(batch["labels"][0][batch["labels"][0] >= 0].tolist()) == sorted(example.target_ids.tolist())
    assert tokenizer.eos_token_id in batch["labels"][0]


@pytest.mark.parametrize(
    ("feature", "settings"),
    [
        ({"text": TEXT}, {"dialect": None}),
        ({"prompt": "Hi"}, {}),
        ({"text": "a\n####: b\n####%%%%"}, {}),
        ({"text": None}, {}),
        ({"completion": [*ANSWER, *CHAT, *ANSWER]}, {}),
        ({"prompt": torch.ones(1, 2), "text": TEXT}, {}),
        ({"input_ids": [5], "position_ids": [0]}, {}),
        ({"text": TEXT}, {"max_length": 20}),
        ({**TREE.to_dict(), "view_stops": [3]}, {}),
    ],
)
def test_features_that_cannot_be_read_raise_with_their_index(feature: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="feature 1 of the batch"):
        DataCollatorForParallel(TOKENIZER, **{"dialect": "pdos", **settings})([TREE, feature])


# Dialects

NESTED = (
    "Hi <Parallel>two\n<Path>1: a</Path>\n<Path>2: b <Parallel><Path>c</Path><Path>dd</Path></Parallel> e</Path>\n"
    "so</Parallel> end"
)


def seen_by(example: ParallelExample, tokenizer: Any, query: int) -> str:
    """Return the text that a token sees, in the order of `input_ids`."""
    seen: set[int] = set()
    for view in make_views(example):
        for row in np.flatnonzero(view.queries == query):
            seen |= set(view.keys[view.mask()[row]].tolist())
    return tokenizer.decode(example.input_ids[sorted(seen)].tolist())


@pytest.mark.parametrize(
    ("positions", "after"), [("depth", "longest"), ("overlap", "sum"), ("concatenated", "sum")], ids=lambda value: value
)
def test_branches_do_not_see_each_other_and_the_text_after_them_sees_all(positions: str, after: str) -> None:
    tokenizer, dialect = AsciiTokenizer(), Dialect(("<Parallel>", "</Parallel>"), ("<Path>", "</Path>"), positions)
    example = ParallelExample.from_text(NESTED, tokenizer, dialect, prompt="Q")
    model = enabled()
    assert teacher_forced_logits(model, example).isfinite().all()
    text = tokenizer.decode(example.input_ids.tolist())
    inner = text.index("dd</Path>")
    assert seen_by(example, tokenizer, inner) == "QHi <Parallel>two\n<Path>2: b <Parallel><Path>d"
    assert seen_by(example, tokenizer, len(text) - 1) == text
    first, second = (text.index(f"<Path>{i}") for i in (1, 2))
    begins = example.position_ids[[first, second]]
    assert (begins[0] == begins[1]) == (positions != "concatenated")
    lengths = np.array([text.index("</Path>") + 7 - first, text.index("so<") - 1 - second])
    if positions == "concatenated":
        assert example.position_ids[-1] == len(text) - 1
    elif positions == "overlap":
        assert example.segment_positions[-1] + example.segment_lengths[-1] == len(text)
    else:
        assert example.segment_positions[-1] < begins[0] + lengths.sum()


def test_malformed_dialects_and_texts_raise() -> None:
    for tags in (("<P>", "<B>"), (("<P>", "</P>"), ("<P>", "</B>")), (("<P>", "</P>"), ("<B>", ""))):
        with pytest.raises(ValueError, match="tags"):
            Dialect(*tags)
    for text, dialect, message in (
        ("a</Path>", "multiverse", "line 1: </Path> closes nothing"),
        ("\n<Path>x</Path>", "multiverse", "line 2: <Path> must be directly in <Parallel>"),
        ("<Parallel>\n<Path>x</Parallel>", "multiverse", "line 2: </Parallel> closes <Path>"),
        ("<Parallel>\n<Thread>", "threadweaver", "line 2: <Thread> is not closed"),
        ("\n####a: b\n####c: d\n", "pdos", "line 2: #### opens a block"),
        ("####a: b\n####c\n####%%%%", "pdos", "line 2: the title"),
        ("a\nb ####%%%% c", "pdos", "line 2: ####%%%% closes nothing"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            ParallelExample.from_text(text, AsciiTokenizer(), dialect)


def test_text_of_the_mode_pdos_is_laid_out_as_the_mode_computes_it() -> None:
    """With `join="reencode"`, the text after a block is that of the whole sequential text."""
    model, tokenizer = enabled(), AsciiTokenizer()
    text = "I look.\n####a: x y\n####b: zz\n####%%%%\nSo done."
    prompt = IDS[0].tolist()
    for join in ("reencode", "rotate"):
        example = ParallelExample.from_text(text, tokenizer, hf_parallel.PDOSConfig(join=join), prompt)
        logits = teacher_forced_logits(model, example)
        assert logits.isfinite().all()
        targets = tokenizer.decode(example.target_ids.tolist())
        assert targets == "I look.\n####a:b:% x y\n# zz\n#\nSo done."  # without the text that the mode forces
    sequential = model(input_ids=torch.tensor([[*prompt, *encode(tokenizer, text)]])).logits[0]
    reencoded = teacher_forced_logits(model, ParallelExample.from_text(text, tokenizer, "pdos", prompt))
    length = len("\nSo done.")
    torch.testing.assert_close(reencoded[-length:], sequential[-length:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("join", ["reencode", "rotate"])
def test_the_text_of_a_run_has_the_targets_of_the_run(join: str) -> None:
    """A skeleton's forced text is no target, and what is generated has the logits of the run."""
    model, tokenizer = enabled(), AsciiTokenizer()
    settings = {"opening": "I.\n####", "max_branches": 3, "max_title_tokens": 3, "branch_max_new_tokens": 6}
    output = model.generate(
        IDS,
        generation_mode="pdos",
        tokenizer=tokenizer,
        join=join,
        max_new_tokens=90,
        return_dict_in_generate=True,
        **settings,
    )
    assert output.blocks[0]
    trunks = []
    examples = (
        ParallelExample.from_output(output),
        ParallelExample.from_text(output.transcripts[0], tokenizer, hf_parallel.PDOSConfig(join=join), IDS[0].tolist()),
    )
    for example in examples:
        is_trunk = (example.target_rows == 0) & (example.target_ids != ord("%"))  # the third branch is the last one
        logits = teacher_forced_logits(model, example)[torch.from_numpy(example.target_queries[is_trunk])]
        trunks.append((example.target_ids[is_trunk].tolist(), logits))
    (ids, expected), (found, logits) = trunks
    begin, length = len(settings["opening"]), sum(len(title) + 1 for title in output.titles[0][0])
    assert tokenizer.decode(found) == settings["opening"] + tokenizer.decode(ids)
    assert found[begin : begin + length] == ids[:length]  # further tokens of the text may be longer ones
    torch.testing.assert_close(logits[begin : begin + length], expected[:length], rtol=0, atol=1e-9)
