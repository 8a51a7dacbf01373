"""Pages of the documentation site that aren't files of docs/.

These are files of the repository's root (the README is the first page), the Python reference and the table of
the client's methods, which are made from the source, and redirects from pages that were merged into others.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from tests.docs import client_methods, python_reference

ROOT = Path(__file__).parent
#: By the file of the repository.
PAGES = {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")} | {
    "README.md": "index.md"
}
REFERENCE = "python-reference.md"
#: Where what a page had is now: a page, and the heading for links to the old page as a whole.
MOVED = {
    "benchmarks": ("performance", "compared-with-other-queues"),
    "limits": ("configuration", "limits"),
    "scaling": ("performance", ""),
    "threat-model": ("security", ""),
}
#: The script keeps the heading of a link; without scripts the browser follows the other line.
_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<script>location.replace("{page}.html" + (location.hash || "{anchor}"))</script>
<meta http-equiv="refresh" content="0; url={page}.html{anchor}">
<p>This page is now a part of <a href="{page}.html{anchor}">{page}</a>.</p>
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        # Links into the source code have no target on the site.
        text = re.sub(r"\[([^\]]+)\]\(src/[^)]+\)", r"`\1`", text)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, REFERENCE, content=python_reference.page()))
    for old, (page, heading) in MOVED.items():
        redirect = _REDIRECT.format(page=page, anchor=f"#{heading}" if heading else "")
        files.append(File.generated(config, f"{old}.html", content=redirect))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository lead to their pages."""
    markdown = markdown.replace(client_methods.MARK, client_methods.table())
    return re.sub(r"\]\(\.\./(\w+\.md)", r"](\1", markdown)
