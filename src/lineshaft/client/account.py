"""The account of this process: the actor of what a command does on a database."""

import getpass
import os
import socket


def user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # A container may run with a user id that has no name.
        return f"uid {os.getuid()}"


def account() -> str:
    """The user and the host: a database connection doesn't tell who acts."""
    return f"{user()}@{socket.gethostname()}"
