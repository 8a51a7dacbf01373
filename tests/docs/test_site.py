"""The documentation site: it builds without a warning, has every page, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import mkdocs_hooks
import pytest

pytestmark = pytest.mark.slow("builds the site")

ROOT = Path(__file__).parents[2]
#: What a browser loads when it shows a page; links that people follow may lead anywhere.
_LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")


def test_the_site_is_complete_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Dead links, dead anchors and pages without a place in the navigation are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert built.returncode == 0, built.stdout + built.stderr
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")}
    assert pages | {"index", "CHANGELOG", "python-reference"} <= {
        file.stem for file in tmp_path.glob("*.html")
    }
    assert "<code>add_dag_budget</code>" in (tmp_path / "client.html").read_text(encoding="utf-8")
    for old, (page, heading) in mkdocs_hooks.MOVED.items():
        assert f'href="{page}.html' in (tmp_path / f"{old}.html").read_text(encoding="utf-8")
        assert f'id="{heading}"' in (tmp_path / f"{page}.html").read_text(encoding="utf-8") or not heading
    for file in tmp_path.rglob("*.html"):
        assert _LOADED.findall(file.read_text(encoding="utf-8")) == [], file.name
    for file in tmp_path.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//", file.read_text(encoding="utf-8")), file.name
