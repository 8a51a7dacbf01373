"""The registry of all checks, including the user's own."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Self

from msgspec import Struct

from lineshaft.checks import decision_report
from lineshaft.checks.command import CheckCommand, CommandCheck, read_commands
from lineshaft.checks.judge import Judge, JudgeCheck
from lineshaft.checks.llm_judge import TIMEOUT_SEC, LLMJudge
from lineshaft.checks.verdict import CandidateOutput, NoVerdict, Verdict, rejected
from lineshaft.errors import InvalidInputError, SettingsError
from lineshaft.integrations.llm.configuration import LLMConfig, check_installed, is_installed
from lineshaft.model.budget import shown
from lineshaft.model.tasks import Gate
from lineshaft.settings import Settings

HUMAN = "human"
MAX_GATES = 20

CheckResult = Verdict | bool
#: Receives the gate's schema and the output.
Check = Callable[[Any, CandidateOutput], CheckResult | Awaitable[CheckResult]]
Fault = Callable[[Any], str | None]


class _Method(Struct, frozen=True):
    check: Check
    fault: Fault
    #: Finishes without waiting for anything.
    is_instant: bool
    #: Costs money, which is reserved before it runs.
    is_paid: bool = False


def _from_module(name: str) -> _Method:
    """Import the module when it is used: its library is slow to import, and most processes never check."""

    def check(schema: Any, candidate: CandidateOutput) -> Verdict:
        verdict: Verdict = import_module(f"lineshaft.checks.{name}").check(schema, candidate)
        return verdict

    def fault(schema: Any) -> str | None:
        found: str | None = import_module(f"lineshaft.checks.{name}").fault(schema)
        return found

    return _Method(check, fault, is_instant=True)


class Checks:
    def __init__(
        self, *, commands: Mapping[str, CheckCommand] | None = None, judge: Judge | None = None
    ) -> None:
        command, judging = CommandCheck(commands or {}), JudgeCheck(judge)
        self._methods: dict[str, _Method] = {
            "json-schema": _from_module("json_schema"),
            "regex": _from_module("regex"),
            decision_report.METHOD: _Method(decision_report.check, _anything, is_instant=True),
            "test-pass": _Method(command.check, command.fault, is_instant=False),
            "llm-judge": _Method(judging.check, judging.fault, is_instant=False, is_paid=True),
        }

    @classmethod
    def from_settings(cls, settings: Settings | None = None) -> Self:
        """With the operator's commands and judge; by default those of this process's settings."""
        settings = settings or Settings.load()
        path = settings.validation_commands
        commands = {} if path is None else read_commands(path)
        return cls(commands=commands, judge=judge_of(settings))

    def register(self, name: str, check: Check, *, fault: Fault | None = None, is_paid: bool = False) -> None:
        """Add a check of your own as a method that tasks can name.

        A plain function must return quickly: it runs while the task is being completed. An `async` function
        runs in the validator and may take long. `fault` returns what is wrong with a schema, at submission.
        `is_paid`: it costs money; what it may cost is reserved before it runs, and without money it waits.
        """
        is_instant = not inspect.iscoroutinefunction(check)
        if is_paid and is_instant:
            fault_ = f"gate {name!r} can't cost money: it isn't async, so nothing could be reserved for it"
            raise InvalidInputError(errors=[("is_paid", fault_)])
        if name in self._methods or name in {"none", HUMAN}:
            raise InvalidInputError(errors=[("name", f"gate {name!r} already exists; choose another name")])
        self._methods[name] = _Method(check, fault or _anything, is_instant, is_paid)

    def faults(self, gates: Sequence[Gate]) -> list[tuple[str, str]]:
        """What is wrong with the gates of a new task: (field, fault) pairs."""
        if len(gates) > MAX_GATES:
            return [("validation", f"must be at most {MAX_GATES} gates, got {len(gates)}")]
        found = []
        for number, gate in enumerate(gates):
            alone = len(gates) == 1
            if gate.method == HUMAN:
                continue
            method = self._methods.get(gate.method)
            if method is None or gate.method == decision_report.METHOD:
                place = "validation" if alone else f"validation[{number}].method"
                found.append((place, f"must be one of {', '.join(self.names)}, got {gate.method[:100]!r}"))
            elif fault := method.fault(gate.schema):
                place = "validation_schema" if alone else f"validation[{number}].schema"
                found.append((place, fault))
        return found

    @property
    def names(self) -> list[str]:
        """The methods that a task may name."""
        return sorted({*self._methods, "none", HUMAN} - {decision_report.METHOD})

    @property
    def runnable(self) -> list[str]:
        """The methods that a validator with these checks can run."""
        return list(self._methods)

    @property
    def paid(self) -> list[str]:
        """Those of them that cost money."""
        return [name for name, method in self._methods.items() if method.is_paid]

    def is_instant(self, name: str) -> bool:
        method = self._methods.get(name)
        return method is not None and method.is_instant

    def check_now(self, name: str, schema: Any, candidate: CandidateOutput) -> Verdict:
        try:
            result = self._methods[name].check(schema, candidate)
        except NoVerdict:
            raise
        except RecursionError:
            return rejected("the output is nested too deeply to be checked")
        except Exception as error:
            raise NoVerdict(f"the check {name} failed: {type(error).__name__}: {error}") from error
        if inspect.isawaitable(result):
            raise NoVerdict(f"the check {name} returned an awaitable, but is not async")
        return _verdict(name, result)

    async def check(self, name: str, schema: Any, candidate: CandidateOutput) -> Verdict:
        if self.is_instant(name):
            return await asyncio.to_thread(self.check_now, name, schema, candidate)
        try:
            result = self._methods[name].check(schema, candidate)
            return _verdict(name, await result if inspect.isawaitable(result) else result)
        except NoVerdict:
            raise
        except Exception as error:
            failed = f"the check {name} failed: {type(error).__name__}: {error}"
            raise NoVerdict(failed, cost_usd=None) from error


def judge_of(settings: Settings) -> LLMJudge | None:
    """The operator's judge: a model of its own, or the model of the installation."""
    model = settings.judge_model or settings.llm_model
    if model is None:
        if settings.judge_url is not None:
            raise SettingsError("LINESHAFT_JUDGE_URL needs a model too: set LINESHAFT_JUDGE_MODEL.")
        return None
    if settings.judge_model is None and settings.judge_url is None and not is_installed():
        return None  # a model for other purposes, perhaps of another process
    check_installed("LINESHAFT_JUDGE_MODEL")
    if settings.judge_url is not None:
        # The key of one address is never sent to another.
        settings = replace(settings, llm_url=settings.judge_url, llm_api_key=settings.judge_api_key)
    return LLMJudge(replace(LLMConfig.from_settings(settings, model=model), timeout_sec=TIMEOUT_SEC))


def _verdict(name: str, result: CheckResult) -> Verdict:
    if isinstance(result, Verdict):
        return result
    if not isinstance(result, bool):  # a check that returns nothing hasn't rejected the output
        raise NoVerdict(f"the check {name} must return True, False or a Verdict, got {shown(result)}")
    return Verdict(passed=result)


def _anything(_: Any) -> None:
    return None
