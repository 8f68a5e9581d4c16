"""Between host and device without waiting: pinned buffers on the way in, one copy on the way out.
Has never run on a GPU: docs/attention.md says what is unknown.

Who calls it: `gpu.forward.packed` and `gpu.pooler` (ids, positions, row numbers), `gpu.attention.base` (prefix
sums), `gpu.answer.outputs` and `gpu.answer.heads` (results).
What must stay true: on the CPU nothing is pinned, copied twice or delayed; a pinned buffer is not
written again before the copy out of it has finished; what is handed out owns its memory, so nothing that
a later forward does changes it; buffers belong to one thread, as the stream they feed does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu.batch import Float32

DEPTH = 2  # buffers per thread: one is filled while the other's copy runs
SMALLEST = 4096  # values of a new buffer; from there on it doubles
MAX_KEPT_BYTES = 64 * 2**20  # results above this get a pinned buffer of their own, not kept


class Event(Protocol):
    """`torch.cuda.Event`, as far as it is used."""

    def synchronize(self) -> None:
        """Wait until the stream has passed the mark."""
        ...


class Calls(Protocol):
    """The few torch calls that need a CUDA device; tests put a recording double here."""

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """[size] page-locked host memory."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy in the current stream; do not wait."""
        ...

    def event(self) -> Event: ...

    def record(self, event: Event, device: torch.device) -> None:
        """Mark this place in the device's current stream."""
        ...


class CudaCalls:
    """torch's own. Copies and marks go to the current stream of the device at hand."""

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        event: Event = torch.cuda.Event()
        return event

    def record(self, event: Event, device: torch.device) -> None:
        # Without a stream it would be that of the current device, which another model may own.
        assert isinstance(event, torch.cuda.Event)
        event.record(torch.cuda.current_stream(device))


class _Slot:
    """A pinned buffer and the event behind the last copy that used it."""

    def __init__(self, calls: Calls, dtype: torch.dtype) -> None:
        self._calls, self._dtype = calls, dtype
        self._buffer: torch.Tensor | None = None
        self._copied: Event | None = None

    def ready(self, size: int) -> torch.Tensor:
        """[size] pinned values that no copy reads or writes any more."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._buffer is None or self._buffer.numel() < size:
            held = SMALLEST if self._buffer is None else self._buffer.numel()
            while held < size:
                held *= 2
            self._buffer = self._calls.pinned(held, self._dtype)
        return self._buffer[:size]

    def used(self, device: torch.device) -> Event:
        """Call it right after the copy was queued."""
        if self._copied is None:
            self._copied = self._calls.event()
        self._calls.record(self._copied, device)
        return self._copied


class InputStaging:
    """A ring of pinned buffers of one dtype, for one thread and one device."""

    def __init__(self, calls: Calls, dtype: torch.dtype) -> None:
        self._calls, self._dtype = calls, dtype
        self._slots = [_Slot(calls, dtype) for _ in range(DEPTH)]
        self._next = 0

    def upload(self, rows: Sequence[npt.NDArray[Any]], target: torch.Tensor) -> torch.Tensor:
        """Rows of one length into `target`, by one copy.

        rows: arrays of [n] integers. target: [len(rows), n] contiguous, of this ring's dtype, on the
        device. Returns `target`, right for whatever is queued in this stream from now on.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % DEPTH
        host = slot.ready(target.numel()).view(target.shape)
        values = host.numpy()
        for place, row in enumerate(rows):
            values[place] = row
        self._calls.copy(target, host)
        slot.used(target.device)
        return target


class _Staging(threading.local):
    """What one thread keeps."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[torch.device, torch.dtype], InputStaging] = {}
        self.results: dict[tuple[Calls, torch.device], _Slot] = {}


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32}
_staging = _Staging()
_cuda = CudaCalls()


def upload(
    rows: Sequence[npt.NDArray[Any]],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
    *,
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Host integers of one length as tensors [n] on the device, one for each row.

    dtype: int64 or int32. into: a [len(rows), n] tensor to write to; the rows of it are returned. On CUDA all rows travel in
    one copy, which is queued and not awaited.
    """
    if device.type != "cuda":
        kind = _NUMPY[dtype]
        made = [torch.from_numpy(row.astype(kind)) for row in rows]
        if into is None:
            return tuple(values.to(device) for values in made)
        return tuple(kept.copy_(values) for kept, values in zip(into, made, strict=True))
    ring = _staging.inputs.get((device, dtype))
    if ring is None:
        ring = _staging.inputs[device, dtype] = InputStaging(_cuda, dtype)
    if into is None:
        into = torch.empty(len(rows), len(rows[0]), dtype=dtype, device=device)
    return ring.upload(rows, into).unbind()


def row_numbers(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    """[len(rows)] int64 on the device, to index with."""
    if device.type != "cuda" or not len(rows):
        return torch.tensor(rows, dtype=torch.int64, device=device)
    return upload([np.asarray(rows, dtype=np.int64)], device)[0]


Ticket = Callable[[], Float32]
"""The array on the host; `CopyOut.finish` must have been called."""


class CopyOut:
    """Float32 results of one forward on their way to the host: one copy, one wait, at the end.

    On the CPU an array is the tensor's own memory, at once. Use one per forward, from one thread.
    """

    def __init__(self, device: torch.device, calls: Calls | None = None) -> None:
        self._device = device
        self._calls = calls if calls is not None else _cuda if device.type == "cuda" else None
        self._parts: list[torch.Tensor] = []
        self._size = 0
        self._host: Float32 | None = None

    def add(self, values: torch.Tensor) -> Ticket:
        """values: float32 on the device, any shape. Returns what gives the array after `finish`."""
        if self._calls is None:
            array: Float32 = values.cpu().numpy()
            return lambda: array
        assert values.dtype == torch.float32, values.dtype
        assert self._host is None, "this forward's results have left"
        shape, start = tuple(values.shape), self._size
        self._parts.append(values.reshape(-1))
        self._size += values.numel()
        end = self._size

        def arrived() -> Float32:
            assert self._host is not None, "finish() comes before the arrays"
            return self._host[start:end].reshape(shape)

        return arrived

    def finish(self) -> None:
        """Copy everything that was added and wait for it."""
        if self._calls is None or self._host is not None:
            return
        if not self._size:
            self._host = np.zeros(0, np.float32)
            return
        flat = self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
        slot = self._slot()
        pinned = slot.ready(self._size)
        self._calls.copy(pinned, flat)
        slot.used(self._device).synchronize()
        # The buffer serves the next forward of this thread, and rows may be kept for long.
        self._host = pinned.numpy().copy()
        self._parts.clear()

    def _slot(self) -> _Slot:
        assert self._calls is not None
        if self._size * 4 > MAX_KEPT_BYTES:
            return _Slot(self._calls, torch.float32)
        key = (self._calls, self._device)
        if key not in _staging.results:
            _staging.results[key] = _Slot(self._calls, torch.float32)
        return _staging.results[key]
