"""The page python-reference.md of the documentation site, which mkdocs_hooks.py builds from the source.

The source has what the objects no longer have: comments of fields, and annotations and defaults as they are
written.
"""

import ast
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lineshaft
import lineshaft.types

HEAD = """# Python reference

Everything that `lineshaft` and `lineshaft.types` export, in alphabetical order. [client.md](client.md) and
[agents.md](agents.md) show how it is used. This page is generated from the source.
"""
_LINE = 100
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    lines: list[str]
    tree: ast.Module

    def comment_above(self, line: int) -> str:
        """The `#:` comment above a line, which counts from 1."""
        comment: list[str] = []
        while line >= 2 and self.lines[line - 2].strip().startswith("#:"):
            comment.insert(0, self.lines[line - 2].strip().removeprefix("#:").strip())
            line -= 1
        return " ".join(comment)

    def class_named(self, name: str) -> ast.ClassDef | None:
        return next((n for n in self.tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)


@cache
def read(file: Path) -> Source:
    text = file.read_text(encoding="utf-8")
    return Source(text.splitlines(), ast.parse(text))


def source_of(module: str) -> Source:
    return read(Path(str(sys.modules[module].__file__)))


def names() -> list[str]:
    values = {name for name in vars(lineshaft.types) if name[0].isupper()}
    return sorted({*lineshaft.__all__, *values} - {"__version__"}, key=str.lower)


def page() -> str:
    return "\n".join([HEAD, *("\n".join(section(name)) for name in names())])


def section(name: str) -> Iterator[str]:
    yield f"## {name}\n"
    if name in lineshaft.__all__:
        value: Any = getattr(lineshaft, name)
    else:
        value = getattr(lineshaft.types, name)
        yield "In `lineshaft.types`.\n"
    if not isinstance(value, type):
        yield from alias(name)
        return
    if name == "Settings":
        yield "The settings, read from the environment and a file: [configuration.md](configuration.md).\n"
        return
    lines = [line for base in lineage(value) for line in members(value.__name__, base)]
    node = source_of(value.__module__).class_named(name)
    assert node is not None, name
    if documentation := ast.get_docstring(node):
        yield f"{documentation}\n"
    yield from lines


def alias(name: str) -> Iterator[str]:
    for file in sorted(Path(str(lineshaft.__file__)).parent.rglob("*.py")):
        source = read(file)
        for node in source.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                if comment := source.comment_above(node.lineno):
                    yield f"{comment}\n"
                yield f"```python\n{ast.unparse(node)}\n```\n"
                return
    raise AssertionError(f"{name} is assigned nowhere")


def lineage(value: type) -> list[type]:
    """The class and those of its bases that are ours; of errors and typed dictionaries the class alone."""
    if issubclass(value, BaseException):
        return [value]
    bases = getattr(value, "__orig_bases__", ())
    ours = [base for base in value.__mro__ if base.__module__.startswith("lineshaft.")]
    if issubclass(value, dict):
        ours += [base for base in bases if getattr(base, "__module__", "").startswith("lineshaft.")]
    return ours


def members(owner: str, kind: type) -> Iterator[str]:
    source = source_of(kind.__module__)
    node = source.class_named(kind.__name__)
    if node is None:
        return
    rows = list(fields(source, node))
    constructor = next((n for n in node.body if isinstance(n, _Function) and n.name == "__init__"), None)
    if constructor is not None and kind.__name__ == owner:
        yield code(f"{owner}{parameters(constructor)}")
        if text := ast.get_docstring(constructor):
            yield f"{text}\n"
    if rows:
        yield "| field | type | default | |\n|---|---|---|---|"
        yield from rows
        yield ""
    without_await = []
    for member in node.body:
        if isinstance(member, _Function) and is_shown(member):
            yield from method(owner, member)
        elif (
            isinstance(member, ast.Assign)
            and isinstance(member.value, ast.Call)
            and ast.unparse(member.value.func) in {"_blocking", "_handled", "_iterating"}
        ):
            without_await.append(f"`{ast.unparse(member.targets[0])}`")
    if without_await:
        yield textwrap.fill(
            f"As in `{owner.removeprefix('Sync')}`, without `await`: {', '.join(without_await)}.\n", 118
        )
        yield ""


def is_shown(node: _Function) -> bool:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    return (not node.name.startswith("_") or node.name == "__getitem__") and "overload" not in decorators


def fields(source: Source, node: ast.ClassDef) -> Iterator[str]:
    is_enum = any(ast.unparse(base).endswith("Enum") for base in node.bases)
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            name = ast.unparse(member.target)
            if name.endswith("_json"):
                continue  # its property decodes it
            default = "" if member.value is None else shown_default(member.value)
            kind = ast.unparse(member.annotation).strip("'\"")
            yield row(name, kind, default, source.comment_above(member.lineno))
        elif is_enum and isinstance(member, ast.Assign):
            comment = source.comment_above(member.lineno)
            yield row(ast.unparse(member.targets[0]), "", ast.unparse(member.value), comment)


def shown_default(value: ast.expr) -> str:
    if isinstance(value, ast.Call) and ast.unparse(value.func) in {"field", "msgspec.field"}:
        for keyword in value.keywords:
            if keyword.arg in {"default", "default_factory"}:
                text = ast.unparse(keyword.value)
                return f"{text}()" if keyword.arg == "default_factory" else text
        return ""
    return ast.unparse(value)


def row(name: str, kind: str, default: str, text: str) -> str:
    cells = [f"`{cell}`" if cell else "" for cell in (name, kind, default)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in [*cells, text]) + " |"


def method(owner: str, node: _Function) -> Iterator[str]:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    is_property = bool(decorators & {"property", "cached_property"})
    returns = "" if node.returns is None else ast.unparse(node.returns).strip("'\"")
    prefix = "await " if isinstance(node, ast.AsyncFunctionDef) and "AsyncGenerator" not in returns else ""
    yield f"### {owner}.{node.name}\n"
    if is_property:
        yield code(f"{node.name}: {returns}")
    else:
        yield code(f"{prefix}{node.name}{parameters(node)}" + (f" -> {returns}" if returns else ""))
    if text := ast.get_docstring(node):
        yield f"{text}\n"


def parameters(node: _Function) -> str:
    arguments = node.args
    first = [*arguments.posonlyargs, *arguments.args]
    is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in node.decorator_list)
    defaults: list[ast.expr | None] = [None] * (len(first) - len(arguments.defaults)) + [*arguments.defaults]
    shown = []
    for number, (argument, default) in enumerate(zip(first, defaults, strict=True)):
        if number or is_static:
            shown.append(parameter(argument, default))
        if arguments.posonlyargs and argument is arguments.posonlyargs[-1] and number:
            shown.append("/")
    if arguments.vararg is not None:
        shown.append(f"*{parameter(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        shown.append(parameter(argument, default))
    if arguments.kwarg is not None:
        shown.append(f"**{parameter(arguments.kwarg, None)}")
    line = f"({', '.join(shown)})"
    if len(line) + len(node.name) <= _LINE:
        return line
    return "(\n    " + ",\n    ".join(shown) + ",\n)"


def parameter(argument: ast.arg, default: ast.expr | None) -> str:
    kind = "" if argument.annotation is None else ": " + ast.unparse(argument.annotation).strip("'\"")
    value = "" if default is None else f"{' = ' if kind else '='}{ast.unparse(default)}"
    return f"{argument.arg}{kind}{value}"


def code(text: str) -> str:
    return f"```python\n{text}\n```\n"
