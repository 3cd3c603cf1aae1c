"""`memcorr serve`: the socket. One websocket is one client; openpi's client connects to it unchanged.

On connect the server sends its metadata, then answers every message: a plan as a binary frame, or one line as
a text frame, which openpi's client raises as an error; the connection stays open either way. A browser's page
cannot connect (it sends an Origin), nor can anybody without the key where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import signal
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from ..correspondence.matcher import load_matcher
from ..demos.store import Store
from ..errors import UserError
from ..machine import provenance
from ..policy.plan import ACTION_LIMIT
from ..policy.policy import load_policy
from ..spec import SPEC
from .inference import Inference, Masks
from .protocol import FRAME, OPTIONS, Message, Refused, Upload, encode, read_message
from .sessions import Library, Session

log = logging.getLogger(__name__)
T = TypeVar("T")
SHORTEST_KEY = 16
PAUSE = 1.0  # seconds that too many uploads are made to wait for their refusal
LINES = 100  # of the log in a minute, however many connections fail
FAILED = "the server failed on this message; its log says why"


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, to whom, and how much of anything it takes."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    key: str | None = None  # sent by clients as "Authorization: Api-Key KEY"
    message_bytes: int = 32 * 2**20  # a reference of 200 frames of 128 x 128 has 26 MB
    uploaded_bytes: int = 2**30  # of all clients together
    uploaded_frames: int = 2000  # a minute, from one address: making them ready takes about as long
    clients: int = 32
    pending: int = 128  # connections that have not asked for anything yet; the oldest makes way
    patience: float = 20.0  # seconds: for an answer to a ping, which also ends a message that never ends

    def __post_init__(self) -> None:
        if self.key is None and not is_local(self.host):
            raise UserError(f"--host {self.host} is open to others: give --key-file, or listen on 127.0.0.1")
        if self.key is not None and not (len(self.key) >= SHORTEST_KEY and self.key.isascii()):
            raise UserError(f"a key has at least {SHORTEST_KEY} letters or digits; `openssl rand -hex 16` makes one")


def is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"--key-file {path} cannot be read ({problem})") from None


class PolicyServer:
    """Sessions of the clients that are connected, in front of one `Inference`."""

    def __init__(self, settings: ServerSettings, inference: Inference, library: Library) -> None:
        self.settings, self.inference, self.library = settings, inference, library
        self.sessions: dict[ServerConnection, Session] = {}
        self.held: dict[ServerConnection, int] = {}  # bytes of uploads, with those of a message under way
        self.pending: dict[ServerConnection, None] = {}  # the oldest first
        self.budgets: dict[str, tuple[float, float]] = {}  # address -> frames that it may upload, and as of when
        policy = inference.planner.policy
        self.metadata = encode(
            {
                "server": f"memcorr {provenance().get('memcorr', '')}".strip(),
                "policy": {"name": policy.design.name, "seed": policy.seed, "digest": policy.digest},
                "matcher": None if inference.matcher is None else inference.matcher.name,
                "references": library.names,
                "observation": list(FRAME),
                "options": list(OPTIONS),
                "action_horizon": SPEC.chunk,
                "action_limit": policy.design.action_limit,
                "executed": SPEC.executed,
                "slots": inference.slots,
                "masks": inference.masks,
                "message_bytes": settings.message_bytes,
            }
        )

    def begin(self, *arguments: Any, **settings: Any) -> ServerConnection:
        """A connection that has said nothing yet."""
        connection = ServerConnection(*arguments, **settings)
        connection.connection_lost_waiter.add_done_callback(lambda _: self.pending.pop(connection, None))
        self.pending[connection] = None
        if len(self.pending) > self.settings.pending:
            oldest = next(iter(self.pending))
            del self.pending[oldest]
            oldest.transport.abort()
        return connection

    def admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Before anything else is read: the health check, the key, and room for one more."""
        self.pending.pop(connection, None)
        if request.path == "/healthz":
            return connection.respond(*((200, "OK\n") if self.inference.alive else (503, "inference has ended\n")))
        if (key := self.settings.key) is not None:
            given = request.headers.get_all("Authorization")
            if len(given) != 1 or not hmac.compare_digest(
                given[0].encode(errors="surrogateescape"), f"Api-Key {key}".encode()
            ):
                refusal = connection.respond(401, "a key is needed, and this is not it\n")
                refusal.headers["WWW-Authenticate"] = "Api-Key"
                return refusal
        if len(self.sessions) >= self.settings.clients:
            return connection.respond(503, f"{self.settings.clients} clients are connected already\n")
        return None

    async def converse(self, connection: ServerConnection) -> None:
        """One client, from metadata to good-bye."""
        self.sessions[connection] = Session()
        answered, refused, total_ms = 0, 0, None
        try:
            await connection.send(self.metadata)
            while True:
                data = await connection.recv()
                began = time.perf_counter()
                try:
                    answer: bytes | str = await self.answer(connection, data, total_ms)
                    answered += 1
                except Refused as problem:
                    answer, refused = str(problem), refused + 1
                except ConnectionClosed:
                    raise
                except Exception:
                    log.exception("a message could not be answered")
                    answer, refused = FAILED, refused + 1
                del data  # an upload need not live until the next message
                await connection.send(answer)
                total_ms = 1e3 * (time.perf_counter() - began)
        except ConnectionClosed:
            pass
        finally:
            del self.sessions[connection]
            self.held.pop(connection, None)
            log.info(f"a client left: {answered} answers, {refused} refusals")

    async def answer(self, connection: ServerConnection, data: bytes | str, total_ms: float | None) -> bytes:
        """The session moves on only if everything about the message was right."""
        message = await asyncio.to_thread(read_message, data)
        if isinstance(message.reference, Upload):
            await self.count_upload(connection, len(message.reference))
        before = self.sessions[connection]
        session = await asyncio.to_thread(before.heard, message, self.library)
        others = sum(held for c, held in self.held.items() if c is not connection)
        if session.held > before.held and others + session.held > self.settings.uploaded_bytes:
            raise Refused("the server holds as many uploaded references as it may; try again later")
        self.held[connection] = max(session.held, before.held)
        try:
            return await self.obey(connection, message, session, total_ms)
        finally:
            self.held[connection] = self.sessions[connection].held

    async def obey(
        self, connection: ServerConnection, message: Message, session: Session, total_ms: float | None
    ) -> bytes:
        if session.reference is not None:
            await self.awaited(connection, self.inference.make_ready(session.reference))
        content: dict[str, Any] = {"reference": session.name, "elapsed": session.elapsed}
        if (look := session.query(message)) is not None:
            tracked = None if message.masked else session.tracked
            planned = await self.awaited(connection, self.inference.submit(look, message.seed, tracked))
            design = self.inference.planner.policy.design
            plan, session = session.executed(planned.plan, look.observation, design)
            session = replace(session, tracked=planned.tracked)
            timing = {"infer_ms": planned.infer_ms, "wait_ms": planned.wait_ms, "company": planned.company}
            content |= {
                "actions": plan.actions,
                "phase": plan.phase,
                "confidence": plan.confidence,
                "valid_points": plan.valid_points,
                "fallback": plan.fallback,
                "reason": plan.reason,
                "server_timing": timing | ({} if total_ms is None else {"prev_total_ms": total_ms}),
            }
        self.sessions[connection] = session
        return encode(content)

    async def awaited(self, connection: ServerConnection, result: Future[T]) -> T:
        """A result, unless its client leaves first: then it need not be computed any more."""
        answer, gone = asyncio.wrap_future(result), asyncio.ensure_future(connection.wait_closed())
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise connection.protocol.close_exc
            return answer.result()
        finally:
            gone.cancel()
            answer.cancel()

    async def count_upload(self, connection: ServerConnection, frames: int) -> None:
        most, address, now = self.settings.uploaded_frames, str(connection.remote_address[0]), time.monotonic()
        if len(self.budgets) > 1000:
            self.budgets = {a: (left, since) for a, (left, since) in self.budgets.items() if now - since < 60}
        left, since = self.budgets.get(address, (most, now))
        left = min(left + (now - since) * most / 60, most)
        self.budgets[address] = (left - frames if frames <= left else left, now)
        if frames > left:
            await asyncio.sleep(PAUSE)
            seconds = 60 * (frames - left) / most
            raise Refused(f"the server takes {most} uploaded frames a minute: try again in {seconds:.0f} s")

    async def run(self) -> None:
        """Until SIGINT or SIGTERM: every connection is closed (1001), the batch under way is finished."""
        s, stop, loop = self.settings, asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        listening = serve(
            self.converse,
            s.host,
            s.port,
            origins=[None],
            compression=None,
            process_request=self.admit,
            server_header=None,
            open_timeout=s.patience / 2,
            ping_interval=s.patience,
            ping_timeout=s.patience,
            close_timeout=2,
            max_size=s.message_bytes,
            max_queue=2,
            logger=quiet_logger(),
            create_connection=cast(type[ServerConnection], self.begin),
        )
        self.inference.start()
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    server = await stack.enter_async_context(listening)
                except OSError as problem:
                    raise UserError(f"cannot listen on {s.host}, port {s.port} ({problem.strerror})") from None
                port = server.sockets[0].getsockname()[1]
                host = f"[{s.host}]" if ":" in s.host else s.host
                log.info(f"serving at ws://{host}:{port}, {len(self.library.names)} references; Ctrl-C stops")
                await stop.wait()
        finally:
            self.inference.stop()
        log.info("stopped")


def quiet_logger() -> logging.Logger:
    """What websockets tells of strangers who break off or speak no HTTP: warnings, one line each."""

    def in_one_line(record: logging.LogRecord) -> bool:
        problem, record.exc_info = record.exc_info and record.exc_info[1], None
        if problem is not None:
            record.msg, record.args = "%s (%s)", (record.getMessage(), problem)
        return True

    logger = logging.getLogger("memcorr.websockets")
    logger.setLevel(logging.WARNING)
    logger.filters = [in_one_line]
    return logger


class FewLines(logging.Filter):
    """Drops what is beyond so many lines in a minute, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.times: deque[float] = deque(maxlen=LINES)

    def filter(self, record: logging.LogRecord) -> bool:
        if len(self.times) == LINES and record.created - self.times[0] < 60:
            return False
        self.times.append(record.created)
        if len(self.times) == LINES and record.created - self.times[0] < 60:
            record.msg = f"{record.getMessage()} (no more lines this minute)"
            record.args = ()
        return True


def serve_policy(
    policy: str,
    references: Path | None,
    matcher: str,
    settings: ServerSettings,
    slots: int | None = None,
    thread_count: int = 1,
    device: str = "auto",
    action_limit: float = ACTION_LIMIT,
    masks: Masks = "sent",
) -> None:
    """What the command line runs; returns when the server was stopped."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(FewLines())
    store = None if references is None else Store.open(references)
    loaded = load_policy(policy, device)
    if slots is None:
        slots = 8 if loaded.device == "cuda" else 1
    inference = Inference(loaded, load_matcher(matcher), slots, thread_count, action_limit, masks)
    asyncio.run(PolicyServer(settings, inference, Library(store, inference.matcher)).run())
