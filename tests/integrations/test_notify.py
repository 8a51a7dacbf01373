"""Senders with real receivers: what arrives, and the errors if it doesn't."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lineshaft.errors import SettingsError
from lineshaft.integrations.notify import DeliveryError, Sender
from lineshaft.integrations.notify.apprise import Apprise
from lineshaft.integrations.notify.command import NotifyCommand
from lineshaft.integrations.notify.review_log import ReviewLog, append
from lineshaft.integrations.notify.webhook import Webhook, key_of, signature
from lineshaft.model.notices import Notice, NoticeKind, Notification, message
from tests.integrations.receiver import Receiver, receiving

AT = datetime(2026, 2, 8, 10, 30, tzinfo=UTC)
NOTICE = Notice(kind=NoticeKind.DEAD_LETTER, at=AT, text="Task t failed", task_id="t", data={"error": "é"})
MESSAGE = message("msg_7", [NOTICE])
KEY = b"0123456789abcdef"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened


async def test_a_webhook_is_signed_over_id_time_and_body(receiver: Receiver) -> None:
    """R-135: as a receiver verifies it."""
    sender = Webhook(f"{receiver.url}/hook?token=s3", KEY, {"x-team": "ops"}, clock=lambda: 1_770_000_000.9)

    await sender.send(MESSAGE)

    (got,) = receiver.got
    signed = b"msg_7.1770000000." + got.body
    expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert got.headers["webhook-signature"] == f"v1,{expected}"
    assert (got.headers["webhook-id"], got.headers["webhook-timestamp"]) == ("msg_7", "1770000000")
    assert (got.path, got.headers["x-team"]) == ("/hook?token=s3", "ops")
    assert got.headers["content-type"] == "application/json"
    assert got.json == {
        "id": "msg_7",
        "kind": "dead_letter",
        "title": "Dead letter",
        "text": "Task t failed",
        "count": 1,
        "notices": [
            {
                "kind": "dead_letter",
                "at": "2026-02-08T10:30:00Z",
                "text": "Task t failed",
                "task_id": "t",
                "data": {"error": "é"},
            }
        ],
    }


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The example from the tests of its libraries."""
    key = key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")

    found = signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')

    assert found == "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("status", [301, 400, 410, 500, 503])
async def test_anything_but_success_is_a_failure(receiver: Receiver, status: int) -> None:
    """Including redirects: the signed message is sent nowhere else."""
    receiver.answers.append(status)

    with pytest.raises(DeliveryError, match=f"responded with HTTP {status}$"):
        await Webhook(receiver.url, KEY).send(MESSAGE)

    assert len(receiver.got) == 1


async def test_a_receiver_that_does_not_respond(receiver: Receiver) -> None:
    receiver.may_answer.clear()

    with pytest.raises(DeliveryError, match=r"^no response within 0\.05 s$"):
        await Webhook(receiver.url, KEY, timeout_sec=0.05).send(MESSAGE)


async def test_addresses_without_a_receiver() -> None:
    """Refused, unknown, closed immediately, not HTTP, not TLS: no error contains the URL."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        unused = f"http://127.0.0.1:{closed.getsockname()[1]}/s3cret"
        assert "refused" in await failure(Webhook(unused, KEY))
    # Too long for DNS, so that no server has to be asked.
    unknown = ".".join(["nobody" * 10] * 5)
    assert "host name can't be resolved" in await failure(Webhook(f"http://{unknown}/s3cret", KEY))

    async def answer(said: bytes) -> tuple[str, str]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(said)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            plain = await failure(Webhook(f"http://127.0.0.1:{port}/s3cret", KEY))
            return plain, await failure(Webhook(f"https://127.0.0.1:{port}/s3cret", KEY))

    plain, secure = await answer(b"220 mail.example ESMTP\r\n\r\n")
    assert plain == "the response is not valid HTTP"
    assert secure.startswith("no secure connection")
    plain, _ = await answer(b"HTTP/1.1 103 Early Hints\r\n\r\n")
    assert "closed" in plain or "not valid HTTP" in plain


async def failure(sender: Sender) -> str:
    with pytest.raises(DeliveryError) as caught:
        await sender.send(MESSAGE)
    assert "s3cret" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate, and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    ask = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    subprocess.run([program, *ask, "-keyout", key, "-out", certificate], capture_output=True, check=True)
    return certificate, key


async def test_an_untrusted_certificate_is_rejected(certificate: tuple[Path, Path]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        said = await failure(Webhook(f"https://127.0.0.1:{port}/s3cret", KEY))

    assert said.startswith("its certificate is not trusted")


async def test_a_command_gets_the_message_on_its_standard_input(tmp_path: Path) -> None:
    """R-135: a hook that needs no server."""
    to = tmp_path / "got.json"
    program = f"import sys; open({str(to)!r}, 'w').write(sys.stdin.read())"

    await NotifyCommand((sys.executable, "-c", program), timeout_sec=60).send(MESSAGE)

    assert msgspec.json.decode(to.read_bytes(), type=Notification) == MESSAGE


async def test_a_command_that_fails_hangs_or_does_not_exist() -> None:
    python = sys.executable
    fails = NotifyCommand((python, "-c", "raise SystemExit(3)"), timeout_sec=60)
    assert await failure(fails) == "ended with exit code 3"
    assert "can't be started" in await failure(NotifyCommand(("/nowhere/s3cret",)))
    hangs = NotifyCommand((python, "-c", "import time; time.sleep(600)", "s3cret"), timeout_sec=0.05)
    assert await failure(hangs) == "did not finish within 0.05 s"


@pytest.mark.parametrize("early", [False, True], ids=["at work", "just started"])
async def test_a_command_that_times_out_is_killed_with_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """As a script that waits for curl: every try would leave a process behind."""
    create, go = asyncio.create_subprocess_exec, asyncio.Event()
    if early:

        async def slowly(*args: Any, **options: Any) -> Any:
            process = await create(*args, **options)
            await go.wait()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = f"exec 3>{pipe}; sleep 600 & echo $! >&3; wait"
    sending = asyncio.create_task(NotifyCommand(("/bin/sh", "-c", script)).send(MESSAGE))
    with await asyncio.to_thread(pipe.open) as open_while_it_runs:
        started = int(await asyncio.to_thread(open_while_it_runs.readline))
        try:
            sending.cancel()
            if early:
                asyncio.get_running_loop().call_soon(go.set)
            await asyncio.wait({sending})
            async with asyncio.timeout(60):
                assert await asyncio.to_thread(open_while_it_runs.read) == ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(started, signal.SIGKILL)


#: Of modules that it imports.
OLD_MODULES = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.slow("importing apprise takes seconds")
@OLD_MODULES
async def test_apprise_delivers(receiver: Receiver) -> None:
    """R-135: here to a plain JSON receiver."""
    sender = Apprise("ops", receiver.url.replace("http://", "json://") + "/path")

    await sender.send(MESSAGE)

    (got,) = receiver.got
    assert (got.json["title"], got.json["message"]) == ("Dead letter", "Task t failed")
    assert got.json["type"] == "failure"


@pytest.mark.slow("importing apprise takes seconds")
@OLD_MODULES
async def test_a_failure_of_apprise_reveals_no_url(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver.answers.append(500)
    sender = Apprise("ops", receiver.url.replace("http://", "json://user:s3cret@") + "/s3cret?+X-Key=s3cret")

    assert await failure(sender) == "apprise could not deliver the message"
    with pytest.raises(SettingsError, match="'ops' has a URL that apprise doesn't support"):
        Apprise("ops", "nosuch://s3cret")

    assert "s3cret" not in caplog.text


def review(n: int = 0, **data: object) -> Notification:
    reported = {"resolution": "retry", "reviewer": "ann", **data}
    notice = Notice(
        kind=NoticeKind.REVIEW,
        at=AT + timedelta(seconds=n),
        text="reviewed",
        task_id=f"task_{n}",
        data=reported,
    )
    return message(f"msg_{n}", [notice])


async def test_decisions_are_logged_by_day(tmp_path: Path) -> None:
    """R-134: the UTC date, appended."""
    log = ReviewLog(tmp_path / "logs" / "decisions")

    await log.send(review(0, note="the API\nis back", error="it broke", category="crash"))
    await log.send(review(1, resolution="modify_and_retry", changed=["/prompt"], reviewer=None))
    await log.send(review(14 * 3_600))

    first, second = sorted((tmp_path / "logs" / "decisions").iterdir())
    assert (first.name, second.name) == ("dlq-review-2026-02-08.md", "dlq-review-2026-02-09.md")
    assert first.read_text() == (
        "# Dead letters reviewed on 2026-02-08 (UTC)\n"
        "\n"
        "## 10:30:00 task_0: retry\n"
        "<!-- task_0 2026-02-08T10:30:00+00:00 -->\n"
        "\n"
        "- reviewer: ann\n"
        "- note: the API is back\n"
        "- category: crash\n"
        "- error: it broke\n"
        "\n"
        "## 10:30:01 task_1: modify_and_retry\n"
        "<!-- task_1 2026-02-08T10:30:01+00:00 -->\n"
        "\n"
        "- reviewer: none, retried manually\n"
        "- changed: /prompt\n"
    )


def test_a_decision_delivered_twice_is_logged_once(tmp_path: Path) -> None:
    """R-134: also after a process died in the middle of a line."""
    append(tmp_path, review(0))
    (path,) = tmp_path.iterdir()
    once = path.read_text()
    append(tmp_path, review(0))
    assert path.read_text() == once
    with path.open("a") as broken:
        broken.write("\n## 10:3")

    append(tmp_path, review(1))

    assert path.read_text().startswith(f"{once}\n## 10:3\n\n## 10:30:01 task_1: retry\n")


WRITES_25 = """
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from lineshaft.integrations.notify.review_log import append
from lineshaft.model.notices import Notice, NoticeKind, message
at = datetime(2026, 2, 8, 10, 30, tzinfo=UTC)
for n in range(int(sys.argv[2]), int(sys.argv[2]) + 25):
    when = at + timedelta(seconds=n)
    data = {"resolution": "retry"}
    notice = Notice(kind=NoticeKind.REVIEW, at=when, text="", task_id=f"task_{n}", data=data)
    append(Path(sys.argv[1]), message("msg_1", [notice]))
"""


@pytest.mark.slow("starts several processes")
def test_several_processes_append_to_one_file(tmp_path: Path) -> None:
    """R-134: no line is lost, torn or repeated."""
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITES_25, tmp_path, str(first)]) for first in (0, 25, 50, 60)
    ]
    assert [process.wait() for process in processes] == [0, 0, 0, 0]

    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert all(text.count(f" task_{n}: retry\n") == 1 for n in range(85))
    assert (text.count("\n## "), text.count("# Dead letters reviewed")) == (85, 1)


async def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert "can't be written" in await failure(ReviewLog(tmp_path / "file"))
