"""fork_join, where a path is a call: APR and AsyncThink by a scripted model, and paths alone by plain `generate`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
import tiny
import torch
from players import Player
from small_tokenizers import make, small_llama
from workers import TOKENIZER, encode, small_model

import hf_parallel
from hf_parallel import ForkJoinConfig, ForkJoinOutput
from hf_parallel.generation.call_dialects import CALL_DIALECTS, CallDialect
from hf_parallel.training import DataCollatorForParallel, ParallelExample

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def run(dialect: Any, player: Player, prompt: str, **settings: Any) -> ForkJoinOutput:
    """Return the output of a model that writes the texts of a player."""
    return small_model().generate(
        torch.tensor(encode(prompt))[None],
        generation_mode="fork_join",
        dialect=dialect,
        tokenizer=TOKENIZER,
        logits_processor=[player],
        return_dict_in_generate=True,
        **{"do_sample": False, "max_new_tokens": 2000, **settings},
    )


# AsyncThink: the organizer writes on beside its workers

ORGANIZER = "Two parts. <FORK-1>2*2</FORK-1> and <FORK-2>3*3</FORK-2> I think on. <JOIN-2>"


def organizer(prompt: str) -> tuple[Player, str]:
    """Return a model that forks twice and joins in another order, and its answer."""
    player = Player()
    answer = ORGANIZER
    player.add(prompt, ORGANIZER)
    player.add("2*2", "Twice two, let me see. <RETURN> 4 </RETURN> and more")
    player.add("3*3", "<RETURN>9</RETURN>")
    answer += "9</JOIN-2>"
    player.add(prompt + answer, " nine <JOIN-1>")
    answer += " nine <JOIN-1> 4 </JOIN-1>"
    player.add(prompt + answer, " <ANSWER>13</ANSWER>")
    return player, answer + " <ANSWER>13</ANSWER>"


def test_the_organizer_of_asyncthink_writes_on_beside_its_workers_and_reads_what_they_return() -> None:
    streamed: dict[int, str] = defaultdict(str)

    class Streamer(hf_parallel.ParallelStreamer):
        def write_row(self, row: int, text: str, event: str) -> None:
            streamed[row] += text

    player, answer = organizer("Q: ")
    out = run("asyncthink", player, "Q: ", streamer=Streamer())
    assert out.transcripts == [answer]
    assert out.fallback == [None]
    first, second = (fork.paths[0] for fork in out.forks[0])
    assert (first.number, first.message, first.returned, first.ended_by) == ("1", "2*2", " 4 ", "tag")
    assert first.text == "Twice two, let me see. <RETURN> 4 </RETURN>"
    assert (second.number, second.message, second.returned, second.ended_by) == ("2", "3*3", "9", "tag")
    tokens = out.sequences[0, len("Q: ") :].tolist()
    inserted = [TOKENIZER.decode(tokens[fork.start : fork.end]) for fork in out.forks[0]]
    assert inserted == [" 4 </JOIN-1>", "9</JOIN-2>"]
    assert streamed == {0: answer, 1: first.text, 2: second.text}
    # No worker is the last to end, so nothing waits: the answer takes a step for each token that it writes
    written = len(answer) - sum(map(len, inserted)) + 1
    assert out.critical_path == [written]
    assert out.stats.decoded_tokens == written + len(first.text) + len(second.text)
    (section,) = out.to_dict(TOKENIZER)["sections"]
    assert section["columns"] == ["Path 1", "Path 2", "answer"]


def test_a_join_waits_for_a_worker_that_is_still_thinking() -> None:
    player = Player()
    player.add("Q: ", "<FORK-1>x</FORK-1><JOIN-1>")
    thoughts = "a long thought. " * 4
    player.add("x", f"{thoughts}<RETURN>7</RETURN>")
    player.add("Q: <FORK-1>x</FORK-1><JOIN-1>7</JOIN-1>", " 7")
    out = run("asyncthink", player, "Q: ")
    assert out.transcripts == ["<FORK-1>x</FORK-1><JOIN-1>7</JOIN-1> 7"]
    assert out.critical_path == [len("<FORK-1>x</FORK-1>") + len(thoughts) + len("<RETURN>7</RETURN>") + len(" 7") + 1]


@pytest.mark.parametrize(
    ("text", "settings", "reason", "ends"),
    [
        ("<FORK-1>a</FORK-1><FORK-1>b</FORK-1>", {}, "there is already a path 1", ["cancelled"]),
        ("<FORK-1>a</FORK-1><FORK-2>b</FORK-2>", {"max_paths": 1}, "2 paths at once are more than", ["cancelled"]),
        ("So <JOIN-3>.", {}, "waits for path 3, which does not run", []),
        ("So <FORK-1>a</FORK-2>.", {}, "has not written '</FORK-{number}>'", []),
        ("<FORK-1>abcdefghijkl</FORK-1>", {"max_new_tokens": 40}, "the budget is too small for the paths", []),
        ("<FORK-1>a</FORK-1><JOIN-1>", {"max_new_tokens": 50}, "the budget is too small for what", ["eos"]),
    ],
)
def test_calls_that_cannot_be_made_stay_text(text: str, settings: dict[str, Any], reason: str, ends: list[str]) -> None:
    player = Player()
    player.add("Q: ", text)
    player.add("a", "A long return that nobody has room for"[: 20 if "JOIN" in text else None])
    out = run("asyncthink", player, "Q: ", **settings)
    assert out.transcripts == [text]
    assert reason in str(out.fallback[0])
    assert [path.ended_by for fork in out.forks[0] for path in fork.paths] == ends
    assert out.sequences.shape[1] <= len("Q: ") + settings.get("max_new_tokens", 2000)


# APR: the calls of a search are replaced by what they have found

PROBLEM = "Moving to Node #0\nCurrent State: 39:[36, 51, 49, 25], Operations: []"
SEARCH = (
    "\nExploring Operation: 51-49=2, Resulting Numbers: [36, 25, 2]\n"
    "Generated Node #0,0: 39:[36, 25, 2] Operation: 51-49=2\n"
    "Exploring Operation: 36-25=11, Resulting Numbers: [51, 49, 11]\n"
    "Generated Node #0,1: 39:[51, 49, 11] Operation: 36-25=11\n"
    "Moving to Node #0,0\nCurrent State: 39:[36, 25, 2], Operations: ['51-49=2']\n"
    "Generated Node #0,0,0: 39:[25, 38] Operation: 36+2=38\n"
)
CALL = (
    "<Calling Sub Searches>\n<Start Sub Search 0 at level 1> Moving to Node #0,1\n"
    "<Start Sub Search 1 at level 1> Moving to Node #0,0,0\n<End Calling Sub Searches>"
)
FOUND = "Moving to Node #0,1,0\nCurrent State: 39:[51, 49, 11], Operations: ['36-25=11']\n39,39 equal: Goal Reached"
STATES = (
    "Moving to Node #0,1\nCurrent State: 39:[51, 49, 11], Operations: ['36-25=11']",
    "Moving to Node #0,0,0\nCurrent State: 39:[25, 38], Operations: ['51-49=2', '36+2=38']",
)
RESULTS = (
    f"<Sub Searches>\n<Goal Reached in Sub Search 0 at level 1 at Node #0,1>\n{FOUND}\n"
    "<No Solution in Sub Search 1 at level 1 at Node #0,0,0>\n<End Sub Searches>\n"
)
ENDING = "39,39 equal: Goal Reached\nMoving to Node #0\n39,39 equal: Goal Reached"


@pytest.mark.parametrize("budget", ["", "Sub Call Budget: 10 ", "Token Budget: 512 "])
@pytest.mark.parametrize("call", [CALL, CALL.replace("<Calling Sub Searches>", "<Sub Searches>", 1)])
def test_a_search_of_apr_calls_others_and_reads_their_results_instead_of_the_call(budget: str, call: str) -> None:
    player = Player()
    player.add(budget + PROBLEM, SEARCH + call)
    if call != CALL:  # the tag is replaced while the model writes
        begin = call.index(">") + 1
        player.add(budget + PROBLEM + SEARCH + "<Calling Sub Searches>", call[begin:])
    passed = budget if budget.startswith("Token") else ""
    searched = f"\nExploring Operation: 51-11=40\n39,39 equal: Goal Reached\n{FOUND}\n"
    player.add(passed + STATES[0], searched)
    player.add(passed + STATES[1], "\n38,39 unequal: No Solution\nNo solution found.\n")
    player.add(budget + PROBLEM + SEARCH + RESULTS, ENDING)
    out = run("apr", player, budget + PROBLEM)
    assert out.transcripts == [SEARCH + RESULTS + ENDING]
    (fork,) = out.forks[0]
    assert [path.message for path in fork.paths] == ["0,1", "0,0,0"]
    assert [path.returned for path in fork.paths] == [FOUND, None]
    assert fork.paths[0].text == searched
    tokens = out.sequences[0, len(budget + PROBLEM) :].tolist()
    assert TOKENIZER.decode(tokens[fork.start : fork.end]) == RESULTS
    # What the prompts have in common is computed once, and the text before the call is not computed again
    prompts = [budget + PROBLEM, *(passed + state for state in STATES)]
    distinct = {prompt[:length] for prompt in prompts for length in range(1, len(prompt) + 1)}
    inserted = len(RESULTS) + (len("<Calling Sub Searches>") if call != CALL else 0)
    assert len(distinct) + inserted - 4 <= out.stats.prefilled_tokens <= len(distinct) + inserted


# Each text is what `generate` writes after the same tokens


@pytest.mark.parametrize("architecture", ["llama", "lfm2", "mistral", "gpt2"])
@pytest.mark.parametrize("keeps_call", [True, False])
def test_paths_and_the_text_after_them_are_those_of_plain_generate(architecture: str, keeps_call: bool) -> None:
    model = hf_parallel.enable(tiny.build(architecture))
    dialect = CallDialect(("{", "}"), separator="|", joined="<{text}>", around=("=", ";"), keeps_call=keeps_call)
    prompt = torch.tensor(encode("Shared words. Q: "))[None]
    given = {"do_sample": False, "eos_token_id": None, "pad_token_id": tiny.PAD, "suppress_tokens": [ord("}")]}
    opening = "So {Shared words. One|Shared words. Two|x}"
    out = model.generate(
        prompt,
        generation_mode="fork_join",
        dialect=dialect,
        tokenizer=TOKENIZER,
        opening=opening,
        path_max_new_tokens=9,
        max_new_tokens=250,
        return_dict_in_generate=True,
        **given,
    )
    (fork,) = out.forks[0]

    def alone(text: str, count: int) -> list[int]:
        ids = torch.tensor(encode(text))[None]
        return model.generate(ids, generation_mode=None, max_new_tokens=count, **given)[0, ids.shape[1] :].tolist()

    for path, message in zip(fork.paths, opening[4:-1].split("|"), strict=True):
        assert path.message == message
        assert path.tokens == alone(message, 9)
    tokens = out.sequences[0].tolist()
    begun = tokens[: prompt.shape[1] + fork.end]
    joined = f"={''.join(f'<{path.returned}>' for path in fork.paths)};"
    assert TOKENIZER.decode(begun) == "Shared words. Q: So " + (opening[3:] if keeps_call else "") + joined
    assert tokens[len(begun) :] == alone(TOKENIZER.decode(begun), len(tokens) - len(begun))
    assert len(tokens) > len(begun) + 10


def test_a_chat_template_renders_the_prompt_of_a_worker_and_a_text_prompt_begins_as_the_answers() -> None:
    tokenizer = make("byte_level")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    model = hf_parallel.enable(small_llama(tokenizer))
    seen: list[str] = []

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.extend(tokenizer.batch_decode(input_ids))
        return scores

    chat = CallDialect(("[", "]"), is_chat=True, system="Be brief.")
    text = CallDialect(("[", "]"), prompt="Do {message}:")
    for dialect, prompt in ((chat, "<system>Be brief.<user>it<assistant>"), (text, "<s>Do it:")):
        seen.clear()
        model.generate(
            torch.tensor([[tokenizer.bos_token_id, *tokenizer("Q", add_special_tokens=False).input_ids]]),
            generation_mode="fork_join",
            dialect=dialect,
            opening="So [it]",
            path_max_new_tokens=2,
            max_new_tokens=60,
            tokenizer=tokenizer,
            logits_processor=[watch],
        )
        assert any(row.replace("<pad>", "").startswith(prompt) for row in seen)


# Settings


def test_a_call_dialect_is_a_name_an_object_or_a_mapping_and_is_no_format_of_training_texts() -> None:
    own = CallDialect(("spawn(", ")"), separator=", ", returned=("join(", ")"))
    for given in (own, {"call": ["spawn(", ")"], "separator": ", ", "returned": ["join(", ")"]}):
        config = ForkJoinConfig(dialect=given)
        assert config.format == own
        assert ForkJoinConfig(**json.loads(json.dumps(config.to_dict()))).format == own
    for name, dialect in CALL_DIALECTS.items():
        assert ForkJoinConfig(dialect=name).format is dialect
        assert ForkJoinConfig(dialect=dialect).dialect == name
        with pytest.raises(ValueError, match="train on each path"):
            ParallelExample.from_text("x", TOKENIZER, name)
    with pytest.raises(ValueError, match="train on each path"):
        DataCollatorForParallel(TOKENIZER, own)
    with pytest.raises(ValueError, match="opening must end where it waits for paths, got ' and'"):
        ForkJoinConfig(dialect=own, opening="So spawn(a) and")
    with pytest.raises(ValueError, match="force=True needs a dialect whose paths are joined"):
        ForkJoinConfig(dialect="apr", force=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"call": "[]"}, "call must be a pair of texts"),
        ({"call": ("[", "[")}, "call must be two different tags"),
        ({"call": ("", "]")}, "call must be two different tags"),
        ({"wait": "<J-{number}>"}, "wait names its path"),
        ({"call": ("<{number}", ">"), "wait": "<J-{number}>", "keeps_call": False}, "needs keeps_call=True"),
        ({"call": ("[", "{number}]")}, "call must have {number} in the opening tag"),
        ({"call": ("<{number}", ">"), "separator": "|"}, "a call with a separator numbers its paths"),
        ({"returned": ("(", "")}, "returned must have a closing tag"),
        ({"prompt": "Do it"}, "prompt must hold {message}"),
        ({"system": "Be brief."}, "needs is_chat=True"),
        ({"keeps_call": False}, "must be some text"),
        ({"is_nested": 1}, "is_nested must be True or False"),
        ({"joined": 3}, "joined must be a string"),
        ({"tag": "x"}, "dialect has no 'tag'"),
    ],
)
def test_invalid_call_dialects_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ForkJoinConfig(dialect={"call": ("[", "]"), **settings})
