"""The locked requirements: installers check a hash for every file that they download."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def locked(name: str) -> dict[str, str]:
    """The version of each requirement of a file; each must have hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", "")
    found: dict[str, str] = {}
    for line in text.splitlines():
        pinned, *hashes = line.split(" --")
        requirement = Requirement(pinned.strip())
        ((operator, version),) = [(each.operator, each.version) for each in requirement.specifier]
        assert operator == "==", line
        assert hashes, line
        assert all(_HASH.fullmatch(f"--{each.strip()}") for each in hashes), line
        found[canonicalize_name(requirement.name)] = version
    return found


def wanted(*lists: list[str]) -> list[Requirement]:
    return [Requirement(text) for some in lists for text in some]


def test_every_dependency_is_locked_with_hashes() -> None:
    """A new dependency in pyproject.toml needs `make lock`."""
    package, development = locked("package"), locked("development")
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = wanted(about["project"]["dependencies"], about["build-system"]["requires"])
    extras = wanted(*about["project"]["optional-dependencies"].values())

    for requirement in needed:
        assert requirement.specifier.contains(package[canonicalize_name(requirement.name)]), requirement
    for requirement in (*needed, *extras):
        assert requirement.specifier.contains(development[canonicalize_name(requirement.name)]), requirement


def test_the_package_is_tested_with_the_versions_that_it_is_installed_with() -> None:
    assert locked("package").items() <= locked("development").items()
