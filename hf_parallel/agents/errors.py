"""Errors of agents."""


class AgentError(RuntimeError):
    """Raised by an agent that waits for one that failed, and by `Runtime.run`; its cause is the error."""


class AgentEndedError(RuntimeError):
    """Raised by `next` if the agent has ended and yields nothing more."""


class AgentCancelledError(RuntimeError):
    """Raised by `next` if the agent was cancelled."""


class DeadlockError(RuntimeError):
    """Raised where agents would wait for each other for ever."""


class ReplayError(RuntimeError):
    """Raised if an agent does something else when it is replayed: its code is not deterministic."""


class ToolError(RuntimeError):
    """Raised by `tool` if the function failed or took too long, after all attempts."""


class BudgetExceededError(RuntimeError):
    """Raised if a search has used its budget before any of its paths has yielded."""
