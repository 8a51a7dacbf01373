"""The page about notifications: its configuration loads, its example verifies signatures."""

import re
from pathlib import Path
from typing import Any

import pytest

from lineshaft.integrations.notify.config import load
from lineshaft.integrations.notify.webhook import Webhook
from lineshaft.model.notices import Notice, NoticeKind, message
from tests.docs.pages import ROOT, blocks
from tests.integrations.receiver import receiving
from tests.integrations.test_notify import AT

PAGE = "docs/notifications.md"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that apprise imports
def test_the_example_of_destinations_loads(tmp_path: Path) -> None:
    text = (ROOT / PAGE).read_text()
    (document,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    path = tmp_path / "notifications.yaml"
    path.write_text(document)
    environ = {
        "OPS_WEBHOOK_URL": "https://example.com/hook",
        "OPS_WEBHOOK_SECRET": "0123456789abcdef",
        "SLACK_URL": "json://localhost",
    }

    assert [each.name for each in load(path, environ)] == [
        *("ops", "slack", "requests", "pager", "decisions", "signals"),
    ]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, re.MULTILINE)
    described = re.findall(r"`(\w+)`", " ".join(rows))
    assert set(described) == {kind.value for kind in NoticeKind}


async def test_the_example_verifies_signatures() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    (block,) = (each for each in blocks(PAGE) if each.is_file)
    exec(block.text, names)  # noqa: S102 - our own documentation
    key = b"0123456789abcdef"
    with receiving() as receiver:
        notice = Notice(kind=NoticeKind.ALERT, at=AT, text="x")
        await Webhook(receiver.url, key).send(message("msg_1", [notice]))
    (got,) = receiver.got

    assert names["is_ours"](key, got.headers, got.body)
    assert not names["is_ours"](b"another key, which is wrong", got.headers, got.body)
    assert not names["is_ours"](key, got.headers, got.body + b" ")
