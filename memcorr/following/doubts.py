"""Signs that a live frame, its calibration or its reference cannot be right: what a robot can check before it moves.

    reason = doubt(frame, Witness.of(recorded), relation)   # "" where nothing speaks against it

`recorded` is the reference's frame that was matched. The hand tells most: its position is known from the robot, and the
camera must see something there, as it did in the recording. What no frame can tell (a reference of the wrong task, a
wrong gripper) is not looked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from ..frames import Frame
from ..spec import SPEC, Array

if TYPE_CHECKING:
    from .step import Relation

QUANTILES = np.linspace(0.02, 0.98, 25)
OF_OBJECT = np.linspace(0.1, 0.9, 9)
CROSS = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
MIDDLE = 0.005  # metres of the gripper from the middle of the fingertips, at most
FEW = 12  # pixels of an object that say nothing of its colours
PATIENCE = 2  # observations in a row that have to look wrong; at the first of an episode one is enough


@dataclass(frozen=True)
class Signs:
    """From where on something counts as wrong."""

    centre: float = 0.2  # of the image size: principal point from the middle of the image
    aspect: float = 1.25  # of the two focal lengths
    flat_m: float = 0.002  # depth that varies less than this over the whole image
    camera_deg: float = 80.0  # between the live camera's axes and the recording's
    hand_m: float = 0.05  # between what is seen around the gripper and what the recording saw there, optical axis
    first_hand_m: tuple[float, ...] = (0.035, 0.035, 0.035, 0.05)  # the same at the first look, of each `hand_points`
    hand_front: tuple[float, float] = (-0.12, 0.05)  # where a hand is seen; elsewhere the recording saw past it
    hand_window: float = 0.04  # of the image size: how far around the gripper's pixel that is
    colours: float = 0.6  # of their difference as they are, that of exchanged red and blue
    tilt_deg: float = 35.0  # of the object against the recording's
    travel_m: float = 0.6  # of the object against the recording's
    height_m: float = 0.06  # of that, upwards or downwards
    confidence: float = 0.25  # mean of the matched points at the first look
    object_colours: float = 32.0  # of 255, mean over the quantiles of the object's, exposed as the recording was
    top_m: float = 0.05  # of the object's top, upwards or downwards

    def shows_hand(self, surface: float) -> bool:
        """Whether it is a hand that was seen there: between open fingers a camera sees what is behind them."""
        return self.hand_front[0] < surface < self.hand_front[1]


SIGNS = Signs()


@dataclass(frozen=True)
class Witness:
    """What of one frame is compared with another one."""

    rotation: Array  # (3, 3) camera axes -> world
    hand: float | None  # `hand_surface` of the gripper
    hands: tuple[float | None, ...]  # of it and of the other points of the hand that robot_state has, at a first look
    colours: Array  # (25, 3) quantiles of red, green and blue
    exposure: Array  # (3,) their means
    object_colours: Array | None  # (9, 3) quantiles, of the object alone; None where too little of it is seen
    top: float | None  # the height that a tenth of what is seen of the object is above, metres, world

    @staticmethod
    def of(frame: Frame, signs: Signs = SIGNS) -> Witness:
        hands = tuple(hand_surface(replace(frame, gripper=p), signs, behind=True) for p in hand_points(frame))
        object_colours, top = object_looks(frame)
        mean = np.asarray(frame.rgb.reshape(-1, 3).mean(axis=0))
        return replace(
            Witness.on_the_way(frame, signs), hands=hands, exposure=mean, object_colours=object_colours, top=top
        )

    @staticmethod
    def on_the_way(frame: Frame, signs: Signs = SIGNS) -> Witness:
        """Without what is compared at a first look alone."""
        rotation = frame.camera.T_world_cam[:3, :3]
        return Witness(rotation, hand_surface(frame, signs), (), colour_quantiles(frame.rgb), np.zeros(3), None, None)


def colour_quantiles(rgb: NDArray[np.uint8]) -> Array:
    """`np.quantile` of every channel, from how often each of the 256 values occurs: nothing has to be sorted."""
    at = QUANTILES * (rgb.shape[0] * rgb.shape[1] - 1)
    low, part = np.floor(at), at % 1
    found = []
    for channel in range(3):
        upto = np.cumsum(np.bincount(rgb[..., channel].ravel(), minlength=256))
        below, above = (np.searchsorted(upto, index, side="right") for index in (low, np.ceil(at)))
        found.append(below + part * (above - below))
    return np.stack(found, axis=1)


def doubt(frame: Frame, recorded: Witness, relation: Relation, signs: Signs = SIGNS) -> str:
    """Why a plan from this frame should not be executed; "" if nothing speaks against it."""
    if relation.matches is not None and relation.matches.valid.sum() < SPEC.min_valid:
        return "too little of the object was seen to use the reference"
    live = Witness.on_the_way(frame, signs)
    return (
        wrong_intrinsics(frame, signs)
        or wrong_pose(live, recorded, signs)
        or wrong_images(frame, live, recorded, signs)
        or wrong_object(relation, signs)
    )


def wrong_intrinsics(frame: Frame, signs: Signs = SIGNS) -> str:
    """Intrinsics of another image size or shape."""
    K, (height, width) = frame.camera.K, frame.depth.shape
    off = max(abs(K[0, 2] / width - 0.5), abs(K[1, 2] / height - 0.5))
    if off > signs.centre:
        return f"camera.K is not of images of {width} x {height} pixels: its principal point is {100 * off:.0f} % off"
    if max(K[0, 0] / K[1, 1], K[1, 1] / K[0, 0]) > signs.aspect:
        return f"camera.K has focal lengths {K[0, 0]:.0f} and {K[1, 1]:.0f}: is it of another image shape?"
    return ""


def wrong_pose(live: Witness, recorded: Witness, signs: Signs = SIGNS) -> str:
    """Extrinsics that do not put the hand where the camera sees it."""
    angle = float(np.degrees(Rotation.from_matrix(live.rotation.T @ recorded.rotation).magnitude()))
    if angle > signs.camera_deg:
        return f"the camera is turned by {angle:.0f} degrees against the recording's: inverted, or another camera's?"
    if recorded.hand is None or live.hand is None or not signs.shows_hand(recorded.hand):
        return ""
    if np.isinf(live.hand):
        return "camera and gripper do not fit: the gripper would be outside of the image; check the extrinsics"
    if abs(gap := live.hand - recorded.hand) > signs.hand_m:
        return f"camera and gripper do not fit: {100 * gap:+.0f} cm; check extrinsics, depth and gripper"
    return ""


def hand_points(frame: Frame) -> list[Array]:
    """The gripper; the fingertips that it is the middle of, and the end effector, where robot_state has them."""
    state = frame.robot_state
    if len(state) != SPEC.state_dim or np.abs((state[3:6] + state[6:9]) / 2 - frame.gripper).max() > MIDDLE:
        return [frame.gripper]
    return [frame.gripper, state[3:6], state[6:9], state[:3]]


def hand_surface(frame: Frame, signs: Signs = SIGNS, behind: bool = False) -> float | None:
    """From the gripper to the front of what is seen around its pixel, metres along the optical axis. The front is the
    hand, wherever it is in the image. Infinite outside of the image; None where the object hides it, or nothing
    returned. With `behind` an object farther away than the gripper does not hide it, but is seen in its place."""
    (uv, z), (height, width) = frame.camera.project(frame.gripper), frame.depth.shape
    reach = max(2, round(signs.hand_window * max(height, width)))
    if z <= 0 or not (0 <= uv[0] < width and 0 <= uv[1] < height):
        return np.inf
    u, v = (int(x) for x in np.round(uv))
    window = slice(max(v - reach, 0), v + reach + 1), slice(max(u - reach, 0), u + reach + 1)
    depth, mask = frame.depth[window], frame.mask[window]
    hidden = mask & (depth < z + signs.hand_m) if behind else mask
    seen = depth[np.isfinite(depth) & (depth > 0) & ~hidden]
    return float(np.quantile(seen, 0.1) - z) if seen.size > depth.size / 2 else None


def wrong_images(frame: Frame, live: Witness, recorded: Witness, signs: Signs = SIGNS) -> str:
    """Depth without content; red and blue exchanged."""
    seen = frame.depth[np.isfinite(frame.depth) & (frame.depth > 0)]
    if not seen.size:
        return "depth holds nothing"
    if np.ptp(seen) < signs.flat_m:
        return f"depth is {seen[0]:.3g} m everywhere"
    as_is, exchanged = (np.abs(order - recorded.colours).mean() + 1 for order in (live.colours, live.colours[:, ::-1]))
    return "red and blue look exchanged: frames are RGB" if exchanged < signs.colours * as_is else ""


def another_object(confidence: float, signs: Signs = SIGNS) -> str:
    """Matched points that hardly match. Asked at the first look alone: later the hand may hide what tells."""
    if confidence >= signs.confidence:
        return ""
    return f"hardly anything agrees with the recording (confidence {confidence:.2f}): is it another object?"


def object_looks(frame: Frame) -> tuple[Array | None, float | None]:
    """Colours and top of the object, without the outline of its mask, which shows other things."""
    inner = cv2.erode(frame.mask.astype(np.uint8), CROSS) > 0
    for mask in (inner, frame.mask):
        v, u = np.nonzero(mask & np.isfinite(frame.depth) & (frame.depth > 0))
        if len(v) >= FEW:
            heights = frame.camera.lift(np.stack([u, v], axis=-1), frame.depth[v, u])[:, 2]
            return np.quantile(frame.rgb[v, u], OF_OBJECT, axis=0), float(np.quantile(heights, 0.9))
    return None, None


def at_first_look(frame: Frame, recorded: Witness, signs: Signs = SIGNS) -> str:
    """What is asked at the first look of an episode alone, where hand and object look as they did in the recording: a
    hand that is not where the camera has it, an object of other colours or of another height."""
    live = Witness.of(frame, signs)
    for here, there, most in zip(live.hands, recorded.hands, signs.first_hand_m, strict=False):
        if here is not None and there is not None and signs.shows_hand(there) and abs(here - there) > most:
            return f"camera and gripper do not fit: {in_cm(here - there)}; check extrinsics, depth and gripper"
    if live.object_colours is None or live.top is None or recorded.object_colours is None or recorded.top is None:
        return ""
    exposed = live.object_colours * recorded.exposure / np.maximum(live.exposure, 1.0)
    if (off := float(np.abs(exposed - recorded.object_colours).mean())) > signs.object_colours:
        return f"the object's colours are {off:.0f} of 255 away from the recording's: is it another object?"
    if abs(higher := live.top - recorded.top) > signs.top_m:
        return f"the object's top is {in_cm(higher)} from where it was recorded: is it another object?"
    return ""


def in_cm(metres: float) -> str:
    return "outside of the image" if np.isinf(metres) else f"{100 * metres:+.0f} cm"


def wrong_object(relation: Relation, signs: Signs = SIGNS) -> str:
    """Matched points that no object on a table could have moved like."""
    if relation.matches is None or relation.motion is None:
        return ""
    matches, motion = relation.matches, relation.motion
    tilt = float(np.degrees(np.arccos(np.clip(motion[2, 2], -1.0, 1.0))))
    if tilt > signs.tilt_deg:
        return f"the object would be tilted by {tilt:.0f} degrees: check the camera's pose"
    travel = (matches.p_live - matches.p_ref)[matches.valid].mean(axis=0)
    far, up = float(np.linalg.norm(travel)), float(travel[2])
    if far > signs.travel_m or abs(up) > signs.height_m:
        where = (
            f"{100 * abs(up):.0f} cm {'above' if up > 0 else 'below'}" if far < signs.travel_m else f"{far:.1f} m from"
        )
        return f"the object would be {where} where it was recorded: check the camera's pose"
    return ""
