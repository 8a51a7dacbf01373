"""The engine: all operations of the queue, on one database."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from lineshaft.artifacts.store import Store
from lineshaft.checks.registry import Checks
from lineshaft.clock import Clock
from lineshaft.engine.agents import Fleet
from lineshaft.engine.artifacts.artifacts import DEFAULT_MAX_BYTES, ArtifactRegistry
from lineshaft.engine.claim.claim_tokens import ClaimKey
from lineshaft.engine.claim.claims import Claims
from lineshaft.engine.claim.undelivered import UndeliveredClaims
from lineshaft.engine.claim.upcoming import Upcoming
from lineshaft.engine.feed.events import Events
from lineshaft.engine.feed.redis_dispatch import RedisDispatch
from lineshaft.engine.guards.breakers import Breakers
from lineshaft.engine.guards.budgets import Budgets
from lineshaft.engine.guards.limits import InstallationLimits
from lineshaft.engine.guards.locks import Locks
from lineshaft.engine.guards.outside import OutsideLocks, OutsideRows
from lineshaft.engine.guards.pauses import Pauses
from lineshaft.engine.guards.quotas import Quotas
from lineshaft.engine.guards.reservations import Reservations
from lineshaft.engine.guards.rules import Rules
from lineshaft.engine.guards.slowdowns import Slowdowns
from lineshaft.engine.guards.task_types import TaskTypes
from lineshaft.engine.guards.type_limits import LimitsOfTypes
from lineshaft.engine.maintenance import Maintenance
from lineshaft.engine.postgres.database import FAIL_WITHIN_SEC, Database
from lineshaft.engine.postgres.lane_reports import LaneReports
from lineshaft.engine.read.queries import Queries
from lineshaft.engine.review.approvals import Approvals
from lineshaft.engine.review.dead_letters import DeadLetters
from lineshaft.engine.review.gates import Gates
from lineshaft.engine.review.reports import Reports
from lineshaft.engine.sessions import Sessions
from lineshaft.engine.sources.event_sources import EventSources
from lineshaft.engine.sources.file_sources import FileSources
from lineshaft.engine.sources.firing import Firings
from lineshaft.engine.sources.observers import Observers
from lineshaft.engine.sources.registry import SourceRegistry
from lineshaft.engine.sources.schedules import Schedules
from lineshaft.engine.submit.lanes import Lanes
from lineshaft.engine.submit.submission import Submission
from lineshaft.engine.tokens import Tokens
from lineshaft.engine.transfers import Transfers
from lineshaft.engine.transition.cancel import Cancellations
from lineshaft.engine.transition.complete import Acceptance, Completions
from lineshaft.engine.transition.correct import Corrections
from lineshaft.engine.transition.dependencies import TaskDependencies
from lineshaft.engine.transition.edit import Edit
from lineshaft.engine.transition.fail import Failures
from lineshaft.engine.transition.matching import Matching
from lineshaft.engine.transition.release import Releases
from lineshaft.engine.transition.rerun import Rerun
from lineshaft.engine.transition.reviews import Reviews
from lineshaft.engine.transition.revive import Revive
from lineshaft.engine.transition.spawn import Spawn
from lineshaft.engine.transition.start import Starts
from lineshaft.engine.transition.steps import Steps
from lineshaft.engine.transition.transitions import Transitions
from lineshaft.engine.transition.waits import Waits
from lineshaft.engine.work import Work
from lineshaft.integrations.redis.connection import RedisServer
from lineshaft.model.tasks import TaskRules


class Engine:
    def __init__(  # noqa: PLR0915 - a statement for each part
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
        server: str | None = None,
        source_folders: Sequence[str] | None = None,
        store: Store | None = None,
        max_artifact_bytes: int = DEFAULT_MAX_BYTES,
        outside_locks: OutsideLocks | None = None,
        redis: RedisServer | None = None,
    ) -> None:
        """`store` has the artifacts. `server`: its name; only a server's settings replace limits.

        `redis` carries wake-ups; sessions must last, so there is no pooler in transaction mode.

        `source_folders`: those that servers watch; None: this process doesn't know them.
        """
        self._server, self._outside_locks = server, outside_locks
        #: How outputs are checked; by default without commands and judges.
        self.checks = checks or Checks()
        self.rules = rules or Rules()
        reports = None if redis is None else LaneReports()
        self.database = Database(
            dsn,
            clock=clock,
            max_connections=max_connections,
            read_connections=read_connections,
            keep_connections=keep_connections,
            prepare=prepare,
            fail_within_sec=fail_within_sec,
            reports=reports,
        )
        #: Wake-ups through Redis, if there is one.
        self.dispatch = (
            None if redis is None or reports is None else RedisDispatch(redis, self.database, reports)
        )
        self.artifacts = ArtifactRegistry(self.database, store, max_bytes=max_artifact_bytes)
        lanes = Lanes(self.rules.max_lanes)
        transitions = Transitions(self.database, max_spawned_tasks=self.rules.max_spawned_tasks)
        reviews = Reviews(self.database)
        self.dependencies = TaskDependencies(transitions)
        steps = Steps(transitions)
        release = Releases(transitions, lanes)
        self.cancel = Cancellations(transitions, self.dependencies, reviews)
        self.revive = Revive(transitions, lanes, self.dependencies, reviews)
        self.rerun = Rerun(transitions, self.revive, self.cancel, self.dependencies)
        self.edit = Edit(transitions, lanes)
        self.corrections = Corrections(transitions)

        # Guards.
        self.slowdowns = Slowdowns(self.database)
        self.locks = Locks(self.database)
        self.breakers = Breakers(self.database)
        self.limits = InstallationLimits(self.database)
        self.budgets = Budgets(self.database, transitions.locks, self.limits)
        self.pauses = Pauses(self.database)
        self.quotas = Quotas(self.database)
        self.reservations = Reservations(self.database, transitions.locks)

        # Reads.
        self.read = Queries(self.database)
        self.events = Events(self.database)
        self.upcoming = Upcoming(self.database)

        # Work.
        fail = Failures(
            transitions,
            lanes,
            self.breakers,
            self.slowdowns,
            max_retry_after_sec=self.rules.max_retry_after_sec,
        )
        acceptance = Acceptance(transitions, fail, self.breakers)
        self.gates = Gates(transitions, acceptance, self.checks, self.artifacts)
        task_rules = TaskRules(
            gate_faults=self.checks.faults,
            max_duration_sec=self.rules.max_duration_sec,
            max_dag_tasks=self.rules.max_dag_tasks,
            max_spawn_depth=self.rules.max_spawn_depth,
            max_spawned_tasks=self.rules.max_spawned_tasks,
        )
        self.submission = Submission(self.database, lanes, self.cancel.cancel_in, rules=task_rules)
        self.task_types = TaskTypes(self.database, LimitsOfTypes(self.database, lanes, task_rules))
        self.maintenance = Maintenance(
            transitions, fail, self.cancel, self.breakers, self.budgets, slowdowns=self.slowdowns
        )
        self.undelivered = UndeliveredClaims(self.database, release.release)
        self.claims = Claims(
            self.database,
            self.maintenance,
            self.read.why_not,
            breakers=self.breakers,
            undelivered=self.undelivered,
            types=self.task_types,
            outside=outside_locks,
        )
        self.claim_key = ClaimKey(self.database)
        self.waits = Waits(transitions, lanes, steps, self.claim_key)
        self.work = Work(
            self.database,
            start=Starts(transitions),
            steps=steps,
            waits=self.waits,
            spawn=Spawn(transitions, lanes, steps, self.dependencies, self.submission),
            complete=Completions(transitions, acceptance, fail, self.gates),
            fail=fail,
            release=release,
            cancel=self.cancel,
            claims=self.claims,
            transfers=Transfers(
                self.database, releases=release, claims=self.claims, submission=self.submission
            ),
        )
        self.fleet = Fleet(self.database, fail, self.task_types)

        # People.
        self.matching = Matching(self.read, self.cancel, self.revive)
        self.dead_letters = DeadLetters(self.database, reviews, self.cancel, self.revive, self.dependencies)
        self.approvals = Approvals(transitions, self.gates, self.read)
        self.reports = Reports(self.database)
        self.tokens = Tokens(self.database)
        self.sessions = Sessions(self.database)

        # Sources.
        self.sources = SourceRegistry(self.database, folders=source_folders, by_server=server is not None)
        self.firings = Firings(self.database, self.submission, self.cancel)
        self.schedules = Schedules(self.database, self.firings)
        self.file_sources = FileSources(self.database, self.firings)
        self.observers = Observers(self.database, self.firings)
        self.event_sources = EventSources(self.database, self.firings, self.read)

    async def __aenter__(self) -> Self:
        await self.database.open()
        try:
            await self.limits.apply(self.rules.installation_limits, server=self._server)
            if self._outside_locks is not None:
                await self._outside_locks.open(OutsideRows(self.database))
            if self.dispatch is not None:
                await self.dispatch.open()
        except BaseException:
            # Tasks of a pool that isn't closed survive the end of the event loop, which waits for them.
            await self.database.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.undelivered.close()
        if self._outside_locks is not None:
            await self._outside_locks.close()
        if self.dispatch is not None:
            await self.dispatch.close()
        await self.database.close()
