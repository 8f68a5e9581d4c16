"""CUDA graphs and pinned memory, played on the CPU: what is recorded runs again on the same memory.

Who calls it: tests of `gpu.forward.cuda_graphs` and `gpu.device.staging`, and the dry run of `benchmarks.gpu_check`.
What must stay true: like a CUDA graph, a replay runs the recorded operations on the recorded tensors
and no Python of the model; a value that Python reads from a tensor while recording is an error; a copy
that was queued reads its source only when somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ReadWhileRecording(RuntimeError):
    """What CUDA says about a synchronisation inside a capture."""


class _Piece(TorchDispatchMode):
    """Runs and keeps every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            raise ReadWhileRecording("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        view = not func._schema.is_mutable and all(_memory(t) in given for t in outs)
        if not view:
            self.steps.append((func, args, kwargs, outs))
        return out

    def replay(self) -> None:
        for func, args, kwargs, outs in self.steps:
            again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            for old, new in zip(outs, again, strict=True):
                if _memory(old) != _memory(new):
                    old.copy_(new)


def _memory(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory; prepacked weights have none that could be asked for."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


class CpuRecorder:
    """A `gpu.forward.cuda_graphs.Recorder`. warm_ups, pieces: how many there were."""

    def __init__(self, device: Any = None) -> None:
        self.warm_ups = 0
        self.recording = False

    def warm_up(self, run: Callable[[], object]) -> None:
        self.warm_ups += 1
        run()

    def record(
        self, run: Callable[[Callable[[], None]], torch.Tensor]
    ) -> tuple[list[Callable[[], None]], torch.Tensor]:
        pieces: list[_Piece] = []

        def begin() -> None:
            pieces.append(_Piece())
            pieces[-1].__enter__()

        def cut() -> None:
            pieces[-1].__exit__(None, None, None)
            begin()

        self.recording = True
        begin()
        try:
            out = run(cut)
        finally:
            pieces[-1].__exit__(None, None, None)
            self.recording = False
        return [piece.replay for piece in pieces], out


class LateCopies:
    """`gpu.device.staging.Calls` whose copies happen when an event behind them is waited for, in order.

    log: what was asked of it.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        self.log.append(f"pinned {size}")
        return torch.zeros(size, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append(f"copy {source.numel()}")
        self._queue.append((target, source))

    def event(self) -> _Mark:
        return _Mark(self)

    def record(self, event: Any, device: torch.device) -> None:
        assert isinstance(event, _Mark) and isinstance(device, torch.device)
        self.log.append("record")
        event.behind = len(self._queue) + event.passed(self)

    def run_until(self, position: int) -> None:
        """Copies up to that many since the beginning."""
        while self._done < position and self._queue:
            target, source = self._queue.pop(0)
            target.copy_(source)
            self._done += 1

    _done = 0


class _Mark:
    """An event; waiting for it makes the copies before it happen."""

    def __init__(self, calls: LateCopies) -> None:
        self._calls = calls
        self.behind = 0

    @staticmethod
    def passed(calls: LateCopies) -> int:
        return calls._done

    def synchronize(self) -> None:
        self._calls.log.append("wait")
        self._calls.run_until(self.behind)
