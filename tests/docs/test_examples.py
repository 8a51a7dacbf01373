"""Examples in the documentation: each page runs as printed, in a new folder, with an embedded database."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.docs.pages import ROOT, all_pages, blocks, followed, matches
from tests.embedded.helpers import stop_server
from tests.valkey import valkey_server

#: Languages of which a page may show a part without a title: nothing runs it.
_SHOWN_ONLY = {"sql", "text", "ini", "yaml", "dockerfile", "json", "toml", "diff"}
#: Their commands need an account, a service manager or a cluster.
_NOT_RUN = {"docs/security.md"}
_OWN_DATABASE = "docs/transactional-submit.md"
_OWN_REDIS = "docs/officeplane.md"
#: `tests/e2e/test_fresh_install.py` runs them on the built wheel.
#: So do `test_redis_page.py`, with a Valkey, and `test_models_page.py`, with a server of models.
_RUN_ELSEWHERE = {
    "README.md",
    "docs/quick-start.md",
    *("docs/redis.md", "docs/models.md", "docs/pydantic-ai.md"),
}
_RUN = [page for page in all_pages() if any(block.language == "sh" for block in blocks(page))]


@pytest.fixture
def folder() -> Iterator[Path]:
    """As a user has it: readable by the account that the embedded database runs under, unlike tmp_path."""
    with tempfile.TemporaryDirectory(prefix="page-") as made:
        Path(made).chmod(0o755)
        work = Path(made) / "work"
        work.mkdir()
        yield work
        stop_server(work / ".lineshaft")


@pytest.mark.slow("a Django project, and some programs")
def test_the_page_for_a_database_of_ones_own_runs_as_printed(dsn: str, folder: Path) -> None:
    parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    others = {name: parts[name] for name in parts.keys() - {"user", "dbname"}}
    variables = {
        "LINESHAFT_DATABASE_URL": f"postgresql://{parts['user']}@/{parts['dbname']}?{urlencode(others)}",
        "PGHOST": parts["host"],
        "PGUSER": parts["user"],
        "PGDATABASE": parts["dbname"],
        "PGPASSFILE": parts["passfile"],
    }
    with followed(_OWN_DATABASE, folder, variables=variables):
        pass


@pytest.mark.slow("initdb, and some programs")
def test_the_page_with_a_redis_runs_as_printed(folder: Path) -> None:
    with (
        valkey_server() as valkey,
        followed(_OWN_REDIS, folder, replaced={"redis://127.0.0.1:6379": valkey.url}),
        valkey.client() as redis,
    ):
        assert (folder / "report.txt").read_text().count("write_page") == 3
        assert redis.keys("officeplane:doclock:*") == [], "released"
        assert redis.exists("lineshaft:doclock-data"), "they were taken"


@pytest.mark.slow("initdb, and some programs")
@pytest.mark.parametrize("page", sorted(set(_RUN) - _NOT_RUN - _RUN_ELSEWHERE - {_OWN_DATABASE, _OWN_REDIS}))
def test_a_page_runs_as_printed(page: str, folder: Path) -> None:
    with followed(page, folder):
        pass


@pytest.mark.parametrize("page", all_pages())
def test_examples_are_complete_programs(page: str) -> None:
    """A reader can save each Python block as a file: it has a name, and imports nothing internal."""
    for block in blocks(page):
        if block.language == "python":
            assert block.is_file, f"{block} has no title"
            compile(block.text, str(ROOT / page), "exec")
            for line in block.text.splitlines():
                assert not line.startswith(("from lineshaft.engine", "from lineshaft.client")), (
                    f"{block}: {line}"
                )
        else:
            assert block.title or block.language in _SHOWN_ONLY | {"sh"}, f"{block} can't be run"


#: Parts of programs that the text around them explains.
_SHOWN_FILES = {"careful.py", "pod.py", "signatures.py"}


def test_every_file_is_used() -> None:
    """Not only shown: a command of the page, or another file, names it."""
    for page in set(_RUN) - _NOT_RUN:
        found = blocks(page)
        for file in (block for block in found if block.is_file and block.language == "python"):
            if file.title in _SHOWN_FILES:
                continue
            name = Path(file.title).stem
            others = [block.text for block in found if block is not file]
            assert any(name in text for text in others), f"{file} is never run"


def test_output_is_compared_line_by_line() -> None:
    assert matches("one\nt…e\n", "one   \ntwo\nthree\n")
    assert not matches("three\none\n", "one\nthree\n")
    assert not matches("four", "one\n")
