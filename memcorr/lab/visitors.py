"""Who may steer: pages that this server itself has sent, and programs on purpose; no other web page.

A browser says which page a connection comes from (`Origin`) and under which name it found the server (`Host`). A page
from elsewhere has another origin. A page whose own name was pointed at this machine meanwhile has that name as host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import websockets.asyncio.server as sockets
from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

MESSAGE_BYTES = 2**20  # of a page; what it is sent is larger


def welcome(headers: Headers, host: str) -> bool:
    """Whether a request to a server that listens on `host` names it by address, or by a name of this machine, and comes
    from no page but its own."""
    named, origins = headers.get_all("Host"), headers.get_all("Origin")
    try:
        own = len(named) == 1 and all(urlsplit(origin).netloc == named[0] for origin in origins)
        name = (urlsplit(f"//{named[0]}").hostname or "") if own else ""
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name in {"localhost", host.lower(), socket.gethostname().lower()}


@contextlib.contextmanager
def guarded(host: str) -> Iterator[None]:
    """Servers that viser starts meanwhile refuse all other visitors; viser has no option for that."""
    begun = sockets.serve

    def serve(*arguments: Any, process_request: Any = None, **settings: Any) -> Any:
        def checked(connection: ServerConnection, request: Request) -> Response | None:
            if not welcome(request.headers, host):
                return connection.respond(403, "the lab is steered from its own page, at the address it printed\n")
            return process_request(connection, request)

        return begun(*arguments, process_request=checked, **{**settings, "max_size": MESSAGE_BYTES})

    sockets.serve = serve  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        sockets.serve = begun  # type: ignore[misc]
