"""For people who write agents.

An `Agent` claims tasks and gives them to handlers; a `TaskContext` is what a handler works with.

- `loop` is the work of one agent: claims with wake-ups and polls, runs, batched outcomes (`writer`).
- `heartbeats` is a thread for the whole process that keeps all leases.
- `crew` is what agents of one process share; `stopping` are signals.
- `handlers` turn a signature into arguments from a spec; `outcome` turns what came of it into one record.
- `context`, `steps` and `money` are what a handler can do.
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
