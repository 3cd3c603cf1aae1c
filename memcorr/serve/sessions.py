"""Who is served: what each client follows, how far it is, and the references it may choose from."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from ..correspondence.matcher import Matcher
from ..demos.store import Store, demonstration_path, read_demonstration
from ..errors import UserError
from ..following.course import Progress
from ..following.masks import Tracked
from ..following.step import Observation, Query
from ..policy.checkpoint import Design
from ..policy.plan import Guard, Plan
from ..spec import SPEC
from .inference import ServedReference
from .protocol import Message, Refused, Upload

log = logging.getLogger(__name__)
NOTHING_YET = Guard()
UPLOADS = 4  # that a client may bring; the oldest is forgotten
LOADED = 256  # references of the store kept in memory, followed or not; their images are not


class Library:
    """References that every client may choose by name: the demonstrations of a store, read when first asked for."""

    def __init__(self, store: Store | None, matcher: Matcher | None) -> None:
        self.matcher, self._lock = matcher, threading.Lock()
        found = [] if store is None else [(store, pair, task) for pair in range(len(store)) for task in store.tasks]
        paths = [demonstration_path(store.root, pair, task) for store, pair, task in found]
        self.paths = {path.stem: path for path in paths}
        self._loaded: OrderedDict[str, ServedReference] = OrderedDict()

    @property
    def names(self) -> list[str]:
        return list(self.paths)

    def find(self, name: str) -> ServedReference:
        """Shared by all who follow it: its frames are prepared once."""
        if name not in self.paths:
            known = f"{self.names[0]} ... {self.names[-1]}" if self.paths else "none, upload one"
            raise Refused(f"there is no reference {name[:80]!r}; known ones: {known}")
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._read(name)
            self._loaded.move_to_end(name)
            while len(self._loaded) > LOADED:
                self._loaded.popitem(last=False)
            return self._loaded[name]

    def _read(self, name: str) -> ServedReference:
        try:
            return ServedReference(read_demonstration(self.paths[name]), self.matcher)
        except UserError as problem:  # names files of this machine
            log.warning(f"{problem}")
            raise Refused(f"reference {name!r} cannot be read; the server's log says why") from None


@dataclass(frozen=True)
class Session:
    """One client, between two messages. A message that is refused changes nothing."""

    name: str | None = None
    reference: ServedReference | None = None
    elapsed: int = 0  # control steps since the reference was begun
    uploads: tuple[tuple[str, ServedReference, int], ...] = ()  # name, reference, bytes
    progress: Progress | None = None  # of the last plan, where the phase is by what is seen
    began: Observation | None = None  # the first of the episode
    guard: Guard = NOTHING_YET  # of the last plan
    tracked: Tracked | None = None  # the object's mask at the last look, where masks are carried

    @property
    def held(self) -> int:
        return sum(size for _, _, size in self.uploads)

    def heard(self, message: Message, library: Library) -> Session:
        """Another reference is begun at its start, in the middle of an episode or not; naming the one that is
        being followed changes nothing, so a client may name it in every message."""
        name, reference, uploads = self.name, self.reference, self.uploads
        if isinstance(message.reference, Upload):
            name, upload = str(message.reference.path), message.reference
            if name in library.paths:
                raise Refused(f"the server has a reference {name!r} of its own; upload under another name")
            reference = ServedReference(upload, library.matcher)
            others = tuple(u for u in uploads if u[0] != name)
            uploads = (*others, (name, reference, upload.nbytes))[-UPLOADS:]
        elif message.reference is not None and message.reference != name:
            name = message.reference
            own = {u[0]: u[1] for u in uploads}
            reference = own[name] if name in own else library.find(name)
        begun = message.reset or reference is not self.reference
        elapsed, progress = (0, None) if begun else (self.elapsed, self.progress)
        began = None if message.reset else self.began
        now = elapsed if message.elapsed is None else message.elapsed
        guard, tracked = (NOTHING_YET, None) if message.reset else (self.guard, self.tracked)
        return Session(name, reference, now, uploads, progress, began, guard, tracked)

    def query(self, message: Message) -> Query | None:
        """The decision that the message asks for, if it does."""
        if message.frame is None:
            return None
        if self.reference is None:
            raise Refused("no reference chosen: name one of the metadata's references, or upload one")
        if not message.masked and self.tracked is None:
            raise Refused("frame lacks mask: every frame needs it, or, with --masks carried, the first of an episode")
        return Query(Observation(message.frame), self.reference, self.elapsed, self.progress, self.began)

    def executed(self, plan: Plan, seen: Observation, design: Design) -> tuple[Plan, Session]:
        """What the client is told, and the session after it: unless it says otherwise, a client executes half of a
        chunk before it looks again."""
        began, elapsed = self.began or seen, self.elapsed + SPEC.executed
        plan, guard = self.guard.passed(plan, self.elapsed, design)
        return plan, replace(self, elapsed=elapsed, progress=plan.progress, began=began, guard=guard)
