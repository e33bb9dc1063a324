"""Paths that read each other's messages: rounds of PaCoRe, and exchanges of LeaP.

A path starts to read as soon as the messages for it are there; it waits for no other path. All paths are requests of
one engine, which computes what their conversations have in common once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hf_parallel.agents.calls import gather, rng
from hf_parallel.agents.chat import Chat
from hf_parallel.agents.models import Completion
from hf_parallel.generation.prompts import END_THINK, Message
from hf_parallel.generation.validation import (
    check_bool,
    check_choice,
    check_int,
    check_template,
    check_text,
    check_texts,
    template_uses,
)

PACORE_PROMPT = """\
You are given a problem and a list of reference responses. Your job is to analyze these references and provide your \
own response.

Original Problem:
{question}

Reference Responses:
{references}

Now, based on the original problem and reference responses above, please provide your own comprehensive solution.\
"""
"""Prompt of all rounds but the first, as the template in github.com/stepfun-ai/PaCoRe,
pacore/batch_inference/base_exp.py, renders it: two blank lines after the references, no line end after the last."""
PACORE_REFERENCE = "\nReference {number}:\n{text}\n"
"""A message in it."""


def conclusion(text: str) -> str:
    """Return what follows the thinking of an answer, or all of it."""
    return text.rpartition(END_THINK)[2]


async def pacore(
    chat: Chat,
    rounds: Sequence[int] = (4,),
    reads: int | None = None,
    prompt: str = PACORE_PROMPT,
    reference: str = PACORE_REFERENCE,
    compact: Callable[[str], str] = conclusion,
    **settings: Any,
) -> str:
    """Answer the last message of a chat in rounds (PaCoRe: Parallel Coordinated Reasoning, 2026, arXiv 2601.05593).

    The answers of a round become messages for the next round, whose prompts consist of the question and these messages.
    The last round has one answer, which is appended to the chat and returned. An answer begins as soon as its messages
    have arrived. The model needs `do_sample=True`, or the answers of a round are equal.

    Parameters
    ----------
    chat : Chat
        A conversation that ends with the user's message.
    rounds : list of int
        Number of answers of each round except the last. The paper: `(4,)`, `(16,)` and `(32, 4)`.
    reads : int, optional
        Maximum number of messages that an answer reads. Each answer reads another selection, so it need not wait for
        the slowest answer of the round. The last answer reads all. Default: all.
    prompt, reference : str
        Prompt of later rounds, with `{question}` and `{references}`, and each message in it, with `{number}` and
        `{text}`.
    compact : callable
        Returns the message in an answer. Default: what follows `</think>`.
    **settings
        Settings of `Chat.gen`.

    Raises
    ------
    ValueError
        If an argument is invalid, or the chat does not end with a text of the user.
    """
    if not isinstance(rounds, list | tuple) or not rounds:
        raise ValueError(f"rounds must be a list of numbers of answers, got {rounds!r}")
    for index, count in enumerate(rounds):
        check_int(f"rounds[{index}]", count, at_least=1)
    if reads is not None:
        check_int("reads", reads, at_least=1)
    check_template("prompt", prompt, question="", references="")
    check_template("reference", reference, number=1, text="")
    for name, template, needed in (("prompt", prompt, "references"), ("reference", reference, "text")):
        if not template_uses(template, needed):
            raise ValueError(f"{name} must hold {{{needed}}}, or an answer reads no others, got {template!r}")
    question = _question_of(chat)
    loop = asyncio.get_running_loop()
    counts = [*rounds, 1]
    said: list[list[asyncio.Future[str]]] = [[loop.create_future() for _ in range(count)] for count in counts]
    orders = rng()

    async def answer(number: int, place: int, read: Sequence[int]) -> str:
        messages: list[Message] = [dict(message) for message in chat.messages]
        if number:
            texts = [await said[number - 1][index] for index in read]
            references = "".join(reference.format(number=index, text=text) for index, text in enumerate(texts, 1))
            messages[-1] = {**messages[-1], "content": prompt.format(question=question, references=references)}
        text = await Chat(messages=messages, **{**chat.settings, **settings}).gen(forkable=False)
        said[number][place].set_result(compact(text))
        return text

    answers = []
    for number, count in enumerate(counts):
        for place in range(count):
            last = counts[number - 1] if number else 0
            size = last if reads is None or number == len(rounds) else min(reads, last)
            read = [(place * size + index) % last for index in range(size)]
            orders.shuffle(read)  # no answer is always the first
            answers.append(answer(number, place, read))
    *_, text = await gather(*answers)
    chat.messages.append({"role": "assistant", "content": text})
    return text


def _question_of(chat: Chat) -> str:
    """Return the last message of a chat."""
    if not chat.messages or chat.messages[-1]["role"] != "user" or not isinstance(chat.messages[-1]["content"], str):
        raise ValueError("chat must end with a message of the user, a text")
    return str(chat.messages[-1]["content"])


LEAP_TRIGGERS = (
    "Alright, let's take a step back and summarize what we've figured out so far briefly.",
    "Wait, let me quickly recap what I've concluded so far.",
    "Alright, let me shortly review the conclusions I've drawn so I can move forward more efficiently.",
    "Hmm, a quick summary of what I've figured out might help streamline the next part of my reasoning.",
    "Hold on, I should summarize the key points briefly to ensure I'm on the right track.",
    "Okay, before continuing, let me put together a brief summary of the insights I've gathered so far.",
    "Okay, time to consolidate everything I've found into a concise summary.",
)
"""Texts that ask for a summary: github.com/tongxuluo/LeaP, leap/prompts.py."""
LEAP_SUMMARIES = (
    "In short, my current conclusions are that",
    "To summarize, based on my previous reasoning, I have currently found that",
    "In conclusion, the current key takeaways and results are",
    "In short, I've currently concluded that",
    "To summarize, my recent findings are",
    "In conclusion, the current insights and results I've gathered are",
)
"""First words of a summary, from the same file."""
LEAP_COMMENT = (
    "Hmm, it seems that my peers have given me some comments, so let me check if anyone's conclusions are different "
    "from mine before I continue my own reasoning."
)
LEAP_NO_COMMENT = "Hmm, there are no comments, so let's continue reasoning."
BEGIN_SUMMARY, END_SUMMARY = "<summarize>", "</summarize>"
ROUTERS = ("dispersed", "clustered", "hybrid", "random")


@dataclass
class PeerMessage:
    """A summary that a path has written, and what it has read afterward."""

    text: str
    read: list[int] = field(default_factory=list)
    """Indices of the paths whose summaries it has read."""


@dataclass
class PeerPath:
    """A path of `leap`."""

    text: str = ""
    """Its text, what was inserted included."""
    messages: list[PeerMessage] = field(default_factory=list)
    """Its summaries."""
    tokens: int = 0
    """Number of tokens that it has generated."""


async def leap(
    chat: Chat,
    paths: int = 4,
    interval: int = 2048,
    exchanges: int = 4,
    peers: int = 2,
    router: str = "dispersed",
    summary_max_new_tokens: int = 256,
    starts_summary: bool = False,
    opening: str = "",
    triggers: Sequence[str] = LEAP_TRIGGERS,
    summaries: Sequence[str] = LEAP_SUMMARIES,
    **settings: Any,
) -> list[PeerPath]:
    """Answer the last message of a chat by paths that read each other's summaries (LeaP, 2025, arXiv 2505.07787).

    After `interval` tokens, a path writes a summary, reads the summaries of its peers, and continues. A path that has
    written `</think>`, or has ended, takes no further part in the exchange. After the last exchange, paths continue up
    to `max_new_tokens`, which includes summaries. The paths need `do_sample=True`, or all are equal. Nothing is
    appended to the chat.

    Parameters
    ----------
    chat : Chat
        A conversation that ends with the user's message.
    paths : int
        Number of paths.
    interval : int
        Tokens between exchanges. At an exchange, the text is cut at its last blank line, as in the authors' script.
        After the first exchange, an interval without a blank line is therefore dropped entirely.
    exchanges : int
        Maximum number of exchanges.
    peers : int
        Maximum number of summaries that a path reads.
    router : {"dispersed", "clustered", "hybrid", "random"}
        Which summaries a path reads: the least similar to its own, the most similar, half of each, or the summaries of
        random paths. With `random`, it waits for these only; otherwise for the summaries of all paths that still take
        part.
    summary_max_new_tokens : int
        Maximum number of tokens of a summary.
    starts_summary : bool
        Whether a path also exchanges where it begins a summary by itself, as the models that were trained for LeaP do.
    opening : str
        First text of every path.
    triggers, summaries : list of str
        Texts that ask for a summary, and texts that begin it. One of each is chosen at random.
    **settings
        Settings of `Chat.gen`.

    Returns
    -------
    list of PeerPath
        The paths, in order.

    Raises
    ------
    ValueError
        If an argument is invalid, or the chat does not end with a text of the user.
    """
    for name, count in (
        ("paths", paths),
        ("interval", interval),
        ("peers", peers),
        ("summary_max_new_tokens", summary_max_new_tokens),
    ):
        check_int(name, count, at_least=1)
    check_int("exchanges", exchanges, at_least=0)
    check_choice("router", router, ROUTERS)
    check_bool("starts_summary", starts_summary)
    check_text("opening", opening)
    check_texts("triggers", triggers)
    check_texts("summaries", summaries)
    if not triggers or not summaries:
        raise ValueError("triggers and summaries must hold at least one text each")
    _question_of(chat)
    loop = asyncio.get_running_loop()
    said: list[list[asyncio.Future[str | None]]] = []
    said += [[loop.create_future() for _ in range(paths)] for _ in range(exchanges)]
    settings = {**chat.settings, **settings}
    budget = settings.pop("max_new_tokens", None)
    numbers = rng()
    seeds = [numbers.getrandbits(32) for _ in range(paths)]

    async def write(text: str, limit: int | None, **more: Any) -> Completion:
        messages: list[Message] = [dict(message) for message in chat.messages]
        if text:
            messages.append({"role": "assistant", "content": text})
        given = settings if limit is None else {**settings, "max_new_tokens": limit}
        return await Chat(messages=messages, **given).complete(**more)

    async def run(index: int) -> PeerPath:
        path = PeerPath(opening)
        draw = Random(seeds[index])
        for number in range(exchanges):
            left = interval if budget is None else min(interval, budget - path.tokens)
            stops = {"stop_strings": [BEGIN_SUMMARY]} if starts_summary else {}
            completion = await write(path.text, left, **stops) if left > 0 else Completion(("",))
            thought, begins_summary, _ = completion.texts[0].partition(BEGIN_SUMMARY if starts_summary else "\0")
            path.text += thought
            path.tokens += completion.tokens
            is_short = completion.tokens < interval and not begins_summary
            if is_short or END_THINK in path.text:
                for later in said[number:]:
                    later[index].set_result(None)
                if not begins_summary and (completion.tokens < left or left <= 0):
                    return path
                break
            before, blank, _ = path.text[len(opening) :].rpartition("\n\n")
            kept = before if blank else path.text[len(opening) :]
            begun = f"{opening}{kept}\n\n{draw.choice(triggers)} {BEGIN_SUMMARY} {draw.choice(summaries)}"
            written = await write(begun, summary_max_new_tokens, stop_strings=[END_SUMMARY, END_THINK])
            path.tokens += written.tokens
            path.text = begun + _closed(written.texts[0])
            message = PeerMessage(path.text.rpartition(BEGIN_SUMMARY)[2].removesuffix(END_SUMMARY).strip())
            path.messages.append(message)
            said[number][index].set_result(message.text)
            others = [other for other in range(paths) if other != index]
            if router == "random":
                others = draw.sample(others, min(peers, len(others)))
            heard = {other: await said[number][other] for other in others}
            known = {other: text for other, text in heard.items() if text is not None}
            message.read = route(message.text, known, peers, router)
            path.text += _comment([known[other] for other in message.read])
        left = None if budget is None else budget - path.tokens
        if left is None or left > 0:
            completion = await write(path.text, left)
            path.text += completion.texts[0]
            path.tokens += completion.tokens
        return path

    return await gather(*(run(index) for index in range(paths)))


def route(own: str, others: dict[int, str], count: int, router: str) -> list[int]:
    """Return which of other paths' summaries a path reads, at most `count`, as `leap` describes."""
    if router == "random":
        return list(others)
    nearest = sorted(others, key=lambda index: -similarity(own, others[index]))
    farthest = sorted(others, key=lambda index: similarity(own, others[index]))
    if router == "dispersed":
        return farthest[:count]
    if router == "clustered":
        return nearest[:count]
    half = count // 2
    return list(dict.fromkeys([*farthest[:half], *nearest[: count - half]]))


def similarity(first: str, second: str) -> float:
    """Return twice the length of the longest common subsequence of two texts, divided by their lengths (0 to 1)."""
    if not first and not second:
        return 1.0
    places: dict[str, int] = {}
    for index, character in enumerate(first):
        places[character] = places.get(character, 0) | 1 << index
    full = (1 << len(first)) - 1
    row = full  # zero where the subsequence takes a character (Hyyrö, 2004)
    for character in second:
        matches = row & places.get(character, 0)
        row = ((row + matches) | (row - matches)) & full
    return 2 * (full & ~row).bit_count() / (len(first) + len(second))


def _closed(summary: str) -> str:
    """Return a summary up to its closing tag, which is completed or appended."""
    before, tag, _ = summary.replace(END_THINK, "").partition(END_SUMMARY)
    if tag:
        return before + tag
    for length in range(len(END_SUMMARY) - 1, 1, -1):
        if before.endswith(END_SUMMARY[:length]):
            return before + END_SUMMARY[length:]
    return f"{before}... {END_SUMMARY}"


def _comment(summaries: Sequence[str]) -> str:
    """Return what a path reads of its peers."""
    if not summaries:
        return f" <comment> No comments </comment>\n\n{LEAP_NO_COMMENT}"
    lines = "\n".join(f'Peer {number}: "{text}"' for number, text in enumerate(summaries, 1))
    return f" <comment> {lines} </comment>\n\n{LEAP_COMMENT}"
