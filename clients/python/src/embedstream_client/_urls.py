"""Addresses of a service's broker, as text and as values.

Who calls it: `AsyncClient.from_url`; programs that build an endpoint themselves.
What must stay true: the path of a Redis address is the database number, as everywhere else; a
parameter that is not known is refused by name; no message and no repr holds a password.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

REQUESTS = "embedstream.requests"
REDIS_PORT, SENTINEL_PORT = 6379, 26379
REPLY_TOPIC = "embedstream.replies"
REPLY_PREFIX = "embedstream.replies."
"""A client's reply stream is this and 32 random characters; the service allows `embedstream.*`."""


class RedisEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A Redis (6.2 or newer) or Valkey server and the stream, or list, that the service reads.

    key           the list, where the service reads one instead of a stream
    take_from     the end of the list that the service takes from; requests are pushed to the other one
    nodes         further sentinels or nodes of a cluster, ``host:port``
    sentinel      host and nodes are sentinels, and this is what they call the service
    cluster       host and nodes are nodes of a Redis Cluster
    reply_prefix  start of this client's reply stream; change it only if the operator allows replies
                  elsewhere
    """

    host: str = "localhost"
    port: int = 6379
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    ssl_ca_certs: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_check_hostname: bool = True
    nodes: tuple[str, ...] = ()
    sentinel: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    cluster: bool = False
    stream: str = REQUESTS
    key: str | None = None
    take_from: Literal["right", "left"] = "right"
    reply_prefix: str = REPLY_PREFIX

    needs: ClassVar[str] = "redis"
    extra: ClassVar[str] = "redis"

    @property
    def address(self) -> str:
        """Without user and password: fit for messages."""
        where = ",".join([f"{self.host}:{self.port}", *self.nodes])
        kind = "redis" if self.key is None else "redis-list"
        return f"{kind.replace('redis', 'rediss') if self.tls else kind}://{where}/{self.db}"

    @property
    def queue(self) -> str:
        """The stream or list that requests are put into."""
        return self.stream if self.key is None else self.key

    def servers(self) -> list[tuple[str, int]]:
        """Host and port of every server that is named."""
        more = [node.rpartition(":") for node in self.nodes]
        return [(self.host, self.port), *((host, int(port)) for host, _, port in more)]

    def __repr__(self) -> str:
        kind = "stream" if self.key is None else "key"
        return f"RedisEndpoint({self.address}, {kind}={self.queue})"


class KafkaEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A Kafka cluster, the topic that the service reads and the one it answers on."""

    bootstrap: str = "localhost:9092"
    topic: str = REQUESTS
    reply_topic: str = REPLY_TOPIC
    max_request_size: int = 1024 * 1024
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"] = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = None
    sasl_password_file: str | None = None
    sasl_token_file: str | None = None
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_password: str | None = None
    ssl_check_hostname: bool = True

    needs: ClassVar[str] = "aiokafka"
    extra: ClassVar[str] = "kafka"

    @property
    def address(self) -> str:
        """Without user and password: fit for messages."""
        return f"kafka://{self.bootstrap}"

    def __repr__(self) -> str:
        return f"KafkaEndpoint({self.address}, topic={self.topic}, reply_topic={self.reply_topic})"


Endpoint: TypeAlias = "RedisEndpoint | KafkaEndpoint"
EndpointT = TypeVar("EndpointT", RedisEndpoint, KafkaEndpoint)


def parse_url(url: str) -> Endpoint:
    """The endpoint that `url` names.

    - ``redis://[user:password@]host[:port][/db][?stream=name]``, ``rediss://`` for TLS; a path that
      is no number is the stream: ``redis://host/embedstream.requests``
    - ``redis-list://host[:port][/db or /key][?key=name]``, ``rediss-list://``: the service reads a list
    - ``redis://host:port,host:port/...?sentinel=NAME``: the hosts are sentinels; ``?cluster=true``: nodes
      of a Redis Cluster
    - ``kafka://host[:port][,host:port][/topic][?reply_topic=name]``

    Every other field of `RedisEndpoint` and `KafkaEndpoint` is a parameter of the query.
    Raises `ValueError` with one line that names what is wrong.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "redis-list", "rediss-list", "kafka"):
        raise ValueError(
            f"unknown scheme {parts.scheme[:20]!r}: use redis://, rediss://, redis-list:// or kafka://"
        )
    if not url.startswith(f"{parts.scheme}://"):
        raise ValueError(f"{parts.scheme}: write two slashes, {parts.scheme}://host:port")
    if parts.fragment:
        raise ValueError(f"{parts.scheme}: write a '#' in the address as %23")
    return _kafka(parts) if parts.scheme == "kafka" else _redis(parts)


def _redis(parts: SplitResult) -> RedisEndpoint:
    try:
        each = [urlsplit(f"//{one}") for one in parts.netloc.rpartition("@")[2].split(",")]
        (host, port), *others = [(one.hostname, one.port) for one in each]
    except ValueError:
        raise ValueError(
            "redis: the port is no number from 1 to 65535 (write a '/', '@' or ':' in a password as "
            "%2F, %40 or %3A)"
        ) from None
    is_list = parts.scheme.endswith("-list")
    values: dict[str, Any] = {"tls": parts.scheme.startswith("rediss")}
    default = SENTINEL_PORT if "sentinel=" in parts.query else REDIS_PORT
    if host:
        values["host"] = host
    if port is not None or default != REDIS_PORT:
        values["port"] = default if port is None else port
    if others:
        values["nodes"] = tuple(f"{h or 'localhost'}:{p or default}" for h, p in others)
    if parts.username:
        values["username"] = unquote(parts.username)
    if parts.password is not None:
        values["password"] = unquote(parts.password)
    path = unquote(parts.path.strip("/"))
    if path.isascii() and path.isdigit():
        values["db"] = int(path)
    elif path:
        values["key" if is_list else "stream"] = path
    not_here = {"stream"} if is_list else {"key", "take_from"}
    endpoint = _convert(parts, values, RedisEndpoint, not_here=not_here)
    if is_list and endpoint.key is None:
        endpoint = msgspec.structs.replace(endpoint, key=REQUESTS)
    if endpoint.cluster and (endpoint.sentinel is not None or endpoint.db):
        raise ValueError("redis: a cluster has no sentinels, and database 0 only")
    if others and not endpoint.cluster and endpoint.sentinel is None:
        raise ValueError(
            "redis: several hosts: add sentinel=NAME when they are sentinels, or cluster=true when they "
            "are nodes of a cluster"
        )
    return endpoint


def _kafka(parts: SplitResult) -> KafkaEndpoint:
    if "@" in parts.netloc:
        raise ValueError("kafka: give user and password as sasl_username and sasl_password")
    if not parts.netloc:
        raise ValueError("kafka: the address names no host:port")
    hosts = [h if ":" in h.rpartition("]")[2] else f"{h}:9092" for h in parts.netloc.split(",")]
    values: dict[str, Any] = {"bootstrap": ",".join(hosts)}
    topic = unquote(parts.path.strip("/"))
    if topic:
        values["topic"] = topic
    return _convert(parts, values, KafkaEndpoint)


def _convert(
    parts: SplitResult,
    values: dict[str, Any],
    cls: type[EndpointT],
    *,
    not_here: AbstractSet[str] = frozenset(),
) -> EndpointT:
    known = {field.name for field in msgspec.structs.fields(cls)} - not_here
    for pair in parts.query.split("&") if parts.query else ():
        name, _, text = pair.partition("=")
        if name not in known:
            raise ValueError(
                f"{parts.scheme}: unknown parameter {name[:40]!r}; known are {', '.join(sorted(known))}"
            )
        if name in values:
            raise ValueError(f"{parts.scheme}: {name} is given twice")
        values[name] = unquote(text)  # a '+' stays: it is common in passwords
    try:
        return msgspec.convert(values, cls, strict=False)
    except msgspec.ValidationError as error:
        # Only where: the message may quote the value, and a value may be a secret.
        name = str(error).rpartition("$.")[2].rstrip("`")
        raise ValueError(f"{parts.scheme}: {name[:40]} has a value that it cannot have") from None
