"""The operator's file of destinations (LINESHAFT_NOTIFICATIONS). docs/notifications.md describes it.

URLs and keys are secrets: `${NAME}` reads one from the environment, and no message shows a value.
"""

import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from lineshaft.engine.feed.outbox import Throttle
from lineshaft.errors import SettingsError
from lineshaft.integrations.notify import Destination, Sender
from lineshaft.integrations.notify.apprise import Apprise
from lineshaft.integrations.notify.command import NotifyCommand
from lineshaft.integrations.notify.review_log import ReviewLog
from lineshaft.integrations.notify.slowdown_file import SlowdownFile
from lineshaft.integrations.notify.webhook import Webhook, key_of
from lineshaft.model.notices import DEFAULT_KINDS, NoticeKind

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_MIN_SECRET = 16
_HEADER = re.compile(r"[A-Za-z0-9-]+")


class ThrottleConfig(Struct, frozen=True, forbid_unknown_fields=True):
    #: Messages of one kind; further notices are combined into one message.
    most: int = 10
    seconds: float = 60.0


class _Common(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"  # without URL and key


class _Alerting(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    events: tuple[NoticeKind, ...] = ()
    sources: tuple[str, ...] = ()
    throttle: ThrottleConfig = ThrottleConfig()


class WebhookConfig(_Alerting, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="webhook"):
    url: str
    secret: str
    headers: dict[str, str] = field(default_factory=dict)


class AppriseConfig(_Alerting, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="apprise"):
    url: str


class CommandConfig(_Alerting, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="command"):
    command: tuple[str, ...]


class ReviewLogConfig(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="review-log"):
    folder: str


class SlowdownFileConfig(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="slowdown-file"):
    folder: str


_Config = WebhookConfig | AppriseConfig | CommandConfig | ReviewLogConfig | SlowdownFileConfig


class _NotifyFile(Struct, frozen=True, forbid_unknown_fields=True):
    destinations: tuple[_Config, ...]


def load(path: Path, environ: Mapping[str, str]) -> list[Destination]:
    """Read the destinations from a file; raises SettingsError with what is wrong."""
    try:
        document = _expanded(msgspec.yaml.decode(path.read_bytes()), environ)
        config = msgspec.convert(document, type=_NotifyFile)
    except OSError as error:
        raise _invalid(path, error.strerror or type(error).__name__) from None
    except msgspec.ValidationError as error:
        raise _invalid(path, str(error)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # The error's text quotes the line, which may contain a secret.
        mark = getattr(error.__context__, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark is not None else ""
        raise _invalid(path, f"not valid YAML{where}") from None
    names = [each.name for each in config.destinations]
    for name in names:
        if not _NAME.fullmatch(name) or names.count(name) > 1:
            raise _invalid(path, f"the name {name!r} must be unique, of letters, digits, _ . and -")
    return [_destination(path, each) for each in config.destinations]


def _destination(path: Path, config: _Config) -> Destination:
    sender: Sender
    if isinstance(config, ReviewLogConfig):
        sender = ReviewLog(Path(config.folder).expanduser().absolute())
        return Destination(config.name, sender, frozenset({NoticeKind.REVIEW}), Throttle(most=None))
    if isinstance(config, SlowdownFileConfig):
        sender = SlowdownFile(Path(config.folder).expanduser().absolute())
        return Destination(config.name, sender, frozenset({NoticeKind.SLOWDOWN}), Throttle(most=None))
    throttle = config.throttle
    if throttle.most < 1 or not 0 < throttle.seconds <= 86_400:  # noqa: PLR2004 - a day
        raise _invalid(
            path, f"{config.name}: throttle.most must be at least 1, and throttle.seconds at most a day"
        )
    if isinstance(config, WebhookConfig):
        sender = _webhook(path, config)
    elif isinstance(config, AppriseConfig):
        sender = Apprise(config.name, config.url)
    elif config.command:
        sender = NotifyCommand(config.command)
    else:
        raise _invalid(path, f"{config.name}: command must have a program and its arguments")
    kinds = frozenset(config.events) or DEFAULT_KINDS
    limit = Throttle(throttle.most, throttle.seconds)
    return Destination(config.name, sender, kinds, limit, frozenset(config.sources))


def _webhook(path: Path, config: WebhookConfig) -> Webhook:
    parts = urlsplit(config.url)
    plain = config.url.isascii() and config.url.isprintable() and " " not in config.url
    if parts.scheme not in {"http", "https"} or not parts.hostname or not plain or "@" in parts.netloc:
        raise _invalid(
            path, f"{config.name}: url must be http:// or https://, without a user; use headers instead"
        )
    try:
        key = key_of(config.secret)
    except (binascii.Error, ValueError):
        raise _invalid(path, f"{config.name}: secret begins with whsec_ but is not base 64") from None
    if len(key) < _MIN_SECRET:
        raise _invalid(path, f"{config.name}: secret must have at least {_MIN_SECRET} bytes")
    for name, value in config.headers.items():
        if not _HEADER.fullmatch(name) or not value.isascii() or not value.isprintable():
            raise _invalid(path, f"{config.name}: the header {name!r} or its value can't be sent")
    headers = {name.lower(): value for name, value in config.headers.items()}
    return Webhook(config.url, key, headers)


def _expanded(value: Any, environ: Mapping[str, str]) -> Any:
    """The value with `${NAME}` replaced in every string."""
    if isinstance(value, dict):
        return {key: _expanded(inner, environ) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expanded(inner, environ) for inner in value]
    if not isinstance(value, str):
        return value
    if missing := [name for name in _VARIABLE.findall(value) if not environ.get(name)]:
        raise msgspec.ValidationError(f"the variable {missing[0]} is not set")
    return _VARIABLE.sub(lambda match: environ[match[1]], value)


def _invalid(path: Path, fault: str) -> SettingsError:
    return SettingsError(f"The notifications file {path} is not valid: {fault}.")
