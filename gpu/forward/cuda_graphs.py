"""Small packs as CUDA graphs: what lies between two attention calls is recorded once and replayed.
Has never run on a GPU: docs/attention.md says what is unknown.

Who calls it: `gpu.model_runner` at load, for `cuda_graphs = "auto"`; the forward it gets serves packs.
What must stay true: attention is never recorded (its plan follows from the pack); a pack is filled up to
its bucket with short items of its own, which attention keeps apart and whose rows are dropped; whatever
cannot be recorded, or gives other numbers than without graphs, runs without them and a note says so;
graphs share memory, so one pack runs at a time and its rows are copied out before the next.

How it is cut: the model's own forward runs once per bucket while the stream records. When it calls
attention, the recording is ended, and another is begun when attention returns: L layers give L + 1
pieces, without a compiler and with the kernels of the ordinary forward. Between pieces q, k and v lie in
buffers that all layers and buckets share, and attention writes where the next piece reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from gpu.attention import LayerKind, PackedContext, PackLayout, packed_context
from gpu.attention.interface import entered
from gpu.batch import Int32, PackedBatch
from gpu.device.staging import upload
from gpu.forward.packed import Forward, PackedForward
from gpu.forward.rope import RopePackedForward
from gpu.forward.selfcheck import compare
from gpu.forward.token_buckets import SMALLEST_BUCKET, bucket_of, buckets, filled, probe


class GraphRefused(RuntimeError):
    """The forward cannot be recorded; the message says why."""


Piece = Callable[[], None]
"""Queues the recorded work again."""


class Recorder(Protocol):
    """Records work into pieces; see `CudaRecorder`, and tests for one that works on the CPU."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once unrecorded, where recordings will be made, so that libraries set themselves up."""
        ...

    def record(
        self, run: Callable[[Callable[[], None]], torch.Tensor]
    ) -> tuple[list[Piece], torch.Tensor]:
        """Record `run(cut)`; each `cut()` ends a piece and begins the next. With the result of `run`.

        Raises what `run` or the recording raised; nothing is being recorded then.
        """
        ...


class CudaRecorder:
    """`torch.cuda.CUDAGraph` on a stream of its own, with one memory pool for all pieces."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], object]) -> None:
        with self._on_stream():
            run()

    def record(
        self, run: Callable[[Callable[[], None]], torch.Tensor]
    ) -> tuple[list[Piece], torch.Tensor]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # Other threads may serve other models meanwhile.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        with self._on_stream():
            begin()
            try:
                out = run(cut)
            except BaseException:
                _abandon(graphs[-1])
                raise
            graphs[-1].capture_end()
        return [graph.replay for graph in graphs], out

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                yield
            torch.cuda.synchronize()


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """End a recording whose work failed; that it cannot be ended well is known already."""
    try:
        graph.capture_end()
    except RuntimeError:
        return
    graph.reset()


class _Buffers:
    """q, k, v and the result of attention, shared by every layer and bucket of these shapes."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._tokens, self._device = tokens, device
        self._held: dict[tuple[int, int, int, torch.dtype], tuple[torch.Tensor, ...]] = {}

    def of(self, kind: LayerKind, dtype: torch.dtype, tokens: int) -> tuple[torch.Tensor, ...]:
        """q, k, v, out: [tokens, heads, head_dim] each, contiguous."""
        key = (kind.n_heads, kind.n_kv_heads, kind.head_dim, dtype)
        if key not in self._held:
            heads = (kind.n_heads, kind.n_kv_heads, kind.n_kv_heads, kind.n_heads)
            self._held[key] = tuple(
                torch.empty(self._tokens, n, kind.head_dim, dtype=dtype, device=self._device)
                for n in heads
            )
        return tuple(tensor[:tokens] for tensor in self._held[key])


def _head_major(tensor: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim] -> [1, heads, T, head_dim], as attention modules hand it over."""
    return tensor.transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call of the recorded forward, between two pieces."""

    kind: LayerKind
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    def run(self, context: PackedContext) -> None:
        heads = (_head_major(self.q), _head_major(self.k), _head_major(self.v))
        self.out.copy_(context.attend(self.kind, *heads, None)[0])


class _NoLayout:
    """The pack's shape while recording: there is none, and who asks for it cannot be replayed."""

    multi_item = keys = None

    def __getattr__(self, name: str) -> Any:
        raise GraphRefused(f"the model's own code reads the pack ({name})")


class _Recording(PackedContext):
    """Attention while recording: q, k, v into the buffers, and a cut where attention will run."""

    def __init__(self, tokens: int, buffers: _Buffers, cut: Callable[[], None]) -> None:
        super().__init__(PackLayout.of([0, tokens], "cpu"), ())
        self.layout: Any = _NoLayout()
        self._tokens, self._buffers, self._cut = tokens, buffers, cut
        self.recorded: list[_Call] = []

    def attend(
        self,
        kind: LayerKind,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        if bias is not None:
            raise GraphRefused("its attention takes a bias that follows from the pack")
        if q.shape[0] != 1 or q.shape[2] != self._tokens or k.shape[2] != self._tokens:
            raise GraphRefused("a module does not attend over the packed sequence")
        call = _Call(kind, *self._buffers.of(kind, q.dtype, self._tokens))
        for target, source in ((call.q, q), (call.k, k), (call.v, v)):
            target.copy_(source[0].transpose(0, 1))
        self._cut()
        self.recorded.append(call)
        return call.out.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class _Graph:
    """The forward of one bucket. inputs: [n_arguments, bucket] int64; hidden: [bucket, hidden_size]."""

    names: tuple[str, ...]
    inputs: torch.Tensor
    pieces: tuple[Piece, ...]
    calls: tuple[_Call, ...]
    hidden: torch.Tensor


class GraphedForward(PackedForward):
    """The packed forward with graphs for packs up to the largest bucket; larger ones run as ever.

    `run` never uses graphs. Replays happen in the calling thread's current stream, one at a time;
    executor threads all use the device's default stream, so that buffers are never written too early.
    Call it in inference mode, in which its buffers were made.
    longest: tokens an item of this model may have.
    """

    def __init__(self, packed: PackedForward, graphs: dict[int, _Graph], longest: int) -> None:
        super().__init__(
            packed.base,
            device=packed.device,
            position_offset=packed.position_offset,
            token_types=packed.token_types,
            backends=packed.backends,
        )
        self.sizes = tuple(sorted(graphs))
        self._graphs, self._longest = graphs, longest
        self._lock = threading.Lock()

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        size = bucket_of(batch.n_tokens, self.sizes)
        if size is None or any(item.attended is not None for item in batch.items):
            return super().__call__(batch)
        whole = filled(batch, size, self._longest)
        graph = self._graphs[size]
        with self._lock:
            upload(_arguments(self, whole, graph.names), self.device, into=graph.inputs)
            with packed_context(whole, self.device, self.backends) as context:
                for piece, call in zip(graph.pieces, graph.calls, strict=False):
                    piece()
                    call.run(context)
            graph.pieces[-1]()
            # The next pack's graph writes to the same memory.
            return graph.hidden[: batch.n_tokens].clone()

    def n_pieces(self, size: int) -> int:
        """Pieces of a bucket's graph."""
        return len(self._graphs[size].pieces)


def record(
    packed: PackedForward, recorder: Recorder, sizes: Sequence[int], longest: int
) -> GraphedForward:
    """Record every bucket, the largest first, so that the others find their memory in its pool.

    Raises `GraphRefused`, or what the forward or the recording raised.
    """
    buffers = _Buffers(max(sizes), packed.device)
    graphs = {
        size: _record(packed, recorder, buffers, probe(size, 1, longest))
        for size in sorted(sizes, reverse=True)
    }
    return GraphedForward(packed, graphs, longest)


@torch.inference_mode()
def _record(
    packed: PackedForward, recorder: Recorder, buffers: _Buffers, batch: PackedBatch
) -> _Graph:
    names = tuple(packed.inputs(batch))
    if packed.token_types:
        names = (*names, _TYPES)  # always given: zeros are what the model takes for none
    inputs = torch.empty(len(names), batch.n_tokens, dtype=torch.int64, device=packed.device)
    rows = upload(_arguments(packed, batch, names), packed.device, into=inputs)
    given = dict(zip(names, rows, strict=True))

    def warm() -> torch.Tensor:
        with packed_context(batch, packed.device, packed.backends) as context:
            out = packed.compute(given)
        for kind, dtype in context.plans:
            buffers.of(kind, dtype, 0)  # made here, outside of any recording
        return out

    calls: list[_Call] = []

    def recorded(cut: Callable[[], None]) -> torch.Tensor:
        context = _Recording(batch.n_tokens, buffers, cut)
        with entered(context):
            hidden = packed.compute(given)
        if context.masks_seen:
            raise GraphRefused("the model builds a mask of its own")
        calls.extend(context.recorded)
        return hidden

    recorder.warm_up(warm)
    pieces, hidden = recorder.record(recorded)
    if not calls or len(pieces) != len(calls) + 1:
        raise GraphRefused(f"{len(pieces)} pieces around {len(calls)} attention calls")
    return _Graph(names, inputs, tuple(pieces), tuple(calls), hidden)


_TYPES = "token_type_ids"


def _arguments(packed: PackedForward, batch: PackedBatch, names: Sequence[str]) -> list[Int32]:
    rows = packed.inputs(batch)
    nothing = np.zeros(batch.n_tokens, dtype=np.int32)
    return [rows.get(name, nothing) for name in names]


def with_graphs(
    forward: Forward,
    setting: str,
    *,
    device: torch.device,
    max_batch_tokens: int,
    max_tokens: int,
    vocab_size: int,
    notes: list[str],
    recorder: Callable[[torch.device], Recorder] = CudaRecorder,
) -> Forward:
    """`forward`, with graphs for small packs where the setting, the device and the model allow it.

    Every bucket is compared with the ordinary forward before it may serve. The reason for not using
    graphs goes into the notes.
    """
    if setting == "off":
        return forward
    sizes = buckets(max_batch_tokens)
    reason: str | None = None
    if device.type != "cuda" and recorder is CudaRecorder:
        reason = f"they are CUDA's, and the model runs on {device.type}"
    elif not isinstance(forward, PackedForward):
        reason = "the model does not run packed"
    elif isinstance(forward, RopePackedForward):
        reason = "its rotary positions depend on the longest item"
    elif not sizes:
        reason = f"a pack holds less than {SMALLEST_BUCKET} tokens"
    else:
        graphed, reason = _checked(forward, recorder, device, sizes, max_tokens, vocab_size)
        if graphed is not None:
            notes.append(
                f"packs of up to {sizes[-1]} tokens run as CUDA graphs of {sizes[0]} to {sizes[-1]} "
                f"tokens, {graphed.n_pieces(sizes[0])} pieces each; this has never been tried on a GPU "
                "by its authors"
            )
            return graphed
    notes.append(f"cuda_graphs is not in use: {reason}")
    return forward


def _checked(
    forward: PackedForward,
    recorder: Callable[[torch.device], Recorder],
    device: torch.device,
    sizes: Sequence[int],
    max_tokens: int,
    vocab_size: int,
) -> tuple[GraphedForward | None, str | None]:
    """Graphs that give the numbers of the ordinary forward, or the reason why there are none."""
    try:
        graphed = record(forward, recorder(device), sizes, max_tokens)
        for size in sizes:
            # A pack that needs filler, and other ids than those of the recording.
            batch = probe(size - size // 4, vocab_size, max_tokens)
            with torch.inference_mode():
                found = compare(graphed(batch), forward(batch), "the ordinary forward")
            if found.reason is not None:
                return None, f"in a bucket of {size} tokens {found.reason}"
    except (RuntimeError, AssertionError, TypeError, MemoryError) as error:
        told = str(error).splitlines()[0][:200] if str(error) else ""
        return None, told if isinstance(error, GraphRefused) else f"{type(error).__name__}: {told}"
    return graphed, None
