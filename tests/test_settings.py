"""Settings from the environment and a file."""

import os
from decimal import Decimal
from pathlib import Path

import pytest

from lineshaft.errors import SettingsError
from lineshaft.model.retry import DEFAULT_MAX_DURATION_SEC
from lineshaft.settings import Settings, find_home


def test_defaults(tmp_path: Path) -> None:
    settings = Settings.load({}, directory=tmp_path)

    assert settings == Settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8001)
    assert settings.home.is_absolute()
    assert settings.home.name == ".lineshaft"
    assert settings.default_max_duration_sec == DEFAULT_MAX_DURATION_SEC == 3600


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "lineshaft.toml").write_text('port = 9000\nreaper_interval_sec = 0.5\nhost = "::1"\n')

    settings = Settings.load({"LINESHAFT_PORT": "9001", "PATH": "/bin"}, directory=tmp_path)

    assert (settings.port, settings.reaper_interval_sec, settings.host) == (9001, 0.5, "::1")


def test_values_are_read_by_type(tmp_path: Path) -> None:
    settings = Settings.load(
        {
            "LINESHAFT_DAILY_BUDGET_USD": "12.50",
            "LINESHAFT_AUTH": "Required",
            "LINESHAFT_URL": "https://queue.example/",
            "LINESHAFT_HOME": str(tmp_path / "x"),
            "LINESHAFT_JUDGE_MODEL": "",
        },
        directory=tmp_path,
    )

    assert settings.daily_budget_usd == Decimal("12.50")
    assert settings.auth == "required"
    assert settings.url == "https://queue.example"
    assert settings.home == tmp_path / "x"
    assert settings.judge_model is None


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("LINESHAFT_PORT", "http", "LINESHAFT_PORT must be a whole number from 1 to 65535, got 'http'"),
        ("LINESHAFT_PORT", "0", "LINESHAFT_PORT must be"),
        ("LINESHAFT_REAPER_INTERVAL_SEC", "0.01", "must be a number of seconds, at least 0.05, got '0.01'"),
        ("LINESHAFT_REAPER_INTERVAL_SEC", "nan", "must be a number of seconds"),
        ("LINESHAFT_REAPER_INTERVAL_SEC", "inf", "must be a number of seconds"),
        ("LINESHAFT_DAILY_BUDGET_USD", "-1", "must be an amount of dollars"),
        ("LINESHAFT_DAILY_BUDGET_USD", "NaN", "must be an amount of dollars"),
        ("LINESHAFT_DAILY_BUDGET_USD", "ten", "must be an amount of dollars"),
        ("LINESHAFT_AUTH", "maybe", "must be one of auto, required, off, got 'maybe'"),
        ("LINESHAFT_SOURCE_FOLDERS", "/srv/in,inbox", "must be absolute paths separated by commas"),
        ("LINESHAFT_URL", "ftp://x", "must be a URL"),
        ("LINESHAFT_PROT", "80", "Unknown setting LINESHAFT_PROT; did you mean LINESHAFT_PORT?"),
        ("LINESHAFT_CONFIG", "nowhere.toml", "LINESHAFT_CONFIG names 'nowhere.toml', which doesn't exist"),
    ],
)
def test_an_invalid_value_is_reported_with_name_rule_and_value(
    tmp_path: Path, variable: str, value: str, message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load({variable: value}, directory=tmp_path)

    assert message in str(caught.value)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "lineshaft.toml").write_text('prot = 1\nport = "x"\nauth = true\nhome = ["a"]\n')

    with pytest.raises(SettingsError) as caught:
        Settings.load({"LINESHAFT_LOG_FORMAT": "xml"}, directory=tmp_path)

    message = str(caught.value)
    assert "unknown setting 'prot'; did you mean port?" in message
    assert "port in" in message
    assert "auth in" in message
    assert "home in" in message
    assert "LINESHAFT_LOG_FORMAT must be one of auto, text, json, got 'xml'" in message


@pytest.mark.parametrize("content", [b"port = ", b"\xff\xfe"])
def test_an_unreadable_file_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lineshaft.toml").write_bytes(content)

    with pytest.raises(SettingsError, match=r"lineshaft\.toml can't be read"):
        Settings.load({}, directory=tmp_path)


def test_no_message_and_no_repr_contains_a_secret(tmp_path: Path) -> None:
    secret = "hunter2"
    settings = Settings.load(
        {
            "LINESHAFT_DATABASE_URL": f"postgresql://u:{secret}@h/d",
            "LINESHAFT_TOKEN": secret,
            "LINESHAFT_JUDGE_API_KEY": secret,
        },
        directory=tmp_path,
    )

    assert settings.token == secret
    assert secret not in repr(settings)
    with pytest.raises(SettingsError) as caught:
        Settings.load({"LINESHAFT_DATABASE_URL": f"mysql://u:{secret}@h"}, directory=tmp_path)
    assert "LINESHAFT_DATABASE_URL must be a PostgreSQL URL" in str(caught.value)
    assert secret not in str(caught.value)


def test_variables_that_describe_a_task_are_not_settings(tmp_path: Path) -> None:
    """An agent's command may call Lineshaft."""
    assert (
        Settings.load({"LINESHAFT_TASK_ID": "task_1", "LINESHAFT_FD": "3"}, directory=tmp_path) == Settings()
    )


def test_the_home_is_found_in_a_folder_above(tmp_path: Path) -> None:
    below = tmp_path / "project" / "src" / "deep"
    below.mkdir(parents=True)
    assert find_home(below) == below / ".lineshaft", "it is created here"
    (tmp_path / "project" / ".lineshaft").mkdir()

    assert find_home(below) == tmp_path / "project" / ".lineshaft"
    assert find_home(tmp_path / "project") == tmp_path / "project" / ".lineshaft"
    (below / ".lineshaft").mkdir()
    assert find_home(below) == below / ".lineshaft", "the nearest"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another account")
def test_a_home_above_that_belongs_to_another_account_is_passed_over(tmp_path: Path) -> None:
    below = tmp_path / "project"
    below.mkdir()
    (tmp_path / ".lineshaft").mkdir()
    os.chown(tmp_path / ".lineshaft", 65534, 65534)

    assert find_home(below) == below / ".lineshaft"
    assert find_home(tmp_path) == tmp_path / ".lineshaft", "in the working directory it was chosen"
