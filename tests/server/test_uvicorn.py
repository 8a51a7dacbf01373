"""What `server/framework` and `server/server.py` use of uvicorn that uvicorn doesn't promise.

`pyproject.toml` has an upper bound for that reason. Before it is raised, these tests say what a new version
changed.
"""

import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http import flow_control, httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

#: Methods of `HttpToolsProtocol` that ours calls or replaces, with their parameters.
METHODS = {
    "_should_upgrade": [],
    "_start_asgi_task": ["cycle", "app"],
    "connection_lost": ["exc"],
    "connection_made": ["transport"],
    "data_received": ["data"],
    "handle_websocket_upgrade": [],
    "on_body": ["body"],
    "on_header": ["name", "value"],
    "on_headers_complete": [],
    "on_message_begin": [],
    "on_message_complete": [],
    "on_response_complete": [],
    "send_400_response": ["msg"],
}
#: Attributes of a protocol.
ATTRIBUTES = (
    *("access_logger", "app", "app_state", "asgi_version", "client", "connections", "cycle", "flow"),
    *("headers", "logger", "parser", "root_path", "scheme", "scope", "server", "server_state"),
    *("timeout_keep_alive", "transport"),
)
#: The parameters of a cycle: ours gives all of them.
CYCLE = [
    *("scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers"),
    *("message_event", "expect_100_continue", "keep_alive", "on_response"),
]
#: What a cycle has besides its parameters.
CYCLE_ATTRIBUTES = (
    *("body", "chunked_encoding", "disconnected", "more_body", "response_complete", "response_started"),
    "waiting_for_100_continue",
)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """An application that is never called."""


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_installed_version_is_within_the_bound() -> None:
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        dependencies = map(Requirement, tomllib.load(file)["project"]["dependencies"])
    (bound,) = (one.specifier for one in dependencies if one.name == "uvicorn")

    assert uvicorn.__version__ in bound
    assert any(part.operator == "<" for part in bound), "private parts change without notice"


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_the_protocol(name: str) -> None:
    assert parameters(getattr(HttpToolsProtocol, name)) == METHODS[name]


async def test_attributes_of_the_protocol() -> None:
    protocol = HttpToolsProtocol(uvicorn.Config(app), ServerState(), {})

    assert [name for name in ATTRIBUTES if not hasattr(protocol, name)] == []
    assert protocol.server_state.total_requests == 0
    assert protocol.server_state.default_headers == []


def test_a_request_and_its_response() -> None:
    assert parameters(RequestResponseCycle) == CYCLE
    cycle = RequestResponseCycle(**dict.fromkeys(CYCLE, None))  # type: ignore[arg-type]

    assert [name for name in CYCLE_ATTRIBUTES if not hasattr(cycle, name)] == []
    assert parameters(RequestResponseCycle.send) == ["message"]


def test_flow_control_and_constants() -> None:
    flow = {"drain", "pause_reading", "resume_reading"}
    assert {name for name in flow if not hasattr(flow_control.FlowControl, name)} == set()
    assert {"read_paused", "write_paused"} <= vars(flow_control.FlowControl(None)).keys()  # type: ignore[arg-type]
    assert flow_control.HIGH_WATER_LIMIT == 64 << 10
    assert httptools_impl.STATUS_LINE[404] == b"HTTP/1.1 404 Not Found\r\n"
    assert httptools_impl.HEADER_VALUE_RE.search(b"a\r\nb")


def test_the_server() -> None:
    server = uvicorn.Server(uvicorn.Config(app))

    assert parameters(server.startup) == parameters(server.shutdown) == ["sockets"]
    assert parameters(server.capture_signals) == []
    assert (server.started, server.should_exit, server.force_exit) == (False, False, False)
    assert server.server_state.connections == set()
