"""Specs from objects with fields."""

from dataclasses import dataclass, field
from datetime import date

import msgspec
import pytest

from lineshaft.errors import InvalidInputError
from lineshaft.model.tasks import NewTask, resolve


@dataclass
class Page:
    url: str
    tags: list[str] = field(default_factory=list)


@dataclass
class Crawl:
    first: Page
    since: date


class Struct(msgspec.Struct):
    prompt: str


class Model:
    """As one of pydantic."""

    def model_dump(self, *, mode: str = "python") -> dict[str, object]:
        return {"mode": mode}


def test_the_fields_of_an_object_are_the_spec() -> None:
    crawl = NewTask("crawl", spec=Crawl(Page("https://a.example"), date(2030, 1, 31)))

    assert crawl.spec == {"first": {"url": "https://a.example", "tags": []}, "since": "2030-01-31"}
    assert msgspec.json.decode(resolve(crawl).spec) == crawl.spec
    assert crawl.with_options(priority=3).spec == crawl.spec
    assert NewTask("x", spec=Struct("p")).spec == {"prompt": "p"}
    assert NewTask("x", spec=Model()).spec == {"mode": "json"}
    assert msgspec.json.decode(b'{"type": "x", "spec": {"a": 1}}', type=NewTask).spec == {"a": 1}


@pytest.mark.parametrize("spec", ["text", 7, Page, [1]])
def test_what_has_no_fields_is_refused(spec: object) -> None:
    with pytest.raises(InvalidInputError, match="spec: must be an object"):
        resolve(NewTask("x", spec=spec))  # type: ignore[arg-type]
