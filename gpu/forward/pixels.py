"""Resized pictures as they wait (bytes) -> what a vision tower takes (float32).

Who calls it: `gpu.forward.clip` and `gpu.forward.qwen2_vl`, on the device.
What must stay true: pictures wait as uint8, a quarter of the memory of floats and exact, because PIL
resizes bytes to bytes; the numbers are those of transformers' processors:
``(pixel * rescale_factor - mean) / std`` per channel, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

# transformers' OPENAI_CLIP_MEAN and OPENAI_CLIP_STD, the defaults of both processors.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class Pixels:
    """preprocessing: preprocessor_config.json."""

    def __init__(self, preprocessing: Mapping[str, Any], device: torch.device) -> None:
        rescale = preprocessing.get("do_rescale", True)
        self._factor = float(preprocessing.get("rescale_factor", 1 / 255)) if rescale else 1.0
        mean, std = (0.0,) * 3, (1.0,) * 3
        if preprocessing.get("do_normalize", True):
            mean = tuple(preprocessing.get("image_mean") or _MEAN)
            std = tuple(preprocessing.get("image_std") or _STD)
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=device).view(3, 1, 1)
            for values in (mean, std)
        )
        self._device = device

    def __call__(self, pixels: np.ndarray) -> torch.Tensor:
        """[..., 3, height, width] uint8, host -> the same shape, float32, on the device."""
        assert pixels.dtype == np.uint8 and pixels.shape[-3] == 3, (pixels.dtype, pixels.shape)
        raw = torch.from_numpy(pixels).to(self._device).float()
        return (raw * self._factor - self._mean) / self._std
