"""Every kind of transport, one row each; nobody else tells them apart.

Who calls it: settings (addresses, contradictions, the page), the graph (a transport per route), the
CLI (`--source`, `--via`, `check`).
What must stay true: importing this module imports no broker client: `<kind>/source.py`, `sink.py`,
`reach.py` and `ask.py` are imported when one is opened. All kinds pass the one suite in `tests/conformance/`.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from actors.ports import Clock, Metrics, Sink, Source, Transactions
from actors.route import Decoder
from pipeline.transports.address import read_address, read_destination, scheme_of
from pipeline.transports.ask import Asker
from pipeline.transports.backlog import Backlog
from pipeline.transports.files.options import REPLIES as FILE_REPLIES
from pipeline.transports.files.options import STANDARD, FileOptions
from pipeline.transports.inproc.options import InprocOptions
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.letters import Letters
from pipeline.transports.one_place import OnePlace
from pipeline.transports.options import Accepts, Options
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.redis_list.options import RedisListOptions
from pipeline.transports.signed import SignedDestinations, read_keys
from pipeline.transports.span import Span
from schemas.requests import Lane


class _SourceModule(Protocol):
    async def open_source(self, options: Any, *, clock: Clock, metrics: Metrics) -> Source:
        """Connected, or a `ConnectionError` with a remedy; nothing stays open then."""
        ...


class _ReplayModule(Protocol):
    async def open_replay(
        self, options: Any, span: Span, *, clock: Clock, metrics: Metrics
    ) -> Source:
        """As `open_source`; what it returns is `span.Replaying`, too."""
        ...


class _ReachModule(Protocol):
    async def reach(
        self, options: Any, *, place: str | None = None, **more: Any
    ) -> tuple[str, ...]:
        """As `registry.reach`; with a `place` as `registry.reach_destination`. more: `exactly_once`
        where options do not refuse it."""
        ...


class _SinkModule(Protocol):
    async def open_sink(self, options: Any, *, beside: Source | None, metrics: Metrics) -> Sink:
        """As `open_source`. `beside`: the source of the same options, and what it has learned."""
        ...


class _LettersModule(Protocol):
    async def open_letters(self, options: Any, place: str) -> Letters:
        """As `registry.open_letters`."""
        ...


class _AskModule(Protocol):
    async def open_asker(self, options: Any, *, timeout_s: float) -> Asker:
        """As `open_source`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of transport.

    name      in metric labels, and of a route that `--source` makes
    schemes   of its addresses
    title, form  heading and address in docs/settings.md
    options   what an address of it is read into
    folder    the package with `source.py`, `sink.py`, `reach.py` and, when `asks`, `ask.py`
    asks      a running service can be asked over it
    keeps_letters  it has `letters.py`: dead letters can be listed and sent again
    replays   it has `replay.py`: a part of what was read can be read once more
    tells_backlog  it has `backlog.py`: how far its group is behind can be asked
    lane      where its requests go unless the route says otherwise
    """

    name: str
    schemes: tuple[str, ...]
    title: str
    form: str
    options: type[Options]
    folder: str
    asks: bool = False
    keeps_letters: bool = False
    replays: bool = False
    tells_backlog: bool = False
    lane: Lane = "bulk"

    def module(self, file: str) -> Any:
        """`source`, `sink`, `reach` or `ask` of this kind, imported on first use."""
        return import_module(f"pipeline.transports.{self.folder}.{file}")


KINDS = (
    Kind(
        name="kafka",
        schemes=("kafka",),
        title="Kafka",
        form="kafka://host:port[,host:port]/topic[,topic]",
        options=KafkaOptions,
        folder="kafka",
        asks=True,
        keeps_letters=True,
        replays=True,
        tells_backlog=True,
    ),
    Kind(
        name="redis",
        schemes=("redis", "rediss"),
        title="Redis and Valkey",
        form="redis://[user:password@]host[:port][/stream or /db] (rediss:// for TLS)",
        options=RedisOptions,
        folder="redis",
        asks=True,
        keeps_letters=True,
        lane="interactive",  # a Redis queue is where somebody waits for the answer
    ),
    Kind(
        name="redis-list",
        schemes=("redis-list", "rediss-list"),
        title="Redis lists",
        form="redis-list://[user:password@]host[:port][/key or /db] (rediss-list:// for TLS)",
        options=RedisListOptions,
        folder="redis_list",
        asks=True,
        lane="interactive",
    ),
    Kind(
        name="file",
        schemes=("file",),
        title="Files",
        form="file:///path.jsonl, or - for stdin to stdout",
        options=FileOptions,
        folder="files",
        keeps_letters=True,
    ),
    Kind(
        name="inproc",
        schemes=("inproc",),
        title="In process",
        form="inproc://name",
        options=InprocOptions,
        folder="inproc",
    ),
)
_BY_SCHEME = {scheme: kind for kind in KINDS for scheme in kind.schemes}
_BY_OPTIONS = {kind.options: kind for kind in KINDS}


def kind_of(url: str) -> Kind:
    """The kind that an address belongs to. Raises `ValueError`."""
    scheme = "file" if url == STANDARD else scheme_of(url)
    if scheme in _BY_SCHEME:
        return _BY_SCHEME[scheme]
    known = ", ".join(f"{known}://" for known in _BY_SCHEME)
    # Without :// the text may be anything, a login too.
    shown = "" if scheme is None else f" {scheme!r}"
    raise ValueError(f"unknown transport{shown}: use {known} or {STANDARD}")


def parse_url(url: str) -> Options:
    """Options of the transport that `url` names.

    - ``kafka://host:port[,host:port]/topic[,topic]?group=g&session_timeout_ms=6000``
    - ``redis://[user:password@]host[:port]/stream?group=g&db=1`` (``rediss://`` for TLS);
      a path that is a number is the database: ``redis://host/1?stream=s``
    - ``redis-list://host/key?take_from=right`` (``rediss-list://`` for TLS)
    - ``inproc://name``, ``file:///path.jsonl?replies=/out.jsonl``, ``-`` (stdin to stdout)

    Every option is a query parameter; lists are comma-separated. Raises `ValueError` with one line
    that names the parameter; `check()` has been passed.
    """
    kind = kind_of(url)
    return kind.options() if url == STANDARD else read_address(url, kind.options)


def reading(options: Options, decoder: Decoder) -> Decoder:
    """`decoder`, reading what the records of this source hold in the source's own format.

    Raises `ConnectionError` when what that needs is not there.
    """
    if isinstance(options, KafkaOptions) and options.schema_registry_url is not None:
        from pipeline.transports.kafka.schema_registry import Registry, RegistryDecoder

        return RegistryDecoder(decoder, Registry(options))
    return decoder


REPLY = "reply"
"""The destination of a route whose replies go where the request says, on the source's broker."""


def parse_destination(url: str) -> tuple[Options, str]:
    """Options of the transport that a route's `destination` names, and the place there.

    - ``kafka://host:port/topic``, ``redis://host:port/list:NAME`` or ``/stream:NAME``
    - ``file:///replies.jsonl``, ``-`` (stdout)

    Raises `ValueError` as `parse_url` does.
    """
    kind = kind_of(url)
    if url == STANDARD:
        return kind.options(), FILE_REPLIES
    return read_destination(url, kind.options)


@dataclass(frozen=True, slots=True)
class Transport:
    """A source and the sink for its replies and dead letters. Close the source first.

    transactions: of the sink, where what it publishes and what the source settles are one.
    """

    source: Source
    sink: Sink
    transactions: Transactions | None = None


async def open_transport(
    options: Options,
    *,
    destination: str = REPLY,
    exactly_once: bool = False,
    replay: Span | None = None,
    clock: Clock,
    metrics: Metrics,
) -> Transport:
    """Connect a source, the sink beside it and, for an address, the destination.

    exactly_once: `options.exactly_once_problem()` is None, and `destination` is `REPLY`.
    replay: what the source reads instead, where the kind `replays`; it ends then.

    The caller then starts `source.run()` as a task. Raises `ValueError` when `options.check()` finds
    a contradiction and `ConnectionError`, with a one-line remedy, when a broker cannot be used;
    nothing stays open then.
    """
    problems = options.check()
    if problems:
        raise ValueError("; ".join(problems))
    kind = _BY_OPTIONS[type(options)]
    async with AsyncExitStack() as opened:
        source: Source
        if replay is not None:
            replays: _ReplayModule = kind.module("replay")
            source = await replays.open_replay(options, replay, clock=clock, metrics=metrics)
        else:
            sources: _SourceModule = kind.module("source")
            source = await sources.open_source(options, clock=clock, metrics=metrics)
        opened.push_async_callback(source.aclose)
        transactions: Transactions | None = None
        if exactly_once:
            assert destination == REPLY and options.exactly_once_problem() is None
            together = kind.module("transactions")
            sink = transactions = await together.open_sink(options, beside=source, metrics=metrics)
        else:
            sink = await _open_sink(options, source, metrics)
        opened.push_async_callback(sink.aclose)
        if isinstance(options, KafkaOptions) and options.reply_key_file is not None:
            sink = SignedDestinations(sink, read_keys(options.reply_key_file))
        if destination != REPLY:
            there, place = parse_destination(destination)
            sink = OnePlace(await _open_sink(there, None, metrics), place, beside=sink)
        opened.pop_all()
    return Transport(source, sink, transactions)


async def _open_sink(options: Options, beside: Source | None, metrics: Metrics) -> Sink:
    sinks: _SinkModule = _BY_OPTIONS[type(options)].module("sink")
    return await sinks.open_sink(options, beside=beside, metrics=metrics)


async def open_asker(url: str, *, timeout_s: float = 10.0) -> Asker:
    """Connect to the service behind `url` (`redis://host:port/stream`, `redis-list://host:port/key`,
    `kafka://host:port/topic`).

    Raises `ValueError` for an address nobody can ask and `ConnectionError` for a broker out of
    reach.
    """
    options, kind = parse_url(url), kind_of(url)
    if not kind.asks:
        able = " or ".join(f"{kind.schemes[0]}://" for kind in reversed(KINDS) if kind.asks)
        raise ValueError(f"a running service is asked over {able}")
    askers: _AskModule = kind.module("ask")
    return await askers.open_asker(options, timeout_s=timeout_s)


def reaching(url: str) -> None:
    """Import what `reach` needs, which takes longer than a broker may. Raises `ValueError`."""
    kind_of(url).module("reach")


async def open_letters(url: str) -> Letters:
    """The dead letters at `kafka://host:port/topic`, `redis://host:port/stream:NAME`, `file:///path.jsonl`.

    Raises `ValueError` and `ConnectionError`, each with one line and the remedy.
    """
    options, place = parse_destination(url)
    if url == STANDARD or not kind_of(url).keeps_letters:
        raise ValueError("dead letters lie in a kafka:// topic, a redis:// stream or a file://")
    opener: _LettersModule = kind_of(url).module("letters")
    return await opener.open_letters(options, place)


async def read_backlog(url: str) -> tuple[Backlog, ...]:
    """How far the group of a source is behind, one entry for each partition of `kafka://host:port/topic?group=g`.

    Raises `ConnectionError`, and `ValueError` for a source that cannot tell; each with one line.
    """
    if not kind_of(url).tells_backlog:
        raise ValueError("how far a group is behind is told by kafka:// sources alone")
    options = parse_url(url)
    if problems := options.check():
        raise ValueError("; ".join(problems))
    found: tuple[Backlog, ...] = await kind_of(url).module("backlog").read_backlog(options)
    return found


async def reach(url: str, *, exactly_once: bool = False) -> tuple[str, ...]:
    """Whether the broker behind a source can be used; joins no group and creates nothing.

    Tries all that `serve` will need there: reading, settling, replies and dead letters. Returns one
    line per thing that works but should be looked at (a topic that does not exist yet). Raises
    `ConnectionError` or `ValueError` with one line and the remedy.
    """
    module: _ReachModule = kind_of(url).module("reach")
    more: dict[str, Any] = {"exactly_once": True} if exactly_once else {}
    return await module.reach(parse_url(url), **more)


async def limit_notices(options: Options, accepts: Accepts) -> tuple[str, ...]:
    """One line for each limit of a route that its broker's does not match; raises nothing."""
    if not isinstance(options, KafkaOptions):
        return ()
    from pipeline.transports.kafka.limits import against

    return await against(options, accepts)


async def reach_destination(url: str) -> tuple[str, ...]:
    """As `reach`, for a destination that is an address: it is only written."""
    options, place = parse_destination(url)
    module: _ReachModule = kind_of(url).module("reach")
    return await module.reach(options, place=place)
