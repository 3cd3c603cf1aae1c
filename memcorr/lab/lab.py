"""`memcorr lab`: an interactive page. One thread, the one that calls `run`, owns simulation, renderer and policy.

    page -> callbacks (the web server's thread) -> inbox of orders -> this thread -> pictures and poses -> page

Sliders act at once. Before the first step they choose the scene; in mid-episode they disturb it, in both slots.
"""

from __future__ import annotations

import contextlib
import errno
import io
import ipaddress
import logging
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import viser

from ..correspondence.matcher import load_matcher
from ..demos.collect import find_references
from ..demos.store import Demonstration, Store
from ..errors import UserError
from ..evaluation.controllers import REPLAYS, PolicyController, ReplayController
from ..evaluation.evaluate import find_subject, normalised, usual
from ..evaluation.intervention import Intervention
from ..policy.policy import load_policy
from ..spec import DOOR, stock_task, tasks_of
from ..worlds.pairs import find_tasks
from ..worlds.scenes import Scene
from ..worlds.world import World, shared_world
from .clicks import CLICKS, Clicks
from .episode import Episode, Guide, usual_share
from .panel import BACK, MOST_ORDERS, ON_A_PAGE, SPEED, UP, WAYS, Order, Panel, picture
from .stage import Stage
from .visitors import guarded

log = logging.getLogger(__name__)
NUDGE, BASE_M, HAND_M = 0.15, 0.02, 0.05  # share of the neutral range, metres, metres: one push
QUIET = 0.3  # seconds without an order after which a slot that stands still looks ahead
# Of several such orders that wait the last counts.
ONCE = ("u x", "u y", "placement", "start", "camera", "speed", "follow", "record", "world", "page")
KEPT = 2  # references prepared for the matcher, 70 MB each


class Lab:
    """The simulation behind the page."""

    def __init__(self, policy: str, matcher: str, data: Path | None, world: str | None, out: Path) -> None:
        self.out, self.policy = out, load_policy(policy)
        if self.policy.design.visual:
            raise UserError(f"{self.policy.design.name} follows no reference: it is given the task")
        self.shown = normalised(find_subject(policy), usual(policy, Intervention(matcher=matcher)))
        self.replayed = Intervention(matcher=matcher)
        load_matcher(matcher)  # complains before anything is recorded
        self.stores: dict[str, Path] = {}
        if data is not None:
            found = Store.open(data).manifest.world
            if not tasks_of(found):
                raise UserError(f"{data} holds recordings of {found!r}, which is not simulated here")
            if world not in (None, found):
                raise UserError(f"--world {world}: the demonstrations in {data} are of the world {found}")
            self.stores[found] = data
            world = found
        self.inbox: SimpleQueue[Order] = SimpleQueue()
        self.names = (self.policy.design.name, REPLAYS[0])
        self.guides: dict[Path, Guide] = {}
        self.playing, self.speed, self.page = False, float(SPEED), 0
        self.clicks = Clicks()
        self.clicked_scene: Scene | None = None  # the one that was clicked on
        self.first_world = DOOR if world is None else world
        find_tasks(self.first_world)  # complains about an unknown one

    def begin(self, server: viser.ViserServer) -> None:
        self.server = server
        self.enter(self.first_world)
        for modifier, what in CLICKS.items():
            server.scene.on_click(modifier=modifier)(partial(self.clicked, what))

    def clicked(self, what: str, event: viser.SceneClickEvent) -> None:
        """In the 3D scene, in the web server's thread."""
        if self.inbox.qsize() < MOST_ORDERS:
            self.inbox.put(Order(what, (np.array(event.ray_origin), np.array(event.ray_direction))))

    def enter(self, name: str) -> None:
        """Another world: its scene, its references, an episode at its start."""
        if name not in self.stores:
            self.stores[name] = find_references(self.out, name)
        self.world: World = shared_world(name)
        self.store, self.page, self.playing = Store.open(self.stores[name]), 0, False
        self.guides.clear()
        first = self.store.demonstration(0, self.store.tasks[0])
        share = None if stock_task(name) else usual_share(self.world)
        with self.server.atomic():
            self.stage = Stage(self.server, self.world, self.names)
            self.panel = Panel(self.server, self.inbox, self.world.pair, self.names, share)
        self.usual_start = None if share is None else self.panel.number("start")
        scene = Scene("validation", 0, 0, (0.5, 0.5), world=name)
        self.episode = Episode(self.world, scene, self.guide(first))
        self.fill_gallery()
        self.panel.say("choose a reference, press play, interfere")
        self.show()

    def guide(self, demonstration: Demonstration) -> Guide:
        """Who follows this reference, as evaluation would have it."""
        if demonstration.path not in self.guides:
            while len(self.guides) >= KEPT:
                del self.guides[next(iter(self.guides))]
            one = {demonstration.task: demonstration}
            controllers = (
                PolicyController(self.policy, one, self.shown, slots=1),
                ReplayController(one, self.replayed),
            )
            self.guides[demonstration.path] = Guide(demonstration, dict(zip(self.names, controllers, strict=True)))
        return self.guides[demonstration.path]

    def fill_gallery(self) -> None:
        pairs = range(len(self.store))[ON_A_PAGE * self.page :][:ON_A_PAGE]
        self.panel.fill_gallery([self.store.demonstration(pair, task) for pair in pairs for task in self.store.tasks])

    # Orders

    def obey(self, order: Order) -> None:
        self.panel.check(order)
        e, value, number = self.episode, order.value, self.panel.number
        match order.what:
            case "run":
                self.run_order(value)
            case "speed":
                self.speed = number("speed")
            case "u x" | "u y":
                e.place((number("u x"), number("u y")))
            case "placement":
                e.begin(replace(e.scene, index=int(number("placement"))), e.now.guide)
            case "start":
                e.put_joint(None if number("start") == self.usual_start else number("start"))
            case "camera":
                e.turn_camera(number("camera"))
            case "object":
                self.push(value)
            case "base":
                e.interfere(lambda world: world.move_base(BASE_M * np.array(WAYS[value])), f"base moved {value}")
            case "hand":
                by = HAND_M * np.array((WAYS | UP)[value])
                e.interfere(lambda world: world.push_hand(by), f"hand pushed {value}")
            case "follow":
                _, pair, task = value.split("-", 2)
                e.follow(self.guide(self.store.demonstration(int(pair), task)))
            case "page":
                last = (len(self.store) - 1) // ON_A_PAGE
                self.page = int(np.clip(self.page + (1 if value == "later" else -1), 0, last))
                self.fill_gallery()
            case "record":
                self.record()
            case "on the object" | "beside it" | "mask":
                self.mask_order(order.what, value)
            case "world":
                if value != self.world.pair.name:
                    self.panel.say(f"preparing the world {value} and its references ...")
                    self.server.flush()
                    self.enter(value)

    def run_order(self, what: str) -> None:
        self.playing = what == "play"
        if what == "step":
            self.episode.advance()
        elif what == "reset":
            e, number = self.episode, self.panel.number
            scene = replace(e.scene, camera_azimuth_deg=number("camera"))
            if self.usual_start is not None:
                share = number("start")
                start = None if share == self.usual_start else share
                scene = replace(scene, u=(number("u x"), number("u y")), start=start)
            e.begin(scene, e.now.guide)

    def mask_order(self, what: str, value: Any) -> None:
        """A click on the live picture of an episode that has not begun, or what to do with all of them."""
        e = self.episode
        if e.now.step:
            raise UserError("a mask is clicked before the first step: reset, then click")
        if value == "clear" or self.clicked_scene is not e.scene:
            self.clicks, self.clicked_scene = Clicks(), e.scene
        frame = e.see()[0].frame
        if what != "mask":
            self.clicks.add(what, value, frame)
            self.panel.say("look at the mask; more clicks mend it, then press use")
        elif value == "use":
            one = {e.now.guide.demonstration.task: e.now.guide.demonstration}
            carrying = PolicyController(self.policy, one, replace(self.shown, masks="carried"), slots=1)
            e.carry(self.names[0], carrying, self.clicks.usable(frame))
            self.panel.say(f"{self.names[0]} carries the clicked mask in this episode")
        self.panel.masked.image = self.clicks.picture(frame)

    def push(self, how: str) -> None:
        """The object's joint by hand: back to where it started, or some way towards one of the goals."""
        pair = self.world.pair
        if how == BACK:
            share = self.episode.scene.start
            q = pair.start if share is None else pair.start_at(share)
            return self.episode.interfere(lambda world: world.set_joint(q), "object set back")
        towards = NUDGE if how == f"to {pair.tasks[0]}" else -NUDGE
        by = towards * (pair.start_at(1.0) - pair.start_at(0.0))
        return self.episode.interfere(lambda world: world.set_joint(world.joint + by), f"object pushed {how}")

    def record(self) -> None:
        from .record import record

        self.panel.recorded.visible = True

        def progress(share: float) -> None:
            self.panel.recorded.value = 100 * share

        try:
            film, rrd = record(self.episode, self.out, progress)
        finally:
            self.panel.recorded.visible = False
        self.panel.say(f"wrote {film} and {rrd.name}")
        log.info(f"wrote {film} and {rrd}")

    # The loop

    def run(self) -> None:
        """Until interrupted."""
        due = quiet = time.monotonic()
        while True:
            orders = self.orders(self.patience(due, quiet))
            now = time.monotonic()
            quiet = now if orders else quiet
            for order in orders:
                try:
                    self.obey(order)
                except UserError as problem:
                    self.playing = False
                    self.panel.say(str(problem), wrong=True)
                except Exception:
                    log.exception(f"{order.what!r} could not be done")
                    self.playing = False
                    self.panel.say(f"{order.what} could not be done; the log says why", wrong=True)
            if self.playing and now >= due:
                was_over = self.episode.now.over
                self.episode.advance()
                due = max(due + 1 / self.speed, now)
                if self.episode.now.over and not was_over:
                    self.playing = False
                    self.panel.say("over; play goes on, reset starts again")
            elif not orders and self.waiting and now >= quiet + QUIET:
                self.episode.look()
            elif not orders:
                continue
            self.show()

    @property
    def waiting(self) -> bool:
        """Whether a decision would come first if the episode went on."""
        return not self.playing and any(slot.answer is None and not slot.broken for slot in self.episode.now.slots)

    def patience(self, due: float, quiet: float) -> float | None:
        if self.playing:
            return max(due - time.monotonic(), 0.0)
        return max(quiet + QUIET - time.monotonic(), 0.0) if self.waiting else None

    def orders(self, patience: float | None) -> list[Order]:
        """Everything in the inbox, after waiting for something; of what counts once the last."""
        found: list[Order] = []
        with contextlib.suppress(Empty):
            found.append(self.inbox.get(timeout=patience) if patience != 0 else self.inbox.get_nowait())
            while True:
                found.append(self.inbox.get_nowait())
        last = {order.what: i for i, order in enumerate(found)}
        return [order for i, order in enumerate(found) if order.what not in ONCE or last[order.what] == i]

    def show(self) -> None:
        sights = self.episode.see()
        pictures = [picture(sight) for sight in sights]
        with self.server.atomic():
            self.stage.show(sights)
            self.panel.show(self.episode.now, sights, pictures, self.episode.where)
        self.server.flush()  # rather than with the next sixtieth of a second


def run_lab(policy: str, world: str | None, data: Path | None, matcher: str, out: Path, host: str, port: int) -> None:
    """What the command line runs; returns after Ctrl-C or SIGTERM."""
    _check_free(host, port)
    lab = Lab(policy, matcher, data, world, out)
    with contextlib.redirect_stdout(io.StringIO()), guarded(host):  # a banner
        server = viser.ViserServer(host, port, verbose=False)
    try:
        if port not in (0, server.get_port()):
            raise UserError(f"port {port} was taken meanwhile; give another --port")
        lab.begin(server)
        log.info(f"open http://{host}:{server.get_port()} in a browser; Ctrl-C stops")
        lab.run()
    except KeyboardInterrupt:
        log.info("stopped")
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            server.stop()


def _check_free(host: str, port: int) -> None:
    """viser takes the next port if one is taken, where the user would not look."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as problem:
        reason = "it is in use" if problem.errno == errno.EADDRINUSE else problem.strerror or str(problem)
        raise UserError(f"cannot listen on {host}, port {port} ({reason}); give another --port") from None
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(host).is_loopback:
            log.warning(f"anyone who reaches {host} can steer this lab and write into its folder")
