from collections.abc import Iterator

import pytest

from tests.agent.conftest import shaft
from tests.llm_server import LLMServer, llm_server

__all__ = ["shaft"]

KEY = "sk-secret-key-of-the-endpoint"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMServer]:
    """The model of this process's settings. A call costs 0.01 USD."""
    with llm_server() as running:
        running.reply.usage["cost"] = 0.01
        monkeypatch.setenv("LINESHAFT_LLM_URL", running.url)
        monkeypatch.setenv("LINESHAFT_LLM_MODEL", "m")
        monkeypatch.setenv("LINESHAFT_LLM_API_KEY", KEY)
        yield running
