"""Everything that can be done to the queue, over one database."""

from types import TracebackType
from typing import Self

from lineshaft.checks.registry import Checks
from lineshaft.clock import Clock
from lineshaft.engine.agents import Fleet
from lineshaft.engine.claim.claims import Claims
from lineshaft.engine.claim.undelivered import UndeliveredClaims
from lineshaft.engine.guards.breakers import Breakers
from lineshaft.engine.guards.budgets import Budgets
from lineshaft.engine.guards.locks import Locks
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.guards.slowdowns import Slowdowns
from lineshaft.engine.maintenance import Maintenance
from lineshaft.engine.postgres.database import Database
from lineshaft.engine.read.queries import Queries
from lineshaft.engine.review.approvals import Approvals
from lineshaft.engine.review.dead_letters import DeadLetters
from lineshaft.engine.review.gates import Gates
from lineshaft.engine.review.reports import Reports
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.submit.submission import Submission
from lineshaft.engine.tokens import Tokens
from lineshaft.engine.transition.lifecycle import Lifecycle
from lineshaft.engine.transition.operations import Operations
from lineshaft.engine.transition.spawn import Parting
from lineshaft.engine.transition.working import Working
from lineshaft.engine.work import Work


class Engine:
    def __init__(
        self,
        dsn: str,
        *,
        clock: Clock | None = None,
        max_connections: int = 10,
        prepare: bool = True,
        rules: Rules | None = None,
        checks: Checks | None = None,
    ) -> None:
        #: How outputs are checked; without any, commands and judges are not to be had.
        self.checks = checks or Checks()
        self.rules = rules or Rules()
        self.database = Database(dsn, clock=clock, max_connections=max_connections, prepare=prepare)
        lanes = Lanes()
        self.submission = Submission(self.database, lanes, gate_faults=self.checks.faults)
        self.slowdowns = Slowdowns(self.database)
        self.locks = Locks(self.database)
        self.breakers = Breakers(self.database, self.rules.breakers)
        self.lifecycle = Lifecycle(self.database, lanes, breakers=self.breakers)
        self.budgets = Budgets(self.database, self.lifecycle, self.rules)
        self.maintenance = Maintenance(self.database, self.lifecycle, self.breakers, self.budgets)
        self.read = Queries(self.database, daily_budget_usd=self.rules.daily_budget_usd)
        self.returning = UndeliveredClaims(self.lifecycle.release)
        self.claims = Claims(
            self.database,
            self.maintenance,
            self.read.why_not,
            self.breakers,
            self.returning,
            daily_budget_usd=self.rules.daily_budget_usd,
        )
        self.fleet = Fleet(self.database, self.lifecycle)
        self.operations = Operations(self.database, lanes, self.lifecycle, self.submission)
        self.dead_letters = DeadLetters(self.database, self.operations)
        self.working = Working(
            self.database, self.lifecycle, daily_budget=self.rules.daily_budget_usd is not None
        )
        self.parting = Parting(self.database, self.lifecycle, self.operations)
        #: What agents do with the tasks they hold.
        self.work = Work(self.database, self.lifecycle, self.working, self.parting, self.operations)
        self.gates = Gates(self.database, self.lifecycle, self.checks)
        self.lifecycle.gatekeeper = self.gates
        self.approvals = Approvals(self.database, self.lifecycle, self.gates, self.read)
        self.reports = Reports(self.database)
        self.tokens = Tokens(self.database)

    async def __aenter__(self) -> Self:
        await self.database.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.returning.close()
        await self.database.close()
