"""Pages of other origins are refused, with a reason in the log; those of the setting may call the API."""

from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.typing import Origin

from lineshaft.errors import SettingsError
from lineshaft.settings import Settings
from tests.server.client import Client, Reply
from tests.server.conftest import Serve

UI = "https://ui.example"
#: As a browser sends them with a script's request.
FETCH = {"Origin": UI, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}


async def preflight(client: Client, path: str, origin: str = UI) -> Reply:
    headers = {
        "Origin": origin,
        "Sec-Fetch-Site": "cross-site",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return await client.request("OPTIONS", path, headers=headers)


@pytest.mark.parametrize("path", ["/api/tasks", "/v1/tasks", "/health"])
async def test_an_allowed_origin_may_read_and_write(serve: Serve, path: str) -> None:
    async with serve(allowed_origins=(UI, "http://localhost:3000")) as served:
        asked = await preflight(served.client, path)
        reply = await served.client.request("GET", path, headers=FETCH)

        assert (asked.status, reply.status) == (204, 200)
        for answer in (asked, reply):
            assert answer.headers["access-control-allow-origin"] == UI
            assert answer.headers["access-control-allow-credentials"] == "true"
            assert answer.headers["vary"] == "origin"
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"


async def test_an_allowed_origin_reads_errors_too(serve: Serve) -> None:
    async with serve(auth=True, allowed_origins=(UI,)) as served:
        assert (await preflight(served.client, "/api/tasks")).status == 204, (
            "a browser sends no token with it"
        )
        reply = await served.client.request("GET", "/api/tasks", headers=FETCH)

        assert (reply.status, reply.headers["access-control-allow-origin"]) == (401, UI)


@pytest.mark.parametrize(
    "origin", ["https://ui.example:8443", "http://ui.example", "https://x.ui.example", "null"]
)
async def test_other_origins_are_refused(serve: Serve, origin: str) -> None:
    async with serve(allowed_origins=(UI,)) as served:
        for reply in (
            await preflight(served.client, "/api/tasks", origin),
            await served.client.request("GET", "/api/tasks", headers=FETCH | {"Origin": origin}),
        ):
            assert reply.status == 403
            assert "access-control-allow-origin" not in reply.headers
            assert reply.headers["vary"] == "origin"


async def test_the_dashboard_is_for_no_other_origin(serve: Serve) -> None:
    """Its forms act with a cookie."""
    async with serve(allowed_origins=(UI,)) as served:
        for path in ("/", "/tasks", "/login"):
            reply = await served.client.request("POST", path, headers=FETCH)
            assert reply.status == 403
            assert "access-control-allow-origin" not in reply.headers


async def test_by_default_no_answer_mentions_origins(client: Client) -> None:
    reply = await client.get("/api/tasks")

    assert not [name for name in reply.headers if name.startswith("access-control") or name == "vary"]


async def test_the_log_says_once_what_to_set(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    async with serve() as served:
        for _ in range(3):
            reply = await served.client.request("GET", "/api/tasks", headers=FETCH)
            assert reply.status == 403
            assert "LINESHAFT_ALLOWED_ORIGINS" in reply.json["detail"]
        with pytest.raises(Exception, match="403"):
            async with connect(
                f"ws://127.0.0.1:{served.client.port}/ws", origin=Origin("https://b.example"), proxy=None
            ):
                pass
    lines = [line for line in capsys.readouterr().out.splitlines() if "LINESHAFT_ALLOWED_ORIGINS" in line]
    assert len(lines) == 2, lines
    assert UI in lines[0]
    assert "https://b.example" in lines[1]


async def test_an_allowed_origin_opens_a_socket(serve: Serve) -> None:
    async with serve(allowed_origins=(UI,)) as served:
        url = f"ws://127.0.0.1:{served.client.port}/api/ws"
        options: dict[str, Any] = {"additional_headers": {"Sec-Fetch-Site": "cross-site"}, "proxy": None}
        async with connect(url, origin=Origin(UI), **options) as socket:
            assert await socket.recv()


@pytest.mark.parametrize(
    "text", ["*", "ui.example", "https://ui.example/", "https://*.example", "HTTPS://a.b"]
)
def test_only_exact_origins_can_be_set(text: str) -> None:
    with pytest.raises(SettingsError, match="LINESHAFT_ALLOWED_ORIGINS must be origins"):
        Settings.load({"LINESHAFT_ALLOWED_ORIGINS": text})
