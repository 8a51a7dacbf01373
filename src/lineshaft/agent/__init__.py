"""Agents: claim tasks and run their handlers.

- `agent` has `Agent`; `task_type` has what `@agent.task` returns.
- `run` is one call of `Agent.run`. Its parts have one duty each: `claiming` decides when to look for work and
  for how many tasks, through the calls of `claim_calls`; `slots` counts the room; `executor` runs handlers;
  `writer` writes outcomes in batches; `stopping` ends the work; `answers` carries out what heartbeats answer.
- `execution` is one claimed task, with its `lease`, its `durable_steps`, its `waits`, its `quotas` and its
  `money`. A handler sees it as its `context`.
- `lease_keeper` is a thread for the whole process that sends heartbeats for all claims.
- `process_group` is what agents of one process share; `signals` turns signals into requests to stop.
- `handlers` turns specs into arguments; `outcome` turns return values and exceptions into outcomes.
"""

from lineshaft.agent.agent import Agent as Agent
from lineshaft.agent.context import SyncTaskContext as SyncTaskContext
from lineshaft.agent.context import TaskContext as TaskContext
from lineshaft.agent.outcome import AttemptCancelled as AttemptCancelled
from lineshaft.agent.outcome import BudgetExceeded as BudgetExceeded
from lineshaft.agent.outcome import Cancel as Cancel
from lineshaft.agent.outcome import Fail as Fail
from lineshaft.agent.outcome import RateLimited as RateLimited
from lineshaft.agent.outcome import Result as Result
from lineshaft.agent.outcome import SignalTimeout as SignalTimeout
from lineshaft.agent.outcome import Snooze as Snooze
from lineshaft.agent.quotas import QuotaUse as QuotaUse
from lineshaft.agent.task_type import TaskDecorator as TaskDecorator
from lineshaft.agent.task_type import TaskFunction as TaskFunction
from lineshaft.agent.task_type import TaskType as TaskType
