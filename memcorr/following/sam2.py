"""`sam2`: masks by Segment Anything 2 through transformers, for who has its weights. Annotation, not control.

    memcorr data mask STORE --segmenter sam2 --weights facebook/sam2.1-hiera-tiny --first-masks FOLDER

Colours are scaled here, as its own video processor does, which would need torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from ..errors import UserError
from ..frames import Frame

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what its image encoder was trained with
USUAL = "facebook/sam2.1-hiera-tiny"
OBJECT = 1  # any number: one object is followed


class Sam2Segmenter:
    name = "sam2"

    def __init__(self, weights: str = USUAL, model: Any = None) -> None:
        """`weights` is a folder or a name on the Hub; `model` a Sam2VideoModel that is there already."""
        try:
            from transformers import Sam2VideoModel
            from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoInferenceSession
        except ImportError:
            raise UserError("sam2 needs transformers 4.56 or newer: pip install 'memcorr[sam2]'") from None
        self.session = Sam2VideoInferenceSession
        if model is None:
            try:
                model = Sam2VideoModel.from_pretrained(weights)
            except (OSError, ValueError) as problem:
                reason = str(problem).splitlines()[0]
                raise UserError(
                    f"--weights {weights}: no SAM 2 there ({reason}); give a folder with its config.json and "
                    f"model.safetensors, or a name such as {USUAL} where the Hub can be reached"
                ) from None
        self.model = model.eval()

    @property
    def size(self) -> tuple[int, int]:
        """What the image encoder takes: height and width."""
        found = self.model.config.vision_config.backbone_config.image_size
        return (found, found) if isinstance(found, int) else (found[0], found[1])

    @torch.inference_mode()
    def segment(self, frames: Sequence[Frame], first: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """One frame after the other, as they come: the recording need not fit into memory at this size."""
        height, width = first.shape
        session = self._opened(height, width)
        drawn = torch.from_numpy(first.astype(np.float32))[None, None]
        masks = []
        for t, frame in enumerate(frames):
            pixels = self._pixels(frame)
            if t == 0:
                index = session.add_new_frame(pixels)
                session.add_mask_inputs(session.obj_id_to_idx(OBJECT), index, self._resized(drawn))
                session.obj_with_new_inputs = [OBJECT]
                self.model(inference_session=session, frame_idx=index)
                masks.append(first)
                continue
            logits = self.model(inference_session=session, frame=pixels).pred_masks
            masks.append(_whole(logits, height, width))
        return np.stack(masks)

    @torch.inference_mode()
    def clicked(
        self, frames: Sequence[Frame], clicks: Sequence[tuple[int, int]], away: Sequence[tuple[int, int]] = ()
    ) -> NDArray[np.bool_]:
        """The object's mask on the first frame, from points on it and beside it."""
        height, width = frames[0].depth.shape
        session = self._opened(height, width)
        index = session.add_new_frame(self._pixels(frames[0]))
        scale = torch.tensor([self.size[1] / width, self.size[0] / height])
        points = torch.tensor([*clicks, *away], dtype=torch.float32) * scale
        labels = torch.tensor([1] * len(clicks) + [0] * len(away), dtype=torch.int32)
        prompt = {"point_coords": points[None, None], "point_labels": labels[None, None]}
        session.add_point_inputs(session.obj_id_to_idx(OBJECT), index, prompt)
        session.obj_with_new_inputs = [OBJECT]
        return _whole(self.model(inference_session=session, frame_idx=index).pred_masks, height, width)

    def _opened(self, height: int, width: int) -> Any:
        # Its own default is the word "float32", which torch does not take.
        return self.session(video=None, video_height=height, video_width=width, dtype=torch.float32)

    def _pixels(self, frame: Frame) -> torch.Tensor:
        """(1, 3, H, W) of its own size, standardised."""
        rgb = torch.from_numpy(np.ascontiguousarray(frame.rgb)).permute(2, 0, 1)[None].float() / 255
        rgb = F.interpolate(rgb, self.size, mode="bilinear", align_corners=False, antialias=True)
        mean, std = (torch.tensor(v)[None, :, None, None] for v in (MEAN, STD))
        return (rgb - mean) / std

    def _resized(self, mask: torch.Tensor) -> torch.Tensor:
        return (F.interpolate(mask, self.size, mode="bilinear", align_corners=False, antialias=True) >= 0.5).float()


def _whole(logits: torch.Tensor, height: int, width: int) -> NDArray[np.bool_]:
    whole = F.interpolate(logits.float(), (height, width), mode="bilinear", align_corners=False)
    return whole[0, 0].numpy() > 0
