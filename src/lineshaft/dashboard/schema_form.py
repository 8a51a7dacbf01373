"""A JSON Schema as the fields of a form, and what was entered in them as JSON.

An object becomes one field for each property; an object within it becomes a section with its fields. What a
field can't hold is entered as JSON in a text area. The form only helps to enter an answer: whether the answer
is valid is decided by the gate that has the schema.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from math import isfinite
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

#: A schema with more fields is answered as JSON.
MAX_FIELDS = 100
#: The start of all names of fields.
PREFIX = "data"
#: A text that may be longer gets several lines.
_MOST_IN_ONE_LINE = 200
_LONG_NAMES = frozenset(
    {
        "body",
        "comment",
        "comments",
        "content",
        "description",
        "feedback",
        "message",
        "note",
        "notes",
        "reason",
        "summary",
        "text",
    }
)
_MAX_HELP = 1_000
_WHOLE = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_MOST_DIGITS = 300
_MISSING: Any = object()
_NULL = {"type": "null"}


class Kind(StrEnum):
    TEXT = "text"
    EMAIL = "email"
    URL = "url"
    DATE = "date"
    LONG_TEXT = "long_text"
    NUMBER = "number"
    INTEGER = "integer"
    #: Yes or no. A checkbox would answer "no" for people who overlook it.
    BOOLEAN = "boolean"
    CHOICE = "choice"
    #: Several of some values.
    CHOICES = "choices"
    #: A list of texts, one in each line.
    LINES = "lines"
    JSON = "json"


_SIMPLE = {"boolean": Kind.BOOLEAN, "integer": Kind.INTEGER, "number": Kind.NUMBER}
_FORMATS = {"email": Kind.EMAIL, "uri": Kind.URL, "date": Kind.DATE}


class Field(Struct, frozen=True):
    """One value of the answer."""

    #: Keys that lead to it; empty: the whole answer.
    path: tuple[str, ...]
    kind: Kind
    label: str
    help: str = ""
    #: The title of the object around it, if that is not the answer itself.
    section: str = ""
    #: The object around it is left out if nothing in it is entered.
    is_in_optional: bool = False
    is_required: bool = False
    #: An empty field that is required means null.
    is_nullable: bool = False
    #: The value that it starts with.
    default: Any = _MISSING
    #: Values as JSON, each with its label.
    choices: tuple[tuple[str, str], ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    #: Not checked by browsers: their patterns are another dialect.
    pattern: str = ""

    @property
    def name(self) -> str:
        return PREFIX + "".join(f"/{key.replace('~', '~0').replace('/', '~1')}" for key in self.path)

    @property
    def must_be_filled(self) -> bool:
        """Whether a browser may refuse an empty field."""
        may_be_empty = self.is_nullable or self.is_in_optional or self.kind in {Kind.LINES, Kind.CHOICES}
        return self.is_required and not may_be_empty


def fields_of(schema: Any) -> list[Field]:
    """At least one; a schema that no fields fit is one field for the whole answer as JSON."""
    whole = _resolved(schema, schema)
    properties = whole.get("properties")
    if not _is_object(whole) or not isinstance(properties, Mapping) or not properties:
        return [_field((), whole, schema, is_required=True)]
    # Fields of one section stay together, behind those without one; optional JSON comes last.
    fields = sorted(_fields_in((), whole, schema), key=_place)
    return fields if len(fields) <= MAX_FIELDS else [json_field(schema)]


def _place(field: Field) -> int:
    if field.section:
        return 1
    return 2 if field.kind is Kind.JSON and not field.is_required else 0


def json_field(schema: Any) -> Field:
    """The whole answer as JSON."""
    return replace(_field((), {}, {}, is_required=True), default=_default(_resolved(schema, schema)))


def _fields_in(path: tuple[str, ...], part: Mapping[str, Any], root: Any) -> Iterator[Field]:
    properties: Mapping[str, Any] = part["properties"]
    listed = part.get("required")
    required = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    for key in properties:
        inner = _resolved(properties.get(key, {}), root)
        is_required = key in required
        has_fields = isinstance(inner.get("properties"), Mapping) and bool(inner["properties"])
        if not path and has_fields and _is_object(inner) and not inner.get("nullable"):
            title = _text(inner.get("title")) or key
            for field in _fields_in((key,), inner, root):
                yield replace(field, section=title, is_in_optional=not is_required)
        else:
            yield _field((*path, key), inner, root, is_required=is_required)


def _field(path: tuple[str, ...], part: Mapping[str, Any], root: Any, *, is_required: bool) -> Field:
    kind, choices = _kind(path, part, root)
    return Field(
        path=path,
        kind=kind,
        label=_text(part.get("title")) or (path[-1] if path else "Answer"),
        help=_text(part.get("description"))[:_MAX_HELP],
        is_required=is_required,
        is_nullable=bool(part.get("nullable")),
        default=_default(part),
        choices=choices,
        minimum=_number(part.get("minimum")),
        maximum=_number(part.get("maximum")),
        min_length=_length(part.get("minLength")),
        max_length=_length(part.get("maxLength")),
        pattern=_text(part.get("pattern")),
    )


def _kind(
    path: tuple[str, ...], part: Mapping[str, Any], root: Any
) -> tuple[Kind, tuple[tuple[str, str], ...]]:
    if choices := _choices(part):
        return Kind.CHOICE, choices
    kind = part.get("type")
    if kind == "array":
        return _kind_of_list(part, root)
    if kind == "string":
        form = part.get("format")
        usual = Kind.LONG_TEXT if _is_long(path, part) else Kind.TEXT
        return _FORMATS.get(form, usual) if isinstance(form, str) else usual, ()
    return _SIMPLE.get(kind, Kind.JSON) if isinstance(kind, str) else Kind.JSON, ()


def _kind_of_list(part: Mapping[str, Any], root: Any) -> tuple[Kind, tuple[tuple[str, str], ...]]:
    items = _resolved(part.get("items", {}), root)
    if items.get("type") != "string" or items.get("nullable") or "prefixItems" in part:
        return Kind.JSON, ()
    choices = _choices(items)
    return (Kind.CHOICES, choices) if choices else (Kind.LINES, ())


def _is_long(path: tuple[str, ...], part: Mapping[str, Any]) -> bool:
    longest = _length(part.get("maxLength"))
    if longest is not None:
        return longest > _MOST_IN_ONE_LINE
    default = part.get("default")
    has_lines = isinstance(default, str) and "\n" in default
    return has_lines or "contentMediaType" in part or bool(path and path[-1].lower() in _LONG_NAMES)


def _choices(part: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Values that the schema lists, as `enum`, as `const`, or as `oneOf` with a title for each."""
    listed = part.get("enum")
    if isinstance(listed, list) and listed:
        return tuple((as_json(value), _label(value)) for value in listed)
    if "const" in part:
        return ((as_json(part["const"]), _label(part["const"])),)
    options = part.get("oneOf")
    if not isinstance(options, list):
        return ()
    listed = [one for one in options if isinstance(one, Mapping) and "const" in one]
    if len(listed) < len(options):
        return ()
    return tuple((as_json(one["const"]), _text(one.get("title")) or _label(one["const"])) for one in listed)


def _label(value: Any) -> str:
    return value if isinstance(value, str) and value.strip() else as_json(value)


def _resolved(part: Any, root: Any) -> dict[str, Any]:
    """With its reference followed, and with `nullable` in place of the type null; {} for anything else."""
    found = _referred(part, root)
    # `nullable` is our own mark here; in a schema it has no meaning.
    found.pop("nullable", None)
    kinds = found.get("type")
    if isinstance(kinds, list):
        others = [kind for kind in kinds if kind != "null"]
        return {**found, "type": others[0] if len(others) == 1 else None, "nullable": "null" in kinds}
    options = found.get("anyOf") if "type" not in found else None
    if isinstance(options, list) and _NULL in options:
        others = [one for one in options if one != _NULL]
        if len(others) == 1:
            around = {name: value for name, value in found.items() if name != "anyOf"}
            return {**_referred(others[0], root), **around, "nullable": True}
    return found


def _referred(part: Any, root: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        return {}
    ref = part.get("$ref")
    if not isinstance(ref, str):
        return dict(part)
    where, _, key = ref.rpartition("/")
    definitions = (
        root.get(where[2:]) if isinstance(root, Mapping) and where in {"#/$defs", "#/definitions"} else None
    )
    target = definitions.get(key) if isinstance(definitions, Mapping) else None
    if not isinstance(target, Mapping) or "$ref" in target:
        return {}
    return {**target, **{name: value for name, value in part.items() if name != "$ref"}}


def _is_object(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "object" or ("type" not in part and "properties" in part)


def _default(part: Mapping[str, Any]) -> Any:
    return part.get("default", _MISSING)


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _length(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


# Values and texts.


def as_json(value: Any, *, indent: int = 0) -> str:
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()


def texts_of(fields: Sequence[Field], value: Any = _MISSING) -> dict[str, list[str]]:
    """What the fields show for a value; without one, their defaults."""
    return {field.name: _texts(field, _at(field, value)) for field in fields}


def _at(field: Field, value: Any) -> Any:
    if value is _MISSING:
        return field.default
    for key in field.path:
        value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


def _texts(field: Field, value: Any) -> list[str]:
    if value is _MISSING or (value is None and field.kind not in {Kind.CHOICE, Kind.JSON}):
        return []
    if field.kind is Kind.CHOICES and isinstance(value, list):
        return [as_json(one) for one in value]
    if field.kind is Kind.LINES and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ["\n".join(value)]
    if isinstance(value, str) and field.kind not in {Kind.CHOICE, Kind.JSON}:
        return [value]
    return [as_json(value, indent=2 if field.kind is Kind.JSON else 0)]


class FormError(ValueError):
    """What can't be read, by the name of the field."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {fault}" for name, fault in faults.items()))
        self.faults = dict(faults)


def value_of(fields: Sequence[Field], pairs: Iterable[tuple[str, str]]) -> Any:
    """The answer that was entered; raises FormError. Fields that are empty and optional are left out."""
    entered: dict[str, list[str]] = {}
    for name, text in pairs:
        if text.strip():
            entered.setdefault(name, []).append(text)
    used = {field.path[0] for field in fields if field.path and field.name in entered}
    wanted = [field for field in fields if not field.is_in_optional or field.path[0] in used]
    faults: dict[str, str] = {}
    found: list[tuple[tuple[str, ...], Any]] = []
    for field in wanted:
        try:
            found.append((field.path, _value(field, entered.get(field.name, []))))
        except ValueError as fault:
            faults[field.name] = str(fault)
    if faults:
        raise FormError(faults)
    return _assembled(found)


def _assembled(found: Iterable[tuple[tuple[str, ...], Any]]) -> Any:
    answer: dict[str, Any] = {}
    for path, value in found:
        if not path:
            return value
        place = answer
        for key in path[:-1]:
            place = place.setdefault(key, {})
        if value is not _MISSING:
            place[path[-1]] = value
    return answer


def _value(field: Field, texts: list[str]) -> Any:
    if not texts:
        return _empty(field)
    if field.kind is Kind.CHOICES:
        return [_chosen(field, text) for text in texts]
    if field.kind is Kind.CHOICE:
        return _chosen(field, texts[-1])
    return _READERS.get(field.kind, str)(texts[-1])


def _empty(field: Field) -> Any:
    if not field.is_required:
        return _MISSING
    if field.kind in {Kind.LINES, Kind.CHOICES} and not field.is_nullable:
        return []
    if field.is_nullable:
        return None
    raise ValueError("is required")


def _chosen(field: Field, text: str) -> Any:
    if text not in {value for value, _ in field.choices}:
        raise ValueError("must be one of the choices")
    return msgspec.json.decode(text)


def _number_in(text: str, *, whole: bool) -> int | float:
    if _WHOLE.fullmatch(text):
        if len(text) > _MOST_DIGITS:
            raise ValueError(f"must have at most {_MOST_DIGITS} digits, got {len(text)}")
        return int(text)
    if whole:
        raise ValueError(f"must be a whole number, got {text[:100]!r}")
    if not _NUMBER.fullmatch(text) or not isfinite(number := float(text)):
        raise ValueError(f"must be a number, got {text[:100]!r}")
    return number


def _json_in(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise ValueError(f"must be JSON: {error}") from None


def _boolean_in(text: str) -> bool:
    if text not in {"true", "false"}:
        raise ValueError("must be yes or no")
    return text == "true"


_READERS: dict[Kind, Callable[[str], Any]] = {
    Kind.INTEGER: lambda text: _number_in(text, whole=True),
    Kind.NUMBER: lambda text: _number_in(text, whole=False),
    Kind.BOOLEAN: _boolean_in,
    Kind.LINES: lambda text: [line.strip() for line in text.split("\n") if line.strip()],
    Kind.JSON: _json_in,
}


def place_of(fields: Sequence[Field], reason: str) -> tuple[str | None, str]:
    """The name of the field that a reason of the gate is about, and the reason without its place."""
    found: str | None = None
    longest = ""
    for field in fields:
        place = "".join(f".{key}" for key in field.path)
        start = f"output.data{place}"
        if reason.startswith((f"{start}:", f"{start}.", f"{start}[")) and len(start) > len(longest):
            found, longest = field.name, start
    return found, reason.removeprefix(longest).removeprefix(": ") if found else reason
