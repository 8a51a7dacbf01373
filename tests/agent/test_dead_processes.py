"""Whether the process of an instance is dead, judged by its name."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lineshaft.agent.siblings import is_dead, new_name
from lineshaft.model.instance_names import ProcessName, parse

#: Under another account, on a /proc that hides the processes of others.
HIDDEN = """
import os, sys
from lineshaft.agent.siblings import is_dead
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
assert not os.path.exists(f"/proc/{sys.argv[2]}/stat")
print(is_dead(sys.argv[1]))
"""


@pytest.fixture
def child() -> Iterator["subprocess.Popen[str]"]:
    """A process that prints its name and waits."""
    code = "from lineshaft.agent.siblings import new_name; print(new_name(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def name_of(process: "subprocess.Popen[str]") -> ProcessName:
    assert process.stdout is not None
    name = parse(process.stdout.readline().strip())
    assert name is not None
    assert name.pid == str(process.pid)
    return name


def test_a_process_is_dead_once_it_has_ended_even_as_a_zombie(child: "subprocess.Popen[str]") -> None:
    name = str(name_of(child))
    assert not is_dead(name)

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert is_dead(name), "its parent hasn't noticed yet"
    child.wait()
    assert is_dead(name)


def test_a_process_id_that_was_used_again_is_another_process(child: "subprocess.Popen[str]") -> None:
    assert is_dead(str(name_of(child)._replace(start="1")))


def test_processes_elsewhere_are_not_judged(child: "subprocess.Popen[str]") -> None:
    name = name_of(child)
    child.kill()
    child.wait()

    assert not is_dead(str(name._replace(namespace="1")))
    assert not is_dead(str(name._replace(boot="00000000")))
    assert not is_dead("writer-6d5f9c7b8-x2x4z")


def test_agents_of_one_process_have_different_names() -> None:
    one, two = parse(new_name()), parse(new_name())

    assert one is not None
    assert two is not None
    assert one.number != two.number
    assert one._replace(number="") == two._replace(number="")


@pytest.mark.slow("starts processes")
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare, to hide processes"
)
def test_a_hidden_process_is_not_taken_for_dead(child: "subprocess.Popen[str]") -> None:
    """As with ProtectProc=invisible and one account for each unit."""
    name = str(name_of(child))
    script = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    command = [sys.executable, "-c", HIDDEN, name, str(child.pid)]

    shown = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )

    assert shown.stdout == "False\n", shown.stderr
