"""Pages of the documentation site that are files of the repository: the README is its first page."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent
#: By the file of the repository.
PAGES = {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")} | {
    "README.md": "index.md"
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        # Links into the source code have no target on the site.
        text = re.sub(r"\[([^\]]+)\]\(src/[^)]+\)", r"`\1`", text)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository lead to their pages."""
    return re.sub(r"\]\(\.\./(\w+\.md)", r"](\1", markdown)
