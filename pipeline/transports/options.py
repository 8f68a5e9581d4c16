"""Settings of each transport: plain frozen values that check themselves.

Who calls it: `urls.parse_url` builds them, `pipeline.settings.load` prints and checks them, each
transport reads them.
What must stay true: building never touches a network; `check` names the settings that contradict
each other and both remedies; secrets never appear in `repr` of a plan (see `SECRET_FIELDS`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import msgspec

from pipeline.transports import names

SECRET_FIELDS = frozenset({"password", "sasl_password", "ssl_password"})
"""Names that every print of a plan redacts."""

_KAFKA_NAME = re.compile(r"[A-Za-z0-9._-]+")
_MAX_MS = 2**31 - 1
_MAX_TTL_S = 10 * 365 * 24 * 3600


def name_error(value: str, what: str) -> str | None:
    """Why `value` cannot name a key, stream or group; None when it can."""
    if not value:
        return f"{what} is empty"
    if len(value) > names.MAX_NAME_CHARS:
        return f"{what} has {len(value)} characters, at most {names.MAX_NAME_CHARS} are taken"
    if any(
        ord(char) < 32 or 127 <= ord(char) < 160 or 0xD800 <= ord(char) < 0xE000 for char in value
    ):
        return f"{what} holds a control character"
    return None


def topic_error(value: str, what: str) -> str | None:
    """Why `value` cannot name a Kafka topic; None when it can."""
    error = name_error(value, what)
    if error is None and (not _KAFKA_NAME.fullmatch(value) or value in (".", "..")):
        error = f"{what} may hold only letters, digits, '.', '_' and '-'"
    return error


def _ranges(options: Any, ranges: dict[str, tuple[float, float]]) -> list[str]:
    problems = []
    for name, (low, high) in ranges.items():
        value = getattr(options, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            problems.append(f"{name} is {value!r}, allowed is {low:g} to {high:g}")
    return problems


def _safe_repr(options: Any) -> str:
    """As msgspec's own, with secrets masked: options end up in tracebacks and logs."""
    shown = (
        f"{name}={'***' if name in SECRET_FIELDS and value is not None else repr(value)}"
        for name in options.__struct_fields__
        for value in [getattr(options, name)]
    )
    return f"{type(options).__name__}({', '.join(shown)})"


def _prefix_problems(prefixes: Iterable[str]) -> list[str]:
    found = list(prefixes)
    if not found:
        return [
            "reply_prefixes is empty: no request could name a reply_to; give at least one prefix"
        ]
    return [f"reply_prefixes: {error}" for p in found if (error := name_error(p, "a prefix"))]


class KafkaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A Kafka source and the sink beside it. Times carry their unit; sizes are bytes.

    Defaults follow aiokafka's except: `auto_offset_reset` is `earliest` (a new group must not skip
    the backlog), `fetch_max_wait_ms` is short (the packaged broker wakes a long poll only after
    half of it), fetch sizes let one over-limit record through so that it can be dead-lettered.
    """

    bootstrap: str
    """`host:port[,host:port]`"""
    topics: tuple[str, ...] = (names.REQUEST_TOPIC,)
    group: str = names.GROUP
    client_id: str = "embedstream"
    session_timeout_ms: int = 10_000
    heartbeat_interval_ms: int = 3_000
    max_poll_interval_ms: int = 300_000
    fetch_max_wait_ms: int = 50
    max_partition_fetch_bytes: int = 4 * 1024 * 1024
    fetch_max_bytes: int = 50 * 1024 * 1024
    max_in_flight: int = 4096
    """Records handed out or buffered, over all partitions."""
    max_in_flight_per_partition: int = 1024
    """Records from the lowest unsettled one to the newest, per partition: at the bound it pauses."""
    max_in_flight_bytes: int = 256 * 1024 * 1024
    """Bytes handed out or buffered, over all partitions."""
    max_receive: int = 256
    """Records that one `receive` hands out at most."""
    commit_interval_ms: int = 500
    drain_budget_s: float = 20.0
    """How long a revoked partition may finish its work before it is given up."""
    close_timeout_s: float = 5.0
    """Bound of leaving the group and closing connections, each."""
    open_timeout_s: float = 15.0
    watchdog_s: float = 60.0
    """A consumer that receives nothing for this long although records wait is recreated."""
    metadata_max_age_ms: int = 10_000
    """How soon a topic created later, or new partitions, are seen."""
    release_backoff_ms: int = 200
    release_backoff_max_ms: int = 10_000
    auto_offset_reset: Literal["earliest", "latest"] = "earliest"
    """Where a group begins that has committed nothing; it remembers that place at once."""
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """`read_committed` leaves out records of aborted and of open transactions."""
    idempotent: bool | Literal["auto"] = "auto"
    """`auto`: idempotent when the broker supports it, said in the log when not."""
    linger_ms: int = 2
    request_timeout_ms: int = 30_000
    max_request_size: int = 1024 * 1024
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"
    auto_create: bool = True
    """Create request, reply and dead-letter topics that are missing."""
    partitions: int = 6
    """Partitions of topics that `auto_create` makes."""
    replication_factor: int = 1
    reply_topic: str = names.REPLY_TOPIC
    dead_letter_topic: str = names.DEAD_LETTERS
    reply_prefixes: tuple[str, ...] = names.REPLY_PREFIXES
    """A request may name only a `reply_to` that starts with one of these."""
    refuse_destinations: tuple[str, ...] = ()
    """Names that no `reply_to` may have though a prefix allows them: the sources of other routes."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = None
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_password: str | None = None
    ssl_check_hostname: bool = True

    def __repr__(self) -> str:
        return _safe_repr(self)

    def check(self) -> list[str]:
        """One line per contradiction, each naming its settings; empty when all is well."""
        problems = _ranges(self, _KAFKA_RANGES) + _prefix_problems(self.reply_prefixes)
        if not self.topics:
            problems.append("topics is empty: name at least one request topic")
        named = [("topics", t) for t in self.topics]
        named += [("reply_topic", self.reply_topic), ("dead_letter_topic", self.dead_letter_topic)]
        problems += [error for what, value in named if (error := topic_error(value, what))]
        if error := name_error(self.group, "group"):
            problems.append(error)
        problems += [
            f"bootstrap names {host!r}, expected host:port"
            for host in self.bootstrap.split(",")
            if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@]+):\d{1,5}", host)
        ]
        if problems:
            return problems
        return self._timing_problems() + self._naming_problems() + self._security_problems()

    def _timing_problems(self) -> list[str]:
        problems = []
        if self.heartbeat_interval_ms * 2 > self.session_timeout_ms:
            problems.append(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) must be at most half of "
                f"session_timeout_ms ({self.session_timeout_ms}): lower the one or raise the other"
            )
        if self.drain_budget_s * 1000 >= self.max_poll_interval_ms:
            problems.append(
                f"drain_budget_s ({self.drain_budget_s:g}) must be below max_poll_interval_ms "
                f"({self.max_poll_interval_ms}): lower the one or raise the other"
            )
        if self.fetch_max_wait_ms >= self.request_timeout_ms:
            problems.append(
                f"fetch_max_wait_ms ({self.fetch_max_wait_ms}) must be below request_timeout_ms "
                f"({self.request_timeout_ms}): lower the one or raise the other"
            )
        if self.max_in_flight_per_partition > self.max_in_flight:
            problems.append(
                f"max_in_flight_per_partition ({self.max_in_flight_per_partition}) exceeds "
                f"max_in_flight ({self.max_in_flight}): lower the one or raise the other"
            )
        if self.release_backoff_ms > self.release_backoff_max_ms:
            problems.append(
                f"release_backoff_ms ({self.release_backoff_ms}) exceeds release_backoff_max_ms "
                f"({self.release_backoff_max_ms}): lower the one or raise the other"
            )
        return problems

    def _naming_problems(self) -> list[str]:
        problems = []
        for what, topic in (
            ("reply_topic", self.reply_topic),
            ("dead_letter_topic", self.dead_letter_topic),
        ):
            if topic in self.topics:
                problems.append(
                    f"{what} ({topic}) is also one of topics: a reply would become a request; rename one"
                )
        if self.reply_topic == self.dead_letter_topic:
            problems.append(
                f"reply_topic and dead_letter_topic are both {self.reply_topic}; rename one"
            )
        return problems

    def _security_problems(self) -> list[str]:
        problems = []
        uses_sasl = self.security_protocol.startswith("SASL")
        if uses_sasl and (self.sasl_username is None or self.sasl_password is None):
            problems.append(
                f"security_protocol {self.security_protocol} needs sasl_username and sasl_password"
            )
        if not uses_sasl and self.sasl_username is not None:
            problems.append(
                f"sasl_username is set but security_protocol is {self.security_protocol}: "
                "choose SASL_PLAINTEXT or SASL_SSL, or drop sasl_username"
            )
        if self.ssl_certfile is None and self.ssl_keyfile is not None:
            problems.append("ssl_keyfile is set without ssl_certfile: give both or none")
        return problems


_KAFKA_RANGES: dict[str, tuple[float, float]] = {
    "session_timeout_ms": (100, 1_800_000),
    "heartbeat_interval_ms": (10, 600_000),
    "max_poll_interval_ms": (100, _MAX_MS),
    "fetch_max_wait_ms": (1, 60_000),
    "max_partition_fetch_bytes": (1024, _MAX_MS),
    "fetch_max_bytes": (1024, _MAX_MS),
    "max_in_flight": (1, 1_000_000),
    "max_in_flight_per_partition": (1, 1_000_000),
    "max_in_flight_bytes": (1024, 2**40),
    "max_receive": (1, 100_000),
    "commit_interval_ms": (1, 600_000),
    "drain_budget_s": (0, 3600),
    "close_timeout_s": (0.1, 600),
    "open_timeout_s": (0.1, 600),
    "watchdog_s": (1, 86_400),
    "metadata_max_age_ms": (100, 3_600_000),
    "release_backoff_ms": (1, 600_000),
    "release_backoff_max_ms": (1, 3_600_000),
    "linger_ms": (0, 10_000),
    "request_timeout_ms": (100, 600_000),
    "max_request_size": (2048, 2**30),
    "partitions": (1, 10_000),
    "replication_factor": (1, 100),
}


class RedisOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis (>= 6.2) or Valkey stream source and the sink beside it."""

    host: str = "localhost"
    port: int = 6379
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    ssl_cafile: str | None = None
    stream: str = names.REQUEST_TOPIC
    group: str = names.GROUP
    consumer: str | None = None
    """Name inside the group; None makes one that no other process has."""
    start: str = "0"
    """Where a new group begins: `0` is the whole backlog, `$` only what comes later."""
    block_ms: int = 2_000
    claim_idle_ms: int = 60_000
    """An entry that its owner has not renewed for this long is taken over."""
    claim_interval_ms: int = 5_000
    max_in_flight: int = 1024
    max_in_flight_bytes: int = 256 * 1024 * 1024
    max_receive: int = 256
    settle_interval_ms: int = 5
    """How long settles gather before one pipelined XACK and XDEL."""
    reply_ttl_s: int = names.REPLY_TTL_S
    reply_stream_maxlen: int = 100_000
    dead_letter_ttl_s: int = names.DEAD_LETTER_TTL_S
    dead_letter_maxlen: int = 100_000
    socket_timeout_s: float = 10.0
    connect_timeout_s: float = 5.0
    close_timeout_s: float = 5.0
    max_record_bytes: int = 64 * 1024 * 1024
    """Largest reply written; Redis itself takes 512 MiB."""
    release_backoff_ms: int = 200
    release_backoff_max_ms: int = 10_000
    dead_letter_stream: str = names.DEAD_LETTERS
    reply_prefixes: tuple[str, ...] = names.REPLY_PREFIXES
    """A request may name only a `reply_to` that starts with one of these."""
    refuse_destinations: tuple[str, ...] = ()
    """Names that no `reply_to` may have though a prefix allows them: the sources of other routes."""

    def __repr__(self) -> str:
        return _safe_repr(self)

    @property
    def address(self) -> str:
        """`redis://host:port` without user and password: fit for logs."""
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}"

    def check(self) -> list[str]:
        """One line per contradiction, each naming its settings; empty when all is well."""
        problems = _ranges(self, _REDIS_RANGES) + _prefix_problems(self.reply_prefixes)
        named = [
            ("stream", self.stream),
            ("group", self.group),
            ("dead_letter_stream", self.dead_letter_stream),
            ("host", self.host),
        ]
        if self.consumer is not None:
            named.append(("consumer", self.consumer))
        problems += [error for what, value in named if (error := name_error(value, what))]
        if not re.fullmatch(r"\$|\d{1,20}(-\d{1,20})?", self.start):
            problems.append(f"start is {self.start!r}, expected 0, $ or an entry id such as 1700-0")
        if self.stream == self.dead_letter_stream:
            problems.append(
                f"stream and dead_letter_stream are both {self.stream}: "
                "a dead letter would become a request; rename one"
            )
        if problems:
            return problems
        if self.block_ms >= self.socket_timeout_s * 1000:
            problems.append(
                f"block_ms ({self.block_ms}) must be below socket_timeout_s "
                f"({self.socket_timeout_s:g} s): lower the one or raise the other"
            )
        if self.claim_interval_ms > self.claim_idle_ms:
            problems.append(
                f"claim_interval_ms ({self.claim_interval_ms}) exceeds claim_idle_ms "
                f"({self.claim_idle_ms}): lower the one or raise the other"
            )
        if self.release_backoff_ms > self.release_backoff_max_ms:
            problems.append(
                f"release_backoff_ms ({self.release_backoff_ms}) exceeds release_backoff_max_ms "
                f"({self.release_backoff_max_ms}): lower the one or raise the other"
            )
        return problems


_REDIS_RANGES: dict[str, tuple[float, float]] = {
    "port": (1, 65_535),
    "db": (0, 100_000),
    "block_ms": (1, 600_000),
    "claim_idle_ms": (50, 86_400_000),
    "claim_interval_ms": (10, 86_400_000),
    "max_in_flight": (1, 1_000_000),
    "max_in_flight_bytes": (1024, 2**40),
    "max_receive": (1, 100_000),
    "settle_interval_ms": (0, 60_000),
    "reply_ttl_s": (1, _MAX_TTL_S),
    "reply_stream_maxlen": (1, 1_000_000_000),
    "dead_letter_ttl_s": (1, _MAX_TTL_S),
    "dead_letter_maxlen": (1, 1_000_000_000),
    "socket_timeout_s": (0.05, 3600),
    "connect_timeout_s": (0.05, 3600),
    "close_timeout_s": (0.1, 600),
    "max_record_bytes": (1024, 512 * 1024 * 1024),
    "release_backoff_ms": (1, 600_000),
    "release_backoff_max_ms": (1, 3_600_000),
}


class InprocOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An in-process broker: one-off CLI runs, unit tests, platforms without a packaged broker."""

    name: str = "embedstream"
    max_queued: int = 1024
    """Records waiting; a full queue makes `submit` wait."""
    max_in_flight: int = 1024
    max_receive: int = 256
    max_kept_replies: int = 10_000
    """Replies nobody collected; the oldest go first."""
    max_record_bytes: int | None = None
    release_backoff_ms: int = 50
    release_backoff_max_ms: int = 5_000

    def check(self) -> list[str]:
        """One line per contradiction, each naming its settings; empty when all is well."""
        problems = _ranges(self, _INPROC_RANGES)
        if error := name_error(self.name, "name"):
            problems.append(error)
        if self.max_record_bytes is not None and self.max_record_bytes < 1024:
            problems.append(f"max_record_bytes is {self.max_record_bytes}, allowed is 1024 or more")
        if not problems and self.release_backoff_ms > self.release_backoff_max_ms:
            problems.append(
                f"release_backoff_ms ({self.release_backoff_ms}) exceeds release_backoff_max_ms "
                f"({self.release_backoff_max_ms}): lower the one or raise the other"
            )
        return problems


_INPROC_RANGES: dict[str, tuple[float, float]] = {
    "max_queued": (1, 10_000_000),
    "max_in_flight": (1, 1_000_000),
    "max_receive": (1, 100_000),
    "max_kept_replies": (1, 10_000_000),
    "release_backoff_ms": (1, 600_000),
    "release_backoff_max_ms": (1, 3_600_000),
}


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """JSONL in, JSONL out. `-` is standard input or output."""

    path: str = "-"
    replies: str = "-"
    """File that replies are appended to."""
    dead_letters: str | None = None
    """File for records that will never succeed; None counts and logs them only."""
    max_line_bytes: int = 16 * 1024 * 1024
    """A longer line is handed out cut to this length and marked by the header `line-bytes`."""
    max_in_flight: int = 1024
    max_receive: int = 256
    release_backoff_ms: int = 50
    release_backoff_max_ms: int = 5_000

    def check(self) -> list[str]:
        """One line per contradiction, each naming its settings; empty when all is well."""
        problems = _ranges(self, _FILE_RANGES)
        outputs = [p for p in (self.replies, self.dead_letters) if p not in (None, "-")]
        if self.path != "-" and self.path in outputs:
            problems.append(
                f"path and replies are both {self.path}: a reply would become a request"
            )
        if self.dead_letters is not None and self.dead_letters == self.replies:
            problems.append(f"replies and dead_letters are both {self.replies}; name two files")
        if not problems and self.release_backoff_ms > self.release_backoff_max_ms:
            problems.append(
                f"release_backoff_ms ({self.release_backoff_ms}) exceeds release_backoff_max_ms "
                f"({self.release_backoff_max_ms}): lower the one or raise the other"
            )
        return problems


_FILE_RANGES: dict[str, tuple[float, float]] = {
    "max_line_bytes": (16, 2**31 - 1),
    "max_in_flight": (1, 1_000_000),
    "max_receive": (1, 100_000),
    "release_backoff_ms": (1, 600_000),
    "release_backoff_max_ms": (1, 3_600_000),
}

TransportOptions: TypeAlias = KafkaOptions | RedisOptions | InprocOptions | FileOptions
