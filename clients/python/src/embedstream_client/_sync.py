"""The client for code without asyncio: the same calls, blocking.

Who calls it: applications; the adapters' synchronous halves.
What must stay true: one thread runs the event loop of all calls, from any number of threads, over the
same two connections; a forked child gets a thread and connections of its own; an interrupt of a
waiting call withdraws its request.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from . import _batches
from ._async import AsyncClient
from ._urls import Endpoint, parse_url
from .errors import ClientClosed
from .results import Classifications, Embedding, Embeddings, Ranking, Scores

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._requests import (
        ClassifyOptions,
        DocumentInput,
        EmbedInput,
        EmbedOptions,
        ItemInput,
        QueryInput,
        RerankOptions,
        ScoreOptions,
    )

ResultT = TypeVar("ResultT")
_CLOSE_S = 10.0


class _Runner:
    """An event loop in a thread of its own, and the async client that lives there."""

    def __init__(self, client: AsyncClient) -> None:
        self.pid = os.getpid()
        self.client = client
        self.loop = asyncio.new_event_loop()
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="embedstream-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    def submit(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking call inside the client's own thread would wait for ever")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        with contextlib.suppress(TimeoutError, RuntimeError):
            self.submit(self.client.aclose()).result(_CLOSE_S)
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_S)

    def leave(self) -> None:
        """Nobody has the client any more: close it without a wait, from whatever thread collects garbage."""
        if self.pid == os.getpid():
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        async def end() -> None:
            try:
                await self.client.aclose()
            finally:
                self.loop.stop()

        self._ending = self.loop.create_task(end())


class Client:
    """Asks an embedstream service and waits for the answer. May be shared by all threads.

    The arguments are those of `AsyncClient`. Use it as a context manager, or call `close`; one that is
    forgotten closes itself when it is collected.
    Inside a coroutine use `AsyncClient`: a blocking call stops the event loop.
    """

    def __init__(self, endpoint: Endpoint, **settings: Any) -> None:
        AsyncClient(endpoint, **settings)  # its arguments are checked here, not at the first call
        self._endpoint = endpoint
        self._settings = settings
        self._lock = threading.Lock()
        self._runner: _Runner | None = None
        self._closed = False
        _clients.add(self)

    @classmethod
    def from_url(cls, url: str, **settings: Any) -> Self:
        """As `AsyncClient.from_url`."""
        return cls(parse_url(url), **settings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._endpoint!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def embed(
        self,
        input: EmbedInput,
        *,
        timeout: float | None = None,
        partial: bool = False,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """As `AsyncClient.embed`."""
        return self._wait(lambda c: c.embed(input, timeout=timeout, partial=partial, **options))

    def classify(
        self,
        input: EmbedInput,
        *,
        timeout: float | None = None,
        partial: bool = False,
        **options: Unpack[ClassifyOptions],
    ) -> Classifications:
        """As `AsyncClient.classify`."""
        return self._wait(lambda c: c.classify(input, timeout=timeout, partial=partial, **options))

    def rerank(
        self,
        query: QueryInput,
        documents: Sequence[DocumentInput],
        *,
        timeout: float | None = None,
        partial: bool = False,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """As `AsyncClient.rerank`."""
        return self._wait(
            lambda c: c.rerank(query, documents, timeout=timeout, partial=partial, **options)
        )

    def score(
        self,
        query: QueryInput,
        documents: Sequence[DocumentInput],
        *,
        timeout: float | None = None,
        partial: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """As `AsyncClient.score`."""
        return self._wait(
            lambda c: c.score(query, documents, timeout=timeout, partial=partial, **options)
        )

    def embed_many(
        self,
        inputs: Iterable[ItemInput],
        *,
        batch_items: int = _batches.BATCH_ITEMS,
        in_flight: int = _batches.IN_FLIGHT,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Iterator[Embedding]:
        """As `AsyncClient.embed_many`; `inputs` is walked through in the caller's thread."""
        options.setdefault("priority", "bulk")

        def start(batch: list[Any]) -> Future[list[Embedding]]:
            return self.submit(
                lambda c: _batches.embed_each(
                    lambda part: c.embed(part, timeout=timeout, partial=True, **options), batch
                )
            )

        if in_flight < 1:
            raise ValueError("in_flight must be 1 or more")
        waiting: deque[Future[list[Embedding]]] = deque()
        done = 0
        cutting = _batches.cut(inputs, batch_items)
        try:
            more = True
            while more or waiting:
                while more and len(waiting) < in_flight:
                    batch = next(cutting, None)
                    if batch is None:
                        more = False
                    else:
                        waiting.append(start(batch))
                if not waiting:
                    break
                embedded = waiting[0].result()
                waiting.popleft()
                for embedding in embedded:
                    yield _batches.at(embedding, done)
                    done += 1
                if progress is not None:
                    progress(done)
        finally:
            for future in waiting:
                future.cancel()

    def ping(self) -> None:
        """Whether the broker can be used now. Raises `Unreachable`."""
        self._wait(lambda c: c.ping())

    def close(self) -> None:
        """Fail the calls that wait and close the connections. Safe to call again."""
        with self._lock:
            self._closed = True
            runner, self._runner = self._runner, None
        if runner is not None and runner.pid == os.getpid():
            runner.close()

    def _wait(self, work: Callable[[AsyncClient], Coroutine[Any, Any, ResultT]]) -> ResultT:
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(
        self, work: Callable[[AsyncClient], Coroutine[Any, Any, ResultT]]
    ) -> Future[ResultT]:
        """Start `work` in the client's thread; cancelling the future withdraws its requests."""
        with self._lock:
            if self._closed:
                raise ClientClosed("the client is closed")
            if self._runner is None:
                self._runner = _Runner(AsyncClient(self._endpoint, **self._settings))
                weakref.finalize(self, self._runner.leave).atexit = False  # `_close_all` then
            runner = self._runner
        return runner.submit(work(runner.client))

    def _after_fork(self) -> None:
        """In the child: the thread is gone, and whoever held the lock."""
        self._lock = threading.Lock()
        if self._runner is not None:
            _leaked.append(self._runner)
            self._runner = None


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_leaked: list[_Runner] = []
"""Runners of a parent process: their sockets and selectors are shared with it, so they stay untouched."""


def _forget_after_fork() -> None:
    for client in tuple(_clients):
        client._after_fork()


def _close_all() -> None:
    for client in tuple(_clients):
        client.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_close_all)
