"""JMESPath expressions, evaluated within limits.

JMESPath can neither call anything outside nor loop, but a short expression can still build a huge value:
`[@,@] | [@,@] | …` doubles it with each step, and `to_string` or `==` then visits all of it. So every value
that an expression builds is weighed, counting a shared part as often as it occurs, and every step is paid
from a budget, a function by the size of what it visits: an expression ends after a bounded amount of work, or
fails. In case some step takes longer than it should, the CPU time of a rendering is limited as well.
"""

import math
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jmespath import exceptions
from jmespath.functions import Functions
from jmespath.parser import Parser
from jmespath.visitor import Options, TreeInterpreter

MAX_EXPRESSION = 1_000
#: Levels of an expression, and of a value that it builds.
MAX_NESTING = 40
MAX_DEPTH = 150
#: Values and characters in what an expression builds.
MAX_VALUES = 100_000
MAX_CHARACTERS = 1 << 20
#: Steps of one rendering, with all its expressions: a fraction of a second.
MAX_STEPS = 300_000
#: CPU time of one rendering, and after how many steps it is looked at.
MAX_CPU_SEC = 2.0
_LOOK_EVERY = 1_000
#: Characters that count as one step.
_CHARACTERS_PER_STEP = 50

_MAKES_VALUES = frozenset(
    {
        "multi_select_dict",
        "multi_select_list",
        "projection",
        "filter_projection",
        "value_projection",
        "flatten",
        "slice",
        "function_expression",
    }
)

#: Functions that go through all that is in their arguments; others only through items.
_DEEP = frozenset({"contains", "to_string"})


class ExpressionError(ValueError):
    """An expression that can't be compiled or evaluated."""


class Budget:
    """The work that one rendering may do."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._steps = steps
        self._look_at = steps - _LOOK_EVERY
        # The time of this thread: on a busy machine an expression isn't at fault.
        self._ends_at = time.thread_time() + MAX_CPU_SEC

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise ExpressionError("takes too many steps; select less of the event")
        if self._steps < self._look_at:
            self._look_at = self._steps - _LOOK_EVERY
            if time.thread_time() > self._ends_at:
                raise ExpressionError(f"takes longer than {MAX_CPU_SEC:g} s; select less of the event")

    def visit(self, value: Any, *, deeply: bool = False) -> None:
        """Pay for a function or a comparison that goes through a value, or all that is in it."""
        pending = [value]
        while pending:
            part = pending.pop()
            if isinstance(part, str):
                self.spend(len(part) // _CHARACTERS_PER_STEP)
            elif isinstance(part, list | dict):
                self.spend(len(part))
                if deeply:
                    pending += part if isinstance(part, list) else [*part, *part.values()]

    def weigh(self, value: Any) -> None:
        """Refuse a value that is too large or too deep, or isn't JSON."""
        values = characters = 0
        pending = [(value, 0)]
        while pending:
            found, depth = pending.pop()
            values += 1
            if isinstance(found, str):
                characters += len(found)
            elif isinstance(found, list):
                values += len(found)
                if values <= MAX_VALUES:
                    pending += [(item, depth + 1) for item in found]
            elif isinstance(found, dict):
                values += len(found)
                if values <= MAX_VALUES:
                    characters += sum(map(len, found))
                    pending += [(item, depth + 1) for item in found.values()]
            if values > MAX_VALUES or characters > MAX_CHARACTERS or depth > MAX_DEPTH:
                raise ExpressionError(
                    f"makes a value that is too large: at most {MAX_VALUES} values, {MAX_CHARACTERS} "
                    f"characters and {MAX_DEPTH} levels are allowed"
                )
        self.spend(values + characters // _CHARACTERS_PER_STEP)


class Expression:
    """A compiled expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = _parsed(text)

    def evaluate(self, data: Mapping[str, Any], budget: Budget) -> Any:
        """The JSON value of the expression; missing parts are None."""
        interpreter = _Interpreter(budget)
        try:
            value = interpreter.visit(self._tree, data)
        except ExpressionError:
            raise
        except exceptions.JMESPathTypeError as error:
            # Without the value, which may be large or confidential.
            expected = " or ".join(error.expected_types)
            raise ExpressionError(
                f"{error.function_name}() expects {expected}, got {error.actual_type}"
            ) from None
        except exceptions.JMESPathError as error:
            raise ExpressionError(_first_line(error)) from None
        except (ArithmeticError, RecursionError, TypeError, ValueError) as error:
            raise ExpressionError(f"can't be evaluated ({type(error).__name__})") from None
        if not _is_json(value, budget):
            raise ExpressionError("makes a value that isn't JSON, such as &reference or infinity")
        return value


class _Interpreter(TreeInterpreter):  # type: ignore[misc] # jmespath has no types
    def __init__(self, budget: Budget) -> None:
        super().__init__(Options())
        self._budget = budget

    def visit(self, node: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self._budget.spend(1)
        value = super().visit(node, *args, **kwargs)
        if node["type"] in _MAKES_VALUES:
            self._budget.weigh(value)
        return value

    def visit_function_expression(self, node: dict[str, Any], value: Any) -> Any:
        arguments = [self.visit(child, value) for child in node["children"]]
        for argument in arguments:
            self._budget.visit(argument, deeply=node["value"] in _DEEP)
        return self._functions.call_function(node["value"], arguments)

    def visit_comparator(self, node: dict[str, Any], value: Any) -> Any:
        left, right = (self.visit(child, value) for child in node["children"])
        for operand in (left, right):
            if isinstance(operand, list | dict):
                self._budget.weigh(operand)
            else:
                self._budget.visit(operand)
        literals = [{"type": "literal", "value": operand, "children": []} for operand in (left, right)]
        return super().visit_comparator({**node, "children": literals}, value)


@lru_cache(maxsize=2_048)
def _parsed(text: str) -> dict[str, Any]:
    if len(text) > MAX_EXPRESSION:
        raise ExpressionError(f"is {len(text)} characters long; at most {MAX_EXPRESSION} are allowed")
    try:
        tree: dict[str, Any] = Parser().parse(text).parsed
    except RecursionError:
        raise ExpressionError(f"is nested more than {MAX_NESTING} levels deep") from None
    except exceptions.EmptyExpressionError:
        raise ExpressionError("is empty") from None
    except exceptions.JMESPathError as error:
        raise ExpressionError(_parse_fault(text, error)) from None
    _check_tree(tree)
    return tree


def _parse_fault(text: str, error: Exception) -> str:
    if isinstance(error, exceptions.IncompleteExpressionError) or getattr(error, "token_value", None) == "":
        return f"column {len(text) + 1}: the expression is incomplete"
    if isinstance(error, exceptions.LexerError):
        return f"column {error.lexer_position + 1}: {error.message}"
    if isinstance(error, exceptions.ParseError) and isinstance(error.lex_position, int):
        return f"column {error.lex_position + 1}: unexpected {error.token_value!r}"
    return _first_line(error)


def _check_tree(tree: dict[str, Any]) -> None:
    """Refuse deep expressions and unknown functions, which would otherwise be found only when it fires."""
    known = Functions.FUNCTION_TABLE
    pending = [(tree, 1)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_NESTING:
            raise ExpressionError(f"is nested more than {MAX_NESTING} levels deep")
        if node["type"] == "function_expression" and node["value"] not in known:
            raise ExpressionError(f"has an unknown function {node['value']}()")
        pending += [(child, depth + 1) for child in node["children"] if isinstance(child, dict)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["can't be evaluated"])[0]


def _is_json(value: Any, budget: Budget) -> bool:
    """Whether it is JSON, within limits."""
    budget.weigh(value)
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, list):
            pending += found
        elif isinstance(found, dict):
            pending += found.values()
        elif isinstance(found, float):
            if not math.isfinite(found):
                return False
        elif found is not None and not isinstance(found, str | int):
            return False
    return True
