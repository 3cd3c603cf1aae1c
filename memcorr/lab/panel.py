"""What a person presses and reads: controls at the right, pictures and the gallery of references at the left.

Callbacks run in the web server's thread, so they do nothing but put an `Order` into the inbox; the one thread that owns
simulation and renderer takes it out.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import cv2
import numpy as np
import viser

from ..demos.store import Demonstration
from ..errors import UserError
from ..show.video import LEGEND, SIDE, Image, draw, towards
from ..spec import SPEC, WORLD_TASKS
from ..worlds.pairs import Pair
from ..worlds.scenes import SCENE_COUNTS
from ..worlds.stock import StockTask
from .episode import Instant, Sight

ON_A_PAGE = 3  # pairs of the gallery
PLACEMENTS = SCENE_COUNTS["validation"]  # of a task of Meta-World
STRIP = (0.0, 0.4, 1.0)  # frames of a reference in the gallery, as shares of its length
PICTURE = (SIDE, SIDE // 2)  # pixels; half of what is drawn, a little more than the panel is wide
LEFT, SPEED = 430, 20  # pixels, control steps per second
WAYS = {"-x": (-1.0, 0.0, 0.0), "+x": (1.0, 0.0, 0.0), "-y": (0.0, -1.0, 0.0), "+y": (0.0, 1.0, 0.0)}
UP = {"up": (0.0, 0.0, 1.0)}
BACK = "set back"
MOST_ORDERS = 100  # that wait; what comes then is not heard
CELL = 'style="text-align:left;font-weight:normal;padding:0.1em 0.6em 0.1em 0;vertical-align:top;white-space:nowrap"'


@dataclass(frozen=True)
class Order:
    """Something that a person did on the page."""

    what: str
    value: Any = None


def picture(sight: Sight) -> Image:
    """Reference and live image of one slot, with matches, relation vectors and the planned path."""
    plan = None if sight.slot.answer is None else sight.slot.answer.plan
    return draw(sight.frame, sight.supplied, plan, min(sight.slot.since, SPEC.chunk - 1))


class Panel:
    """Made anew for every world; belongs to the thread that owns the simulation."""

    def __init__(
        self,
        server: viser.ViserServer,
        inbox: SimpleQueue[Order],
        pair: Pair | StockTask,
        names: Sequence[str],
        share: float | None,
    ) -> None:
        """`share` is where the joint usually starts; None in a task of Meta-World, which has none."""
        self.gui, self.inbox, self.pair = server.gui, inbox, pair
        self._sliders: dict[str, tuple[Any, float, float]] = {}
        self._options: dict[str, tuple[str, ...]] = {"page": ("earlier", "later")}
        self._options["world"] = tuple(dict.fromkeys((*WORLD_TASKS, pair.name)))
        gui = self.gui
        gui.reset()
        gui.configure_theme(show_logo=False, show_share_button=False, control_width="large")
        gui.set_panel_label("memcorr lab")
        gui.main_panel.dock_right()
        self._controls(share)
        seen = gui.add_panel()
        with seen.add_tab("what they see"):
            empty = np.full((PICTURE[1], PICTURE[0], 3), 40, np.uint8)
            self.pictures = {name: gui.add_image(empty, label=f"{name}: reference, live") for name in names}
            gui.add_html(legend())
        seen.dock_left()
        seen.set_width(LEFT)
        references = gui.add_panel()
        with references.add_tab("references"):
            turn = gui.add_button_group("pairs", self._options["page"])
            turn.on_click(self._tell("page"))
            self.gallery = gui.add_folder(None)
        references.dock_below(seen)
        self._entries: list[Any] = []

    def _tell(self, what: str, value: Any = None) -> Callable[[Any], Coroutine[None, None, None]]:
        """A callback; without a value the order carries the control's own."""

        async def send(event: Any) -> None:
            if self.inbox.qsize() < MOST_ORDERS:
                self.inbox.put(Order(what, event.target.value if value is None else value))

        return send

    def number(self, what: str) -> float:
        """Where a slider is. A page may send anything."""
        slider, lowest, highest = self._sliders[what]
        if not isinstance(slider.value, int | float) or not lowest <= slider.value <= highest:
            raise UserError(f"{what}: a number from {lowest:g} to {highest:g} is expected")
        return float(slider.value)

    def check(self, order: Order) -> None:
        if order.what in self._sliders:
            self.number(order.what)
        elif order.what in self._options and order.value not in self._options[order.what]:
            raise UserError(f"{order.what}: choose {', '.join(self._options[order.what])}")

    def _controls(self, share: float | None) -> None:
        gui = self.gui
        self.reading, self.note = gui.add_html(""), gui.add_html("")
        with gui.add_folder("episode"):
            self._group("run", ("play", "pause", "step", "reset"))
            self._slider("speed", "steps per second", 1.0, 80.0, 1.0, float(SPEED))
            record = gui.add_button("record video and .rrd", icon=viser.Icon.PLAYER_RECORD)
            record.on_click(self._tell("record"))
            self.recorded: Any = gui.add_progress_bar(0.0, visible=False)
        with gui.add_folder("scene"):
            world = gui.add_dropdown("world", self._options["world"], initial_value=self.pair.name)
            world.on_update(self._tell("world"))
            if share is None:
                self._slider("placement", "placement", 0.0, PLACEMENTS - 1.0, 1.0, 0.0)
            else:
                for axis in "xy":
                    self._slider(f"u {axis}", f"position u {axis}", 0.0, 1.0, 0.01, 0.5)
                self._slider("start", "joint", 0.0, 1.0, 0.01, round(share, 2))
            self._slider("camera", "camera, degrees", -90.0, 90.0, 1.0, 0.0)
        with gui.add_folder("push by hand"):
            if share is not None:
                self._group("object", (BACK, *(f"to {task}" for task in self.pair.tasks)))
                self._group("base", tuple(WAYS))
            self._group("hand", (*WAYS, *UP))

        with gui.add_folder("mask by clicking", expand_by_default=False):
            self.masked = gui.add_image(np.zeros((PICTURE[1], PICTURE[1], 3), np.uint8), label="live, from clicks")
            self._group("mask", ("use", "clear"))

    def _group(self, label: str, options: Sequence[str]) -> None:
        self._options[label] = tuple(options)
        self.gui.add_button_group(label, options).on_click(self._tell(label))

    def _slider(self, what: str, label: str, lowest: float, highest: float, step: float, value: float) -> None:
        slider = self.gui.add_slider(label, lowest, highest, step, value)
        slider.on_update(self._tell(what))
        self._sliders[what] = slider, lowest, highest

    def fill_gallery(self, demonstrations: Sequence[Demonstration]) -> None:
        for entry in self._entries:
            entry.remove()
        self._entries = []
        with self.gallery:
            for demonstration in demonstrations:
                label = f"{demonstration.task}, pair {demonstration.pair}"
                picture = self.gui.add_image(strip(demonstration), label=label)
                button = self.gui.add_button(f"follow {label}")
                button.on_click(self._tell("follow", demonstration.name))
                self._entries += [picture, button]

    def say(self, words: str, wrong: bool = False) -> None:
        colour = "#c00" if wrong else "#666"
        self.note.content = f'<p data-lab="note" style="color:{colour};margin:0.3em 1em">{html.escape(words)}</p>'

    def show(self, now: Instant, sights: Sequence[Sight], pictures: Sequence[Image], where: str) -> None:
        for sight, picture in zip(sights, pictures, strict=True):
            self.pictures[sight.slot.name].image = cv2.resize(picture, PICTURE, interpolation=cv2.INTER_AREA)
        self.reading.content = table(self.pair.name, now, sights, where)


def table(world: str, now: Instant, sights: Sequence[Sight], where: str) -> str:
    """The readings as HTML: one column per slot."""
    guide = now.guide
    rows: dict[str, list[str]] = {"": [sight.slot.name for sight in sights]}
    plans = [None if sight.slot.answer is None else sight.slot.answer.plan for sight in sights]
    rows["phase"] = ["" if plan is None or plan.phase is None else f"frame {plan.phase}" for plan in plans]
    rows["confidence"] = [
        "" if plan is None or plan.matches is None else f"{plan.confidence:.2f}, {plan.valid_points} points"
        for plan in plans
    ]
    errors = [sight.match_error_mm for sight in sights]
    rows["match error"] = ["" if error is None else f"{error:.1f} mm" for error in errors]
    rows["object"] = [towards(world, sight.progress) for sight in sights]
    rows["success"] = [verdict(sight) for sight in sights]
    lines = [
        f"<tr><th {CELL}>{label}</th>" + "".join(f"<td {CELL}>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        for label, cells in rows.items()
    ]
    begun = f", begun at step {now.begun}" if now.begun else ""
    head = f"<b>{world}</b>: following <b>{html.escape(guide.words)}</b>{begun}<br>"
    head += f"step {now.step}, {where}, camera {now.azimuth_deg:g}°"
    return (
        f'<div data-lab="reading" style="margin:0.5em 1em;font-size:0.85em">{head}<table>{"".join(lines)}</table></div>'
    )


def verdict(sight: Sight) -> str:
    slot = sight.slot
    if slot.broken:
        return "physics broke down"
    if slot.first_success is None:
        return "not yet"
    return f"after {slot.first_success} steps" + ("" if slot.success else ", undone since")


def legend() -> str:
    words = (f'<span style="color:rgb{colour}">&#9632;</span> {words}' for words, colour in LEGEND)
    return f'<p style="margin:0.3em 1em;font-size:0.85em">{"<br>".join(words)}</p>'


def strip(demonstration: Demonstration) -> Image:
    """How it starts, goes on and ends, side by side."""
    last = len(demonstration) - 1
    return np.concatenate([frame.rgb for frame in demonstration.frames([round(s * last) for s in STRIP])], axis=1)
