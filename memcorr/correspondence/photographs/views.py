"""Pairs of crops of real photographs with known correspondences.

The pictures are those that scikit-image carries in its wheel: nothing is fetched, and everybody has the same. A pair is
a crop and the same place of the photograph again, under a random homography, in another light and with noise; or two
crops of the Middlebury motorcycle, left and right eye, whose disparity is known. Every pair depends on (seed, setting,
photograph, number) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from ...errors import UserError
from ...files import digest_of
from ...frames import Camera
from ...spec import SPEC, Array

INSTALL = "pip install 'memcorr[photographs]'"
PICTURES = (
    "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png",
    "rocket.jpg", "motorcycle_left.png",
)  # fmt: skip
LEFT, RIGHT, DISPARITY = "motorcycle_left.png", "motorcycle_right.png", "motorcycle_disp.npz"
FOCAL, PRINCIPAL, PRINCIPAL_SHIFT, BASELINE = 994.978, (311.193, 254.877), 31.086, 0.193001  # pixels, metres
SIZE = SPEC.image_size
POINTS = 48  # asked for per pair, as many as lifting asks for
PLAIN = 4.0  # grey levels: where a 9 x 9 patch varies less (empty sky) nothing can be located, and nothing is asked
BORDER = 4  # pixels: whose match lies nearer to the query's edge is not asked for


@dataclass(frozen=True)
class Warping:
    """How far the second view may differ from the first."""

    turn_deg: float
    zoom: float  # up to this factor, or its inverse
    tilt: float  # how far the homography's horizon bends the crop, per half its size
    shift: float  # of the crop's size
    light: float  # 0 none; 1 exposure by a third, a colour cast, a gradient over the picture


WARPINGS = {
    "mild": Warping(turn_deg=8, zoom=1.15, tilt=0.05, shift=0.08, light=0.4),
    "strong": Warping(turn_deg=30, zoom=1.4, tilt=0.15, shift=0.12, light=1.0),
}
STEREO = "stereo"
SETTINGS = (*WARPINGS, STEREO)


@dataclass(frozen=True)
class PhotoPair:
    reference: NDArray[np.uint8]  # (128, 128, 3)
    query: NDArray[np.uint8]  # (128, 128, 3)
    pixels: Array  # (POINTS, 2) in the reference
    truth: Array  # (POINTS, 2) where they are in the query
    lifted_error: Callable[[Array], Array] | None = None  # located (N, 2) -> metres (N,), NaN without depth


@cache
def folder() -> Path:
    """Where the pictures lie; scikit-image itself is not imported."""
    found = find_spec("skimage")
    if found is None or found.origin is None:
        raise UserError(f"--photographs needs the pictures inside scikit-image: {INSTALL}")
    path = Path(found.origin).parent / "data"
    if missing := [name for name in (*PICTURES, RIGHT, DISPARITY) if not (path / name).is_file()]:
        raise UserError(f"{path} lacks {missing[0]}; scikit-image carries it from 0.20 to 0.26 at least: {INSTALL}")
    return path


@cache
def picture(name: str) -> NDArray[np.uint8]:
    image = cv2.imread(str(folder() / name), cv2.IMREAD_COLOR)
    if image is None:
        raise UserError(f"{folder() / name} is no picture; reinstall it: {INSTALL}")
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8)


def pictures_digest() -> str:
    """Tells sets of pictures apart, should scikit-image change one."""
    return "-".join(digest_of(folder() / name)[:4] for name in (*PICTURES, RIGHT, DISPARITY))


def pairs(setting: str, seed: int, count: int) -> Iterator[PhotoPair]:
    """`count` of each photograph; of the motorcycle alone for "stereo", as many as of all."""
    names = (LEFT,) if setting == STEREO else PICTURES
    for name in names:
        for number in range(count * len(PICTURES) // len(names)):
            rng = np.random.default_rng([seed, number, *f"{setting} {name}".encode()])
            yield stereo_pair(rng) if setting == STEREO else warped_pair(name, WARPINGS[setting], rng)


def drawn(make: Callable[[], PhotoPair | None]) -> PhotoPair:
    """The first that shows enough of what is asked for."""
    while (pair := make()) is None:
        pass
    return pair


def warped_pair(name: str, warping: Warping, rng: np.random.Generator) -> PhotoPair:
    return drawn(partial(_warped_pair, picture(name), warping, rng))


def _warped_pair(photo: NDArray[np.uint8], warping: Warping, rng: np.random.Generator) -> PhotoPair | None:
    H, W = photo.shape[:2]
    side = rng.uniform(SIZE, 0.6 * min(H, W))
    centre = rng.uniform((side / 2, side / 2), (W - side / 2, H - side / 2))
    from_reference = scaling(side / SIZE, centre)
    bend = np.eye(3)
    bend[2, :2] = rng.uniform(-warping.tilt, warping.tilt, 2) / (SIZE / 2)
    turn = np.radians(rng.uniform(-warping.turn_deg, warping.turn_deg))
    zoom = np.exp(rng.uniform(-1, 1) * np.log(warping.zoom))
    move = np.eye(3)
    move[:2, :2] = zoom * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    move[:2, 2] = rng.uniform(-warping.shift, warping.shift, 2) * SIZE
    middle = np.eye(3)
    middle[:2, 2] = (SIZE - 1) / 2
    to_query = middle @ bend @ move @ np.linalg.inv(middle)  # reference crop -> query crop
    reference, query = seen(photo, from_reference), seen(photo, from_reference @ np.linalg.inv(to_query))
    radius, angle = 42 * np.sqrt(rng.uniform(0, 1, 4 * POINTS)), rng.uniform(0, 2 * np.pi, 4 * POINTS)
    pixels = (SIZE - 1) / 2 + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    truth = mapped(to_query, pixels)
    there = inside(truth) & inside(mapped(from_reference @ np.linalg.inv(to_query), truth), W, H)
    there &= structured(reference, pixels)
    if there.sum() < POINTS:
        return None
    light = partial(relit, rng=rng, strength=warping.light)
    return PhotoPair(light(reference), light(query), pixels[there][:POINTS], truth[there][:POINTS])


def stereo_pair(rng: np.random.Generator) -> PhotoPair:
    """A crop of the left picture, and one of the right where half of it is again, displaced and relit a little."""
    return drawn(partial(_stereo_pair, rng))


def _stereo_pair(rng: np.random.Generator) -> PhotoPair | None:
    left, right = picture(LEFT), picture(RIGHT)
    H, W = left.shape[:2]
    disparity = left_disparity()
    side = rng.uniform(80, 200)
    centre = rng.uniform((side / 2, side / 2), (W - side / 2, H - side / 2))
    pixels = rng.uniform(24, SIZE - 25, (6 * POINTS, 2))
    there = np.rint(mapped(scaling(side / SIZE, centre), pixels)).astype(int)
    there = np.clip(there, 0, (W - 1, H - 1))
    pixels = mapped(np.linalg.inv(scaling(side / SIZE, centre)), there)  # whole pixels of the left picture
    d = disparity[there[:, 1], there[:, 0]]
    if np.isfinite(d).mean() < 0.5:
        return None
    target = centre - (np.nanmedian(d), 0) + rng.uniform(-0.1, 0.1, 2) * side
    target = np.clip(target, side / 2, (W - side / 2, H - side / 2))
    from_query = scaling(side / SIZE * np.exp(rng.uniform(-0.15, 0.15)), target)
    known = np.where(np.isfinite(d), d, 0.0)
    in_right = there - np.stack([known, np.zeros(len(d))], axis=-1)
    truth = mapped(np.linalg.inv(from_query), in_right)
    columns, rows = np.clip(np.rint(in_right), 0, (W - 1, H - 1)).astype(int).T
    seen_there = np.abs(right_disparity()[rows, columns] - d) < 1.0  # and nothing nearer hides it
    reference, query = seen(left, scaling(side / SIZE, centre)), seen(right, from_query)
    fit = np.isfinite(d) & inside(truth) & seen_there & structured(reference, pixels)
    asked = np.flatnonzero(fit)[:POINTS]
    if len(asked) < POINTS:
        return None
    camera, p_true = right_camera(), right_camera().lift(in_right[asked], depth_of(d[asked]))

    def lifted_error(located: Array) -> Array:
        uv = mapped(from_query, located)
        columns, rows = np.clip(np.rint(uv), 0, (W - 1, H - 1)).astype(int).T
        depth = np.where(inside(uv, W, H, 0), depth_of(right_disparity()[rows, columns]), np.nan)
        return np.asarray(np.linalg.norm(camera.lift(uv, depth) - p_true, axis=-1))

    light = partial(relit, rng=rng, strength=0.3)
    return PhotoPair(light(reference), light(query), pixels[asked], truth[asked], lifted_error)


@cache
def left_disparity() -> Array:
    """(H, W) pixels, NaN where it was not measured."""
    with np.load(folder() / DISPARITY) as file:
        d = file[file.files[0]].astype(np.float64)
    return np.where(np.isfinite(d), d, np.nan)


@cache
def right_disparity() -> Array:
    """The left one carried to the right picture, the nearest surface in front; NaN where nothing came to lie."""
    d = left_disparity()
    out = np.full(d.shape, -np.inf)
    rows, columns = np.nonzero(np.isfinite(d))
    to = np.rint(columns - d[rows, columns]).astype(int)
    kept = to >= 0
    np.maximum.at(out, (rows[kept], to[kept]), d[rows, columns][kept])
    return np.where(np.isfinite(out), out, np.nan)


def right_camera() -> Camera:
    x, y = PRINCIPAL
    return Camera(np.array([[FOCAL, 0, x + PRINCIPAL_SHIFT], [0, FOCAL, y], [0, 0, 1]]), np.eye(4))


def depth_of(disparity: Array) -> Array:
    """Metres."""
    return FOCAL * BASELINE / (disparity + PRINCIPAL_SHIFT)


def scaling(scale: float, centre: Array) -> Array:
    """(3, 3) crop pixels -> pixels of the photograph around `centre`."""
    middle = (SIZE - 1) / 2
    return np.array([[scale, 0, centre[0] - scale * middle], [0, scale, centre[1] - scale * middle], [0, 0, 1]])


def mapped(homography: NDArray[np.floating], uv: NDArray) -> Array:
    p = np.concatenate([uv, np.ones((*uv.shape[:-1], 1))], axis=-1) @ homography.T
    return np.asarray(p[..., :2] / p[..., 2:])


def inside(uv: Array, width: int = SIZE, height: int = SIZE, border: float = BORDER) -> NDArray[np.bool_]:
    return np.asarray(((uv >= border) & (uv <= (width - 1 - border, height - 1 - border))).all(axis=-1))


def structured(crop: NDArray[np.uint8], uv: Array) -> NDArray[np.bool_]:
    """Where the picture is not plain."""
    grey = crop.astype(np.float64).mean(axis=-1)
    mean, square = (cv2.blur(x, (9, 9)) for x in (grey, grey**2))
    columns, rows = np.clip(np.rint(uv), 0, SIZE - 1).astype(int).T
    return np.asarray((square - mean**2)[rows, columns] > PLAIN**2)


def seen(photo: NDArray[np.uint8], to_photo: Array) -> NDArray[np.uint8]:
    """The crop (128, 128, 3) whose pixel p shows the photograph at `to_photo` p, drawn four times as large first."""
    fine = 4
    sub = np.array([[1 / fine, 0, 0.5 / fine - 0.5], [0, 1 / fine, 0.5 / fine - 0.5], [0, 0, 1]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    large = cv2.warpPerspective(photo, to_photo @ sub, (fine * SIZE,) * 2, flags=flags, borderMode=cv2.BORDER_REFLECT)
    return np.asarray(cv2.resize(large, (SIZE, SIZE), interpolation=cv2.INTER_AREA), np.uint8)


def relit(crop: NDArray[np.uint8], rng: np.random.Generator, strength: float) -> NDArray[np.uint8]:
    """Exposure, contrast, colour cast, a gradient of light across the picture, and noise."""
    x = (crop.astype(np.float64) / 255) ** np.exp(rng.uniform(-0.3, 0.3) * strength)
    direction, steepness = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.3) * strength
    ramp = np.linspace(-1, 1, SIZE)
    x *= 1 + steepness * (np.cos(direction) * ramp[None, :, None] + np.sin(direction) * ramp[:, None, None])
    x *= rng.uniform(1 - 0.3 * strength, 1 + 0.3 * strength) * rng.uniform(1 - 0.1 * strength, 1 + 0.1 * strength, 3)
    x += rng.normal(0, rng.uniform(0, 0.03) * strength, x.shape)
    return np.asarray(np.clip(255 * x, 0, 255), np.uint8)
