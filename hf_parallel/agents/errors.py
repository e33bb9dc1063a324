"""Errors of agents."""


class AgentError(RuntimeError):
    """Raised by `Runtime.run`, and in agents that wait for a failed agent; its cause is that agent's error."""


def agent_failure(agent_id: str, error: BaseException) -> AgentError:
    """Return the error of a failed agent."""
    failure = AgentError(f"agent {agent_id} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class AgentEndedError(RuntimeError):
    """Raised by `next` if the agent has ended."""


class AgentCancelledError(RuntimeError):
    """Raised by `next` if the agent was canceled."""


class ReplayError(RuntimeError):
    """Raised if an agent diverges from its replay. Ends the run, even if the agent catches it.

    Its code is not deterministic.
    """


class ToolError(RuntimeError):
    """Raised by `tool` if the function failed or took too long."""


class BudgetExceededError(RuntimeError):
    """Raised if a search uses up its budget before a path yields."""
