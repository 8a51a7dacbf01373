"""The operator's file of destinations; no error shows a secret."""

from pathlib import Path

import pytest

from lineshaft.engine.feed.outbox import Throttle
from lineshaft.errors import SettingsError
from lineshaft.integrations.notify import Destination
from lineshaft.integrations.notify.command import NotifyCommand
from lineshaft.integrations.notify.config import load
from lineshaft.integrations.notify.review_log import ReviewLog
from lineshaft.integrations.notify.webhook import Webhook
from lineshaft.model.notices import DEFAULT_KINDS, NoticeKind
from lineshaft.settings import Settings

SECRET = "s3cret-s3cret-s3cret"
ENVIRON = {"HOOK": f"https://x.example/{SECRET}", "KEY": SECRET}

FULL = """
destinations:
  - name: ops
    type: webhook
    url: ${HOOK}
    secret: ${KEY}
    headers: {Authorization: "Bearer ${KEY}"}
    events: [dead_letter, poison_pill]
    throttle: {most: 3, seconds: 300}
  - name: pager
    type: command
    command: [/usr/local/bin/page, --urgent]
  - name: desk
    type: review-log
    folder: .loki/logs/decisions
"""

BAD_HEADER = """
destinations:
  - {name: a, type: webhook, url: 'http://x', secret: '${KEY}', headers: {x: "s3cret\\n"}}
"""


def read(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> list[Destination]:
    path = tmp_path / "notifications.yaml"
    path.write_text(text)
    return load(path, ENVIRON if environ is None else environ)


def test_every_setting_of_the_file(tmp_path: Path) -> None:
    ops, pager, desk = read(tmp_path, FULL)

    assert isinstance(ops.sender, Webhook)
    assert (ops.sender.url, ops.sender.key) == (ENVIRON["HOOK"], SECRET.encode())
    assert ops.sender.headers == {"authorization": f"Bearer {SECRET}"}
    assert ops.kinds == {NoticeKind.DEAD_LETTER, NoticeKind.POISON_PILL}
    assert ops.throttle == Throttle(3, 300)
    assert pager.sender == NotifyCommand(("/usr/local/bin/page", "--urgent"))
    assert (pager.kinds, pager.throttle) == (DEFAULT_KINDS, Throttle(10, 60))
    assert desk.sender == ReviewLog(Path(".loki/logs/decisions").absolute())
    assert (desk.kinds, desk.throttle.most) == (frozenset({NoticeKind.REVIEW}), None)


def test_no_repr_contains_a_secret(tmp_path: Path) -> None:
    assert SECRET not in repr(read(tmp_path, FULL))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("destinations: [{name: a, type: webhook, url: 's3cret", "not valid YAML at line 1"),
        ("- 1", "Expected `object`"),
        ("destinations: 1", "Expected `array`"),
        ("{}", "missing required field `destinations`"),
        ("destinations: [{name: a, type: pigeon}]", "Invalid value 'pigeon'"),
        ("destinations: [{name: a, type: review-log, folder: x, colour: red}]", "unknown field `colour`"),
        ("destinations: [{name: a, type: command, command: []}]", "a: command must have a program"),
        ("destinations: [{name: a b, type: review-log, folder: x}]", "the name 'a b'"),
        (
            "destinations: [{name: a, type: review-log, folder: x}, {name: a, type: review-log, folder: y}]",
            "must be unique",
        ),
        (
            "destinations: [{name: a, type: command, command: [x], events: [rain]}]",
            "Invalid enum value 'rain'",
        ),
        ("destinations: [{name: a, type: command, command: [x], throttle: {most: 0}}]", "throttle"),
        ("destinations: [{name: a, type: command, command: ['${MISSING}']}]", "variable MISSING is not set"),
        ("destinations: [{name: a, type: webhook, url: 'ftp://s3cret', secret: '${KEY}'}]", "url must be"),
        (
            "destinations: [{name: a, type: webhook, url: 'http://u:s3cret@x', secret: '${KEY}'}]",
            "url must be",
        ),
        (
            "destinations: [{name: a, type: webhook, url: 'http://x/s3cret y', secret: '${KEY}'}]",
            "url must be",
        ),
        ("destinations: [{name: a, type: webhook, url: 'http://x', secret: s3cret}]", "at least 16 bytes"),
        ("destinations: [{name: a, type: webhook, url: 'http://x', secret: whsec_s3cret}]", "not base 64"),
        (
            BAD_HEADER,
            "the header 'x' or its value",
        ),
        ("destinations: [{name: a, type: webhook, url: 5, secret: s3cret}]", "Expected `str`, got `int`"),
    ],
)
def test_faults_are_reported_without_secrets(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, text)

    assert message in str(caught.value)
    assert "notifications.yaml" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        load(tmp_path / "nothing.yaml", {})


def test_the_setting(tmp_path: Path) -> None:
    settings = Settings.load({"LINESHAFT_NOTIFICATIONS": "/etc/notifications.yaml"}, directory=tmp_path)

    assert settings.notifications == Path("/etc/notifications.yaml")
    assert Settings.load({}, directory=tmp_path).notifications is None
