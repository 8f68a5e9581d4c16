"""Memory of weights: off the mapped file and into our own, page by page.

Who calls it: `gpu.model_runner` after the linears are packed, on the CPU.
What must stay true: afterwards no tensor of the model reads the weights file any more (a file that is
replaced under a running service would change answers, a truncated one would kill the process), and
the load never holds the file's pages and the copies at once: a page is given back once it is copied.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import torch
from torch import nn

from gpu.device.heap import trim_heap

_TRIM_EVERY = (
    64 << 20
)  # bytes copied: copies leave freed memory behind, which would add to the peak
_MADV_DONTNEED = 4  # Linux: drop the pages; a clean file page would be read again if touched


class FilePages:
    """The file mappings of this process that hold weights, as they are now."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._copied = 0
        self._madvise: ctypes._NamedFuncPointer | None = None
        maps = Path("/proc/self/maps")
        if not sys.platform.startswith("linux") or not maps.is_file():
            return
        for line in maps.read_text(errors="replace").splitlines():
            span, _, name = line.partition(" ")
            if name.endswith((".safetensors", ".safetensors (deleted)")):
                start, end = span.split("-")
                self._ranges.append((int(start, 16), int(end, 16)))
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def release(self, tensor: torch.Tensor) -> None:
        """Give back the whole pages of a tensor that was copied. Memory that is not a file's is left."""
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        self._copied += end - start
        if self._copied > _TRIM_EVERY:
            self._copied = 0
            trim_heap()
        if self._madvise is None or not any(a <= start and end <= b for a, b in self._ranges):
            return
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._madvise(start, end - start, _MADV_DONTNEED)


@torch.inference_mode()
def own_memory(model: nn.Module, pages: FilePages) -> None:
    """Copy every parameter and buffer of a CPU model into memory of our own, one at a time."""
    for tensor in (*model.parameters(), *model.buffers()):
        old = tensor.data
        if old.device.type != "cpu":
            continue
        tensor.data = old.clone()
        pages.release(old)
