"""Runs all duties of one process concurrently."""

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta

from lineshaft.duties.deliverer import Deliverer
from lineshaft.duties.event_watcher import EventWatcher
from lineshaft.duties.file_watcher import FileWatcher
from lineshaft.duties.janitor import Janitor
from lineshaft.duties.loop import Duty, run
from lineshaft.duties.observer import Observer
from lineshaft.duties.offline_detector import OfflineDetector
from lineshaft.duties.promoter import Promoter
from lineshaft.duties.publisher import Publisher
from lineshaft.duties.quota_keeper import QuotaKeeper
from lineshaft.duties.reaper import Reaper
from lineshaft.duties.scheduler import Scheduler
from lineshaft.duties.validator import Validator
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.event_stream import EventStream
from lineshaft.engine.feed.outbox import Outbox
from lineshaft.engine.feed.partitions import Partitions
from lineshaft.engine.read.tally import Tally
from lineshaft.errors import SettingsError
from lineshaft.integrations.loki.mirror import Mirror
from lineshaft.integrations.notify.config import load
from lineshaft.integrations.officeplane_redis.sse import SsePublisher
from lineshaft.integrations.redis.connection import RedisServer
from lineshaft.integrations.redis.stream import EVENTS, EventBus
from lineshaft.settings import Settings


def all_duties(engine: Engine, settings: Settings) -> list[Duty]:
    duties: list[Duty] = [
        Reaper(engine.maintenance, interval_sec=settings.reaper_interval_sec),
        Promoter(engine.maintenance, interval_sec=settings.promoter_interval_sec),
        Janitor(
            engine.maintenance,
            engine.fleet,
            Partitions(engine.database),
            Tally(engine.database),
            engine.sources,
            engine.sessions,
            keep_tasks=_days(settings.keep_tasks_days),
            keep_events=_days(settings.keep_events_days),
            keep_agents=timedelta(days=settings.keep_agents_days),
            keep_firings=timedelta(days=settings.keep_firings_days),
            quotas=engine.quotas,
            reservations=engine.reservations,
            artifacts=engine.artifacts,
            keep_artifacts=timedelta(days=settings.keep_artifacts_days),
        ),
        QuotaKeeper(engine.quotas),
        Scheduler(engine.schedules),
        EventWatcher(engine.event_sources),
        Observer(engine.observers),
        OfflineDetector(engine.fleet),
        Validator(engine.gates, engine.approvals),
    ]
    if settings.source_folders:
        duties.append(FileWatcher(engine.file_sources, settings.source_folders))
    if settings.loki_dir is not None:
        duties.append(Mirror(engine, settings.loki_dir))
    if settings.notifications is not None:
        destinations = load(settings.notifications, os.environ)
        duties += [Deliverer(Outbox(engine.database), destination) for destination in destinations]
    if settings.officeplane_sse:
        if settings.redis_url is None:
            raise SettingsError("LINESHAFT_OFFICEPLANE_SSE needs LINESHAFT_REDIS_URL: it publishes there.")
        redis = RedisServer(settings.redis_url)
        duties.append(SsePublisher(engine.events, redis, settings.officeplane_prefix))
    if settings.redis_events:
        if settings.redis_url is None:
            raise SettingsError(
                "LINESHAFT_REDIS_EVENTS=1 needs LINESHAFT_REDIS_URL, the server that gets the events."
            )
        bus = EventBus(RedisServer(settings.redis_url))
        duties.append(Publisher(EventStream(engine.database, EVENTS), bus))
    return duties


async def supervise(duties: Sequence[Duty], stop: asyncio.Event) -> None:
    """Run duties until `stop` is set, and wait for those that are working."""
    await asyncio.gather(*(run(duty, stop) for duty in duties))


def _days(days: float | None) -> timedelta | None:
    return None if days is None else timedelta(days=days)
