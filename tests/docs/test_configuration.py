"""docs/configuration.md, generated from the settings by `python -m tests.docs.test_configuration`."""

from dataclasses import MISSING, fields
from pathlib import Path

from lineshaft.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

Settings come from the environment, or from `lineshaft.toml` in the working directory (or the file that
`LINESHAFT_CONFIG` names), where they have the same names in lower case without the prefix. The environment
takes precedence. Unknown settings and invalid values are errors; all of them are reported at once.
Durations may be fractions of a second.

| variable | what it is for | value | default |
|---|---|---|---|
"""


def page() -> str:
    rows = []
    for field in fields(Settings):
        default = field.default if field.default is not MISSING else ".lineshaft"
        shown = "" if default in (None, ()) else f"`{default}`"
        rule = field.metadata["rule"].words
        rows.append(f"| `LINESHAFT_{field.name.upper()}` | {field.metadata['about']} | {rule} | {shown} |")
    return HEAD + "\n".join(rows) + "\n"


def test_the_page_describes_every_setting() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
