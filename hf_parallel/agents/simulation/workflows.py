"""Workflows: traces of five agents as in Hive, of random agents, and with an agent that inflates its score."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_parallel.agents.simulation.traces import PromptSegment, Trace, TraceRequest

AGENTS = ("Decision", "Patcher", "Viewer", "Summary", "Searcher")
HOTSPOTS = ("Patcher", "Viewer")


@dataclass(frozen=True)
class FiveAgents:
    """The workflow of five agents of Hive, section 8.3 and figure 3. The lengths are not in the paper.

    In each round, Decision sends work to Viewer and Patcher `loops` times: the main paths, whose two agents are the
    hotspots. Both continue a conversation. Then Searcher retrieves documents, which are long and used once, and Summary
    reads them with the report of the round. In the next round, the conversations begin again, with its summary.

    The default lengths are chosen so that the hit rates of LRU are those of the paper (0.90 for hotspots and 0.31 for
    others in 7 rounds), at the budget at which that of the hotspots is.

    Parameters
    ----------
    rounds : int
    seed : int
        Of the lengths, which vary by `spread`.
    loops : int
        Times that each main path runs in a round.
    task : int
        Tokens with which all prompts begin: rules, and the description of the task.
    role : int
        Tokens of the rules of a role.
    code : int
        Tokens of the files that Viewer and Patcher work on; each has its own.
    message, answer : int
        Tokens of a new message in a conversation, and of an answer.
    report : int
        Tokens of the state of the work that Decision reads; another one each time.
    documents : int
        Tokens that Searcher retrieves.
    summary : int
        Tokens of a summary.
    spread : float
        Lengths are drawn from `1 - spread` to `1 + spread` times these.
    is_changing : bool
        Whether the agents exchange their parts half-way: Searcher and Summary do then what Viewer and Patcher did.
    """

    rounds: int = 7
    seed: int = 0
    loops: int = 7
    task: int = 50
    role: int = 50
    code: int = 2000
    message: int = 25
    answer: int = 40
    report: int = 60
    documents: int = 600
    summary: int = 150
    spread: float = 0.3
    is_changing: bool = False

    def trace(self) -> Trace:
        """Return the trace."""
        rng = random.Random(self.seed)
        requests: list[TraceRequest] = []
        name = f"five agents, seed {self.seed}"

        def length(mean: int) -> int:
            return max(1, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))

        task = (f"{name}: task", length(self.task))
        roles = {agent: (f"{name}: {agent}", length(self.role)) for agent in AGENTS}
        code = {agent: (f"{name}: code of {agent}", length(self.code)) for agent in HOTSPOTS}
        parts = {agent: agent for agent in AGENTS}  # the agent that has each part
        kept: list[PromptSegment] = []  # the summary of the rounds so far

        def add(agent: str, prompt: Sequence[PromptSegment], answer: int, tool: float | None = None) -> PromptSegment:
            output = f"{name}: answer {len(requests)}", length(answer)
            gap = rng.uniform(0.5, 2.0)
            given = (task, roles[agent], *prompt)
            wait = None if tool is None else 1000 * tool
            requests.append(TraceRequest(parts[agent], given, output, gap, name, wait, agent in HOTSPOTS))
            return output

        def decide(where: str) -> None:
            add("Decision", [(f"{name}: state {where}", length(self.report))], self.message)

        for number in range(self.rounds):
            if self.is_changing and number == self.rounds // 2:
                parts |= {"Viewer": "Searcher", "Searcher": "Viewer", "Patcher": "Summary", "Summary": "Patcher"}
            talks: dict[str, list[PromptSegment]] = {"Viewer": [], "Patcher": []}
            for loop in range(self.loops):
                decide(f"{number}.{loop}")
                for agent, talk in talks.items():
                    where = f"{number}.{loop} {agent}"
                    talk.append((f"{name}: message {where}", length(self.message)))
                    waits = 5.0 if loop + 1 < self.loops else None  # for its tool, until its next turn
                    talk.append(add(agent, [code[agent], *kept, *talk], self.answer, waits))
            decide(f"{number} search")
            documents = (f"{name}: documents {number}", length(self.documents))
            add("Searcher", [documents], self.message)
            report = (f"{name}: report {number}", length(self.report))
            kept = [add("Summary", [*kept, report, documents], self.summary)]
        return Trace(tuple(requests))


def random_trace(seed: int, num_agents: int = 8, num_requests: int = 300) -> Trace:
    """Return random requests of random agents.

    Agents differ in how often they send requests, in the length of their rules, and in how they go on: with their
    conversation, or with another one. Some read long texts once. The quarter that sends most requests is the hotspots.
    """
    rng = random.Random(seed)
    names = [f"agent {index}" for index in range(num_agents)]
    weights = [1 / (1 + index) for index in range(num_agents)]
    rules = {name: (f"{seed}: {name}", rng.randint(50, 1500)) for name in names}
    goes_on = {name: rng.choice([0.0, 0.5, 0.8, 0.95]) for name in names}
    texts = {name: rng.choice([20, 50, 100, 500]) for name in names}
    task: PromptSegment = (f"{seed}: task", rng.randint(1, 300))
    talks: dict[str, list[PromptSegment]] = {name: [] for name in names}
    requests = []
    for index in range(num_requests):
        agent = rng.choices(names, weights)[0]
        talk = talks[agent] if rng.random() < goes_on[agent] and len(talks[agent]) < 16 else []
        text: PromptSegment = (f"{seed}: text {index}", rng.randint(1, 2 * texts[agent]))
        output: PromptSegment = (f"{seed}: answer {index}", rng.randint(1, 100))
        prompt = (task, rules[agent], *talk, text)
        talks[agent] = [*talk, text, output]
        waits = rng.uniform(100, 5000) if rng.random() < 0.5 else None
        is_hotspot = agent in names[: max(1, num_agents // 4)]
        requests.append(TraceRequest(agent, prompt, output, rng.uniform(0, 2), str(seed), waits, is_hotspot))
    return Trace(tuple(requests))


def with_adversary(trace: Trace, seed: int = 0, requests: int = 2, *, imitates: bool = False) -> Trace:
    """Return a trace in which an agent of another workflow sends requests after each one, to inflate its score.

    Its requests share a long prefix with each other, and each has a text of its own. `imitates`: they begin with the
    prompt of a hotspot instead, so that they share with that agent.
    """
    rng = random.Random(seed)
    rules: PromptSegment = ("adversary: rules", 1000)
    victims = [one.prompt[:3] for one in trace.requests if one.is_hotspot]
    mixed: list[TraceRequest] = []
    for index, request in enumerate(trace.requests):
        mixed.append(request)
        for number in range(requests):
            own: PromptSegment = (f"adversary: text {index}.{number}", rng.randint(50, 400))
            prefix = rng.choice(victims) if imitates else (rules,)
            output: PromptSegment = (f"adversary: answer {index}.{number}", 10)
            mixed.append(TraceRequest("Adversary", (*prefix, own), output, 0.0, "adversary", 1.0))
    return replace(trace, requests=tuple(mixed))
