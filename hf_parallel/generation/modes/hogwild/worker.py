"""Workers and the problem that they share: what a Hogwild! worker does with a token (sections 3.2, 3.3, appendix C)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from transformers import MaxTimeCriteria

from hf_parallel.cache import Block, Segment
from hf_parallel.cache.hogwild import HogwildCache
from hf_parallel.cache.shared_prefix import Node
from hf_parallel.detokenizer import IncrementalDetokenizer, ends_step
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.rows import Group, PassInputs, Row

if TYPE_CHECKING:
    from hf_parallel.generation.modes.hogwild.config import HogwildConfig

_logger = logging.getLogger(__name__)


@dataclass
class Step:
    """A reasoning step.

    `forward_pass` is the decode pass, counted from 1, whose token ended it; None for a step left unfinished. `worker`
    is -1 and `name` is `common` where somebody else put it into the common history.
    """

    worker: int
    name: str
    step: int
    text: str
    tokens: list[int]
    forward_pass: int | None = None


@dataclass(eq=False)
class Worker(Row):
    """One worker: a row whose own block is exchanged whenever it ends a step."""

    problem: Problem = field(default=None, repr=False)  # type: ignore[assignment]
    number: int = 0
    name: str = ""
    step: int = 0
    began: int = 0  # decode passes that had been when it came
    generated: int = 0
    left: bool = False
    answered: bool = False
    text: str = ""
    current: IncrementalDetokenizer = field(default=None, repr=False)  # type: ignore[assignment]
    own: str = ""  # what of `current` it has generated itself

    @property
    def group(self) -> Problem:
        """The workers of its problem."""
        return self.problem

    def segments(self) -> list[tuple[Segment, list[int]]]:
        """What the problem still owes to the cache, if no other row brings it, then the worker's own tokens."""
        own = Segment(self.problem.space.view(self.number), len(self.pending))
        return [*self.problem.owed_segments(), (own, self.pending)]

    def wanted(self) -> bool:
        """Whether the worker should go on, now that all workers have taken their tokens."""
        return not self.problem.stopped(self)

    @property
    def passes(self) -> int:
        """Decode passes that have been."""
        return self.began + self.generated

    def begin_step(self, before: Sequence[int] = ()) -> None:
        """Write the next step's prefix; `before` are tokens that come first in the worker's own text."""
        problem = self.problem
        self.step += 1
        prefix = problem.config.step_prefix.format(name=self.name, step=self.step)
        if problem.redundancy_due():
            prefix += problem.config.redundancy_prompt
        tokens = problem.encode(prefix)
        self.current = IncrementalDetokenizer(problem.call.tokenizer)
        self.own = ""
        self.pending = list(before)
        self.append_given(tokens, "begin")

    def append_given(self, tokens: Sequence[int], event: str) -> None:
        """Put tokens into the worker's step that it has not generated."""
        problem = self.problem
        self.pending = [*self.pending, *tokens]
        self._write(tokens, event)
        problem.given += len(tokens)
        problem.loop.extend(self.index, tokens)

    def advance(self, token: int, ended: bool) -> bool:
        """Take a new token; says whether the worker goes on."""
        problem, config = self.problem, self.problem.config
        self.generated += 1
        problem.generated += 1
        is_eos = token in problem.call.eos_token_ids
        added = "" if is_eos else self._write([token], "token")
        self.own += added
        self.answered = self.answered or problem.look_for_answer(self)
        self.pending = [] if is_eos else [token]
        complete = ends_step(self.own, added, config.separator, config.sentence_ends, config.code_fence)
        stopped = problem.stopped(self)
        if ended or stopped or self.passes >= problem.call.max_new_tokens or problem.is_full():
            ended = is_eos or (ended and not problem.timed_out())
            self.leave(finished=ended or complete or (stopped and self.answered))
            return False
        if complete:
            self._end_step()
        return True

    def leave(self, finished: bool) -> None:
        """Write no more. What was written last stays in sight, or joins the history if it is complete."""
        if self.left:
            return
        problem, self.left = self.problem, True
        problem.record(self, finished)
        if finished:
            problem.show(self, "", "step")
        problem.show(self, "", "end")
        block = problem.space.workers[self.number]
        if finished and problem.space.layout != "contiguous":
            if not self.current.text.endswith(problem.config.separator):
                tokens = problem.encode(problem.config.separator)
                self.pending += tokens
                problem.given += len(tokens)
            problem.cache.end_step(problem.space, self.number)
        problem.owe(block, self.pending)

    def _write(self, tokens: Sequence[int], event: str) -> str:
        added = self.current.add(tokens)
        self.text += added
        self.problem.show(self, added, event)
        return added

    def _end_step(self) -> None:
        """The step is complete: into the history with it; its last token's key follows in the next pass."""
        problem = self.problem
        problem.record(self, finished=True)
        problem.show(self, "", "step")
        if problem.space.layout == "contiguous":
            self.begin_step(self.pending)
            return
        problem.owe(problem.space.workers[self.number], self.pending)
        problem.cache.end_step(problem.space, self.number)
        self.begin_step()


class Problem(Group):
    """One prompt, its workers, and what they have written together."""

    def __init__(
        self, config: HogwildConfig, call: GenerationCall, loop: DecodeLoop, cache: HogwildCache, index: int, leaf: Node
    ) -> None:
        super().__init__((config.layout, config.num_workers, call.prompts[index].tolist()))
        self.config, self.call, self.loop, self.cache, self.index, self.leaf = config, call, loop, cache, index, leaf
        texts = (config.history_header, config.others_header, config.own_header, config.step_gap)
        self.headers = [self.encode(text) for text in texts]
        lengths = [len(tokens) for tokens in self.headers]
        self.space = cache.new_workspace(config.layout, cache.view(leaf), config.num_workers, lengths)
        self.history: list[Step] = []
        self._recorded = 0  # tokens of the history
        self.answer: str | None = None
        self.conclusion = ""
        self.generated = 0
        self._checked = 0
        self._owed: list[tuple[Block, list[int]]] = []
        self._shown: set[Block] = set()  # headers that have been owed
        self._owe_headers()
        self._positions = _positions(call, index)
        longest = max(map(len, map(self.encode, config.late_prefixes)))
        self._spare = 1 + longest + len(self.encode(config.separator)) + lengths[-1]  # of a worker in a pass, at most
        self._once = len(self.encode(config.redundancy_prompt + config.finisher_prompt)) + config.finisher_tokens
        self.workers: list[Worker] = []
        for number, name in enumerate(config.names):
            self._begin(Worker(index * config.num_workers + number, (), problem=self, number=number, name=name))
        self._check_room()

    def _begin(self, worker: Worker) -> None:
        self.workers.append(worker)
        worker.begin_step()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text of the mode's own."""
        return list(self.call.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _owe_headers(self) -> None:
        """The next forward pass computes the headers that will be seen from now on."""
        space, count = self.space, len(self.space.unfinished)
        unseen = space.layout == "interleaved" and not self.config.finisher_tokens
        seen = (space.layout != "contiguous", count > 1 and not unseen, True, count > 2 and not unseen)
        for block, tokens, is_seen in zip(space.headers, self.headers, seen, strict=True):
            if is_seen and block not in self._shown:
                self._shown.add(block)
                self.owe(block, tokens)
                self.given += len(tokens)

    def add_worker(self, name: str, index: int, began: int) -> Worker:
        """Let one worker more begin, as row `index`, after `began` decode passes."""
        number = len(self.workers)
        self.cache.add_worker(self.space)
        self._owe_headers()
        worker = Worker(index, (), problem=self, number=number, name=name, began=began)
        self._begin(worker)
        return worker

    def remove_worker(self, worker: Worker) -> None:
        """Let a worker go, and what it was writing with it."""
        if not worker.left:
            worker.left = True
            self.show(worker, "", "end")
        self._keep_steps(lambda step: step.worker != worker.number or step.forward_pass is not None)
        self._disown(self.space.workers[worker.number])
        self.cache.remove_worker(self.space, worker.number)

    def tell_all(self, text: str, tokens: list[int], passes: int) -> None:
        """Put a step that no worker wrote into the history, after `passes` decode passes."""
        number = 1 + sum(step.worker < 0 for step in self.history)
        self._add_step(Step(-1, "common", number, text, tokens, passes))
        self.call.show(-1, text, "inject")
        self.call.show(-1, "", "step")
        self.given += len(tokens)
        self.owe(self.cache.add_step(self.space, len(tokens)), tokens)

    def forget(self, number: int) -> None:
        """Forget a finished step, counted from the first that is left."""
        forgotten = self.finished[number]
        self._keep_steps(lambda step: step is not forgotten)
        if number >= len(self.space.steps):
            self._disown(self.space.closing[number - len(self.space.steps)])
        self.cache.forget_step(self.space, number)

    def _add_step(self, step: Step) -> None:
        self.history.append(step)
        self._recorded += len(step.tokens)

    def _keep_steps(self, wanted: Callable[[Step], bool]) -> None:
        """Let all other steps leave the history."""
        self.history = [step for step in self.history if wanted(step)]
        self._recorded = sum(len(step.tokens) for step in self.history)

    @property
    def finished(self) -> list[Step]:
        """Those steps of the history that have ended, as the cache holds them."""
        return [step for step in self.history if step.forward_pass is not None]

    def _disown(self, block: Block) -> None:
        """Owe nothing to a block any more."""
        self._owed = [(other, tokens) for other, tokens in self._owed if other is not block]

    def unread(self) -> PassInputs:
        """What nobody has computed of the prompt."""
        nodes = [node for node in self.leaf.path if len(node.missing)]
        return [(Segment(self.cache.view(node), len(node.missing)), node.missing.tolist()) for node in nodes]

    def describe(self, brought: PassInputs) -> tuple[list[str], object]:
        """See `Group.describe`: blocks by the names that they keep when they move, and which steps have ended."""
        return [self.space.name_of(segment.view[-1]) for segment, _ in brought], self.space.ended

    def owe(self, block: Block, tokens: list[int]) -> None:
        """Note tokens of a block whose keys and values the next forward pass of the problem must compute."""
        if tokens:
            self._owed.append((block, tokens))

    def owed_segments(self) -> list[tuple[Segment, list[int]]]:
        """What is owed, for the next forward pass; taken by whoever asks first."""
        owed, self._owed = self._owed, []
        return [(Segment(self.space.view_of(block), len(tokens)), tokens) for block, tokens in owed]

    def settle(self) -> None:
        """Steps that owe nothing any more move into the history."""
        owed = [block for block, _ in self._owed]
        if not self.backlog:
            self.cache.settle(self.space, sum(block not in owed for block in self.space.closing))

    def redundancy_due(self) -> bool:
        """Whether it is time to ask for redundant work, which is then taken as asked."""
        due = bool(self.config.redundancy_prompt) and self.generated - self._checked >= self.config.redundancy_interval
        if due:
            self._checked = self.generated
        return due

    def _check_room(self) -> None:
        """Raise a `ValueError` unless the model has positions for the first token of every worker."""
        if self._positions is not None and self.length + len(self.workers) > self._positions:
            raise ValueError(
                f"prompt, headers and what steps begin with are {self.length} tokens, which leaves no room for "
                f"{len(self.workers)} workers in the model's {self._positions} positions (max_position_embeddings)"
            )

    @property
    def length(self) -> int:
        """Tokens that there are to be read: prompt, headers, and what has been written."""
        unfinished = sum(len(worker.current.tokens) for worker in self.workers if not worker.left)
        given = len(self.call.prompts[self.index]) + sum(map(len, self.headers))
        return given + self._recorded + unfinished

    def is_full(self) -> bool:
        """Whether what is read might pass the model's positions if all wrote on; says so once."""
        if self._positions is None:
            return False
        full = self.length + len(self.workers) * self._spare + self._once > self._positions
        if full:
            _say_full(self._positions)
        return full

    def look_for_answer(self, worker: Worker) -> bool:
        """Whether the worker has just completed a final answer, which becomes the problem's if it is the first."""
        answer = self.config.find_answer(worker.own)
        if answer is not None and self.answer is None:
            self.answer = answer
        return answer is not None

    def stopped(self, worker: Worker) -> bool:
        """Whether answers end this worker's writing."""
        rule = self.config.stop_on_answer
        return (rule == "any" and self.answer is not None) or (rule == "all" and worker.answered)

    def timed_out(self) -> bool:
        """Whether `max_time` is over: what it has ended was cut off."""
        limits = [criterion for criterion in self.loop.sampler.criteria if isinstance(criterion, MaxTimeCriteria)]
        return any(time.time() - limit.initial_timestamp > limit.max_time for limit in limits)

    def record(self, worker: Worker, finished: bool) -> None:
        """Keep a worker's step as it stands."""
        self._add_step(self.step_of(worker, finished))

    @staticmethod
    def step_of(worker: Worker, finished: bool = False) -> Step:
        """A worker's step as it stands."""
        text = worker.current
        ended = worker.passes if finished else None
        return Step(worker.number, worker.name, worker.step, text.text, list(text.tokens), ended)

    def show(self, worker: Worker, text: str, event: str) -> None:
        """Tell a streamer of parallel text what a worker wrote; events as in `ParallelStreamer`."""
        self.call.show(worker.index, text, event)

    def finisher(self, tokens: list[int]) -> Finisher:
        """A row that reads all that was written and goes on with `tokens`."""
        self.given += len(tokens)
        return Finisher(self.index, (), list(tokens), problem=self, block=self.cache.new_block())


@dataclass(eq=False)
class Finisher(Row):
    """The reader of everything: it brings what the problem still owes, then its own tokens."""

    problem: Problem = field(default=None, repr=False)  # type: ignore[assignment]
    block: Block = field(default=None, repr=False)  # type: ignore[assignment]

    @property
    def group(self) -> Problem:
        """What it reads is its problem's."""
        return self.problem

    def segments(self) -> list[tuple[Segment, list[int]]]:
        """As `Worker.segments`."""
        owed = self.problem.owed_segments()
        own = Segment([*self.problem.space.everything(), self.block], len(self.pending))
        return [*owed, (own, self.pending)]


def _positions(call: GenerationCall, row: int) -> int | None:
    """Positions of the model that a problem must do with; None where the caller asks for rows that are longer."""
    positions = getattr(call.model.config.get_text_config(), "max_position_embeddings", None)
    asked = len(call.prompts[row]) + call.max_new_tokens
    return None if positions is None or asked > positions else positions


@lru_cache
def _say_full(positions: int) -> None:
    _logger.warning("workers stop: what they have written together uses up the model's %d positions", positions)
