"""The OpenAPI document, made from the operations."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lineshaft.model.open_enum import OpenEnum
from lineshaft.operations.operation import Operation
from lineshaft.server.framework import problems
from lineshaft.server.framework.problems import ErrorFormat, ErrorFormats
from lineshaft.server.framework.routing import ItemsOf, Service
from lineshaft.types import Scope

PATH = "/openapi.json"

_REF = "#/components/schemas/{name}"
_CONVERTOR = re.compile(r"\{([a-z_]+):path\}")
_PARAMETER = re.compile(r"\{([a-z_]+)\}")
_ABOUT = """A durable task queue for fleets of AI agents.

Errors are `application/problem+json` with a stable `code`. Times are UTC; money is in US dollars. Lists \
take `limit` and `cursor` and return `items` and `next_cursor`. A POST that creates accepts the header \
`Idempotency-Key`."""


def document(
    title: str, version: str, operations: Sequence[Operation[Any, Any]], formats: ErrorFormats
) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": _ABOUT},
        "paths": _paths(operations, formats),
        "components": {
            "schemas": _schemas(operations, formats),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def route(described: Callable[[], Mapping[str, Any]], service: Service) -> Route:
    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(described())

    async def answer(request: Request) -> Response:
        await service.authenticate(Scope.READ, request.scope)
        return Response(encoded(), media_type="application/json")

    return Route(PATH, answer)


def _paths(operations: Sequence[Operation[Any, Any]], formats: ErrorFormats) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for operation in operations:
        path = _CONVERTOR.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, path, formats)
    return paths


def _operation(operation: Operation[Any, Any], path: str, formats: ErrorFormats) -> dict[str, Any]:
    summary, description = operation.summary
    found: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.area],
        "summary": summary,
        "parameters": [*_path_parameters(path), *_query_parameters(operation)],
        "responses": _responses(operation, formats.of(path)),
    }
    if description:
        found["description"] = description
    if operation.scope is not None:
        found["security"] = [{"token": []}, {}]
        found["x-scope"] = operation.scope.value
    if operation.upload:
        found["requestBody"] = {"required": True, "content": {"application/octet-stream": {"schema": {}}}}
        found["parameters"].append(_FILE_NAME)
    if operation.wire.body is not None:
        content: dict[str, Any] = {"schema": _schema_of(operation.body_shape or operation.wire.body)}
        if operation.example is not None:
            content["example"] = operation.example
        found["requestBody"] = {
            "required": not _is_optional(operation.wire.body),
            "content": {"application/json": content},
        }
        if HTTPStatus.CREATED in operation.answers:
            found["parameters"].append(_IDEMPOTENCY_KEY)
    return found


def _is_optional(body: Any) -> bool:
    """Whether an empty body means one with all defaults."""
    return body is msgspec.Raw or not any(field.required for field in structs.fields(body))


_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Requests with the same key create only once.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 1000},
}


_FILE_NAME = {
    "name": "X-Filename",
    "in": "header",
    "required": False,
    "description": "The name of the file, percent-encoded.",
    "schema": {"type": "string", "pattern": "^[!-~]*$", "maxLength": 3000},
}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]


def _query_parameters(operation: Operation[Any, Any]) -> list[dict[str, Any]]:
    if operation.wire.query is None:
        return []
    schema = _resolved(operation.wire.query)
    return [
        {
            "name": field.encode_name,
            "in": "query",
            "required": field.required,
            "schema": _plain(schema[field.encode_name]),
        }
        for field in structs.fields(operation.wire.query)
    ]


def _responses(operation: Operation[Any, Any], error_format: ErrorFormat) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, kind in operation.answers.items():
        found[str(status)] = {"description": _phrase(status)}
        if isinstance(kind, str):
            found[str(status)]["content"] = {kind: {"schema": {"type": "string"}}}
        elif kind is not None:
            found[str(status)]["content"] = {"application/json": {"schema": _schema_of(kind)}}
    codes: dict[int, list[str]] = {}
    for code in operation.all_codes:
        codes.setdefault(problems.STATUSES[code].value, []).append(code)
    for status, names in codes.items():
        content = {error_format.media_type: {"schema": _schema_of(error_format.shape)}}
        found[str(status)] = {"description": " or ".join(names), "content": content}
    return found


def _phrase(status: int) -> str:
    return {
        200: "Done",
        201: "Created",
        202: "Accepted",
        204: "Done; no body",
        206: "The requested range",
        304: "Not changed",
        307: "Elsewhere, for a short time",
        416: "The range is outside of the content",
    }[status]


def _types(operations: Sequence[Operation[Any, Any]], formats: ErrorFormats) -> list[Any]:
    kinds: list[Any] = [problems.PROBLEM.shape, *(found.shape for found in formats.by_prefix.values())]
    for operation in operations:
        answers = [
            part
            for kind in operation.answers.values()
            for part in (kind.kinds if isinstance(kind, ItemsOf) else (kind,))
            if not isinstance(part, str)
        ]
        kinds += [
            kind for kind in (operation.body_shape or operation.wire.body, *answers) if kind is not None
        ]
    return kinds


def _schemas(operations: Sequence[Operation[Any, Any]], formats: ErrorFormats) -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_types(operations, formats), ref_template=_REF)
    open_names = {kind.__name__ for kind in OpenEnum.__subclasses__()}
    return {
        name: _opened(schema) if name in open_names else _plain(schema) for name, schema in components.items()
    }


def _opened(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Any text, with today's values: a client made from `enum` would refuse those of a newer server."""
    rest = {name: value for name, value in schema.items() if name != "enum"}
    return {**rest, "type": "string", "x-extensible-enum": schema["enum"]}


def _schema_of(kind: Any) -> Any:
    if isinstance(kind, ItemsOf):
        items = [_schema_of(part) for part in kind.kinds]
        item = items[0] if len(items) == 1 else {"anyOf": items}
        array = {"type": "array", "items": item}
        return {"type": "object", "properties": {"items": array}, "required": ["items"]}
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return _plain(schema)


def _resolved(kind: Any) -> Mapping[str, Any]:
    _, components = msgspec.json.schema_components([kind], ref_template=_REF)
    properties: Mapping[str, Any] = components[kind.__name__]["properties"]
    return properties


def _plain(schema: Any) -> Any:
    """Show money as a number, which it is on the wire, though the type is a decimal."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "decimal":
        return {"type": "number"}
    plain = {name: _plain(value) for name, value in schema.items()}
    if "anyOf" in plain:
        # Decimal and float are the same on the wire.
        plain["anyOf"] = [kind for n, kind in enumerate(plain["anyOf"]) if kind not in plain["anyOf"][:n]]
    return plain
