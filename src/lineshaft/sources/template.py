"""Templates: JSON with `${EXPRESSION}` in its strings, compiled once and rendered for each event.

A string that is one expression takes its JSON value; otherwise values become text: null is empty, objects and
lists are JSON. `$${` is a literal `${`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from lineshaft.sources.expressions import MAX_CHARACTERS, Budget, Expression, ExpressionError

#: The limits of a template.
MAX_DEPTH = 30
MAX_EXPRESSIONS = 500
MAX_BYTES = 256 << 10

#: Renders a part of a template.
_Part = Callable[[Mapping[str, Any], Budget], Any]


class TemplateError(ValueError):
    """A template that can't be compiled or rendered; `place` is a path such as task.spec.prompt."""

    def __init__(self, place: str, fault: str) -> None:
        self.place = place
        self.fault = fault
        super().__init__(f"{place}: {fault}")


class Template:
    def __init__(self, value: Any, place: str) -> None:
        """Compile a JSON value; raises TemplateError."""
        self.expressions = 0
        self._render = self._compile(value, place, 0)

    def render(self, data: Mapping[str, Any], budget: Budget) -> Any:
        """The value for this event; raises TemplateError."""
        return self._render(data, budget)

    def _compile(self, value: Any, place: str, depth: int) -> _Part:
        if depth > MAX_DEPTH:
            raise TemplateError(place, f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, str):
            return self._compile_text(value, place)
        if isinstance(value, dict):
            members = {
                str(name): self._compile(inner, f"{place}.{name}", depth + 1) for name, inner in value.items()
            }
            return lambda data, budget: {name: render(data, budget) for name, render in members.items()}
        if isinstance(value, list | tuple):
            items = [self._compile(inner, f"{place}[{n}]", depth + 1) for n, inner in enumerate(value)]
            return lambda data, budget: [render(data, budget) for render in items]
        return lambda _data, _budget: value

    def _compile_text(self, text: str, place: str) -> _Part:
        if "${" not in text:
            return lambda _data, _budget: text
        parts: list[str | Expression] = []
        for kind, found in split(text, place):
            if kind == "text":
                parts.append(found)
                continue
            self.expressions += 1
            if self.expressions > MAX_EXPRESSIONS:
                raise TemplateError(place, f"has more than {MAX_EXPRESSIONS} expressions")
            try:
                parts.append(Expression(found))
            except ExpressionError as error:
                raise TemplateError(place, f"${{{_shown(found)}}}: {error}") from None
        if len(parts) == 1 and isinstance(parts[0], Expression):
            whole = parts[0]
            return lambda data, budget: _evaluate(whole, data, budget, place)
        return lambda data, budget: _joined(parts, data, budget, place)


def _evaluate(expression: Expression, data: Mapping[str, Any], budget: Budget, place: str) -> Any:
    try:
        return expression.evaluate(data, budget)
    except ExpressionError as error:
        raise TemplateError(place, f"${{{_shown(expression.text)}}}: {error}") from None


def _joined(parts: list[str | Expression], data: Mapping[str, Any], budget: Budget, place: str) -> str:
    texts: list[str] = []
    size = 0
    for part in parts:
        text = part if isinstance(part, str) else _text(_evaluate(part, data, budget, place))
        size += len(text)
        if size > MAX_CHARACTERS:
            raise TemplateError(place, f"is longer than {MAX_CHARACTERS} characters when it is rendered")
        texts.append(text)
    return "".join(texts)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()


def split(text: str, place: str) -> Iterator[tuple[str, str]]:
    """The parts of a string: ("text", literal) and ("expression", without its brackets)."""
    literal: list[str] = []
    at = 0
    while at < len(text):
        if text.startswith("$${", at):
            literal.append("${")
            at += 3
        elif text.startswith("${", at):
            end = _end_of(text, at + 2, place)
            if literal:
                yield "text", "".join(literal)
                literal = []
            yield "expression", text[at + 2 : end]
            at = end + 1
        else:
            following = text.find("$", at + 1)
            following = len(text) if following < 0 else following
            literal.append(text[at:following])
            at = following
    if literal:
        yield "text", "".join(literal)


def _end_of(text: str, start: int, place: str) -> int:
    """The place of the bracket that closes an expression: not one inside of quotes or of an inner pair."""
    depth, quote, at = 0, "", start
    while at < len(text):
        sign = text[at]
        if quote:
            if sign == "\\":
                at += 1
            elif sign == quote:
                quote = ""
        elif sign in "'\"`":
            quote = sign
        elif sign == "{":
            depth += 1
        elif sign == "}":
            if depth == 0:
                return at
            depth -= 1
        at += 1
    raise TemplateError(
        place, f"column {start - 1}: ${{ has no closing bracket; write $${{ for a literal ${{"
    )


def _shown(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"  # noqa: PLR2004 - for people
