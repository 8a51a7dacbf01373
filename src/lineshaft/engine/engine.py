"""The engine: all operations of the queue, on one database."""

import logging
from types import TracebackType
from typing import Self

from lineshaft.artifacts.store import Store
from lineshaft.checks.registry import Checks
from lineshaft.clock import Clock
from lineshaft.engine.agents import Fleet
from lineshaft.engine.artifacts.artifacts import DEFAULT_MAX_BYTES, Artifacts
from lineshaft.engine.claim.claim_tokens import ClaimKey
from lineshaft.engine.claim.claims import Claims
from lineshaft.engine.claim.schedule import Schedule
from lineshaft.engine.claim.undelivered import UndeliveredClaims
from lineshaft.engine.guards.breakers import Breakers
from lineshaft.engine.guards.budgets import Budgets
from lineshaft.engine.guards.limits import InstallationLimits
from lineshaft.engine.guards.locks import Locks
from lineshaft.engine.guards.pauses import Pauses
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.guards.slowdowns import Slowdowns
from lineshaft.engine.maintenance import Maintenance
from lineshaft.engine.operations import Operations
from lineshaft.engine.postgres.database import FAIL_WITHIN_SEC, Database
from lineshaft.engine.read.queries import Queries
from lineshaft.engine.review.approvals import Approvals
from lineshaft.engine.review.dead_letters import DeadLetters
from lineshaft.engine.review.gates import Gates
from lineshaft.engine.review.reports import Reports
from lineshaft.engine.review.reviews import Reviews
from lineshaft.engine.sessions import Sessions
from lineshaft.engine.sources.event_sources import EventSources
from lineshaft.engine.sources.file_sources import FileSources
from lineshaft.engine.sources.firing import Firings
from lineshaft.engine.sources.observers import Observers
from lineshaft.engine.sources.registry import Sources
from lineshaft.engine.sources.schedules import Schedules
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.submit.submission import Submission
from lineshaft.engine.tokens import Tokens
from lineshaft.engine.transition.cancel import Cancel
from lineshaft.engine.transition.change import Change
from lineshaft.engine.transition.complete import Acceptance, Complete
from lineshaft.engine.transition.dependencies import Dependencies
from lineshaft.engine.transition.fail import Fail
from lineshaft.engine.transition.matching import Matching
from lineshaft.engine.transition.release import Release
from lineshaft.engine.transition.revive import Revive
from lineshaft.engine.transition.spawn import Spawn
from lineshaft.engine.transition.start import Start
from lineshaft.engine.transition.steps import Steps
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.engine.work import Work
from lineshaft.model.tasks import TaskRules

_log = logging.getLogger("lineshaft.engine")


class Engine:
    def __init__(
        self,
        dsn: str,
        *,
        clock: Clock | None = None,
        max_connections: int = 10,
        read_connections: int = 0,
        keep_connections: int = 1,
        prepare: bool = True,
        fail_within_sec: float = FAIL_WITHIN_SEC,
        rules: Rules | None = None,
        checks: Checks | None = None,
        by_server: bool = False,
        store: Store | None = None,
        max_artifact_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """`store` has the artifacts. `by_server`: limits in `rules` replace the installation's, each once."""
        self._by_server = by_server
        #: How outputs are checked; by default without commands and judges.
        self.checks = checks or Checks()
        self.rules = rules or Rules()
        self.database = Database(
            dsn,
            clock=clock,
            max_connections=max_connections,
            read_connections=read_connections,
            keep_connections=keep_connections,
            prepare=prepare,
            fail_within_sec=fail_within_sec,
        )
        self.artifacts = Artifacts(self.database, store, max_bytes=max_artifact_bytes)
        lanes = Lanes(self.rules.max_lanes)
        transitions = Transitions(self.database)
        reviews = Reviews(self.database)
        dependencies = Dependencies(transitions)
        steps = Steps(transitions)
        release = Release(transitions)
        cancel = Cancel(transitions, dependencies, reviews)
        revive = Revive(transitions, lanes, dependencies, reviews)

        # Guards.
        self.slowdowns = Slowdowns(self.database)
        self.locks = Locks(self.database)
        self.breakers = Breakers(self.database)
        self.limits = InstallationLimits(self.database)
        self.budgets = Budgets(self.database, transitions.locks, self.limits)
        pauses = Pauses(self.database)

        # Reads.
        self.read = Queries(self.database)
        self.schedule = Schedule(self.database)

        # Work.
        fail = Fail(
            transitions,
            lanes,
            self.breakers,
            self.slowdowns,
            max_retry_after_sec=self.rules.max_retry_after_sec,
        )
        acceptance = Acceptance(transitions, fail, self.breakers)
        self.gates = Gates(transitions, acceptance, self.checks, self.artifacts)
        self.submission = Submission(
            self.database,
            lanes,
            rules=TaskRules(
                self.checks.faults,
                self.rules.max_duration_sec,
                self.rules.max_dag_tasks,
                self.rules.max_spawn_depth,
                self.rules.max_spawned_tasks,
            ),
        )
        self.maintenance = Maintenance(transitions, fail, cancel, self.breakers, self.budgets)
        self.undelivered = UndeliveredClaims(self.database, release.release)
        self.claims = Claims(
            self.database,
            self.maintenance,
            self.read.why_not,
            self.breakers,
            self.undelivered,
        )
        self.work = Work(
            self.database,
            start=Start(transitions),
            steps=steps,
            spawn=Spawn(transitions, steps, dependencies, self.submission),
            complete=Complete(transitions, acceptance, fail, self.gates),
            fail=fail,
            release=release,
            cancel=cancel,
            claims=self.claims,
        )
        self.claim_key = ClaimKey(self.database)
        self.fleet = Fleet(self.database, fail)

        # People.
        self.matching = Matching(self.read, cancel, revive)
        self.operations = Operations(cancel, revive, Change(transitions, lanes), dependencies, pauses)
        self.dead_letters = DeadLetters(self.database, reviews, cancel, revive, dependencies)
        self.approvals = Approvals(transitions, self.gates, self.read)
        self.reports = Reports(self.database)
        self.tokens = Tokens(self.database)
        self.sessions = Sessions(self.database)

        # Sources.
        self.sources = Sources(self.database)
        self.firings = Firings(self.database, self.submission, self.operations)
        self.schedules = Schedules(self.database, self.firings)
        self.file_sources = FileSources(self.database, self.firings)
        self.observers = Observers(self.database, self.firings)
        self.event_sources = EventSources(self.database, self.firings, self.read)

    async def __aenter__(self) -> Self:
        await self.database.open()
        try:
            ignored = await self.limits.apply(self.rules.installation_limits, by_server=self._by_server)
        except BaseException:
            # Tasks of a pool that isn't closed survive the end of the event loop, which waits for them.
            await self.database.close()
            raise
        if ignored:
            _log.warning(
                "These settings differ from the limits of the installation, which count: %s. "
                "'lineshaft limits' shows them and 'lineshaft limits set' changes them",
                ", ".join(ignored),
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.undelivered.close()
        await self.database.close()
