"""The Django app: `lineshaft.integrations.django` in INSTALLED_APPS."""

from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.db import connections
from django.db.models.signals import post_migrate


class LineshaftConfig(AppConfig):
    name = "lineshaft.integrations.django"
    label = "lineshaft"
    verbose_name = "Lineshaft"

    def ready(self) -> None:
        post_migrate.connect(_migrate, sender=self)


def _migrate(*, using: str, verbosity: int, **_: Any) -> None:
    """With LINESHAFT_MIGRATE, `manage.py migrate` also brings Lineshaft's schema up to date."""
    if not getattr(settings, "LINESHAFT_MIGRATE", False) or connections[using].vendor != "postgresql":
        return
    from lineshaft.engine.postgres import migrate  # noqa: PLC0415 - imports psycopg
    from lineshaft.integrations.django.submission import dsn_of  # noqa: PLC0415

    for applied in migrate.up(dsn_of(using)):
        if verbosity:
            print(f"  Applied Lineshaft's migration {applied.name} to {using!r}")  # noqa: T201 - as migrate does
