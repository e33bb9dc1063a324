"""KeptTable: responses that clients may fork: those that run, and the last of those that are stored, with their leases.

A lease keeps the prefix of a response cached. Without it, forks compute the prefix again from the tokens kept here.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hf_parallel.detokenizer import visible_text
from hf_parallel.engine import Engine, Lease
from hf_parallel.engine.server.errors import APIError
from hf_parallel.engine.server.openai.answers import Answers, Delta
from hf_parallel.engine.server.openai.responses_api import MAX_CHARACTERS, MAX_KEPT, as_message
from hf_parallel.engine.server.openai.schema import merged_messages
from hf_parallel.engine.server.openai.submission import Submission

JSONObject = dict[str, Any]


@dataclass(eq=False)
class Kept:
    """A response that can be forked."""

    model: str
    fields: JSONObject  # of its body, as JSON, which forks inherit
    mode_settings: Sequence[str]  # names of those that are settings of its mode
    tools: list[JSONObject]
    system: list[JSONObject]
    conversation: list[JSONObject]  # before the answer
    partial: JSONObject | None  # a message that the answer continues
    submission: Submission
    has_tokens: bool  # whether each choice is a sequence of tokens after the prompt, which is a text
    answers: Answers | None  # None: it has ended
    end_tokens: Collection[int]
    lease: Lease | None  # None: it is not stored
    size: int  # characters of the conversation
    rows: list[np.ndarray] = field(default_factory=list)  # new tokens by choice, int32, once it has ended
    replies: dict[int, Delta] = field(default_factory=dict)  # by choice, once it has ended

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        answers = self.answers  # read once: `finish` may run in another thread
        return answers is None or answers.is_shown

    @property
    def kept_size(self) -> int:
        """Characters of the conversation, and bytes of the prompt's tokens."""
        return self.size + sum(tensor.nbytes for tensor in self.submission.prompt.values())

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return self.submission.choices

    def row(self, choice: int) -> list[int]:
        """Return the new tokens of a choice so far."""
        answers = self.answers
        if answers is not None:
            return answers.handle.row_tokens(choice)
        return self.rows[choice].tolist()  # type: ignore[no-any-return]

    def point(self, choice: int, token: int) -> Any:
        """Return the point of a fork in the running request, or None."""
        answers = self.answers
        return None if answers is None else answers.handle.point(choice, token)

    def messages(self, choice: int) -> list[JSONObject]:
        """Return the conversation, with the answer if it is complete."""
        if not self.is_finished:
            return self.conversation
        answers = self.answers
        replies = self.replies if answers is None else answers.shown
        answer = as_message(replies[choice])
        return [*self.conversation, answer if self.partial is None else merged_messages(self.partial, answer)]

    def partial_message(self, tokens: Sequence[int], choice: int) -> JSONObject | None:
        """Return the message of the first tokens of an answer; None: they have no text."""
        submission = self.submission
        hidden = submission.hidden.union(self.end_tokens) - submission.marks
        delta = Delta(choice, visible_text(submission.engine.tokenizer, tokens, hidden))
        reply = submission.make_reply(choice)
        if reply is not None:
            delta.show(reply.add(delta.text, ends=True))
        message: JSONObject | None = as_message(delta)
        if not (delta.text or delta.reasoning or delta.calls):
            message = None
        if self.partial is not None:
            message = self.partial if message is None else merged_messages(self.partial, message)
        return message

    def finish(self) -> None:
        """Keep the tokens and texts of a response that has ended, and nothing else of its request."""
        answers = self.answers
        if answers is None:
            return
        tokens = np.array(answers.handle.sink.tokens, np.int32)
        rows = np.array(answers.handle.sink.rows, np.int32)[: len(tokens)]
        self.rows = [tokens[rows == choice] for choice in range(self.num_choices)]
        self.replies = answers.shown
        self.size += 8 * sum(map(len, self.rows))
        self.answers = None


class KeptTable:
    """Responses by client and id, each client's least recently used first.

    Beyond the limits, the client that keeps most loses its least recently used one, as in `Conversations`. Clients that
    share no cached prefixes share no responses.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: dict[str, OrderedDict[str, Kept]] = {}
        self._running: dict[str, dict[str, Kept]] = {}
        self._sizes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, (*self._kept.values(), *self._running.values())))

    def has(self, salt: str, name: str) -> bool:
        """Return whether a response was added, and not deleted since."""
        with self._lock:
            return self._of(self._kept, salt, name) is not None or self._of(self._running, salt, name) is not None

    def begin(self, salt: str, name: str, kept: Kept) -> None:
        """Add a response that runs."""
        with self._lock:
            self._running.setdefault(salt, {})[name] = kept

    def end(self, salt: str, name: str) -> None:
        """Keep a response that has ended, if it is stored and complete."""
        with self._lock:
            running = self._running.get(salt, {})
            kept = running.pop(name, None)
            if not running:
                self._running.pop(salt, None)
            if kept is None:  # deleted
                return
            assert kept.answers is not None, "it runs"
            if kept.lease is None:
                return
            if not kept.is_finished:
                self._engine.release(kept.lease)
                return
            kept.finish()
            self._kept.setdefault(salt, OrderedDict())[name] = kept
            self._sizes[salt] += kept.kept_size
            while sum(map(len, self._kept.values())) > MAX_KEPT:
                self._drop_oldest(max(self._kept, key=lambda other: len(self._kept[other])))
            while self._sizes.total() > MAX_CHARACTERS:
                self._drop_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def find(self, salt: str, name: str) -> Kept:
        """Return a response. Raises an error if the client has none with this id, or not any more."""
        with self._lock:
            kept = self._of(self._kept, salt, name) or self._of(self._running, salt, name)
        if kept is None:
            message = (
                f"there is no response {name[:200]!r} that can be forked: the server keeps the last {MAX_KEPT} of all "
                "clients, and a chat that has ended only with store=true"
            )
            raise APIError(404, message, None, "response_not_found")
        return kept

    def touch(self, salt: str, name: str) -> None:
        """Register that a response was forked: its lease begins again."""
        with self._lock:
            kept = self._of(self._kept, salt, name)
            if kept is not None:
                self._kept[salt].move_to_end(name)
        if kept is not None and kept.lease is not None:
            self._engine.renew(kept.lease)

    def drop(self, salt: str, name: str) -> bool:
        """Delete a response, and release its lease. Return whether there was one. A running one goes on."""
        with self._lock:
            running = self._running.get(salt, {}).pop(name, None)
            if running is not None and running.lease is not None:
                self._engine.release(running.lease)
            is_kept = name in self._kept.get(salt, ())
            if is_kept:
                self._take(salt, name)
        return is_kept or running is not None

    @staticmethod
    def _of(table: Mapping[str, Mapping[str, Kept]], salt: str, name: str) -> Kept | None:
        return table[salt].get(name) if salt in table else None

    def _drop_oldest(self, salt: str) -> None:
        self._take(salt, next(iter(self._kept[salt])))

    def _take(self, salt: str, name: str) -> None:
        kept = self._kept[salt].pop(name)
        self._sizes[salt] -= kept.kept_size
        if not self._kept[salt]:
            del self._kept[salt], self._sizes[salt]
        if kept.lease is not None:
            self._engine.release(kept.lease)
