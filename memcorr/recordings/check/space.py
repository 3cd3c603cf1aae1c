"""Depth, camera and gripper against each other: in which unit, and in whose frame?

The one thing that ties them together is the hand. Its position is known to the robot in the world; the camera shows it
at the pixel where that point projects, and depth measures how far away it is. When all three agree, frame after frame
while the hand moves, then depth, intrinsics, camera pose and gripper are in one unit and one frame. When they do not,
each usual mistake is undone in turn, and the one that makes them agree is named. Nothing is assumed about the scene.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...frames import Frame
from ...spec import SPEC, Array
from .evidence import Evidence, Finding, returned

NEAR = 0.03  # metres between the gripper and what depth shows there: half a finger, and the noise of depth
WINDOW = 1 / 50  # of the image's larger side, around the gripper's pixel
MIDDLE = 0.005  # metres of the gripper from the middle of the fingertips, at most
DOUBTED, BELIEVED = 0.5, 0.7  # share of frames in which the gripper is where depth is
BETTER = 0.3  # more than as given: believed although what was given is not bad either
FARTHEST = 20.0  # metres; a median depth beyond this is another unit
CENTIMETRES = 150.0  # a median above this is in millimetres instead
NO_RETURN = 0.7  # share of pixels, of the image or of the object, that makes depth useless
OPENGL = np.diag([1.0, -1.0, -1.0, 1.0])
LEVEL = 0.12  # share of all points that lie in one horizontal slab of 2 cm where a table or floor is level
STEADY = 0.75  # of that share has to remain when a mistake is undone


def check_depth(evidence: Evidence) -> tuple[Evidence, list[Finding]]:
    """Its unit, and whether there is any."""
    depth = np.stack([f.depth for f in evidence.frames])
    seen, mask = returned(depth), np.stack([f.mask for f in evidence.frames])
    found = []
    if (nothing := 1 - seen.mean()) > NO_RETURN:
        wrong = f"no return at {100 * nothing:.0f} % of the pixels"
        found.append(
            evidence.finding("depth", "no-returns", wrong, "give depth of every pixel that has it, 0 elsewhere")
        )
        return evidence, found
    if mask.any() and (nothing := 1 - seen[mask].mean()) > NO_RETURN:
        wrong = f"no return at {100 * nothing:.0f} % of the object's pixels"
        right = "nothing can be lifted there: is depth aligned to the colour image, is the object black or shiny?"
        found.append(evidence.finding("depth", "no-returns", wrong, right))
    if (depth[np.isfinite(depth)] < 0).any():
        found.append(
            evidence.finding("depth", "negative", "some of it is negative", "give metres along the optical axis")
        )
    middle = float(np.median(depth[seen]))
    if middle > FARTHEST:
        unit, per_metre = ("centimetres", 100) if middle < CENTIMETRES else ("millimetres", 1000)
        wrong = f"it is in {unit}: its median is {middle:.4g}"
        found.append(evidence.finding("depth", unit, wrong, f"metres are expected: divide by {per_metre}"))
        evidence = evidence.with_depth(1 / per_metre)
    elif (code := depth[seen].max()) > 100:
        wrong = f"it reaches {code:g} where its median is {middle:.2f}: a code for no return"
        found.append(evidence.finding("depth", "code", wrong, "write 0 where nothing returned"))
    return evidence, found


def check_intrinsics(evidence: Evidence) -> tuple[Evidence, list[Finding]]:
    """For an image of this size? The principal point of a camera is near the middle of its image."""
    height, width = evidence.size
    K = np.median([f.camera.K for f in evidence.frames], axis=0)
    middle, focal = K[:2, 2] / [width, height], K[[0, 1], [0, 1]]
    if (focal <= 0).any() or np.abs(K[[1, 2, 2], [0, 0, 1]]).max() > 1e-6 * focal.max() or abs(K[2, 2] - 1) > 1e-6:
        wrong = f"{np.round(K, 3).tolist()} is no matrix of intrinsics"
        return evidence, [evidence.finding("K", "shape", wrong, "give [[fx, 0, cx], [0, fy, cy], [0, 0, 1]] in pixels")]
    if (np.abs(middle - 0.5) <= 0.2).all():
        return evidence, []
    other_width, other_height = 2 * K[:2, 2]
    factors = 0.5 / middle
    wrong = f"its centre ({K[0, 2]:.1f}, {K[1, 2]:.1f}) is of an image of about {other_width:.0f} x {other_height:.0f}"
    right = (
        f"images are {width} x {height}: multiply its first row by {factors[0]:.3g}, its second by {factors[1]:.3g}, "
        "or crop it as the images were"
    )
    return evidence.with_intrinsics(factors), [evidence.finding("K", "image-size", wrong, right)]


def check_rotation(evidence: Evidence) -> list[Finding]:
    """A camera pose is a rigid transform."""
    T = np.stack([f.camera.T_world_cam for f in evidence.frames])
    R, field = T[:, :3, :3], "T_world_cam"
    if np.abs(T[:, 3] - [0, 0, 0, 1]).max() > 1e-6:
        transposed = np.abs(T[:, :, 3] - [0, 0, 0, 1]).max() < 1e-6
        right = "transpose it: the translation is its last column" if transposed else "give 4 x 4 rigid transforms"
        return [evidence.finding(field, "transposed", "its last row is not 0 0 0 1", right)]
    if np.abs(R @ R.transpose(0, 2, 1) - np.eye(3)).max() > 1e-3:
        return [evidence.finding(field, "not-rigid", "its rotation is not orthonormal", "give a rotation, no scale")]
    if (np.linalg.det(R) < 0).any():
        right = "negate one camera axis: x right, y down, z forward are expected"
        return [evidence.finding(field, "mirrors", "its rotation mirrors (determinant -1)", right)]
    return []


@dataclass(frozen=True)
class Fit:
    """How well the gripper is where depth says that something is."""

    agreeing: float  # share of the frames
    outside: int  # frames in which it is behind the camera or outside the image
    miss: float  # metres between it and what is seen there, median over the other frames; NaN without any


def fit_of(evidence: Evidence) -> Fit:
    reach, outside = max(2, round(max(evidence.size) * WINDOW)), 0
    misses: list[float] = []
    for frame in evidence.frames:
        seen = [seen_from(frame, point, reach) for point in hand_points(frame)]
        if seen[0] is None:
            outside += 1
        elif (off := np.concatenate([s for s in seen if s is not None])).size:
            misses.append(float(np.abs(off).min()))
    judged = outside + len(misses)
    agreeing = sum(miss < NEAR for miss in misses) / judged if judged else 1.0
    return Fit(agreeing, outside, float(np.median(misses)) if misses else float("nan"))


def hand_points(frame: Frame) -> list[Array]:
    """The gripper; and the fingertips that it is the middle of, if robot_state has them: between open fingers a camera
    sees what is behind them."""
    tips = frame.robot_state[3:6], frame.robot_state[6:9]
    if len(frame.robot_state) != SPEC.state_dim or np.abs(np.mean(tips, axis=0) - frame.gripper).max() > MIDDLE:
        return [frame.gripper]
    return [frame.gripper, *tips]


def seen_from(frame: Frame, point: Array, reach: int) -> Array | None:
    """From a point to what depth shows around its pixel, metres; None where it is outside of the image."""
    height, width = frame.depth.shape
    with np.errstate(all="ignore"):
        uv, z = frame.camera.project(point)
    if not (z > 0 and 0 <= uv[0] <= width - 1 and 0 <= uv[1] <= height - 1):
        return None
    u, v = np.round(uv).astype(int)
    window = frame.depth[max(v - reach, 0) : v + reach + 1, max(u - reach, 0) : u + reach + 1]
    return np.asarray(window[returned(window)] - z, np.float64)


def poses(change: Callable[[Array], Array]) -> Callable[[Evidence], Evidence]:
    """Undoes a mistake of the camera's poses."""
    return lambda evidence: evidence.with_poses([change(f.camera.T_world_cam) for f in evidence.frames])


def inverted(T: Array) -> Array:
    return np.asarray(np.linalg.inv(T), np.float64)


def composed(R: Array, position: Array) -> Array:
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = R, position
    return T


def in_world(evidence: Evidence, axes: Array) -> Evidence:
    """The gripper, if it was given in the camera's frame."""
    points = np.column_stack([evidence.gripper, np.ones(len(evidence.frames))])
    T = [f.camera.T_world_cam @ axes for f in evidence.frames]
    return evidence.with_gripper(np.stack([(pose @ p)[:3] for pose, p in zip(T, points, strict=True)]))


def fingertips(evidence: Evidence) -> Evidence:
    """The gripper as the robot state has it."""
    state = np.stack([f.robot_state for f in evidence.frames])
    return evidence.with_gripper((state[:, 3:6] + state[:, 6:9]) / 2) if state.shape[1] == 9 else evidence


@dataclass(frozen=True)
class Mistake:
    """A usual one, and how it is undone."""

    field: str
    fault: str
    wrong: str
    right: str
    undo: Callable[[Evidence], Evidence]


CAMERA, PICTURES = "T_world_cam", "rgb, depth, mask"
OPENCV = "OpenCV's axes are expected (x right, y down, z forward)"
# fmt: off
MISTAKES = (
    Mistake(CAMERA, "inverted", "it maps world to camera, as T_cam_world does",
            "invert it: T_world_cam maps camera to world, its last column is the camera's position",
            poses(inverted)),
    Mistake(CAMERA, "opengl", "its camera axes are OpenGL's (y up, z backwards)",
            f"negate its second and third column: {OPENCV}",
            poses(lambda T: T @ OPENGL)),
    Mistake(CAMERA, "inverted-opengl", "it maps world to camera, and its camera axes are OpenGL's",
            "invert it, then negate the second and third column",
            poses(lambda T: inverted(T) @ OPENGL)),
    Mistake(CAMERA, "rotation-transposed", "its rotation is transposed (world to camera), its position is not",
            "transpose the 3 x 3 rotation",
            poses(lambda T: composed(T[:3, :3].T, T[:3, 3]))),
    Mistake(CAMERA, "millimetres", "its position is in millimetres",
            "metres are expected: divide the position by 1000",
            poses(lambda T: composed(T[:3, :3], T[:3, 3] / 1000))),
    Mistake(PICTURES, "upside-down", "the images are upside down",
            "reverse their rows: row 0 is the top (OpenGL renderers begin at the bottom)",
            lambda e: e.with_images(slice(None, None, -1), slice(None))),
    Mistake(PICTURES, "mirrored", "the images are mirrored, left to right",
            "reverse their columns",
            lambda e: e.with_images(slice(None), slice(None, None, -1))),
    Mistake("gripper", "millimetres", "it is in millimetres",
            "metres are expected: divide by 1000",
            lambda e: e.with_gripper(e.gripper / 1000)),
    Mistake("gripper", "camera-frame", "it is in the camera's frame",
            "the world's frame is expected: apply T_world_cam",
            lambda e: in_world(e, np.eye(4))),
    Mistake("gripper", "camera-frame", "it is in the camera's frame, with OpenGL's axes",
            "the world's frame is expected",
            lambda e: in_world(e, OPENGL)),
    Mistake("gripper", "not-the-fingertips",
            "it is not the midpoint of the fingertips in robot_state, which are where the camera sees the hand",
            "give the midpoint of the fingertips; metres, world",
            fingertips),
)
# fmt: on


def check_hand(evidence: Evidence) -> tuple[Evidence, list[Finding]]:
    """Is the gripper where the camera sees something? If not: which mistake, undone, puts it there?"""
    given, flat, count = fit_of(evidence), level(evidence), len(evidence.frames)
    fits = [(fit_of(mended := m.undo(evidence)).agreeing, number, m, mended) for number, m in enumerate(MISTAKES)]
    # Undoing what was no mistake would tilt the table, if one is seen.
    plausible = [fit for fit in fits if fit[2].field == "gripper" or level(fit[3]) >= STEADY * flat]
    share, _, mistake, mended = max(
        plausible, key=lambda fit: (fit[0], -fit[1]), default=(0.0, 0, MISTAKES[0], evidence)
    )
    better = share >= max(given.agreeing + BETTER, 0.9) or (share >= 0.9 and level(mended) >= LEVEL > 1.5 * flat)
    if given.agreeing >= DOUBTED and not better:
        return evidence, []
    off = f"the gripper is outside the image in {given.outside} of {count} frames looked at"
    if given.outside < count / 2:
        off = f"where the gripper projects to, depth is off by {100 * given.miss:.0f} cm (median)"
    if share >= BELIEVED:
        proof = f"{off}; undone, it is on the hand in {round(share * count)}"
        return mended, [evidence.finding(mistake.field, mistake.fault, f"{mistake.wrong} ({proof})", mistake.right)]
    if flat >= LEVEL:
        right = "give the midpoint of the fingertips in metres, in the world that T_world_cam maps to"
        wrong = f"it does not project onto the hand: {off}, while the camera sees a level table"
        return evidence, [evidence.finding("gripper", "off-hand", wrong, right)]
    right = "no usual mistake explains it: calibrate anew (camera to world, OpenCV axes, metres, z up)"
    return evidence, [evidence.finding("T_world_cam", "unknown", f"{off}, and no surface in view is level", right)]


def level(evidence: Evidence) -> float:
    """Largest share of lifted points in one horizontal slab of 2 cm."""
    heights = []
    for frame in evidence.frames[:: max(1, len(evidence.frames) // 4)]:
        v, u = np.nonzero(returned(frame.depth))
        heights.append(frame.camera.lift(np.stack([u, v], axis=-1), frame.depth[v, u])[:, 2])
    z = np.concatenate(heights)
    low, high = np.percentile(z, [1, 99])
    counts, _ = np.histogram(z, bins=np.arange(low, max(high, low + 0.01) + 0.02, 0.01))
    return float((counts + np.append(counts[1:], 0)).max() / len(z))
