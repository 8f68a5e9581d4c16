"""The asyncio client.

Who calls it: applications; the sync client and the adapters are made of it.
What must stay true: results are matched by id and index, never by order; only what is retryable is
tried again, and only within the call's own time-out; a client may be made anywhere and used on the
event loop and in the process that first call it, or anew after a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from . import _batches, _requests
from ._links import Backoff
from ._replies import check
from ._session import Session
from ._urls import Endpoint, RedisEndpoint, parse_url
from ._wire.codec import encode_request
from ._wire.requests import (
    AnyRequest,
    ClassifyRequest,
    EmbedRequest,
    RerankRequest,
    ScoreRequest,
)
from ._wire.results import FailureReply, ItemReply, Reply
from .errors import ClientClosed, EmbedstreamError, Expired, of_items
from .results import (
    Classification,
    Classifications,
    Embedding,
    Embeddings,
    Ranked,
    Ranking,
    Score,
    Scores,
)

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

TIMEOUT_S = 30.0
MAX_TIMEOUT_S = 86_400.0
RETRIES = 2
MAX_PENDING = 10_000
_CLOCKS_DIFFER_S = 1.0
_leaked: list[Session] = []
"""Sessions of a parent process. Closing one here would take its sockets out of the parent's event
loop, which a forked child shares."""


class AsyncClient:
    """Asks an embedstream service over Redis or Kafka.

    One connection sends and one reads, whatever the number of concurrent calls. Both open with the
    first call. Use it as an async context manager, or call `aclose`.

    Args:
        endpoint: where the service's broker is; `from_url` reads it from an address.
        timeout: seconds that a call may take in all, tries and outages of the broker included; it is
            also the request's deadline, after which the service computes nothing. A call may name
            its own.
        retries: how often a call that failed with a retryable error is tried again.
        model: the model of calls that name none; None is the service's choice.
        max_pending: calls that may wait at once; one more is `ClientFull`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout: float = TIMEOUT_S,
        retries: int = RETRIES,
        model: str | None = None,
        max_pending: int = MAX_PENDING,
    ) -> None:
        if importlib.util.find_spec(endpoint.needs) is None:
            raise ImportError(
                f"{endpoint.needs} is not installed: pip install 'embedstream-client[{endpoint.extra}]'",
                name=endpoint.needs,
            )
        self._endpoint = endpoint
        self._timeout_s = _checked_timeout(timeout)
        if retries < 0 or max_pending < 1:
            raise ValueError("retries must be 0 or more, max_pending 1 or more")
        self._retries = retries
        self._model = model
        self._max_pending = max_pending
        self._session: Session | None = None
        self._closed = False

    @classmethod
    def from_url(cls, url: str, **settings: Any) -> Self:
        """A client of the service behind ``redis://host:6379/0``, ``rediss://...`` or
        ``kafka://host:9092``; `settings` are those of the class.

        Raises `ValueError` with one line for an address that is none, `ImportError` when the broker's
        extra is not installed.
        """
        return cls(parse_url(url), **settings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._endpoint!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Closes the client when the application ends: ``FastAPI(lifespan=client.lifespan)``."""
        async with self:
            yield

    # --- tasks ----------------------------------------------------------------------------------

    async def embed(
        self,
        input: EmbedInput,
        *,
        timeout: float | None = None,
        partial: bool = False,
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Vectors of one text, token-id list or image, or of a list of them, in its order.

        `partial=True` returns what succeeded although items failed: see `errors` of the result.
        Raises the service's typed error, `items` naming the items concerned, and what `ask` raises.
        """
        request = EmbedRequest(id="", input=_requests.items(input), **_options(options))
        reply = await self._call(request, timeout, partial)
        dtype = reply.dtype or "float32"
        return Embeddings(reply, [Embedding(item, dtype) for item in _by_index(reply)])

    async def classify(
        self,
        input: EmbedInput,
        *,
        timeout: float | None = None,
        partial: bool = False,
        **options: Unpack[ClassifyOptions],
    ) -> Classifications:
        """Scores by label of one text or a list of texts, in its order. Otherwise as `embed`."""
        request = ClassifyRequest(id="", input=_requests.items(input), **_options(options))
        reply = await self._call(request, timeout, partial)
        return Classifications(reply, [Classification(item) for item in _by_index(reply)])

    async def rerank(
        self,
        query: QueryInput,
        documents: Sequence[DocumentInput],
        *,
        timeout: float | None = None,
        partial: bool = False,
        **options: Unpack[RerankOptions],
    ) -> Ranking:
        """Documents by how well they answer the query, best first; `top_n` keeps the best.

        A document is a text, a map of `text` and `id`, or the ids of a text's own tokens; the query is a
        text or such ids. Otherwise as `embed`.
        """
        given = _requests.documents(documents)
        request = RerankRequest(
            id="", query=_requests.query(query), documents=given, **_options(options)
        )
        reply = await self._call(request, timeout, partial)
        return Ranking(reply, [Ranked(item, given[item.index].text) for item in reply.items])

    async def score(
        self,
        query: QueryInput,
        documents: Sequence[DocumentInput],
        *,
        timeout: float | None = None,
        partial: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Every document's score, in the order of the documents. Otherwise as `rerank`.

        `labels`: texts or token ids, each one token of a causal language model: every document then has
        `scores` by label instead of one `score`.
        """
        given = _requests.documents(documents)
        request = ScoreRequest(
            id="", query=_requests.query(query), documents=given, **_options(options)
        )
        reply = await self._call(request, timeout, partial)
        return Scores(reply, [Score(item, given[item.index].text) for item in _by_index(reply)])

    async def embed_many(
        self,
        inputs: Iterable[ItemInput] | AsyncIterable[ItemInput],
        *,
        batch_items: int = _batches.BATCH_ITEMS,
        in_flight: int = _batches.IN_FLIGHT,
        progress: Callable[[int], object] | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> AsyncIterator[Embedding]:
        """Vectors of any number of items, in their order, as they come.

        At most `in_flight` requests of `batch_items` items wait at once, however long `inputs` is.
        An item that fails is yielded with its `error` and stops nobody else; what concerns a whole
        request is raised. `progress` is called with the number of items done so far. Leaving the
        loop early withdraws what is in flight (use `contextlib.aclosing` to have that at once).
        `index` counts from 0 over all inputs.
        """
        options.setdefault("priority", "bulk")

        async def one(batch: list[ItemInput]) -> list[Embedding]:
            return await _batches.embed_each(
                lambda part: self.embed(part, timeout=timeout, partial=True, **options), batch
            )

        done = 0
        async for embedded in _batches.in_order(
            _batches.batches(inputs, batch_items), one, in_flight
        ):
            for embedding in embedded:
                yield _batches.at(embedding, done)
                done += 1
            if progress is not None:
                progress(done)

    # --- beneath the tasks ----------------------------------------------------------------------

    async def ping(self) -> None:
        """Whether the broker can be used now. Raises `Unreachable`."""
        await self._open().link.ping()

    async def ask(
        self,
        record: bytes,
        *,
        request_id: str,
        content_type: str = "application/msgpack",
        timeout: float | None = None,
    ) -> tuple[bytes, ...]:
        """Send a request record as it is; the records of its reply, in the order of parts.

        The record's own id must be `request_id`, and no other call may have it. Nothing is retried.
        Over a list, which has no headers, `reply_to` and `deadline_ms` are written into the record.

        Raises:
            NoReply: no whole reply in time.
            Unreachable: the broker cannot be used.
            BadReply: the reply cannot be read, or its parts do not fit.
            ClientClosed, ClientFull: see there.
            InvalidRequest: over a list, a record that is no map.
        """
        timeout_s = self._timeout_s if timeout is None else _checked_timeout(timeout)
        session = self._open()
        if request_id in session.calls:
            raise ValueError("another call with that request_id waits for its reply")
        route: dict[str, str | int] = {"reply_to": session.link.reply_to}
        route["deadline_ms"] = _deadline_ms(timeout_s)
        headers = {name.replace("_", "-"): str(value).encode() for name, value in route.items()}
        headers |= {"content-type": content_type.encode(), "request-id": request_id.encode()}
        if isinstance(self._endpoint, RedisEndpoint) and self._endpoint.key is not None:
            record = _requests.with_fields(record, content_type, route)
        _, bodies = await session.ask(request_id, record, headers, timeout_s)
        return bodies

    async def aclose(self) -> None:
        """Fail the calls that wait and close the connections. Safe to call again."""
        self._closed = True
        session, self._session = self._session, None
        if session is None:
            return
        if session.pid != os.getpid():
            _leaked.append(session)
        elif session.loop is asyncio.get_running_loop():
            await session.aclose()

    def _open(self) -> Session:
        """The session of this process and event loop."""
        if self._closed:
            raise ClientClosed("the client is closed")
        session = self._session
        if session is not None and session.pid != os.getpid():
            _leaked.append(session)
            session = None
        if session is not None and session.loop is not asyncio.get_running_loop():
            if not session.loop.is_closed():
                raise RuntimeError(
                    "this client is in use on another event loop: make one client per event loop, or "
                    "use the sync Client"
                )
            session = None
        if session is None or session.ended:
            session = Session(self._endpoint, max_pending=self._max_pending)
            self._session = session
        return session

    async def _call(self, request: AnyRequest, timeout: float | None, partial: bool) -> Reply:
        timeout_s = self._timeout_s if timeout is None else _checked_timeout(timeout)
        end = time.monotonic() + timeout_s
        backoff = Backoff(first_s=0.1)
        tries = 0
        while True:
            tries += 1
            try:
                return await self._try(request, max(0.0, end - time.monotonic()), partial)
            except EmbedstreamError as error:
                wait_s = backoff.next_s() if tries > 1 else 0.0
                left_s = end - time.monotonic() - wait_s
                if not error.retryable or tries > self._retries or left_s <= 0:
                    raise
                await asyncio.sleep(wait_s)

    async def _try(self, request: AnyRequest, timeout_s: float, partial: bool) -> Reply:
        session = self._open()
        started = time.monotonic()
        request = msgspec.structs.replace(
            request,
            id=session.next_id(),
            model=self._model if request.model is None else request.model,
            reply_to=session.link.reply_to,
            deadline_ms=_deadline_ms(timeout_s),
        )
        body, headers = encode_request(request)
        reply, _ = await session.ask(request.id, body, headers, timeout_s)
        if isinstance(reply, FailureReply):
            error = reply.error
            left_s = timeout_s - (time.monotonic() - started)
            if isinstance(error, Expired) and left_s > _CLOCKS_DIFFER_S:
                error = Expired(
                    f"the service says that the deadline has passed, though {left_s:.1f} s are left: "
                    "the clocks of the two machines differ"
                )
            raise error
        check(reply, request)
        failed = [item for item in reply.items if item.error is not None]
        if failed and not partial:
            raise of_items(failed)
        return reply


def _options(given: Any) -> dict[str, Any]:
    """Options of a request as its struct takes them; `None` is the same as leaving one out."""
    options = {name: value for name, value in given.items() if value is not None}
    if "outputs" in options:
        options["outputs"] = tuple(options["outputs"])
    if "labels" in options:
        options["labels"] = _requests.labels(options["labels"])
    return options


def _checked_timeout(timeout: float) -> float:
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout is {timeout!r}: give seconds, above 0 and at most {MAX_TIMEOUT_S:g}"
        )
    return float(timeout)


def _deadline_ms(timeout_s: float) -> int:
    return time.time_ns() // 1_000_000 + int(timeout_s * 1000)


def _by_index(reply: Reply) -> list[ItemReply]:
    return sorted(reply.items, key=lambda item: item.index)
