"""The table of operations: requests survive HTTP, examples are valid, and clients reach every operation."""

import re
from http import HTTPMethod
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Match

import lineshaft
from lineshaft.operations import table
from lineshaft.operations.operation import Operation
from lineshaft.server.app import OPERATIONS
from lineshaft.server.framework.problems import STATUSES
from lineshaft.server.framework.routing import _route, read_query
from lineshaft.types import Scope
from tests.examples import examples
from tests.operations.requests import instances

SOURCE = Path(str(lineshaft.__file__)).parent
#: Operations that no client calls by name.
NOT_CALLED = {
    "submit_task": "clients submit one task as a batch of one",
    "list_task_events": "read_events(task_id=…) reads the same",
}
BY_NAME = {operation.name: operation for operation in table.OPERATIONS}


def sent_and_read(operation: Operation[Any, Any], request: Any) -> Any:
    """What a server makes of what a client sends."""
    sent = operation.wire.encoded(request)
    target = urlsplit(sent.target)
    route = _route(operation, None)  # type: ignore[type-var]  # it isn't called
    # As an ASGI server decodes it.
    path = unquote(target.path)
    match, child = route.matches({"type": "http", "method": operation.method, "path": path, "root_path": ""})
    assert match is Match.FULL, path
    query = None if operation.wire.query is None else read_query(target.query.encode(), operation.wire.query)
    body = None if sent.body is None else msgspec.json.decode(sent.body, type=operation.wire.body)
    return operation.wire.request(child["path_params"], query, body, sent.key)


def plain(value: Any) -> Any:
    """Without the difference between lists and tuples, and between none and empty ones."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value)
    return value


def has_path(request: Any, operation: Operation[Any, Any]) -> bool:
    """A path parameter without slashes can't be empty, nor have any."""
    parts = {name: getattr(request, name) for name in operation.wire.names}
    free = {name for name in parts if f"{{{name}:path}}" in operation.path}
    return all(text and (name in free or "/" not in text) for name, text in parts.items())


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_request_survives_http(name: str, data: st.DataObject) -> None:
    operation = BY_NAME[name]
    request = data.draw(instances(operation.request).filter(lambda found: has_path(found, operation)))

    assert plain(sent_and_read(operation, request)) == plain(request)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_is_described(operation: Operation[Any, Any]) -> None:
    assert operation.method in set(HTTPMethod)
    assert set(operation.all_codes) <= set(STATUSES)
    assert operation.summary[0]
    shape = operation.body_shape or operation.wire.body
    if operation.example is not None and shape is not msgspec.Raw:
        msgspec.json.decode(msgspec.json.encode(operation.example), type=shape)
    if operation.method == "GET":
        assert operation.repeatable is True
        assert not operation.by_hand


def test_who_may_read_changes_nothing() -> None:
    asks = {"which_ended"}
    changes = [
        o.name for o in OPERATIONS if o.scope is Scope.READ and o.method != "GET" and o.name not in asks
    ]
    assert changes == []


def test_every_operation_is_called_by_a_client() -> None:
    """A new one has a method of `Lineshaft`, or is listed with a reason."""
    files = [file for folder in ("client", "agent") for file in (SOURCE / folder).rglob("*.py")]
    called = set(re.findall(r"\.([a-z_]+),", "\n".join(file.read_text(encoding="utf-8") for file in files)))

    assert set(BY_NAME) - called - set(NOT_CALLED) == set()
    assert set(NOT_CALLED) <= set(BY_NAME)
