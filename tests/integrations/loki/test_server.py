"""A server keeps the folder of LINESHAFT_LOKI_DIR."""

from pathlib import Path

from tests.integrations.loki.readers import by_id, check_as_readers_do, places, put
from tests.server.conftest import serving, until


async def test_servers_keep_the_folder_and_the_next_one_goes_on(dsn: str, tmp_path: Path) -> None:
    root = tmp_path / ".loki"
    put(root, "pending", [{"id": "a", "type": "x", "payload": {}}])
    async with (
        serving(dsn, duties=True, loki_dir=root) as first,
        serving(dsn, duties=True, loki_dir=root) as second,
    ):
        assert "loki mirror" in [duty.name for duty in first.server.duties]
        await until(lambda: by_id(root, "pending").get("a", {}).get("status") == "pending")
        await first.stop()
        made = await second.client.submit("x", id="b")
        await until(lambda: made["id"] in places(root))
        check_as_readers_do(root)
    assert {record["claimedBy"] for record in by_id(root, "pending").values()} == {"lineshaft"}
