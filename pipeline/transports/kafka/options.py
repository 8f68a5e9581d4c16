"""Options of the Kafka transport, and how an address names them.

Who calls it: the registry; everything in this folder reads `KafkaOptions`.
What must stay true: as in `pipeline.transports.options`; an address never holds a login in front of
the host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult

import msgspec

from pipeline.transports.address import plain
from pipeline.transports.broker_names import (
    DEAD_LETTERS,
    GROUP,
    REPLIES,
    REPLY_PREFIXES,
    REQUESTS,
    name_error,
    prefix_problems,
)
from pipeline.transports.kafka.login import LoginOptions
from pipeline.transports.options import (
    Place,
    RefuseDestinations,
    ReleaseBackoffMaxMs,
    ReleaseBackoffMs,
    ReplyPrefixes,
    says,
    within,
)

MAX_INT32 = 2**31 - 1
EXACTLY_ONCE_WINDOW = 1024
"""Finished records that a commit's metadata remembers whatever their gaps: random ones of 1,024 take up to
2.4 kB of the 3.5 that there are, and one that is forgotten is answered twice."""
_TOPIC = re.compile(r"[A-Za-z0-9._-]+")


def topic_error(value: str, what: str) -> str | None:
    """Why `value` cannot name a Kafka topic; None when it can."""
    error = name_error(value, what)
    if error is None and (not _TOPIC.fullmatch(value) or value in (".", "..")):
        error = f"{what} may hold only letters, digits, '.', '_' and '-'"
    return error


class KafkaOptions(LoginOptions, frozen=True, kw_only=True):
    """A Kafka source and the sink beside it. Times carry their unit; sizes are bytes.

    Defaults follow aiokafka's except: `auto_offset_reset` is `earliest` (a new group must not skip
    the backlog), `fetch_max_wait_ms` is short (the packaged broker wakes a long poll only after
    half of it), fetch sizes let one over-limit record through so that it can be dead-lettered.
    """

    bootstrap: Annotated[str, says("`host:port[,host:port]`")]
    topics: Annotated[tuple[str, ...], says("From the address: the request topics.")] = (REQUESTS,)
    pattern: Annotated[
        str | None,
        says(
            "Instead of topics: all whose whole name matches this regular expression (Python's), also those "
            "that appear later; never reply and dead-letter topics of this route."
        ),
    ] = None
    group: Annotated[str, says("Consumer group: members share the requests.")] = GROUP
    group_instance_id: Annotated[
        str | None,
        says(
            "Static membership: a member that comes back under this name within "
            "session_timeout_ms gets its partitions back without a rebalance. One per process."
        ),
    ] = None
    client_id: Annotated[str, says("As the broker's log shows it.")] = "embedstream"
    session_timeout_ms: Annotated[
        int, within(100, 1_800_000, "A member that is silent this long is taken for dead.")
    ] = 10_000
    heartbeat_interval_ms: Annotated[
        int, within(10, 600_000, "At most half of session_timeout_ms.")
    ] = 3000
    max_poll_interval_ms: Annotated[
        int,
        within(
            100, MAX_INT32, "The broker gives partitions away when nothing was polled this long."
        ),
    ] = 300_000
    fetch_max_wait_ms: Annotated[
        int, within(1, 60_000, "Longest wait of one fetch; 10 to 20 for the packaged broker.")
    ] = 50
    max_partition_fetch_bytes: Annotated[
        int,
        within(1024, MAX_INT32, "Bytes of one fetch per partition; one larger record still comes."),
    ] = 4 * 1024 * 1024
    fetch_max_bytes: Annotated[
        int, within(1024, MAX_INT32, "Bytes of one fetch over all partitions.")
    ] = 50 * 1024 * 1024
    max_in_flight: Annotated[
        int, within(1, 1_000_000, "Records handed out or buffered, over all partitions.")
    ] = 4096
    max_in_flight_per_partition: Annotated[
        int,
        within(
            1,
            1_000_000,
            "Records from the lowest unsettled one to the newest, per partition: at the bound it pauses.",
        ),
    ] = 1024
    max_in_flight_bytes: Annotated[
        int, within(1024, 2**40, "Bytes handed out or buffered, over all partitions.")
    ] = 256 * 1024 * 1024
    max_receive: Annotated[
        int, within(1, 100_000, "Records that one `receive` hands out at most.")
    ] = 256
    commit_interval_ms: Annotated[
        int, within(1, 600_000, "How often settled offsets are committed.")
    ] = 500
    drain_budget_s: Annotated[
        float,
        within(0, 3600, "How long a revoked partition may finish its work before it is given up."),
    ] = 20.0
    close_timeout_s: Annotated[
        float, within(0.1, 600, "Bound of leaving the group and closing connections, each.")
    ] = 5.0
    open_timeout_s: Annotated[
        float, within(0.1, 600, "Bound of the first look at the cluster.")
    ] = 15.0
    watchdog_s: Annotated[
        float,
        within(
            1,
            86_400,
            "A consumer that receives nothing for this long although records wait is recreated.",
        ),
    ] = 60.0
    metadata_max_age_ms: Annotated[
        int, within(100, 3_600_000, "How soon a topic created later, or new partitions, are seen.")
    ] = 10_000
    release_backoff_ms: ReleaseBackoffMs = 200
    release_backoff_max_ms: ReleaseBackoffMaxMs = 10_000
    auto_offset_reset: Annotated[
        Literal["earliest", "latest"],
        says("Where a group begins that has committed nothing; it remembers that place at once."),
    ] = "earliest"
    isolation_level: Annotated[
        Literal["read_committed", "read_uncommitted"],
        says("`read_committed` leaves out records of aborted and of open transactions."),
    ] = "read_committed"
    idempotent: Annotated[
        bool | Literal["auto"],
        says("`auto`: idempotent when the broker supports it, said in the log when not."),
    ] = "auto"
    transaction_interval_ms: Annotated[
        int,
        within(
            1, 60_000, 'With delivery = "exactly_once": how long replies gather for a transaction.'
        ),
    ] = 100
    transaction_timeout_ms: Annotated[
        int,
        within(
            1000,
            900_000,
            "After it the broker aborts a transaction whose process is gone; so long the next owner waits.",
        ),
    ] = 10_000
    linger_ms: Annotated[
        int, within(0, 10_000, "How long replies gather before they are sent.")
    ] = 2
    request_timeout_ms: Annotated[
        int, within(100, 600_000, "Bound of one request to a broker.")
    ] = 30_000
    max_request_size: Annotated[int, within(2048, 2**30, "Largest record the producer sends.")] = (
        1024 * 1024
    )
    compression: Annotated[
        Literal["none", "gzip", "snappy", "lz4", "zstd"], says("Of replies and dead letters.")
    ] = "none"
    auto_create: Annotated[
        bool, says("Create request, reply and dead-letter topics that are missing.")
    ] = True
    partitions: Annotated[
        int, within(1, 10_000, "Partitions of topics that `auto_create` makes.")
    ] = 6
    replication_factor: Annotated[int, within(1, 100, "Of topics that `auto_create` makes.")] = 1
    reply_topic: Annotated[str, says("Where replies go when a request names no `reply_to`.")] = (
        REPLIES
    )
    dead_letter_topic: Annotated[str, says("Where dead letters go.")] = DEAD_LETTERS
    reply_prefixes: ReplyPrefixes = REPLY_PREFIXES
    refuse_destinations: RefuseDestinations = ()
    refuse_pattern: Annotated[
        str | None, says("As refuse_destinations: all names that match it.")
    ] = None
    reply_key_file: Annotated[
        str | None,
        says(
            "File of keys, one per line: a request may then name only a `reply_to` that one of them "
            "has signed (`embedstream sign`)."
        ),
    ] = None

    @classmethod
    def address_values(cls, parts: SplitResult) -> dict[str, Any]:
        if "@" in parts.netloc:
            raise ValueError("give user and password as sasl_username and sasl_password")
        if not parts.netloc:
            raise ValueError("the address names no host:port")
        hosts = [h if _has_port(h) else f"{h}:9092" for h in parts.netloc.split(",")]
        values: dict[str, Any] = {"bootstrap": ",".join(hosts)}
        topics = tuple(topic for topic in plain(parts.path.strip("/")).split(",") if topic)
        by_pattern = any(pair.startswith("pattern=") for pair in parts.query.split("&"))
        if topics or by_pattern:
            values["topics"] = topics
        return values

    @classmethod
    def destination_values(cls, parts: SplitResult) -> tuple[dict[str, Any], str]:
        values = cls.address_values(parts)
        topics = values.get("topics", ())
        if len(topics) != 1:
            raise ValueError("a destination names one topic: kafka://host:port/TOPIC")
        # All places are this one: nothing else is looked up or created there.
        return values | {"reply_topic": topics[0], "dead_letter_topic": topics[0]}, topics[0]

    @property
    def address(self) -> str:
        """`kafka://host:port`: fit for logs."""
        return f"kafka://{self.bootstrap}"

    @property
    def whole_pattern(self) -> str:
        """`pattern` as it is matched: the whole name, and no topic that only holds answers."""
        never = {self.reply_topic, self.dead_letter_topic, REPLIES, DEAD_LETTERS}
        names = "|".join(map(re.escape, sorted(never)))
        return rf"(?!(?:{names})\Z)(?:{self.pattern})\Z"

    def reads(self, topic: str) -> bool:
        """Whether requests are read there, by this route or by another that it knows of."""
        if topic in self.topics or topic in self.refuse_destinations:
            return True
        patterns = [self.refuse_pattern] if self.refuse_pattern is not None else []
        patterns += [self.whole_pattern] if self.pattern is not None else []
        return any(re.match(pattern, topic) for pattern in patterns)

    def refusing(self, places: Iterable[Place]) -> KafkaOptions:
        places = list(places)
        named = super().refusing(place for place in places if not place.pattern)
        patterns = [place.pattern for place in places if place.pattern]
        if not patterns:
            return named
        also = "|".join(
            dict.fromkeys(
                [*([self.refuse_pattern or ""] if self.refuse_pattern else []), *patterns]
            )
        )
        return msgspec.structs.replace(named, refuse_pattern=also)

    def consumes(self) -> tuple[Place, ...]:
        if self.pattern is not None:
            by_pattern = {"option": "pattern", "group": self.group, "pattern": self.whole_pattern}
            return (self._place(self.pattern, **by_pattern),)
        return tuple(self._place(topic, option="topics", group=self.group) for topic in self.topics)

    def writes(self) -> tuple[Place, ...]:
        return (
            self._place(self.reply_topic, option="reply_topic"),
            self._place(self.dead_letter_topic, option="dead_letter_topic", is_dead_letters=True),
        )

    def exactly_once_problem(self) -> str | None:
        if self.idempotent is False:
            return "idempotent=false takes no part in transactions: remove it from the address"
        if self.max_in_flight_per_partition > EXACTLY_ONCE_WINDOW:
            return (
                f"max_in_flight_per_partition={self.max_in_flight_per_partition} is more than the "
                f"{EXACTLY_ONCE_WINDOW} finished records that a commit has room to remember: lower it"
            )
        return None

    def one_process_problem(self) -> str | None:
        if self.group_instance_id is not None:
            return (
                f"group_instance_id={self.group_instance_id} is the name of one member of the group"
            )
        return None

    def orders(self) -> tuple[str, ...]:
        return "key", "partition"

    def place_at(self, destination: str) -> Place:
        return self._place(destination)

    def _place(self, topic: str, **more: Any) -> Place:
        return Place(frozenset(self.bootstrap.split(",")), "topic", topic, **more)

    def must_poll_within(self) -> tuple[str, float]:
        return "max_poll_interval_ms", self.max_poll_interval_ms / 1000

    def name_problems(self) -> list[str]:
        problems = prefix_problems(self.reply_prefixes)
        if self.pattern is not None and self.topics:
            problems.append("topics and pattern are both set: give one")
        elif self.pattern is None and not self.topics:
            problems.append("topics is empty: name at least one request topic, or a pattern")
        problems += [
            f"{what} is no regular expression: {error}"
            for what in ("pattern", "refuse_pattern")
            if (error := _pattern_error(getattr(self, what)))
        ]
        named = [("topics", t) for t in self.topics]
        named += [("reply_topic", self.reply_topic), ("dead_letter_topic", self.dead_letter_topic)]
        problems += [error for what, value in named if (error := topic_error(value, what))]
        groups = [("group", self.group)]
        if self.group_instance_id is not None:
            groups.append(("group_instance_id", self.group_instance_id))
        problems += [error for what, value in groups if (error := name_error(value, what))]
        problems += [
            f"bootstrap names {host!r}, expected host:port"
            for host in self.bootstrap.split(",")
            if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@]+):\d{1,5}", host)
        ]
        return problems

    def contradictions(self) -> list[str]:
        return self._timing_problems() + self.login_problems()

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
        problems += self.not_above("max_in_flight_per_partition", "max_in_flight")
        return problems + self.not_above("release_backoff_ms", "release_backoff_max_ms")


def _pattern_error(pattern: str | None) -> str | None:
    try:
        re.compile(f"(?:{pattern})" if pattern is not None else "")
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return "it is empty" if pattern == "" else None


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]
