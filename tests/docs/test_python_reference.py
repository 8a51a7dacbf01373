"""The Python reference, which the documentation site has and the repository hasn't."""

import inspect

import pytest

import lineshaft
from tests.docs import python_reference

pytestmark = pytest.mark.slow("reads the whole source")


@pytest.fixture(scope="module")
def page() -> str:
    return python_reference.page()


def test_every_public_name_has_a_section(page: str) -> None:
    for name in set(lineshaft.__all__) - {"__version__"}:
        assert f"\n## {name}\n" in page


def test_every_public_method_of_the_client_and_of_agents_is_described(page: str) -> None:
    for owner in (lineshaft.Lineshaft, lineshaft.Agent, lineshaft.TaskContext):
        for name, value in inspect.getmembers(owner):
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                section = page.partition(f"\n### {owner.__name__}.{name}\n")[2].partition("\n##")[0]
                assert section.strip(), f"{owner.__name__}.{name} isn't described"


def test_parameters_and_defaults_are_those_of_the_source(page: str) -> None:
    for function, owner in (
        (lineshaft.Agent.__init__, "Agent"),
        (lineshaft.Lineshaft.submit_dag, "Lineshaft"),
    ):
        section = page.partition(f"\n## {owner}\n")[2].partition("\n## ")[0]
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            assert parameter.name in section
            if isinstance(parameter.default, int | float):
                assert f"= {parameter.default}" in section


def test_the_client_without_await_names_all_of_its_methods(page: str) -> None:
    section = page.partition("\n## SyncLineshaft\n")[2].partition("\n## ")[0]
    for name in dir(lineshaft.Lineshaft):
        if not name.startswith("_"):
            assert f"`{name}`" in section or f"### SyncLineshaft.{name}\n" in section, name
