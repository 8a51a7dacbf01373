"""The file SLOWDOWN, for other programs (R-214, R-218)."""

import json
from datetime import timedelta
from pathlib import Path

import pytest

from lineshaft.clock import MovableClock
from lineshaft.duties.deliverer import Deliverer
from lineshaft.engine.engine import Engine
from lineshaft.engine.feed.outbox import Outbox, Throttle
from lineshaft.integrations.notify import DeliveryError, Destination
from lineshaft.integrations.notify.config import load
from lineshaft.integrations.notify.slowdown_file import SlowdownFile, write
from lineshaft.model.notices import Notice, NoticeKind, Notification, message
from tests.integrations.test_notify import AT
from tests.world import Actions


def signal(after_sec: float, wait: float) -> Notification:
    at = AT + timedelta(seconds=after_sec)
    data = {"key": "model:large", "wait": wait, "until": (at + timedelta(seconds=wait)).isoformat()}
    notice = Notice(kind=NoticeKind.SLOWDOWN, at=at, text="slow down", data=data)
    return message(f"msg_{after_sec}", [notice])


def found(folder: Path) -> dict[str, object]:
    reported: dict[str, object] = json.loads((folder / "SLOWDOWN").read_text())
    return reported


async def test_from_a_rate_limit_to_the_file_and_back(dsn: str, clock: MovableClock, tmp_path: Path) -> None:
    """R-214: half of what the provider asked for. Ending it manually is written, too."""
    path = tmp_path / "notifications.yaml"
    folder = tmp_path / ".loki" / "signals"
    path.write_text(f"destinations: [{{name: signals, type: slowdown-file, folder: {folder}}}]")
    async with Engine(dsn, clock=clock, max_connections=3) as engine:
        (to,) = load(path, {})
        deliverer = Deliverer(Outbox(engine.database), to)
        await deliverer.run_once()
        await Actions(engine).one()
        task = await Actions(engine).take(await Actions(engine).agent("ann", models_available=["large"]))
        await Actions(engine).fail(task, "429", retry_after_sec=60)
        await deliverer.run_once()

        assert found(folder) == {
            "wait": 30.0,
            "key": "model:large",
            "until": (clock.now() + timedelta(seconds=30)).isoformat().replace("+00:00", "Z"),
            "at": clock.now().isoformat().replace("+00:00", "Z"),
        }
        clock.advance(1)
        await engine.slowdowns.end("model:large")
        await deliverer.run_once()
        assert (found(folder)["wait"], found(folder)["key"]) == (0, "model:large")


def test_an_older_signal_never_overwrites_a_newer_one(tmp_path: Path) -> None:
    """R-218: the later signal decides, even if it is shorter."""
    write(tmp_path, signal(0, 100))
    write(tmp_path, signal(10, 5))
    write(tmp_path, signal(1, 3_600))

    assert found(tmp_path)["wait"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["SLOWDOWN"]


def test_a_file_of_another_program_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "SLOWDOWN").write_text('{"wait": 7}')

    write(tmp_path, signal(0, 1))

    assert found(tmp_path)["wait"] == 1


async def test_an_unusable_folder_is_a_failed_delivery(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(DeliveryError, match="can't be written"):
        await SlowdownFile(tmp_path / "file").send(signal(0, 1))


def test_other_destinations_get_no_slowdowns(tmp_path: Path) -> None:
    path = tmp_path / "notifications.yaml"
    path.write_text(
        "destinations: [{name: a, type: command, command: [x]}, {name: b, type: slowdown-file, folder: y}]"
    )

    other, own = load(path, {})

    assert NoticeKind.SLOWDOWN not in other.kinds
    assert own == Destination(
        "b", SlowdownFile(Path("y").absolute()), frozenset({NoticeKind.SLOWDOWN}), Throttle(most=None)
    )
