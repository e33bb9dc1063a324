"""SearchTree: the states of an agent's searches, read from the events of a run (Hive, figure 2)."""

from __future__ import annotations

from collections.abc import Iterable

from hf_parallel.agents.trace import Event
from hf_parallel.transcript.tree import TreeNode

CHOICE = "choice"
ERROR = "error"
"""Values of `reached` in an event: the status of its state, see `State`. Others are ends of paths."""


class SearchTree:
    """All states of one agent instance. `root` is the last state before the first choice."""

    def __init__(self, agent_id: str, events: Iterable[Event]) -> None:
        self.agent_id = agent_id
        self._nodes: dict[str, TreeNode] = {}
        reached: dict[str, str] = {}
        selected: list[str] = []
        texts: dict[str, str] = {}
        for event in events:
            if event.agent != agent_id:
                continue
            if event.kind == "gen":
                texts.setdefault(event.state, event.data["text"])  # later ones are of the value function or `gather`
            elif event.kind == "state":
                self._node(event.state).value = event.data["value"]
                reached[event.state] = event.data.get("reached", CHOICE)
                if event.data["status"] == "selected":
                    selected.append(event.state)
        for state, how in reached.items():
            node = self._nodes[state]
            node.outcome = _outcome(node, how)
            node.text = texts.get(state, "")
        for state in selected:
            while state:
                if state in reached:
                    self._nodes[state].outcome = "selected"
                state = state.rpartition(".")[0]
        self.root = self._root()

    @property
    def has_branches(self) -> bool:
        """Whether any state was continued twice."""
        return any(len(node.children) > 1 for node in self.root.walk())

    def _node(self, state: str) -> TreeNode:
        """Return the node of a state; make it and those above it if they are missing."""
        missing: list[TreeNode] = []
        while state and state not in self._nodes:
            node = self._nodes[state] = TreeNode(state, children=missing[-1:])
            missing.append(node)
            state = state.rpartition(".")[0]
        if not missing:
            return self._nodes[state]
        if state:
            self._nodes[state].children.append(missing[-1])
        return missing[0]

    def _root(self) -> TreeNode:
        roots = [node for node in self._nodes.values() if "." not in node.id]
        root = roots[0] if roots else TreeNode("0")
        while len(root.children) == 1 and root.children[0].outcome == "start":
            root = root.children[0]
        return root


def search_trees(events: Iterable[Event]) -> list[SearchTree]:
    """Return the trees of all agents that a supervisor has continued twice from a state, in the order of events."""
    events = list(events)
    agents = dict.fromkeys(event.agent for event in events if event.kind == "state")
    trees = [SearchTree(agent, events) for agent in agents]
    return [tree for tree in trees if tree.has_branches]


def _outcome(node: TreeNode, reached: str) -> str:
    if reached == ERROR:
        return "failed"
    if node.children:
        return "continued"
    return "pruned" if reached == CHOICE else "ended"
