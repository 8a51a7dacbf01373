"""All configuration, in one frozen object.

A setting comes from the environment (`LINESHAFT_PORT`), otherwise from `lineshaft.toml` in the working
directory (`port = 8001`), otherwise from its default. Unknown names and invalid values are errors, so that a
misspelt setting is never silently ignored. No message and no repr contains a secret.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

from lineshaft.errors import SettingsError

PREFIX = "LINESHAFT_"
#: Variables that an agent's command receives: those with the prefix describe its task, the other one names
#: the descriptor for messages to the agent. They are not settings.
TASK_PREFIX = "LINESHAFT_TASK_"
#: Secrets of webhooks, which sources name.
HOOK_PREFIX = "LINESHAFT_HOOK_"
FD_VARIABLE = "LINESHAFT_FD"
#: Folders of an agent's command.
INPUTS_VARIABLE, OUTPUTS_VARIABLE = "LINESHAFT_INPUTS", "LINESHAFT_OUTPUTS"
CONFIG_VARIABLE = "LINESHAFT_CONFIG"
CONFIG_FILE = "lineshaft.toml"
_NOT_SETTINGS = frozenset({CONFIG_VARIABLE, FD_VARIABLE, INPUTS_VARIABLE, OUTPUTS_VARIABLE})
HOME_NAME = ".lineshaft"
MIN_DURATION_SEC = 0.05

T = TypeVar("T")


class Rule(NamedTuple, Generic[T]):
    """A parser for a value, and its rule in words."""

    words: str
    parse: Callable[[str], T]


def _text(text: str) -> str:
    return text


def _switch(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError
    return text == "1"


def _one_of(*choices: str) -> Rule[str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError
        return text.lower()

    return Rule(f"one of {', '.join(choices)}", parse)


def _whole(low: int, high: int) -> Rule[int]:
    def parse(text: str) -> int:
        if not low <= int(text) <= high:
            raise ValueError
        return int(text)

    return Rule(f"a whole number from {low} to {high}", parse)


def _duration(text: str) -> float:
    seconds = float(text)
    if not MIN_DURATION_SEC <= seconds < math.inf:
        raise ValueError
    return seconds


def _time_limit(text: str) -> float:
    seconds = float(text)
    if not MIN_DURATION_SEC <= seconds <= 31_536_000:  # noqa: PLR2004 - a year, as the rule says
        raise ValueError
    return seconds


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes <= 1440:  # noqa: PLR2004 - a day, as the rule says
        raise ValueError
    return minutes


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days < 36_500:  # noqa: PLR2004 - a century, as the rule says
        raise ValueError
    return days


def _dollars(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise ValueError from None
    if not amount.is_finite() or amount < 0:
        raise ValueError
    return amount


def _database_url(text: str) -> str:
    if not text.startswith(("postgresql://", "postgres://")) and "=" not in text:
        raise ValueError
    return text


#: What the URL of Redis may set besides the place: files and checks of TLS, and the database of a socket.
_REDIS_OPTIONS = frozenset(
    {"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
)


def _redis_url(text: str) -> str:
    parts = urlsplit(text)
    place = parts.path if parts.scheme == "unix" else parts.hostname
    options = parse_qs(parts.query, keep_blank_values=True)
    if (
        # In small letters and from the beginning, as the client of Redis wants it.
        not text.startswith(("redis://", "rediss://", "unix://"))
        or not place
        or "," in parts.netloc.rpartition("@")[2]  # several hosts: a cluster, or Sentinels
        or parts.fragment  # of a password with a '#' that isn't escaped
        or not options.keys() <= _REDIS_OPTIONS
        or not all(number.isdecimal() for number in options.get("db", ()))
    ):
        raise ValueError
    database = parts.path.removeprefix("/")
    if parts.scheme != "unix" and (parts.port == 0 or (database and not database.isdecimal())):
        raise ValueError
    return text


def _http_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError
    return text.rstrip("/")


def _token(text: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError
    return text


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _artifacts(text: str) -> str:
    if "://" in text and not (text.startswith("s3://") and text.removeprefix("s3://").strip("/")):
        raise ValueError
    return text


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _origins(text: str) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        scheme, _, host = name.partition("://")
        if scheme not in {"http", "https"} or not host or set(host) & set("/?#@*") or name != name.lower():
            raise ValueError
    return names


def _folders(text: str) -> tuple[str, ...]:
    folders = tuple(os.path.expanduser(name) for name in _names(text))  # noqa: PTH111 - keeps links
    if not all(map(os.path.isabs, folders)):
        raise ValueError
    return folders


_ANY_TEXT = Rule("a text", _text)
_SWITCH = Rule("1 (on) or 0 (off)", _switch)
_NAMES = Rule("names separated by commas", _names)
_ORIGINS = Rule(
    "origins as browsers send them (https://ui.example or http://localhost:3000), separated by commas",
    _origins,
)
_FOLDERS = Rule("absolute paths separated by commas", _folders)
_PATH = Rule("a path", _path)
_ARTIFACTS = Rule("a folder or s3://BUCKET/PREFIX", _artifacts)
_DATABASE_URL = Rule("a PostgreSQL URL (postgresql://…) or keywords (host=… dbname=…)", _database_url)
_REDIS_URL = Rule(
    "the URL of one Redis or Valkey server: redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], rediss://… for "
    "TLS, or unix://PATH (not of Sentinels or a cluster; escape special characters of a password)",
    _redis_url,
)
_HTTP_URL = Rule("a URL (http://… or https://…)", _http_url)
TOKEN = Rule("letters, digits and signs without spaces, as 'lineshaft token create' printed it", _token)
_DURATION = Rule(f"a number of seconds, at least {MIN_DURATION_SEC}", _duration)
_TIME_LIMIT = Rule(f"a number of seconds from {MIN_DURATION_SEC} to 31536000", _time_limit)
_MINUTES = Rule("a number of minutes, more than 0 and at most 1440", _minutes)
_DAYS = Rule("a number of days, more than 0 and less than 36500", _days)
_FRACTION = Rule("a number from 0 to 1", _fraction)
_DOLLARS = Rule("an amount of dollars, 0 or more", _dollars)


def _setting(rule: Rule[Any], default: Any, about: str, *, secret: bool = False) -> Any:
    metadata = {"rule": rule, "about": about, "secret": secret}
    if callable(default):
        return field(default_factory=default, metadata=metadata, repr=not secret)
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    database_url: str | None = _setting(
        _DATABASE_URL, None, "The PostgreSQL to use. None: an embedded one is started.", secret=True
    )
    pooler: str = _setting(
        _one_of("none", "transaction"),
        "none",
        "What database_url points to: transaction = a pooler in transaction mode, such as PgBouncer.",
    )
    home: Path = _setting(
        _PATH,
        lambda: find_home(Path.cwd()),
        "The directory of the embedded database and of local files. Unset: the nearest `.lineshaft` of the "
        "working directory and those above it; without one, it is created in the working directory.",
    )
    host: str = _setting(_ANY_TEXT, "127.0.0.1", "The address the server listens on.")
    port: int = _setting(_whole(1, 65535), 8001, "The port the server listens on.")
    auth: str = _setting(
        _one_of("auto", "required", "off"),
        "auto",
        "Whether calls need a token: auto = on loopback only once a token has been created, off = on "
        "loopback never.",
    )
    allowed_hosts: tuple[str, ...] = _setting(
        _NAMES, (), "Host names that requests may use, besides localhost and the server's addresses."
    )
    allowed_origins: tuple[str, ...] = _setting(
        _ORIGINS,
        (),
        "Origins of web pages that may call the API from a browser (CORS, with credentials). None: only "
        "those of the server.",
    )
    max_body_bytes: int = _setting(
        _whole(1024, 1 << 30), 8 << 20, "The largest request body the server accepts."
    )
    max_retries_are: str = _setting(
        _one_of("extra", "all"),
        "extra",
        "What maxRetries of /api/tasks counts: extra = attempts after the first, all = every attempt.",
    )
    read_timeout_sec: float = _setting(
        _DURATION,
        5.0,
        "How long a call that changes nothing, and a page of the dashboard, waits for the database before it "
        "answers 503.",
    )
    log_format: str = _setting(
        _one_of("auto", "text", "json"),
        "auto",
        "Format of the logs of servers and agents: auto = text on a terminal, otherwise JSON.",
    )
    log_level: str | None = _setting(
        _one_of("debug", "info", "warning", "error"),
        None,
        "The least level of lines in the logs. None: info, but agents that don't run on a terminal leave out "
        "the lines about tasks that they start and complete.",
    )
    url: str | None = _setting(_HTTP_URL, None, "For clients: the server to use instead of a database.")
    token: str | None = _setting(TOKEN, None, "For clients: the bearer token.", secret=True)
    reaper_interval_sec: float = _setting(_DURATION, 5.0, "How often to check for expired leases.")
    promoter_interval_sec: float = _setting(
        _DURATION, 5.0, "How often to check for due retries and start times."
    )
    default_max_duration_sec: float = _setting(
        _TIME_LIMIT,
        3600.0,
        "The time limit of an attempt where neither the task nor its preset has one.",
    )
    max_spawn_depth: int = _setting(
        _whole(1, 900), 20, "How many levels of tasks may be spawned below a submitted task."
    )
    max_spawned_tasks: int = _setting(
        _whole(1, 10_000_000), 10_000, "How many tasks of one DAG may be spawned by other tasks."
    )
    max_dag_tasks: int = _setting(
        _whole(1, 100_000),
        10_000,
        "The most tasks that a DAG may be submitted with, or that may be spawned at once.",
    )
    max_lanes: int = _setting(
        _whole(1, 100_000),
        2_000,
        "How many lanes (kinds of tasks for claims) may have waiting tasks when a submission needs another.",
    )
    max_retry_after_sec: float = _setting(
        _TIME_LIMIT, 691200.0, "The longest wait that a provider may ask for: 8 days."
    )
    keep_tasks_days: float | None = _setting(
        _DAYS, None, "How long to keep finished tasks; dead letters are kept forever. None: forever."
    )
    keep_agents_days: float = _setting(
        _DAYS, 30.0, "How long to keep agents that have no process, budget or spend."
    )
    keep_events_days: float | None = _setting(
        _DAYS,
        None,
        "How long to keep events: exact to a day, or to a month if it is over 60. None: forever.",
    )
    keep_firings_days: float = _setting(_DAYS, 30.0, "How long to keep the history of sources.")
    artifacts: str | None = _setting(
        _ARTIFACTS,
        None,
        "Where artifacts are stored: a folder, or s3://BUCKET/PREFIX with the usual AWS_* variables. None: "
        "artifacts in home.",
    )
    max_artifact_bytes: int = _setting(
        _whole(1, 5 << 30), 1 << 30, "The largest artifact; S3 copies at most 5 GiB at once."
    )
    keep_artifacts_days: float = _setting(_DAYS, 30.0, "How long to keep artifacts that no task refers to.")
    daily_budget_usd: Decimal | None = _setting(
        _DOLLARS, None, "The most that all tasks together may cost in a UTC day. None: no limit."
    )
    cost_velocity_usd: Decimal | None = _setting(
        _DOLLARS,
        None,
        "Spending more than this within cost_velocity_minutes pauses all claims. None: no limit.",
    )
    cost_velocity_minutes: float = _setting(_MINUTES, 10.0, "The time window of cost_velocity_usd.")
    cost_velocity_action: str | None = _setting(
        _one_of("stop", "pause"),
        None,
        "What happens then: stop = running attempts are released too, pause = only claims stop. None: stop.",
    )
    default_max_cost_usd: Decimal | None = _setting(
        _DOLLARS,
        None,
        "What a claim reserves for a task without a cost limit; it isn't a limit on the task. None: nothing.",
    )
    crash_cost_fraction: float | None = _setting(
        _FRACTION, None, "The least share of its reservation that a crashed attempt costs. None: 0."
    )
    judge_max_cost_usd: Decimal | None = _setting(
        _DOLLARS, None, "What a run of a gate that costs money reserves. None: 0.05."
    )
    circuit_breakers: Path | None = _setting(
        _PATH, None, "A YAML file with thresholds of the circuit breakers. None: the defaults."
    )
    notifications: Path | None = _setting(
        _PATH, None, "A YAML file with the destinations of notifications. None: notifications are off."
    )
    sources: Path | None = _setting(
        _PATH, None, "A YAML file with sources, which a server applies when it starts. None: no file."
    )
    loki_dir: Path | None = _setting(
        _PATH, None, "A .loki folder that servers keep like the queue (docs/loki.md). None: no folder."
    )
    source_folders: tuple[str, ...] = _setting(
        _FOLDERS, (), "Folders that file sources may watch. None: file sources don't fire."
    )
    validation_commands: Path | None = _setting(
        _PATH,
        None,
        "A YAML file with the commands that test-pass gates may run. None: no commands are allowed.",
    )
    judge_url: str | None = _setting(
        _HTTP_URL, None, "Base URL of the OpenAI-compatible API of llm-judge gates. None: llm_url."
    )
    judge_model: str | None = _setting(_ANY_TEXT, None, "The model of llm-judge gates. None: llm_model.")
    judge_api_key: str | None = _setting(_ANY_TEXT, None, "The API key for judge_url.", secret=True)
    llm_model: str | None = _setting(
        _ANY_TEXT,
        None,
        "The language model: PROVIDER:MODEL (`openai:gpt-5-mini`, `anthropic:claude-haiku-4-5`) with the key "
        "in the provider's usual variable, or a name that the API at llm_url knows.",
    )
    llm_fallback_models: tuple[str, ...] = _setting(
        _NAMES, (), "Models that are tried in this order when llm_model can't answer."
    )
    llm_url: str | None = _setting(
        _HTTP_URL, None, "Base URL of an OpenAI-compatible API, for models without a provider in their name."
    )
    llm_api_key: str | None = _setting(_ANY_TEXT, None, "The API key for llm_url.", secret=True)
    llm_prices: Path | None = _setting(
        _PATH, None, "A YAML file with prices of models. None: what responses report, and a bundled list."
    )
    llm_timeout_sec: float = _setting(_TIME_LIMIT, 600.0, "How long a call of a model may take.")
    redis_url: str | None = _setting(
        _REDIS_URL,
        None,
        "A Redis or Valkey server that carries wake-ups. None: PostgreSQL carries them.",
        secret=True,
    )
    redis_events: bool = _setting(
        _SWITCH,
        False,  # noqa: FBT003 - a default
        "Whether servers publish the events to the stream lineshaft:events of redis_url.",
    )
    officeplane_locks: bool = _setting(
        _SWITCH,
        False,  # noqa: FBT003 - a default
        "Whether document locks are shared with other programs through redis_url, as OfficePlane has them. "
        "Every process that opens the database needs it.",
    )
    officeplane_lock_grace_sec: float = _setting(
        _TIME_LIMIT,
        30.0,
        "How long tasks with a document wait when Redis is away or has lost its data, until they run under "
        "Lineshaft's own lock.",
    )
    officeplane_sse: bool = _setting(
        _SWITCH,
        False,  # noqa: FBT003 - a default
        "Whether servers publish the progress of tasks to the channels officeplane:sse:TASK of redis_url.",
    )
    officeplane_prefix: str = _setting(
        TOKEN, "officeplane:", "What the names of OfficePlane's locks and channels in Redis begin with."
    )

    @property
    def sessions(self) -> bool:
        """Whether a connection keeps its database session from one transaction to the next."""
        return self.pooler == "none"

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, *, directory: Path | None = None) -> "Settings":
        """Read the environment and `lineshaft.toml`; raises SettingsError with all faults."""
        environ = os.environ if environ is None else environ
        given, faults = _from_file(environ, directory or Path.cwd())
        _add_environment(given, faults, environ)
        values: dict[str, Any] = {}
        for name, (text, source) in given.items():
            try:
                values[name] = _FIELDS[name].parse(text)
            except ValueError:
                shown = "a value that is not shown" if _FIELDS[name].secret else repr(text)
                faults.append(f"{source} must be {_FIELDS[name].words}, got {shown}")
        if faults:
            raise SettingsError(
                "The configuration is not valid:\n" + "\n".join(f"  {fault}" for fault in faults)
            )
        return cls(**values)


def find_home(directory: Path) -> Path:
    """The nearest `.lineshaft` of this directory and those above it, as git finds its own.

    One above that belongs to another account is passed over: its owner decides what its server does.
    """
    own = directory.absolute() / HOME_NAME
    if own.is_dir():
        return own
    for folder in own.parent.parents:
        home = folder / HOME_NAME
        try:
            if home.is_dir() and (not hasattr(os, "geteuid") or home.stat().st_uid == os.geteuid()):
                return home
        except OSError:
            continue
    return own


class _Field(NamedTuple):
    parse: Callable[[str], Any]
    words: str
    secret: bool


_FIELDS = {
    f.name: _Field(f.metadata["rule"].parse, f.metadata["rule"].words, f.metadata["secret"])
    for f in fields(Settings)
}


def _from_file(environ: Mapping[str, str], directory: Path) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """The settings of the file, as name → (text, source), and its faults."""
    named = environ.get(CONFIG_VARIABLE)
    path = Path(named) if named else directory / CONFIG_FILE
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, [f"{CONFIG_VARIABLE} names {str(path)!r}, which doesn't exist"] if named else []
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return {}, [f"{path} can't be read: {error}"]
    given, faults = {}, []
    for name, value in table.items():
        if name not in _FIELDS:
            faults.append(f"{path} has an unknown setting {name!r}{_suggestion(name, _FIELDS)}")
        elif isinstance(value, bool) or not isinstance(value, str | int | float):
            faults.append(f"{name} in {path} must be {_FIELDS[name].words}, got {type(value).__name__}")
        else:
            given[name] = (str(value), f"{name} in {path}")
    return given, faults


def _add_environment(
    given: dict[str, tuple[str, str]], faults: list[str], environ: Mapping[str, str]
) -> None:
    known = {PREFIX + name.upper(): name for name in _FIELDS}
    for variable, text in environ.items():
        if (
            not variable.startswith(PREFIX)
            or variable.startswith((TASK_PREFIX, HOOK_PREFIX))
            or variable in _NOT_SETTINGS
        ):
            continue
        if variable not in known:
            faults.append(f"Unknown setting {variable}{_suggestion(variable, known)}")
        elif text:  # an empty variable counts as unset
            given[known[variable]] = (text, variable)


def _suggestion(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
