"""`lineshaft sources`."""

import json
from pathlib import Path

import pytest

from lineshaft.cli.main import main

FILE = """
sources:
  - name: weekly
    kind: schedule
    cron: "0 9 * * MON"
    timezone: Europe/Berlin
    template:
      task: {type: report, title: "Week of ${event.tick}"}
"""


@pytest.fixture(autouse=True)
def database(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINESHAFT_DATABASE_URL", dsn)


def test_a_file_is_applied_after_its_differences_were_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sources.yaml"
    file.write_text(FILE)

    assert main(["sources", "apply", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == "+ weekly\n"
    assert "Use --yes" in output.err
    assert main(["sources", "apply", str(file), "--yes"]) == 0
    assert main(["sources", "apply", str(file), "--yes"]) == 0
    assert capsys.readouterr().out == "+ weekly\nNothing to change.\n"
    file.write_text(FILE.replace("0 9", "0 8"))
    assert main(["sources", "apply", str(file), "--json", "--yes"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "changes": [
            {"name": "weekly", "change": "change", "fields": {"cron": ["0 9 * * MON", "0 8 * * MON"]}}
        ],
        "applied": True,
    }
    file.write_text("sources: []")
    assert main(["sources", "apply", str(file), "--dry-run"]) == 0
    assert capsys.readouterr().out == "- weekly\n"
    file.write_text("sources: [{")
    assert main(["sources", "apply", str(file)]) == 2
    assert "not valid YAML at line" in capsys.readouterr().err


def test_a_source_from_put_to_rm(capsys: pytest.CaptureFixture[str]) -> None:
    definition = {"kind": "schedule", "every_sec": 3600, "template": {"task": {"type": "${event.type}"}}}
    assert main(["sources", "put", "hourly", json.dumps(definition)]) == 0
    assert "every 3600 s" in capsys.readouterr().out
    assert main(["sources", "list"]) == 0
    assert "hourly" in capsys.readouterr().out
    assert main(["sources", "fire", "hourly", "--event", '{"type": "a"}', "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"][0]["type"] == "a"
    assert main(["sources", "fire", "hourly", "--event", '{"type": "a"}']) == 0
    assert capsys.readouterr().out.startswith("created: task_")
    assert main(["sources", "fire", "hourly"]) == 1
    assert "failed (template.task.type" in capsys.readouterr().out
    assert main(["sources", "pause", "hourly"]) == 0
    assert main(["sources", "show", "hourly", "--json"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("hourly: paused\n")
    assert json.loads(output.removeprefix("hourly: paused\n"))["enabled"] is False
    assert main(["sources", "resume", "hourly"]) == 0
    assert main(["sources", "history", "hourly"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("hourly: resumed; next: ")
    assert output.count("created") == output.count("failed") == 1
    assert main(["sources", "rm", "hourly"]) == 0
    assert main(["sources", "rm", "hourly"]) == 1
    assert main(["sources", "list"]) == 0
    assert "No sources." in capsys.readouterr().out


def test_wrong_definitions(capsys: pytest.CaptureFixture[str]) -> None:
    for definition, code, message in (
        ("[]", 2, "must be an object"),
        ("{", 2, "must be JSON"),
        ('{"kind": "nope"}', 2, "kind"),
        ('{"kind": "schedule", "cron": "x", "template": {"goal": "a"}}', 2, "cron: must have five fields"),
        ("@/nope/file", 2, "Can't read"),
    ):
        assert main(["sources", "put", "x", definition]) == code
        assert message in capsys.readouterr().err
