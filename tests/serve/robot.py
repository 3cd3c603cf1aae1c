"""The robot of docs/serve.md, as openpi's environment sees it: the simulator of the test, at the end of a pipe."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

from openpi_client import msgpack_numpy

PIPE = Connection(int(os.environ["ROBOT"]))


class Robot:
    def __init__(self, task: str = "close") -> None:
        self._ask(do="begin", task=task)

    def _ask(self, **request: Any) -> Any:
        PIPE.send_bytes(msgpack_numpy.packb(request))
        return msgpack_numpy.unpackb(PIPE.recv_bytes())

    def observe(self) -> dict:
        return self._ask(do="observe")

    def execute(self, action: Any) -> None:
        self._ask(do="execute", action=action)

    def done(self) -> bool:
        return self._ask(do="done")["done"]


class DepthRobot(Robot):
    """Whose camera gives depth in millimetres."""

    def observe(self) -> dict:
        seen = super().observe()
        return {**seen, "depth": (1000 * seen["depth"]).round().astype("uint16")}
