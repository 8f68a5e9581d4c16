"""Options of the Redis transports, how an address names them, and the names fixed by the wire.

Who calls it: the registry; everything in this folder reads `RedisOptions`, or what it shares with lists.
What must stay true: as in `pipeline.transports.options`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from pipeline.transports.address import plain
from pipeline.transports.broker_names import (
    DEAD_LETTERS,
    GROUP,
    REPLY_PREFIXES,
    REQUESTS,
    name_error,
    prefix_problems,
)
from pipeline.transports.options import (
    MaxInFlight,
    MaxReceive,
    Options,
    Place,
    RefuseDestinations,
    ReleaseBackoffMaxMs,
    ReleaseBackoffMs,
    ReplyPrefixes,
    says,
    within,
)

REPLY_LIST = "embedstream.reply."
"""Prefix of the list that holds the reply of one request: `list:embedstream.reply.<request id>`."""
OWN_REPLIES = "embedstream.reply"
"""How replies begin that a service writes by default, to lists and to the clients' streams."""
DATA_FIELD = "data"
"""The field of a stream entry that carries the record; every other field is a header."""
STREAM_PREFIX = "stream:"
"""How a destination names a stream."""
LIST_PREFIX = "list:"
"""How a destination names a list."""

_NODE = re.compile(r"[^\s:@/]+:[1-9][0-9]{0,4}|\[?[0-9A-Fa-f:.]+\]?:[1-9][0-9]{0,4}")
_PORT, _SENTINEL_PORT = 6379, 26379
_MAX_DB_DIGITS = 6
_DAY_S = 24 * 3600
MAX_TTL_S = 10 * 365 * _DAY_S


def _hosts(parts: SplitResult) -> list[tuple[str | None, int | None]]:
    """(host, port) of each in `host[:port][,host[:port]]`."""
    try:
        each = [urlsplit(f"//{one}") for one in parts.netloc.rpartition("@")[2].split(",")]
        return [(one.hostname, one.port) for one in each]
    except ValueError:
        raise ValueError("the port is no number from 1 to 65535") from None


def _path_values(path: str, option: str) -> dict[str, Any]:
    """`/3` is database 3, as in every Redis URL; any other path is what `option` names."""
    database, _, name = path.partition("/")
    if not re.fullmatch(r"[0-9]+", database):
        return {option: path} if path else {}
    if name or len(database) > _MAX_DB_DIGITS:
        raise ValueError(
            f"a path that begins with a number names a database: write /{option.upper()}?db=NUMBER "
            f"for a {option} in a database, or ?{option}=NAME for a {option} of that name"
        )
    return {"db": int(database)}


class RedisQueueOptions(Options, frozen=True, kw_only=True):
    """What a stream and a list share: the server, the bounds, and the sink beside them."""

    path_option: ClassVar[str]
    """The option that the path of an address is."""
    key_type: ClassVar[str]
    """What the key named there is: `stream` or `list`."""

    host: Annotated[str, says("Name or address of the server.")] = "localhost"
    port: Annotated[int, within(1, 65_535, "Port of the server.")] = _PORT
    db: Annotated[
        int,
        within(0, 100_000, "Number of the database; the address may end in it: redis://host/3."),
    ] = 0
    username: Annotated[str | None, says("From the address.")] = None
    password: Annotated[str | None, says("From the address.")] = None
    tls: Annotated[bool, says("From the address: rediss://.")] = False
    ssl_ca_certs: Annotated[str | None, says("Certificate authorities, PEM.")] = None
    ssl_certfile: Annotated[str | None, says("Our own certificate, PEM.")] = None
    ssl_keyfile: Annotated[str | None, says("Its key, PEM.")] = None
    ssl_check_hostname: Annotated[
        bool, says("Whether the server's certificate must have its name or address.")
    ] = True
    nodes: Annotated[
        tuple[str, ...],
        says("Further sentinels or nodes, `host:port`; in an address they stand beside the host."),
    ] = ()
    sentinel: Annotated[
        str | None,
        says(
            "The hosts are sentinels, and this is what they call the service: its master is used."
        ),
    ] = None
    sentinel_username: Annotated[str | None, says("Login at the sentinels.")] = None
    sentinel_password: Annotated[str | None, says("Login at the sentinels.")] = None
    cluster: Annotated[bool, says("The hosts are nodes of a Redis Cluster.")] = False
    block_ms: Annotated[int, within(1, 600_000, "Longest wait of one blocking read.")] = 2000
    claim_idle_ms: Annotated[
        int,
        within(
            50, 86_400_000, "A request that its owner has not renewed for this long is taken over."
        ),
    ] = 60_000
    claim_interval_ms: Annotated[
        int, within(10, 86_400_000, "How often requests of silent owners are looked for.")
    ] = 5000
    max_in_flight: MaxInFlight = 1024
    max_in_flight_bytes: Annotated[int, within(1024, 2**40, "Bytes handed out or buffered.")] = (
        256 * 1024 * 1024
    )
    max_receive: MaxReceive = 256
    settle_interval_ms: Annotated[
        int, within(0, 60_000, "How long settles gather before one pipelined write.")
    ] = 5
    reply_ttl_s: Annotated[int, within(1, MAX_TTL_S, "How long an unread reply is kept.")] = 300
    reply_stream_maxlen: Annotated[
        int, within(1, 1_000_000_000, "Replies a reply stream keeps, roughly; older ones go.")
    ] = 100_000
    dead_letter_ttl_s: Annotated[int, within(1, MAX_TTL_S, "How long dead letters are kept.")] = (
        14 * _DAY_S
    )
    dead_letter_maxlen: Annotated[
        int, within(1, 1_000_000_000, "Dead letters kept, roughly; older ones go.")
    ] = 100_000
    socket_timeout_s: Annotated[
        float, within(0.05, 3600, "Bound of one answer; above block_ms.")
    ] = 10.0
    connect_timeout_s: Annotated[float, within(0.05, 3600, "Bound of connecting.")] = 5.0
    close_timeout_s: Annotated[float, within(0.1, 600, "Bound of disconnecting.")] = 5.0
    max_record_bytes: Annotated[
        int, within(1024, 512 * 1024 * 1024, "Largest reply written; Redis itself takes 512 MiB.")
    ] = 64 * 1024 * 1024
    release_backoff_ms: ReleaseBackoffMs = 200
    release_backoff_max_ms: ReleaseBackoffMaxMs = 10_000
    dead_letter_stream: Annotated[str, says("Where dead letters go.")] = DEAD_LETTERS
    reply_prefixes: ReplyPrefixes = REPLY_PREFIXES
    refuse_destinations: RefuseDestinations = ()

    @classmethod
    def address_values(cls, parts: SplitResult) -> dict[str, Any]:
        if "@" in parts.path:
            raise ValueError(f"an '@' in the name of a {cls.path_option} is written %40")
        values: dict[str, Any] = {"tls": parts.scheme.startswith("rediss")}
        (host, port), *others = _hosts(parts)
        if host is not None:
            values["host"] = host
        if port is not None:
            values["port"] = port
        elif "sentinel=" in parts.query:
            values["port"] = _SENTINEL_PORT
        if others:
            default = values.get("port", _PORT)
            values["nodes"] = tuple(f"{h or 'localhost'}:{p or default}" for h, p in others)
        if parts.username:
            values["username"] = plain(parts.username)
        if parts.password is not None:
            values["password"] = plain(parts.password)
        return values | _path_values(plain(parts.path.lstrip("/")), cls.path_option)

    @property
    def address(self) -> str:
        """`redis://host:port` without user and password: fit for logs."""
        where = ",".join([f"{self.host}:{self.port}", *self.nodes])
        return f"{'rediss' if self.tls else 'redis'}://{where}"

    def servers(self) -> list[tuple[str, int]]:
        """Host and port of every server that the address names."""
        more = [node.rpartition(":") for node in self.nodes]
        return [(self.host, self.port), *((host, int(port)) for host, _, port in more)]

    @property
    def requests(self) -> str:
        """The key that requests are read from."""
        return str(getattr(self, self.path_option))

    @property
    def own_prefix(self) -> str | None:
        """What the source's own keys begin with; no request may name one."""
        return None

    def writes(self) -> tuple[Place, ...]:
        name = self.dead_letter_stream
        return (self._place(name, option="dead_letter_stream", is_dead_letters=True),)

    def place_at(self, destination: str) -> Place:
        return self._place(destination.removeprefix(LIST_PREFIX).removeprefix(STREAM_PREFIX))

    def _place(self, key: str, **more: Any) -> Place:
        service = "" if self.sentinel is None else f"/{self.sentinel}"
        servers = (f"{host}:{port}/{self.db}{service}" for host, port in self.servers())
        return Place(frozenset(servers), "stream", key, **more)

    def name_problems(self) -> list[str]:
        names = (self.path_option, "dead_letter_stream", "host")
        problems = prefix_problems(self.reply_prefixes)
        if not all(_NODE.fullmatch(node) for node in self.nodes):
            problems.append("nodes are not all written host:port")
        return problems + [e for n in names if (e := name_error(getattr(self, n), n))]

    def contradictions(self) -> list[str]:
        problems = self.not_above("claim_interval_ms", "claim_idle_ms") + self._topology_problems()
        problems += self.not_above("release_backoff_ms", "release_backoff_max_ms")
        if self.block_ms >= self.socket_timeout_s * 1000:
            problems.append(
                f"block_ms ({self.block_ms}) must be below socket_timeout_s "
                f"({self.socket_timeout_s:g} s): lower the one or raise the other"
            )
        return problems

    def _topology_problems(self) -> list[str]:
        if self.cluster and self.sentinel is not None:
            return ["cluster and sentinel are both given: a cluster has no sentinels; remove one"]
        if self.cluster and self.db:
            return [f"db is {self.db} and cluster is true: a cluster has database 0 only"]
        if self.nodes and not self.cluster and self.sentinel is None:
            return [
                "the address names several servers: add sentinel=NAME when they are sentinels, or "
                "cluster=true when they are nodes of a cluster"
            ]
        return []


class RedisOptions(RedisQueueOptions, frozen=True, kw_only=True):
    """A Redis (>= 6.2) or Valkey stream source and the sink beside it."""

    path_option = key_type = "stream"

    stream: Annotated[str, says("The request stream.")] = REQUESTS
    group: Annotated[str, says("Consumer group: members share the requests.")] = GROUP
    consumer: Annotated[
        str | None, says("Name inside the group; None makes one that no other process has.")
    ] = None
    start: Annotated[
        str, says("Where a new group begins: `0` is the whole backlog, `$` only what comes later.")
    ] = "0"

    @classmethod
    def destination_values(cls, parts: SplitResult) -> tuple[dict[str, Any], str]:
        values = cls.address_values(parts)
        name = values.pop("stream", "")
        if not name.startswith((LIST_PREFIX, STREAM_PREFIX)) or name_error(
            name.partition(":")[2], "destination"
        ):
            raise ValueError(
                "a destination names a list or a stream: redis://host/list:NAME or "
                "redis://host/stream:NAME"
            )
        return values, name

    def consumes(self) -> tuple[Place, ...]:
        return (self._place(self.stream, option="stream", group=self.group),)

    def name_problems(self) -> list[str]:
        problems = super().name_problems()
        named = {"group": self.group, "consumer": self.consumer}
        problems += [
            error for n, v in named.items() if v is not None and (error := name_error(v, n))
        ]
        if not re.fullmatch(r"\$|\d{1,20}(-\d{1,20})?", self.start):
            problems.append(f"start is {self.start!r}, expected 0, $ or an entry id such as 1700-0")
        return problems
