"""Permissions for what a folder may name: classes of other packages, and servers.

A folder of somebody else must neither run code nor receive credentials unless its reader agrees.
While it is read (`reading`), a class outside rcir and a server need a permission: an argument of
the call, or the environment (which `--trust-code` and `--trust-server` of the commands set).
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rcir.errors import UntrustedFolder

CODE, SERVERS = "RCIR_TRUST_CODE", "RCIR_TRUST_SERVERS"
# What the call that reads a folder allows: code or not, and servers.
_reading: ContextVar[tuple[bool, frozenset[str]] | None] = ContextVar("reading", default=None)
named_classes: set[str] = set()  # import paths that this program names itself
built_on: set[str] = set()  # servers that this program named itself


@contextmanager
def reading(code: bool = False, servers: Collection[str] = ()) -> Iterator[None]:
    """Read a folder inside the block: what it names needs a permission.

    A thread that is started inside does not inherit the block, and would treat what the folder
    names as the program's own choice: read folders in the calling thread, or pass the context on
    (`asyncio.to_thread`, `contextvars.copy_context().run`). `code` allows classes outside rcir, "*"
    among the `servers` all hosts.
    """
    token = _reading.set((code, frozenset(servers)))
    try:
        yield
    finally:
        _reading.reset(token)


def require_code(option: str, path: str) -> None:
    """Raise `UntrustedFolder` for a class outside rcir that a folder names, unless allowed.

    A class that the program itself names is allowed, for as long as it runs.
    """
    permission = _reading.get()
    if permission is None:
        named_classes.add(path)
    elif not (permission[0] or os.environ.get(CODE) == "1" or path in named_classes):
        raise UntrustedFolder(
            f"{option} is {path}, which is not part of rcir: importing it would run its code. If "
            "you trust it, pass trust_code=True to rcir.load, --trust-code to a command, or set "
            f"{CODE}=1"
        )


def allows_server(host: str) -> bool:
    """Return True if a server that a folder names may receive credentials."""
    permission = _reading.get()
    by_call = () if permission is None else permission[1]
    names = (*by_call, *os.environ.get(SERVERS, "").split(","), *built_on)
    allowed = {name.strip().lower() for name in names} - {""}
    return "*" in allowed or host.lower() in allowed


def require_servers(hosts: Iterable[str]) -> None:
    """Raise `UntrustedFolder` for servers of an index that a folder names, unless allowed."""
    for host in hosts:
        if _reading.get() is not None and not allows_server(host):
            raise UntrustedFolder(
                f"the index is on the server {host!r}, which would receive your credentials. If "
                f"you trust it, pass trust_servers=[{host!r}] to rcir.load, --trust-server {host} "
                f"to a command, or set {SERVERS}={host}"
            )


def allow_servers(hosts: Iterable[str]) -> None:
    """Allow servers that the program itself names, for as long as it runs."""
    built_on.update(host.lower() for host in hosts)


def add_arguments(parser: ArgumentParser, separator: str = "-") -> None:
    """Add `--trust-code` and `--trust-server` to a command that reads folders."""
    parser.add_argument(
        f"--trust{separator}code",
        action="store_true",
        help="import classes outside rcir that the folder names",
    )
    parser.add_argument(
        f"--trust{separator}server",
        action="append",
        default=[],
        metavar="HOST",
        help="connect to this server, with your credentials, if the folder names it; repeatable",
    )


def apply_arguments(options: Any) -> None:
    """Move the permissions of a command line to the environment, which processes inherit."""
    values = vars(options)
    if values.pop("trust_code"):
        os.environ[CODE] = "1"
    if servers := values.pop("trust_server"):
        os.environ[SERVERS] = ",".join(filter(None, [os.environ.get(SERVERS), *servers]))


def permissions() -> dict[str, str]:
    """Return the permissions of this process, for the environment of processes elsewhere."""
    return {name: os.environ[name] for name in (CODE, SERVERS) if name in os.environ}
