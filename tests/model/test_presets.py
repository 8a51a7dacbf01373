"""Presets: found by name, registered by integrations."""

import subprocess
import sys

import pytest
from msgspec.structs import replace

from lineshaft.integrations.loki.preset import LOKI
from lineshaft.integrations.officeplane.preset import OFFICEPLANE
from lineshaft.model import presets
from lineshaft.model.presets import FACTORY, Preset, preset_named, preset_names, register
from lineshaft.model.retry import retry_delay


def middle() -> float:
    return 0.5


@pytest.mark.parametrize(
    ("preset", "attempts", "boost", "duration", "report"),
    [(FACTORY, 3, 0.1, None, False), (LOKI, 3, 0, None, True), (OFFICEPLANE, 4, 0, 300, False)],
)
def test_the_numbers_of_each_preset(
    preset: Preset, attempts: int, boost: float, duration: float | None, report: bool
) -> None:
    """U2, U11, R-016, R-093, R-119, R-165."""
    assert (preset.max_attempts, preset.boost_per_minute) == (attempts, boost)
    assert (preset.max_duration_sec, preset.require_decision_report) == (duration, report)


@pytest.mark.parametrize(
    ("preset", "delays"),
    [
        (LOKI, [60, 120, 240, 480, 960, 1920, 3600, 3600]),
        (OFFICEPLANE, [5, 25, 125, 625]),
        (FACTORY, [10, 20, 40, 80, 160, 300, 300]),
    ],
)
def test_the_delays_of_each_preset(preset: Preset, delays: list[float]) -> None:
    """U3, R-112, R-113, R-114, F-7, F-50: from the base each time: after 240 comes 480, not 3840."""
    assert [retry_delay(preset.retry, n, middle) for n in range(1, len(delays) + 1)] == delays


def test_only_factory_has_jitter() -> None:
    """U3."""
    assert [name for name in preset_names() if preset_named(name).retry.jitter] == ["factory"]


def test_a_name_has_one_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "_presets", {FACTORY.name: FACTORY})
    mine = replace(LOKI, name="mine")

    register(mine)
    register(mine)

    assert preset_named("mine") is mine
    assert preset_names() == ("factory", "mine")
    with pytest.raises(ValueError, match="another preset with the name 'mine'"):
        register(replace(mine, max_attempts=9))


def test_an_unknown_name_in_a_row_is_read_as_factory() -> None:
    """A newer version stored it: the task is still retried and read."""
    assert preset_named("of a newer version") is FACTORY


@pytest.mark.slow("starts a process for each")
@pytest.mark.parametrize(
    "start",
    [
        "from lineshaft import NewTask",
        "import lineshaft.types",
        "import lineshaft.client",
        "import lineshaft.engine.submit.submission",
        "import lineshaft.engine.read.tasks",
        "import lineshaft.sources.work",
        "import lineshaft.agent",
        "import lineshaft.testing.inline",
        "import lineshaft.server.app",
        "import lineshaft.duties.reaper",
    ],
)
def test_every_way_in_knows_the_presets_of_integrations(start: str) -> None:
    code = f"{start}\nfrom lineshaft.model.presets import preset_names; print(*preset_names())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.split() == ["factory", "loki", "officeplane"]


def test_the_model_alone_knows_no_integration() -> None:
    code = (
        "import sys, lineshaft.model.tasks, lineshaft.model.resolving\n"
        "print([name for name in sys.modules if name.startswith('lineshaft.integrations')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"
