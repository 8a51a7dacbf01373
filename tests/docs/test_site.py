"""The documentation site: it builds without a warning, has every page, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What a browser loads when it shows a page; links that people follow may lead anywhere.
_LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")


@pytest.mark.slow("builds the site")
def test_the_site_is_complete_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Dead links, dead anchors and pages without a place in the navigation are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert built.returncode == 0, built.stdout + built.stderr
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")}
    assert pages | {"index", "CHANGELOG"} <= {file.stem for file in tmp_path.glob("*.html")}
    for file in tmp_path.rglob("*.html"):
        assert _LOADED.findall(file.read_text(encoding="utf-8")) == [], file.name
    for file in tmp_path.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//", file.read_text(encoding="utf-8")), file.name
