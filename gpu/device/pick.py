"""Where, in what and with how many threads a model computes.

Who calls it: the runners at load; `gpu.load` for executor threads; `pipeline.model_pool`, to count them.
"""

from __future__ import annotations

import torch

from gpu.faults import ModelLoadError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


def pick_device(device: str) -> torch.device:
    """ "auto" is CUDA when there is one. Raises `ModelLoadError` for a device that is not there."""
    cuda = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda:0" if cuda else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ModelLoadError(
            f"device = {device!r} is no device name; use auto, cpu, cuda:0"
        ) from error
    if chosen.type == "cuda" and (not cuda or (chosen.index or 0) >= torch.cuda.device_count()):
        raise ModelLoadError(f"device = {device!r}: no such CUDA device here")
    if chosen.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"device = {device!r}: only cpu and cuda are supported")
    return torch.device("cuda", chosen.index or 0) if chosen.type == "cuda" else chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on the CPU and bfloat16 on CUDA."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype = {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def init_executor_thread() -> None:
    """One intra-op thread for the calling executor thread: several of them share the cores, and two
    threads spinning inside one OpenMP region collapse as soon as anything else wants a core."""
    torch.set_num_threads(1)
