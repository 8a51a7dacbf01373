"""Random requests: the examples of the OpenAPI document, with changes that it allows, and others."""

import json
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from lineshaft.server.app import describe

#: Values of names that responses had, the newest of each.
_KEPT = 200
#: Tokens are not revoked: the run would end with 401 for everything.
_KEEP_VALID = "token_"
_HARVESTED = (
    "id",
    "claim_token",
    "incarnation",
    "dag_id",
    "next_cursor",
    "idempotency_key",
    "key",
    "agent_id",
)


@dataclass(frozen=True)
class Request:
    operation: str
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    #: The statuses that the document lists; None: the path was changed, it may be of another operation.
    documented: frozenset[int] | None

    def __str__(self) -> str:
        shown = {name: value for name, value in self.headers.items() if name != "Authorization"}
        return f"{self.operation}: {self.method} {self.target} {shown} {self.body[:2000]!r}"


class Names:
    """Names of things that exist, or existed, on the server."""

    def __init__(self) -> None:
        self._known: dict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def learn(self, found: Any) -> None:
        if isinstance(found, list):
            for each in found[:20]:
                self.learn(each)
        elif isinstance(found, dict):
            for name, value in found.items():
                if name not in _HARVESTED or isinstance(value, dict | list):
                    self.learn(value)
                elif value is not None and not str(value).startswith(_KEEP_VALID):
                    self._known[name].append(value)

    def some(self, name: str, dice: random.Random) -> Any:
        known = self._known.get(name) or self._known.get("id")
        return dice.choice(known) if known else "unknown"


def _text(dice: random.Random) -> str:
    alphabet = "abcXYZ019 _-./:%*\\'\"\n\t\0\u00e9\u202e\u4e2d\ud800\udfff\U0001f600"
    return "".join(dice.choices(alphabet, k=dice.choice((0, 1, 5, 30))))


_ODD: tuple[Callable[[random.Random], Any], ...] = (
    lambda _: None,
    lambda _: True,
    lambda _: "",
    lambda _: [],
    lambda _: {},
    lambda dice: dice.choice((0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.1, 1e-9, 1e308, -0.0)),
    lambda dice: dice.choice((float("nan"), float("inf"), -float("inf"))),
    _text,
    lambda dice: "x" * dice.choice((201, 1001, 10_001)),
    lambda dice: dice.choice(("2026-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00")),
    lambda dice: [_text(dice)] * dice.choice((1, 2, 50)),
    lambda dice: {_text(dice): _text(dice)},
    lambda dice: _nested(dice.choice((3, 60, 200))),
    lambda _: {"$ref": "#"},
    lambda _: {"type": "object", "properties": {"a": {"pattern": "(a+)+$"}}},
)


def _nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


class Generator:
    def __init__(self, seed: int, names: Names, tokens: Mapping[str, str | None]) -> None:
        """`tokens` by the name of what they may do; None: no token."""
        self._dice = random.Random(seed)
        self._names = names
        self._tokens = list(tokens.values())
        self._schemas = describe()["components"]["schemas"]
        self._calls = [
            (path, method, call)
            for path, item in describe()["paths"].items()
            for method, call in item.items()
        ]

    def next(self) -> Request:
        dice = self._dice
        path, method, call = dice.choice(self._calls)
        documented: frozenset[int] | None = frozenset(int(status) for status in call["responses"])
        target = path
        for parameter in call["parameters"]:
            if parameter["in"] == "path":
                value = str(self._names.some(parameter["name"], dice))
                if dice.random() < 0.1:
                    value, documented = _text(dice), None
                target = target.replace(f"{{{parameter['name']}}}", _quoted(value))
        if query := self._query(call):
            target += "?" + query
        if dice.random() < 0.02:
            method, documented = dice.choice(("get", "post", "put", "patch", "delete", "options")), None
        headers = self._headers(call)
        return Request(call["operationId"], method.upper(), target, headers, self._body(call), documented)

    def _headers(self, call: Mapping[str, Any]) -> dict[str, str]:
        dice = self._dice
        # Most with the last one, which may do everything: others are refused before anything happens.
        token = self._tokens[-1] if dice.random() < 0.7 else dice.choice(self._tokens)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        if "requestBody" in call and dice.random() < 0.1:
            headers["Idempotency-Key"] = dice.choice(("k1", "k2", "x" * 1001, "\u00e9", " "))
        if dice.random() < 0.05:
            headers["Content-Type"] = dice.choice(("text/plain", "application/json; charset=utf-7", ""))
        if dice.random() < 0.02:
            name = dice.choice(("X-Forwarded-For", "Authorization", "X-Request-Id", "Accept"))
            headers[name] = dice.choice(("", "x", "\u00e9", "Bearer", "Bearer lsh_wrong", "*/*"))
        return headers

    def _query(self, call: Mapping[str, Any]) -> str:
        dice = self._dice
        given: list[tuple[str, Any]] = []
        for parameter in call["parameters"]:
            if parameter["in"] == "query" and dice.random() < 0.2:
                name = parameter["name"]
                values = (self._fitting(parameter["schema"], name), self._names.some(name, dice), _text(dice))
                given.append((name, 0 if name == "within_sec" else dice.choice(values)))
        if dice.random() < 0.01:
            given.append((_text(dice), _text(dice)))
        return urlencode(given, errors="surrogatepass", doseq=True)

    def _body(self, call: Mapping[str, Any]) -> bytes:
        dice = self._dice
        content = call.get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            return b"" if dice.random() < 0.95 else b"[1]"
        body = json.loads(json.dumps(content.get("example", {})))
        body = self._with_names(body)
        for _ in range(dice.choice((0, 0, 1, 1, 2, 5))):
            body = self._changed(content["schema"], body)
        _never_wait(body)
        encoded = json.dumps(body).encode()
        if dice.random() < 0.05:
            place = dice.randrange(len(encoded) + 1)
            junk = dice.choice((b"", b"\xff", b"\0", b"[" * 1000, b'"', b"}", encoded[:place]))
            encoded = encoded[:place] + junk + encoded[place + dice.choice((0, 1, 9)) :]
        return encoded

    def _with_names(self, body: Any) -> Any:
        """The example with the names of things that exist."""
        if isinstance(body, list):
            return [self._with_names(each) for each in body]
        if not isinstance(body, dict):
            return body
        keep = self._dice.random() < 0.1
        return {
            name: self._names.some(name, self._dice)
            if name in _HARVESTED and not keep and not isinstance(value, dict | list)
            else self._with_names(value)
            for name, value in body.items()
        }

    def _changed(self, schema: Mapping[str, Any], body: Any) -> Any:
        """With one change, somewhere."""
        dice = self._dice
        schema = self._resolved(schema)
        if not isinstance(body, dict) or dice.random() < 0.02:
            return dice.choice(_ODD)(dice)
        fields = schema.get("properties", {})
        inside = [name for name, value in body.items() if isinstance(value, dict | list) and value]
        if inside and dice.random() < 0.4:
            name = dice.choice(inside)
            value, below = body[name], self._resolved(fields.get(name, {}))
            if isinstance(value, list):
                place = dice.randrange(len(value))
                changed = [*value]
                changed[place] = self._changed(below.get("items", {}), value[place])
                return body | {name: changed}
            return body | {name: self._changed(below, value)}
        if body and dice.random() < 0.2:
            gone = dice.choice(list(body))
            return {name: value for name, value in body.items() if name != gone}
        if fields and dice.random() < 0.9:
            name = dice.choice(list(fields))
            odd = dice.random() < 0.4
            return body | {name: dice.choice(_ODD)(dice) if odd else self._fitting(fields[name], name)}
        return body | {_text(dice): dice.choice(_ODD)(dice)}

    def _fitting(self, schema: Mapping[str, Any], name: str, levels: int = 4) -> Any:  # noqa: PLR0911 - one for each kind
        """A value that the schema allows, or nearly."""
        dice = self._dice
        schema = self._resolved(schema)
        if name in _HARVESTED:
            return self._names.some(name, dice)
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self._fitting(dice.choice(choices), name, levels)
        if "enum" in schema:
            return dice.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "array":
            items = schema.get("items", {})
            return [
                self._fitting(items, "", levels - 1) for _ in range(dice.choice((0, 1, 2)) if levels else 0)
            ]
        if kind == "object":
            needed = schema.get("required", []) if levels else []
            return {each: self._fitting(schema["properties"][each], each, levels - 1) for each in needed}
        if kind in {"integer", "number"}:
            low, high = schema.get("minimum", 0), schema.get("maximum", 1000)
            value = dice.choice((low, high, (low + high) / 2))
            return int(value) if kind == "integer" else value
        if kind == "boolean":
            return dice.random() < 0.5
        if kind == "string":
            return "2026-01-01T00:00:00Z" if schema.get("format") == "date-time" else _text(dice)
        return dice.choice(_ODD)(dice)

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema and str(schema["$ref"]).startswith("#/components/"):
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema


def _quoted(value: str) -> str:
    return quote(value, safe="", errors="surrogatepass") or "%20"


def _never_wait(body: Any) -> None:
    """Calls that wait for work return at once."""
    if isinstance(body, dict) and isinstance(body.get("wait_sec"), int | float):
        body["wait_sec"] = min(body["wait_sec"], 0)
