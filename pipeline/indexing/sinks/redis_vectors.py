"""Redis 8 vector sets: `docs` is the set of chunks, and three keys stand beside it.

``redis-vectors://user:password@host:6379/0#docs``. `docs__documents` is the ledger (a hash: document
id -> entry), `docs__reach` says how many chunks each document may have (a hash), `docs__identity` is a
text. A chunk's text and metadata are the attributes of its element. Vectors are kept unquantized.
What must stay true: reach is raised before chunks are added and lowered after they are removed, so
surplus is found after any crash, though a vector set cannot be asked for a document; a write never
makes the keys of a collection that is gone; an entry is written only over the one that was judged.
Redis keeps length and direction of a vector apart, so the last bits may move.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pipeline.indexing.identity import CollectionIdentity
from pipeline.indexing.records import DELETED, Entry, Write, chunk_id
from pipeline.indexing.sinks.base import (
    Collection,
    Hit,
    Row,
    SinkLimits,
    StoreRefused,
    StoreUnavailable,
    batched,
)
from pipeline.indexing.urls import CollectionUrl, refuse_unknown
from pipeline.indexing.vectors import Vector, dense

TIMEOUT_S = 30
CONNECT_TIMEOUT_S = 10
_PAGE = 256

RAISE_REACH = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'gone' end
for i = 2, #ARGV, 2 do
  local had = tonumber(redis.call('HGET', KEYS[2], ARGV[i]) or '0')
  if tonumber(ARGV[i + 1]) > had then redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
end
return 'done'
"""
PUT_ENTRIES = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'gone' end
for i = 2, #ARGV, 3 do
  if (redis.call('HGET', KEYS[2], ARGV[i]) or '') ~= ARGV[i + 1] then return 'moved' end
end
for i = 2, #ARGV, 3 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2]) end
return 'done'
"""


class RedisVectorCollection(Collection):
    """See the module."""

    # A call is one transaction, in which the server serves nobody else: 0.6 ms a vector.
    limits = SinkLimits(max_points=128, max_bytes=1024 * 1024)

    def __init__(self, name: str, where: str, **client: Any) -> None:
        super().__init__()
        self.name, self.where = name, where
        self.ledger = f"{name}__documents"
        self.reach = f"{name}__reach"
        self.told_beside = f"{name}__identity"
        self._options = client
        self._client: Any = None
        self._seen: dict[str, bytes] = {}  # document -> its entry as it was read; b"" for none

    async def connect(self) -> None:
        """Make the client, and ask whether this server has vector sets and keeps what it is given."""
        if self._client is None:
            self._client = Redis(
                **self._options,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),  # the writer tries again
                client_name="embedstream",
            )
        with told():
            try:
                await self._client.execute_command("VCARD", self.name)
            except exceptions.ResponseError as error:
                if "unknown command" in str(error):
                    raise StoreUnavailable(
                        "this server has no vector sets: Redis 8 has them"
                    ) from error
                if "WRONGTYPE" not in str(error):  # that one is told by read_identity
                    raise
            with contextlib.suppress(exceptions.NoPermissionError):
                policy = (await self._client.info("memory")).get("maxmemory_policy", "")
                if policy.startswith("allkeys"):
                    raise StoreUnavailable(
                        f"maxmemory-policy is {policy}, which throws keys away: set noeviction"
                    )

    async def read_identity(self) -> CollectionIdentity | None:
        """From the key beside the set."""
        with told():
            text = await self._client.get(self.told_beside)
            if text is None and not await self._client.exists(self.name, self.ledger, self.reach):
                return None
        return CollectionIdentity.from_json(text, self.where)

    async def create(self, identity: CollectionIdentity) -> None:
        """The identity; Redis makes the other keys with what they first hold."""
        with told():
            await self._client.set(self.told_beside, identity.to_json(), nx=True)

    async def read_entries(self, document_ids: Sequence[str]) -> dict[str, Entry]:
        """See `Collection`."""
        if not document_ids:
            return {}
        identity, found = await self._call(
            ("GET", self.told_beside), ("HMGET", self.ledger, *document_ids)
        )
        self._check(b"done" if identity == self._identity() else b"gone")
        self._seen = {name: raw or b"" for name, raw in zip(document_ids, found, strict=True)}
        return {name: Entry.from_fields(json.loads(raw)) for name, raw in self._seen.items() if raw}

    def _identity(self) -> bytes:
        assert self.identity is not None
        return self.identity.to_json().encode()

    def _check(self, answer: bytes) -> None:
        if answer == b"gone":
            raise StoreUnavailable("the collection is gone, or was made anew by another")
        if answer == b"moved":
            raise StoreUnavailable("another writer changed a document meanwhile")

    async def _call(self, *commands: Sequence[Any]) -> list[Any]:
        """One transaction. Its errors are raised without the command: that quotes a document."""
        with told():
            pipeline = self._client.pipeline(transaction=True)
            for command in commands:
                pipeline.execute_command(*command)
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers

    async def _script(self, script: str, key: str, *arguments: Any) -> None:
        with told():
            answer = await self._client.eval(
                script, 2, self.told_beside, key, self._identity(), *arguments
            )
        self._check(answer)

    async def put_chunks(self, writes: Sequence[Write]) -> None:
        """See `Collection`."""
        reach = [part for w in writes for part in (w.document_id, len(w.chunks or ()))]
        await self._script(RAISE_REACH, self.reach, *reach)
        points = (
            (
                (
                    *("VADD", self.name, "FP32", dense(chunk.vector).astype("<f4").tobytes()),
                    *(chunk_id(write.document_id, chunk.ordinal), "NOQUANT"),
                    *("SETATTR", _attributes(write, chunk.ordinal, chunk.text)),
                ),
                dense(chunk.vector).nbytes
                + 4 * len(chunk.text)
                + 4 * len(str(write.metadata))
                + 700,
            )
            for write in writes
            for chunk in write.chunks or ()
        )
        for batch in batched(points, self.limits):
            await self._call(*batch)

    async def delete_surplus(self, keep: Mapping[str, int]) -> None:
        """See `Collection`."""
        (reach,) = await self._call(("HMGET", self.reach, *keep))
        commands: list[Sequence[Any]] = []
        for (document_id, n), had in zip(keep.items(), reach, strict=True):
            if had is None or int(had) <= n:
                continue
            commands += [
                ("VREM", self.name, chunk_id(document_id, ordinal))
                for ordinal in range(n, int(had))
            ]
            lower = ("HSET", self.reach, document_id, n) if n else ("HDEL", self.reach, document_id)
            commands.append(lower)
        # In order: a document's reach is lowered by the call that removes the last of its surplus.
        for batch in batched(((command, 0) for command in commands), self.limits):
            await self._call(*batch)

    async def put_entries(self, entries: Sequence[Entry]) -> None:
        """See `Collection`. Only over the entries that were read."""
        raw = {entry.document_id: _raw(entry) for entry in entries}
        arguments = [part for name in raw for part in (name, self._seen[name], raw[name])]
        await self._script(PUT_ENTRIES, self.ledger, *arguments)
        self._seen |= raw

    async def search(self, vector: Vector, k: int) -> list[Hit]:
        """See `Collection`."""
        with told():
            scores = await self._client.vset().vsim(
                self.name, dense(vector).astype("<f4").tobytes(), with_scores=True, count=k
            )
        ranked = sorted((scores or {}).items(), key=lambda pair: -float(pair[1]))
        if not ranked:
            return []
        kept = await self._call(*(("VGETATTR", self.name, element) for element, _ in ranked))
        hits = []
        for (_, score), raw in zip(ranked, kept, strict=True):
            if raw is not None:  # else removed in between
                # Redis scores (1 + cosine) / 2.
                hits.append(Hit(**_attributes_of(raw), score=2.0 * float(score) - 1.0))
        return hits

    async def count(self) -> tuple[int, int, int | None]:
        """See `Collection`."""
        n_documents, changed = 0, None
        async for entry in self.entries():
            n_documents += entry.content_hash != DELETED
            changed = max(changed or 0, entry.changed_at_ms)
        with told():
            n_chunks = await self._client.execute_command("VCARD", self.name)
        return n_documents, int(n_chunks), changed

    async def _scan(self, key: str) -> AsyncIterator[dict[str, bytes]]:
        """A hash in pages, each field once: while it grows it gives some twice."""
        cursor = 0
        seen: set[str] = set()
        while True:
            with told():
                cursor, page = await self._client.hscan(key, cursor, count=_PAGE)
            fields = {name.decode(): value for name, value in page.items()}
            yield {name: value for name, value in fields.items() if name not in seen}
            seen.update(fields)
            if not cursor:
                return

    async def rows(self) -> AsyncIterator[Row]:
        """See `Collection`."""
        async for page in self._scan(self.reach):
            ids = [chunk_id(name, at) for name, n in page.items() for at in range(int(n))]
            for start in range(0, len(ids), _PAGE):
                asked = ids[start : start + _PAGE]
                commands = [(c, self.name, one) for one in asked for c in ("VEMB", "VGETATTR")]
                answers = await self._call(*commands)
                for one, vector, raw in zip(asked, answers[::2], answers[1::2], strict=True):
                    if vector is not None and raw is not None:
                        numbers = np.asarray([float(x) for x in vector], np.float32)
                        yield Row(one, **_attributes_of(raw), vector=numbers)

    async def entries(self) -> AsyncIterator[Entry]:
        """See `Collection`."""
        async for page in self._scan(self.ledger):
            for raw in page.values():
                yield Entry.from_fields(json.loads(raw))

    async def drop(self) -> None:
        """See `Collection`. One command: all of it is gone, or nothing."""
        with told():
            await self._client.unlink(self.told_beside, self.name, self.ledger, self.reach)

    async def aclose(self) -> None:
        """See `Collection`."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _attributes(write: Write, ordinal: int, text: str) -> str:
    kept = {"document_id": write.document_id, "ordinal": ordinal, "text": text}
    return json.dumps({**kept, "metadata": dict(write.metadata)}, ensure_ascii=False)


def _attributes_of(raw: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(raw) if isinstance(raw, (bytes, str)) else raw
    return found


def _raw(entry: Entry) -> bytes:
    return json.dumps(entry.to_fields(), ensure_ascii=False).encode()


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors of the client as ours. Its words are the server's own; a pipeline's would quote."""
    try:
        yield
    except exceptions.AuthenticationError as error:
        raise StoreUnavailable("user or password is wrong") from error
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise StoreUnavailable(f"no answer ({type(error).__name__})") from error
    except exceptions.RedisError as error:
        first = str(error).split("\n")[0]
        if first.startswith(("Vector dimension mismatch", "asked quantization mismatch")):
            raise StoreRefused(first[:200]) from error
        # Out of memory, read-only, a failing disk, loading, no right: all of them may pass.
        raise StoreUnavailable(f"{type(error).__name__}: {_kind(first)}") from error


def _kind(message: str) -> str:
    hints = {
        "maxmemory": "the server's memory is full",
        "read only replica": "this server is a read-only replica",
        "MISCONF": "the server cannot write its disk",
        "loading": "the server is still loading its data",
        "permission": "this user may not",
        "wrong kind of value": "a key of this name holds something else",
    }
    return next(
        (told for sign, told in hints.items() if sign in message), message.split(",")[0][:80]
    )


def collection(url: CollectionUrl) -> RedisVectorCollection:
    """The collection at an address. Raises `ValueError`."""
    refuse_unknown(url, ("tls", "ssl_ca_certs"))
    if url.host is None:
        raise ValueError("redis-vectors: no host is named: redis-vectors://localhost:6379#docs")
    database = url.path.strip("/") or "0"
    if not database.isascii() or not database.isdigit():
        raise ValueError(f"redis-vectors: the path is a database number, such as /0: {database!r}")
    tls = url.query.get("tls", "false")
    if tls not in ("true", "false"):
        raise ValueError(f"redis-vectors: tls is {tls!r}: true or false")
    if tls == "false" and "ssl_ca_certs" in url.query:
        raise ValueError("redis-vectors: ssl_ca_certs needs tls=true")
    secure = {"ssl": True, "ssl_ca_certs": url.query.get("ssl_ca_certs")} if tls == "true" else {}
    return RedisVectorCollection(
        url.collection,
        url.shown,
        host=url.host,
        port=url.port or 6379,
        db=int(database),
        username=url.user or None,
        password=url.password or None,
        **secure,
    )
