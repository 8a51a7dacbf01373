"""Output gates from hostile submitters: schemas and outputs that are expensive to check."""

import asyncio
from typing import Any

import pytest

from tests.hostile.conftest import Target

ARRAYS = {"type": "array", "items": {"$ref": "#/$defs/r"}}
#: 2^40 errors for an output that is nested 40 deep.
ERROR_BOMB = {
    "$ref": "#/$defs/r",
    "$defs": {"r": {"anyOf": [ARRAYS, {**ARRAYS, "minItems": 1}, {"const": 5}]}},
}


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


async def test_an_output_with_exponentially_many_errors(target: Target) -> None:
    """R-095: it is rejected, with or without a description."""
    client = target.client
    await client.submit(
        output={"validation": "json-schema", "validation_schema": ERROR_BOMB}, retry={"strategy": "immediate"}
    )
    agent = await client.register()
    task_id, token = await client.hold(agent)

    async with target.unharmed():
        reply = await client.post(
            f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": {"data": nested(1, 40)}}
        )

    assert reply.status == 200
    assert reply.json["failure_category"] == "invalid_output"
    assert "output.data" in reply.json["failure_reason"]


def schema(*patterns: str) -> dict[str, Any]:
    return {"validation": "json-schema", "validation_schema": {"allOf": [{"pattern": p} for p in patterns]}}


@pytest.mark.parametrize(
    "patterns",
    [
        [f"[\\w\\pL]{{12}}x{n}" for n in range(1_500)],
        [f"[\\w\\pL]{{12}}x{n}" for n in range(100)],
        ["|".join(["\\w"] * 3_000)],
        ["(?i)" + "[!-\U0010ffff]" * 500],
        ["(?i)" + "\\w" * 4_000],
        ["\\pL" * 60_000],
    ],
    ids=["many", "large in sum", "many classes", "ignoring case", "both", "long"],
)
async def test_patterns_that_are_expensive_to_compile(target: Target, patterns: list[str]) -> None:
    async with target.unharmed():
        replies = await asyncio.gather(
            *(target.client.post("/v1/tasks", {"type": "t", "output": schema(*patterns)}) for _ in range(3))
        )

    assert {reply.status for reply in replies} == {422}
    assert "pattern" in replies[0].json["detail"]


async def test_many_schemas_with_patterns_in_one_batch(target: Target) -> None:
    """Each within its limits; the cache is limited by bytes."""
    tasks = [{"type": "t", "output": schema(f"[\\w\\pL]{{30}}x{n}")} for n in range(300)]

    async with target.unharmed():
        reply = await target.client.post("/v1/tasks/batch", {"tasks": tasks})

    assert reply.status == 201, reply


async def test_a_long_text_and_an_expensive_pattern(target: Target) -> None:
    """Matching takes time in proportion to the text and to the pattern."""
    client = target.client
    await client.submit(output=schema("([\\w\\pL]?){20}[0-9]$"), retry={"strategy": "immediate"})
    task_id, token = await client.hold(await client.register())

    async with target.unharmed():
        reply = await client.post(
            f"/v1/tasks/{task_id}/complete", {"claim_token": token, "output": {"data": "é" * 1_000_000}}
        )

    assert reply.json["failure_category"] == "invalid_output"
