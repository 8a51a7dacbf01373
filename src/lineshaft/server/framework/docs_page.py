"""/docs: the OpenAPI document as one HTML page without scripts. It loads nothing from elsewhere."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from lineshaft.server.framework.routing import Service
from lineshaft.types import Scope

PATH = "/docs"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2733 }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 13px/1.5 ui-monospace, monospace }
pre { background: #f3f5f7; padding: .7rem; overflow-x: auto }
details { border-bottom: 1px solid #dde3e8; padding: .35rem 0 }
summary { cursor: pointer }
summary b { display: inline-block; width: 4.2rem; color: #3457a6 }
table { border-collapse: collapse }
td { padding: .1rem 1rem .1rem 0; vertical-align: top }
.quiet { color: #5d6b78 }
"""
#: The page can load, run or submit nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def route(document: Callable[[], Mapping[str, Any]], service: Service) -> Route:
    @cache
    def page() -> str:
        return "".join(_page(document()))

    async def answer(request: Request) -> HTMLResponse:
        await service.authenticate(Scope.READ, request.scope)
        return HTMLResponse(page(), headers={"Content-Security-Policy": _POLICY})

    return Route(PATH, answer)


def _page(document: Mapping[str, Any]) -> Iterator[str]:
    title = f"{document['info']['title']} {document['info']['version']}"
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
    )
    yield _text(document["info"].get("description", ""))
    yield '<p>For programs: <a href="/openapi.json">/openapi.json</a>.</p>'
    areas: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        for method, call in item.items():
            area = (call.get("tags") or ["more"])[0]
            areas.setdefault(area, []).append("".join(_call(method, path, call)))
    for area, calls in areas.items():
        yield f"<h2>{escape(area.replace('_', ' ').capitalize())}</h2>{''.join(calls)}"
    yield "<h2>Schemas</h2>"
    for name, schema in sorted(document.get("components", {}).get("schemas", {}).items()):
        known = escape(name)
        yield f'<details id="{known}"><summary><code>{known}</code></summary>{_json(schema)}</details>'
    yield "</body></html>"


def _call(method: str, path: str, call: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"<details><summary><b>{method.upper()}</b><code>{escape(path)}</code> "
        f'<span class="quiet">{escape(call.get("summary", ""))}</span></summary>'
    )
    yield _text(call.get("description", ""))
    scope = call.get("x-scope")
    yield f"<p>Needs the scope <code>{escape(scope)}</code>.</p>" if scope else "<p>Needs no token.</p>"
    parameters = call.get("parameters", ())
    if parameters:
        rows = (
            f"<tr><td><code>{escape(given['name'])}</code></td><td>{given['in']}</td>"
            f"<td><code>{escape(json.dumps(given['schema'], ensure_ascii=False))}</code></td></tr>"
            for given in parameters
        )
        yield f"<table>{''.join(rows)}</table>"
    for kind, content in call.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, {escape(kind)}: {_schema(content.get('schema', {}))}</p>"
        if "example" in content:
            yield _json(content["example"])
    yield "<table>"
    for status, answer in call["responses"].items():
        shapes = " ".join(
            _schema(content.get("schema", {})) for content in answer.get("content", {}).values()
        )
        description = escape(answer["description"])
        yield f"<tr><td><code>{escape(status)}</code></td><td>{description}</td><td>{shapes}</td></tr>"
    yield "</table></details>"


def _schema(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "items" in schema:
        return f"a list of {_schema(schema['items'])}"
    return escape(str(schema.get("type", "")))


def _text(text: str) -> str:
    return "".join(f"<p>{escape(part)}</p>" for part in text.split("\n\n") if part)


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"
