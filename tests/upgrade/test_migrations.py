"""Migrations are append-only: databases have applied those of the previous version."""

from tests.upgrade.versions import MIGRATIONS, PREVIOUS, ROOT, archived, require_previous


def test_no_migration_of_the_previous_version_was_changed_or_removed() -> None:
    require_previous()
    with archived(MIGRATIONS) as files:
        before = {
            member.name: content.read()
            for member in files
            if (content := files.extractfile(member)) is not None
        }
    now = {name: file.read_bytes() for name in before if (file := ROOT / name).exists()}

    assert before
    assert [name for name in before if now.get(name) != before[name]] == [], (
        f"Databases have applied these files as they were in {PREVIOUS} (tests/upgrade/PREVIOUS), and this "
        f"version would refuse those databases. Restore the files (git checkout {PREVIOUS} -- FILE) and "
        "write a new migration with the next number: engine/postgres/README.md, Migrations."
    )
