"""Monte-Carlo tree search over an agent's choices: a supervisor of your own. Run: python examples/agents_mcts.py

`MCTS` can be used for any agent. Here, it looks for a short answer without a word twice.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_parallel
from hf_parallel.agents import Chat, Runtime, State, Supervisor, agent
from hf_parallel.engine import Engine

MODEL = None  # a Hub id or a path, such as "Qwen/Qwen3-8B"; None: the demo model
QUESTION = "Describe the sea."
ITERATIONS = 6


@dataclass
class Node:
    """Statistics of a state."""

    visits: int = 0
    losses: int = 0  # visits that failed or have not ended
    total: float = 0.0
    running: int = 0  # transitions
    children: list[State] = field(default_factory=list)
    is_complete: bool = False  # its subtree is fully expanded


@dataclass
class MCTS(Supervisor):
    """Monte-Carlo tree search with UCT (Kocsis and Szepesvari, "Bandit Based Monte-Carlo Planning", 2006).

    An iteration descends from the start to a state with fewer than `expand` completions, along the highest

        mean value + exploration * sqrt(ln(visits of the parent) / visits),

    adds a completion, and continues with one completion per choice until the path ends. Each state of the path is
    credited with the value of its end, and new states stay in the tree. Values are scaled to [0, 1] by the least and
    greatest so far; a failed path counts 0. A running iteration counts 0 until it ends (virtual loss: Chaslot et al.,
    "Parallel Monte-Carlo Tree Search", 2008), so that parallel iterations take different paths. The search ends early
    if all states have `expand` completions.

    Parameters
    ----------
    iterations : int
        Number of paths.
    expand : int
        Completions per choice.
    exploration : float
        Weight of rarely visited states.
    parallel : int
        Number of simultaneous iterations.
    value : callable
        Value of the end of a path.
    """

    iterations: int
    expand: int
    exploration: float = math.sqrt(2)
    parallel: int = 1
    counts: ClassVar[tuple[str, ...]] = ("iterations", "expand", "parallel")
    compares: ClassVar[bool] = True

    def init(self, root: State) -> None:
        super().init(root)
        self._nodes = {root: Node()}
        self._num_left, self._num_running = self.iterations, 0
        self._range = (math.inf, -math.inf)

    def select(self) -> Sequence[State]:
        """Return the states of running iterations, and those where new ones begin."""
        while self._num_left and self._num_running < self.parallel:
            state = self._descend(self.root)
            if state is None:
                break
            self._num_left -= 1
            self._num_running += 1
            for node in self._nodes_above(state):
                node.visits += 1
                node.losses += 1
            self._fire(state)
        return super().select()

    def _fire(self, state: State) -> None:
        self._nodes[state].running += 1
        self.next_states.append(state)

    def commit(self, parent: State, child: State) -> None:
        super().commit(parent, child)
        node = self._nodes[parent]
        node.running -= 1
        node.children.append(child)
        self._nodes[child] = Node(visits=1, losses=1)
        if child.is_choice:
            self._fire(child)
            return
        self._num_running -= 1
        if child.value is not None:
            self._range = min(self._range[0], child.value), max(self._range[1], child.value)
            for node in self._nodes_above(child):
                node.losses -= 1
                node.total += child.value

    def evaluates(self, state: State) -> bool:
        return state.is_final

    def _nodes_above(self, state: State) -> Iterator[Node]:
        """Yield the nodes from a state up to the root."""
        current: State | None = state
        while current is not None and current in self._nodes:
            yield self._nodes[current]
            current = current.parent

    def _descend(self, state: State) -> State | None:
        """Return the state in this subtree to expand next, or None."""
        node = self._nodes[state]
        if not state.is_choice or node.is_complete:
            return None
        if len(node.children) + node.running < self.expand:
            return state
        for child in sorted(node.children, key=lambda child: self._score(node, self._nodes[child]), reverse=True):
            if (found := self._descend(child)) is not None:
                return found
        node.is_complete = not node.running and all(
            not child.is_choice or self._nodes[child].is_complete for child in node.children
        )
        return None

    def _score(self, parent: Node, node: Node) -> float:
        low, high = self._range
        ended = node.visits - node.losses
        gained = (node.total - ended * low) / (high - low) if low < high else ended
        return gained / node.visits + self.exploration * math.sqrt(math.log(parent.visits) / node.visits)


@agent
async def describe(question):
    """Yield an answer of two sentences; the search chooses each."""
    chat = Chat("Answer in one short sentence.", max_new_tokens=16, do_sample=True, temperature=0.8)
    first = await chat.user(question).gen()
    yield f"{first} {await chat.user('Continue.').gen()}"


def distinct(state):
    """Return the fraction of words that occur once."""
    words = str(state.yielded).lower().split()
    return len(set(words)) / max(len(words), 1)


def main():
    if MODEL is None:
        model, tokenizer = hf_parallel.load_embedded_model()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    with Engine(model, tokenizer) as engine:
        search = MCTS(ITERATIONS, expand=2, parallel=3, value=distinct)
        result = Runtime(engine).run(describe.under(search), QUESTION)
    print(" ".join(result.value.split()))
    print(f"{result.stats.completions} completions in {result.stats.transitions} transitions")


if __name__ == "__main__":
    main()

# Prints:
#   ...
#   ... completions in ... transitions
