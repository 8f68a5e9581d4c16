"""Options of the Kafka transport, and how an address names them.

Who calls it: the registry; everything in this folder reads `KafkaOptions`.
What must stay true: as in `pipeline.transports.options`; an address never holds a login in front of
the host.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult

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
from pipeline.transports.options import (
    Options,
    Place,
    RefuseDestinations,
    ReleaseBackoffMaxMs,
    ReleaseBackoffMs,
    ReplyPrefixes,
    says,
    within,
)

MAX_INT32 = 2**31 - 1
_TOPIC = re.compile(r"[A-Za-z0-9._-]+")


def topic_error(value: str, what: str) -> str | None:
    """Why `value` cannot name a Kafka topic; None when it can."""
    error = name_error(value, what)
    if error is None and (not _TOPIC.fullmatch(value) or value in (".", "..")):
        error = f"{what} may hold only letters, digits, '.', '_' and '-'"
    return error


class KafkaOptions(Options, frozen=True, kw_only=True):
    """A Kafka source and the sink beside it. Times carry their unit; sizes are bytes.

    Defaults follow aiokafka's except: `auto_offset_reset` is `earliest` (a new group must not skip
    the backlog), `fetch_max_wait_ms` is short (the packaged broker wakes a long poll only after
    half of it), fetch sizes let one over-limit record through so that it can be dead-lettered.
    """

    bootstrap: Annotated[str, says("`host:port[,host:port]`")]
    topics: Annotated[tuple[str, ...], says("From the address: the request topics.")] = (REQUESTS,)
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
    reply_key_file: Annotated[
        str | None,
        says(
            "File of keys, one per line: a request may then name only a `reply_to` that one of them "
            "has signed (`embedstream sign`)."
        ),
    ] = None
    schema_registry_url: Annotated[
        str | None,
        says(
            "Records and keys that begin with the magic byte are read by this registry's schemas "
            "(extra `schema-registry`)."
        ),
    ] = None
    schema_registry_username: Annotated[str | None, says("Login there.")] = None
    schema_registry_password: Annotated[str | None, says("Login there.")] = None
    schema_registry_password_file: Annotated[
        str | None, says("File that holds the password, instead of the option.")
    ] = None
    schema_registry_cafile: Annotated[
        str | None, says("Certificate authorities of the registry, PEM.")
    ] = None
    security_protocol: Annotated[
        Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"], says("Encryption and login.")
    ] = "PLAINTEXT"
    sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"],
        says("How the login is sent."),
    ] = "PLAIN"
    sasl_username: Annotated[str | None, says("Login.")] = None
    sasl_password: Annotated[str | None, says("Login.")] = None
    sasl_password_file: Annotated[
        str | None, says("File that holds the password, instead of `sasl_password`.")
    ] = None
    sasl_token_file: Annotated[
        str | None, says("OAUTHBEARER: file with a token, read for each connection.")
    ] = None
    sasl_oauthbearer_token_endpoint_url: Annotated[
        str | None, says("OAUTHBEARER: where client credentials are changed for a token.")
    ] = None
    sasl_oauthbearer_client_id: Annotated[str | None, says("Login there.")] = None
    sasl_oauthbearer_client_secret: Annotated[str | None, says("Login there.")] = None
    sasl_oauthbearer_client_secret_file: Annotated[
        str | None, says("File that holds the secret, instead of the option.")
    ] = None
    sasl_oauthbearer_scope: Annotated[str | None, says("Scope to ask for there.")] = None
    ssl_cafile: Annotated[str | None, says("Certificate authorities, PEM.")] = None
    ssl_certfile: Annotated[str | None, says("Our certificate, PEM.")] = None
    ssl_keyfile: Annotated[str | None, says("Our key, PEM.")] = None
    ssl_password: Annotated[str | None, says("Of the key.")] = None
    ssl_check_hostname: Annotated[bool, says("Whether the certificate must name the host.")] = True

    @classmethod
    def address_values(cls, parts: SplitResult) -> dict[str, Any]:
        if "@" in parts.netloc:
            raise ValueError("give user and password as sasl_username and sasl_password")
        if not parts.netloc:
            raise ValueError("the address names no host:port")
        hosts = [h if _has_port(h) else f"{h}:9092" for h in parts.netloc.split(",")]
        values: dict[str, Any] = {"bootstrap": ",".join(hosts)}
        topics = tuple(topic for topic in plain(parts.path.strip("/")).split(",") if topic)
        if topics:
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

    def consumes(self) -> tuple[Place, ...]:
        return tuple(self._place(topic, option="topics", group=self.group) for topic in self.topics)

    def writes(self) -> tuple[Place, ...]:
        return (
            self._place(self.reply_topic, option="reply_topic"),
            self._place(self.dead_letter_topic, option="dead_letter_topic", is_dead_letters=True),
        )

    def exactly_once_problem(self) -> str | None:
        if self.idempotent is False:
            return "idempotent=false takes no part in transactions: remove it from the address"
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
        if not self.topics:
            problems.append("topics is empty: name at least one request topic")
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
        return self._timing_problems() + self._security_problems()

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

    def _security_problems(self) -> list[str]:
        problems: list[str] = []
        bearer = self.sasl_mechanism == "OAUTHBEARER"
        uses_sasl = self.security_protocol.startswith("SASL")
        password = _one_of(self, "sasl_password", "sasl_password_file", problems)
        login = "sasl_oauthbearer_client_secret"
        login_given = _one_of(self, login, f"{login}_file", problems)
        token = _one_of(self, "sasl_token_file", "sasl_oauthbearer_token_endpoint_url", problems)
        if uses_sasl and not bearer and (self.sasl_username is None or not password):
            problems.append(
                f"security_protocol {self.security_protocol} needs sasl_username and "
                "sasl_password or sasl_password_file"
            )
        if uses_sasl and bearer and not token:
            problems.append(
                "sasl_mechanism OAUTHBEARER needs sasl_token_file, or "
                "sasl_oauthbearer_token_endpoint_url with client id and secret"
            )
        endpoint = self.sasl_oauthbearer_token_endpoint_url
        if endpoint is not None:
            if not endpoint.startswith(("https://", "http://")):
                problems.append("sasl_oauthbearer_token_endpoint_url is no http:// or https:// URL")
            if self.sasl_oauthbearer_client_id is None or not login_given:
                problems.append(
                    "sasl_oauthbearer_token_endpoint_url needs sasl_oauthbearer_client_id and "
                    f"{login} or {login}_file"
                )
        if bearer and not uses_sasl:
            problems.append(
                f"sasl_mechanism is OAUTHBEARER but security_protocol is {self.security_protocol}: "
                "choose SASL_SSL"
            )
        if token and not bearer:
            problems.append("a token is set but sasl_mechanism is not OAUTHBEARER")
        if self.sasl_username is not None and (bearer or not uses_sasl):
            problems.append(
                f"sasl_username is set but security_protocol is {self.security_protocol}: "
                "choose SASL_PLAINTEXT or SASL_SSL, or drop sasl_username"
                if not bearer
                else "sasl_username is set but sasl_mechanism is OAUTHBEARER: drop one"
            )
        registry = "schema_registry_password"
        if _one_of(self, registry, f"{registry}_file", problems) and (
            self.schema_registry_username is None
        ):
            problems.append(f"{registry} is set without schema_registry_username")
        url = self.schema_registry_url
        if url is not None and not url.startswith(("https://", "http://")):
            problems.append("schema_registry_url is no http:// or https:// URL")
        if url is not None and "@" in url.partition("://")[2].partition("/")[0]:
            problems.append("schema_registry_url holds a login: give schema_registry_username")
        if self.ssl_certfile is None and self.ssl_keyfile is not None:
            problems.append("ssl_keyfile is set without ssl_certfile: give both or none")
        return problems


def _one_of(options: KafkaOptions, one: str, other: str, problems: list[str]) -> bool:
    """Whether one of two options is given; both are a problem."""
    given = [getattr(options, name) is not None for name in (one, other)]
    if all(given):
        problems.append(f"{one} and {other} are both set: give one")
    return any(given)


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]
