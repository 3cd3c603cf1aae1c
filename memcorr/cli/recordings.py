"""The verbs for recordings of your own: in, out, and looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from ..errors import UserError
from .options import Seed, Speed, app, data_app, export_app, import_app, verb


@verb(data_app, "check")
def data_check(data: tyro.conf.Positional[Path], picture: Path | None = None) -> None:
    """What is there, how well it fits together, what is wrong with it; pictures; exit code 2 if something is wrong.

    Args:
        data: Folder of the demonstrations.
        picture: Page of pictures; DATA/check.png if not given.
    """
    from ..demos.store import Store
    from ..recordings.check.report import check

    if (data / "meta/info.json").exists():
        raise UserError(f"{data} is a LeRobot dataset: memcorr import lerobot {data} --out STORE, then check STORE")
    report = check(Store.open(data), picture or data / "check.png")
    for line in (report.summary, *report.notes, *report.measured, *report.lines()):
        print(line)
    if report.findings:
        wrong = len({finding.demonstration for finding in report.findings})
        raise UserError(f"{data}: something is wrong in {wrong} demonstrations, see above; look at {report.picture}")
    then = f"memcorr serve servo --references {data}"
    print(f"no fault that can be tested was found; look at {report.picture}, then: {then}")


@verb(data_app, "mask")
def data_mask(
    data: tyro.conf.Positional[Path],
    segmenter: str = "matcher",
    first_masks: Path | None = None,
    weights: str | None = None,
    again: bool = False,
    click: tuple[tuple[Seed, Seed], ...] = (),
    away: tuple[tuple[Seed, Seed], ...] = (),
    of: str | None = None,
) -> None:
    """Draw the object's mask in every frame from the one in the first, and write it into the store; or, with clicks,
    make that first one, to be looked at.

    Args:
        data: Folder of the demonstrations.
        segmenter: "matcher" carries the mask with the embedded matcher and depth; "sam2" needs weights of its own.
        first_masks: Folder of pictures pair-000-open.png, white where the object is; if not given, the masks that the
            first frames have.
        weights: Of SAM 2, a folder or a name on the Hub; of the embedded matcher, a file.
        again: Draw also where there are masks.
        click: Points on the object in the first frame, column and row each, such as 64 70 80 55. A mask is made of
            them, from depth and colour or by SAM 2, and shown; nothing is written into the store.
        away: Points that are not the object.
        of: The recording that was clicked on, such as pair-000-open, if there are several.
    """
    from ..demos.store import Store
    from ..following.masks import draw_masks, load_segmenter

    if click or away or of:
        from ..following.clicks import show_clicks

        if not click:
            raise UserError("--click is missing: at least one point on the object, column and row")
        folder = first_masks or data / "first-masks"
        drawn, shown = show_clicks(Store.open(data), load_segmenter(segmenter, weights), of, click, away, folder)
        print(f"look at {shown}; with more of --click and --away the same command mends it ({drawn})")
        print(f"next, with one for every recording: memcorr data mask {data} --first-masks {folder}")
        return
    made = draw_masks(Store.open(data), load_segmenter(segmenter, weights), first_masks, again)
    print(f"drew masks in {made} demonstrations of {data}; next: memcorr data check {data}, and look at its picture")


def import_verb(kind: Literal["lerobot", "mcap"], what: str, folder: str) -> None:
    """Registers `memcorr import KIND`."""

    def command(
        data: tyro.conf.Positional[Path],
        out: Path,
        world: str | None = None,
        mapping: Path | None = None,
        calibration: Path | None = None,
        masks: bool = True,
    ) -> None:
        from ..recordings.sidecars import import_recordings

        made = import_recordings(kind, data, out, world, mapping, calibration, masks)
        then = f"memcorr data check {out}" if masks else f"memcorr data mask {out} --first-masks FOLDER"
        print(f"wrote {made} demonstrations to {out}; next: {then}")

    command.__doc__ = f"""{what}

    Args:
        data: {folder}
        out: Folder of the store that is made.
        world: What the recordings are of, one word; what an export of ours says, else "recorded".
        mapping: JSON file that says which feature or topic holds what; DATA/mapping.json if there is one. What
            `memcorr export` made needs none.
        calibration: JSON file with K and T_world_cam where the recordings have none; DATA/calibration.json if there
            is one.
        masks: Whether there are masks of the object. Without, empty ones are written, to be drawn later.
    """
    verb(import_app, kind)(command)


import_verb(
    "lerobot",
    "Read a LeRobotDataset v3.0 with colour and depth, as images or as video, into a store.",
    "Folder of the dataset, the one that holds meta/info.json.",
)
import_verb(
    "mcap",
    "Read ROS 2 recordings (one MCAP file per demonstration) into a store.",
    "Folder of the .mcap files, named pair-000-open.mcap, or named in the mapping.",
)


@verb(export_app, "lerobot")
def export_lerobot(data: tyro.conf.Positional[Path], out: Path, fps: Speed = 0) -> None:
    """Write a store as a LeRobotDataset v3.0, lossless: importing it gives the same files.

    Args:
        data: Folder of the store.
        out: Folder of the dataset that is made.
        fps: Rows per second; from the times that were recorded if not given, 80 for simulated worlds.
    """
    from ..demos.store import Store
    from ..recordings.export import export_lerobot

    made = export_lerobot(Store.open(data), out, fps or None)
    print(f"wrote {made} episodes to {out}")


app.command(data_app, name="data", help="Look at demonstrations before learning from them.")
app.command(import_app, name="import", help="Read recordings of your own into a store.")
app.command(export_app, name="export", help="Write a store for others to read.")
