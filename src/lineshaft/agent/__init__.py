"""Agents: claim tasks and run their handlers.

- `agent` has `Agent`; `task_type` has what `@agent.task` returns.
- `loop` is one agent at work: it claims, runs handlers and writes outcomes in batches (`writer`).
- `lease_keeper` is a thread for the whole process that sends heartbeats for all claims.
- `process_group` is what agents of one process share; `stopping` handles signals.
- `handlers` turns specs into arguments; `outcome` turns return values and exceptions into outcomes.
- `context` is what a handler sees of its attempt; `execution`, `steps` and `money` are behind it.
"""

from lineshaft.agent.agent import Agent
from lineshaft.agent.context import SyncTaskContext, TaskContext
from lineshaft.agent.outcome import AttemptCancelled, BudgetExceeded, Cancel, Fail, Result, Snooze
from lineshaft.agent.task_type import TaskDecorator, TaskFunction, TaskType

__all__ = [
    "Agent",
    "AttemptCancelled",
    "BudgetExceeded",
    "Cancel",
    "Fail",
    "Result",
    "Snooze",
    "SyncTaskContext",
    "TaskContext",
    "TaskDecorator",
    "TaskFunction",
    "TaskType",
]
