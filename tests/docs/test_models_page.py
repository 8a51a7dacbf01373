"""The pages about language models run as printed, with a server that has OpenAI's protocol."""

from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import followed
from tests.docs.test_redis_page import folder
from tests.llm_server import USAGE, LLMServer, Reply, llm_server

__all__ = ["folder"]

_ADDRESS = "localhost:11434"


def _place(server: LLMServer) -> str:
    return server.url.removeprefix("http://").removesuffix("/v1")


@pytest.mark.slow("initdb, and some programs")
def test_the_page_about_models_runs_as_printed(folder: Path) -> None:
    usage = USAGE | {"cost": 0.0012}

    def answer(request: dict[str, Any]) -> Reply:
        last = request["messages"][-1]
        if last["role"] == "user" and "people" in str(last["content"]):
            return Reply(tools=[("population", {"city": "Ghent"}, "id1")], usage=usage)
        return Reply(f"So it is: {last['content']}", usage=usage)

    with (
        llm_server(LLMServer(answer=answer)) as server,
        followed("docs/models.md", folder, replaced={_ADDRESS: _place(server)}),
    ):
        pass

    assert [request["model"] for request in server.requests] == ["llama3.2:3b"] * 3
    assert "265000" in server.sent()


@pytest.mark.slow("initdb, and some programs")
def test_the_page_about_pydantic_ai_runs_as_printed(folder: Path) -> None:
    with llm_server() as server:
        server.plan(Reply(tools=[("look_up", {"topic": "bridges"}, "id1")]), Reply("Bridges."))
        with followed("docs/pydantic-ai.md", folder, replaced={_ADDRESS: _place(server)}):
            pass

    assert len(server.requests) == 2
