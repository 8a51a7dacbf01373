"""`lineshaft agent --llm`: a real command, a real server with OpenAI's protocol."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from lineshaft import NewTask, SyncLineshaft
from tests.llm_server import USAGE, LLMServer, Reply, llm_server

KEY = "sk-secret-key-of-the-endpoint"


WITHOUT_THE_EXTRA = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec


def find_spec(name, path=None, target=None):
    missing = name.partition(".")[0] in {"anthropic", "genai_prices", "openai", "pydantic_ai"}
    return None if missing else find(name, path, target)


PathFinder.find_spec = find_spec
"""


@pytest.fixture
def server() -> Iterator[LLMServer]:
    with llm_server() as running:
        running.reply = Reply("Ghent.", usage=USAGE | {"cost": 0.01})
        yield running


def run(
    dsn: str, folder: Path, *options: str, environ: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LINESHAFT_")}
    inherited.pop("OPENAI_API_KEY", None)
    return subprocess.run(
        [sys.executable, "-m", "lineshaft.cli.main", "agent", *options],
        env=inherited | {"LINESHAFT_DATABASE_URL": dsn, "COLUMNS": "80"} | (environ or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow("starts an agent")
def test_a_model_does_tasks(
    dsn: str, tmp_path: Path, server: LLMServer, connection: psycopg.Connection
) -> None:
    """With tools and instructions; the key is in nothing that it prints or writes."""
    server.plan(Reply(tools=[("look", {"where": KEY}, "id1")], usage=USAGE), server.reply)
    (tmp_path / "app.py").write_text(
        'import os\n\n\ndef look(where: str) -> str:\n    """Look."""\n    return f"nothing at {where}"\n\n\n'
        "tools = [look]\n"
    )
    (tmp_path / "how.md").write_text("Be brief.")
    with SyncLineshaft(dsn) as shaft:
        task = shaft.submit(NewTask("research", spec={"prompt": "Which city?"}))

        done = run(
            dsn,
            tmp_path,
            *("--llm", "--type", "research", "--model", "m", "--tools", "app:tools"),
            *("--instructions", "@how.md", "--until-idle", "--id", "researcher"),
            environ={"LINESHAFT_LLM_URL": server.url, "LINESHAFT_LLM_API_KEY": KEY[::-1]},
        )

        assert done.returncode == 0, done.stderr
        ended = shaft.get(task)
    assert ended.result == "Ghent."
    assert server.requests[0]["messages"][0]["content"].endswith("Be brief.")
    assert [tool["function"]["name"] for tool in server.requests[0]["tools"]] == ["look"]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY[::-1]}"
    assert connection.execute("SELECT models_available FROM lineshaft.instance").fetchall() == [(["m"],)]
    written = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert KEY[::-1] not in done.stdout + done.stderr + written


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    ("options", "environ", "said"),
    [
        (["--type", "t"], {}, "No model is configured. Set LINESHAFT_LLM_MODEL"),
        (["--type", "t", "--model", "m"], {}, "Nothing says where the model 'm' is"),
        (["--type", "t", "--model", "openai:gpt-5-mini"], {}, "OPENAI_API_KEY"),
        (["--type", "t", "--model", "unknown:gpt"], {}, "Unknown provider"),
        (["--type", "t", "--model", "groq:llama"], {}, "pip install 'pydantic-ai-slim[groq]'"),
        ([], {}, "--type TYPE is missing"),
        (["--type", "t", "--shell"], {}, "--shell is for commands"),
        (["--type", "t", "--exec", "true"], {}, "--exec is for commands"),
        (["--type", "t", "--tools", "app"], {"LINESHAFT_LLM_MODEL": "openai:x"}, "must be MODULE:TOOLS"),
        (["--type", "t", "--instructions", "@none.md"], {}, "--instructions @none.md can't be read"),
    ],
)
def test_what_is_missing_is_said_at_once(
    dsn: str, tmp_path: Path, options: list[str], environ: dict[str, str], said: str
) -> None:
    url = {"LINESHAFT_LLM_URL": "http://127.0.0.1:9/v1"} if "--instructions" in options else {}
    model = {"LINESHAFT_LLM_MODEL": "m"} if url else {}
    key = {"OPENAI_API_KEY": "sk-x"} if environ else {}

    done = run(dsn, tmp_path, "--llm", *options, environ=environ | url | model | key)

    assert done.returncode in {1, 2}
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", [("--model", "m"), ("--tools", "app:tools"), ("--instructions", "x")])
def test_options_of_models_without_llm(dsn: str, tmp_path: Path, option: tuple[str, str]) -> None:
    done = run(dsn, tmp_path, "--exec", "true", "--type", "t", *option)

    assert done.returncode == 2
    assert f"{option[0]} is for language models: add --llm" in done.stderr


@pytest.mark.slow("starts a process")
def test_without_the_extra(dsn: str, tmp_path: Path) -> None:
    """As in an environment that doesn't have it."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_THE_EXTRA)

    done = run(
        dsn,
        tmp_path,
        *("--llm", "--type", "t", "--model", "openai:gpt-5-mini"),
        environ={"PYTHONPATH": str(tmp_path)},
    )

    assert done.returncode == 1
    assert "--llm needs an extra: pip install 'lineshaft[llm]'." in " ".join(done.stderr.split())
