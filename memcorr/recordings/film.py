"""Depth and video as LeRobot stores them: 12-bit codes in HEVC, or 16-bit millimetres.

A pixel without return becomes the shortest depth that can be coded; here it is put back to 0.
"""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

# A file that is a list of other files, or of addresses, is no video.
ONLY_VIDEO = ("-protocol_whitelist", "file", "-format_whitelist", "mov,mp4,matroska,webm,avi")
CLOSEST = 0.02  # metres; no depth camera sees this near, so a video's depth below it is its code for no return


def metres(depth: NDArray) -> NDArray[np.float32]:
    """16-bit millimetres."""
    return (depth.astype(np.float32) / 1000).astype(np.float32)


def dequantised(codes: NDArray[np.uint16], info: dict[str, Any]) -> NDArray[np.float32]:
    """LeRobot's 12-bit codes of depth (logarithmic, unless `info` differs) to metres; the nearest are no returns."""
    said = {
        name: info.get(f"video.{name}", usual)
        for name, usual in (("depth_min", 0.01), ("depth_max", 10.0), ("shift", 3.5), ("use_log", True))
    }
    low, high, shift = (float(said[name]) for name in ("depth_min", "depth_max", "shift"))
    share = codes.astype(np.float64) / 4095
    if said["use_log"]:
        depth = np.exp(np.log(low + shift) + share * np.log((high + shift) / (low + shift))) - shift
    else:
        depth = low + share * (high - low)
    return np.where(depth < max(CLOSEST, low * 1.05), 0, depth).astype(np.float32)


def frame_size(path: Path) -> tuple[int, int]:
    """Height and width, as ffmpeg would give them."""
    from imageio_ffmpeg import read_frames

    frames = read_frames(path, input_params=list(ONLY_VIDEO))
    try:
        width, height = next(frames)["size"]
    except (OSError, RuntimeError, KeyError):
        raise UserError(f"{path} is damaged, or no video: copy it again") from None
    finally:
        frames.close()
    return height, width


class Film:
    """A video that is read forwards, through the ffmpeg that comes with imageio-ffmpeg."""

    def __init__(self, path: Path, height: int, width: int, depth: bool) -> None:
        if not path.exists():
            raise UserError(f"{path} is missing: copy the dataset's videos too")
        if (found := frame_size(path)) != (height, width):
            raise UserError(f"{path} has frames of {found[1]} x {found[0]} pixels; {width} x {height} was declared")
        self.path, self.depth, self.shape = path, depth, (height, width) if depth else (height, width, 3)
        self._position, self._process = 0, self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        from imageio_ffmpeg import get_ffmpeg_exe

        code = "gray12le" if self.depth else "rgb24"
        command = [get_ffmpeg_exe(), "-v", "error", *ONLY_VIDEO, "-i", str(self.path), "-fps_mode", "passthrough"]
        command += ["-f", "rawvideo", "-pix_fmt", code, "-"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    def frames(self, first: int, count: int) -> NDArray:
        if first < self._position:
            self.close()
            self._position, self._process = 0, self._start()
        while self._position < first:
            self._read()
        return np.stack([self._read() for _ in range(count)])

    def _read(self) -> NDArray:
        assert self._process.stdout is not None
        dtype = np.dtype("<u2" if self.depth else "u1")
        size = math.prod(self.shape) * dtype.itemsize
        content = self._process.stdout.read(size)
        if len(content) != size:
            raise UserError(f"{self.path} ends after {self._position} frames, or is damaged: copy it again")
        self._position += 1
        return np.frombuffer(content, dtype).reshape(self.shape)

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.terminate()
        self._process.wait()
