"""Errors of agents."""


class AgentError(RuntimeError):
    """Raised by an agent that waits for one that failed, and by `Runtime.run`; its cause is the error."""


def agent_failure(agent_id: str, error: BaseException) -> AgentError:
    """Return the error of an agent that has failed."""
    failure = AgentError(f"agent {agent_id} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class AgentEndedError(RuntimeError):
    """Raised by `next` if the agent has ended and yields nothing more."""


class AgentCancelledError(RuntimeError):
    """Raised by `next` if the agent was cancelled."""


class DeadlockError(RuntimeError):
    """Raised where agents would wait for each other for ever."""


class ReplayError(RuntimeError):
    """Raised if an agent does something else when it is replayed, and ends the run, also if the agent handles it.

    Its code is not deterministic, or the recording is of other arguments, or lacks a completion and there is no engine.
    """


class ToolError(RuntimeError):
    """Raised by `tool` if the function failed or took too long, after all attempts."""


class BudgetExceededError(RuntimeError):
    """Raised if a search has used its budget before any of its paths has yielded."""
