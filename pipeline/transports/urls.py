"""Transport addresses in one line of text -> options.

Who calls it: `pipeline.settings.load` for each route, the CLI for `--via`.
What must stay true: pure; a parameter that is not a setting is refused by its name, and so is one
whose value is not of the setting's type; messages never repeat a password.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec

from pipeline.transports.options import (
    FileOptions,
    InprocOptions,
    KafkaOptions,
    RedisOptions,
    TransportOptions,
)

_TUPLES = {"topics", "reply_prefixes", "refuse_destinations"}
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def parse_url(url: str) -> TransportOptions:
    """Options of the transport that `url` names.

    - ``kafka://host:port[,host:port]/topic[,topic]?group=g&session_timeout_ms=6000``
    - ``redis://[user:password@]host[:port]/stream?group=g&db=1`` (``rediss://`` for TLS)
    - ``inproc://name``, ``file:///path.jsonl?replies=/out.jsonl``, ``-`` (stdin to stdout)

    Every setting of the transport's options is a query parameter; lists are comma-separated.
    Raises `ValueError` with one line that names the parameter; `check()` has been passed.
    """
    if url == "-":
        return FileOptions()
    parts = urlsplit(url)
    try:
        build = _BUILDERS[parts.scheme]
    except KeyError:
        known = ", ".join(f"{scheme}://" for scheme in _BUILDERS)
        raise ValueError(
            f"unknown transport {parts.scheme or url[:40]!r}: use {known} or -"
        ) from None
    if parts.fragment:
        raise ValueError(f"{parts.scheme}: a '#' in the address must be written as %23")
    cls, values = build(parts)
    values.update(_query(cls, parts, reserved=set(values)))
    try:
        options: TransportOptions = msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        raise ValueError(f"{parts.scheme}: {error}") from None
    problems = options.check()
    if problems:
        raise ValueError(f"{parts.scheme}: {'; '.join(problems)}")
    return options


def _query(cls: type[Any], parts: SplitResult, reserved: set[str]) -> dict[str, Any]:
    fields = {f.name: f for f in msgspec.structs.fields(cls)}
    values: dict[str, Any] = {}
    for name, text in parse_qsl(
        parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)
    ):
        if name not in fields:
            close = ", ".join(sorted(fields))
            raise ValueError(f"{parts.scheme}: unknown parameter {name!r}; known are {close}")
        if name in values or name in reserved:
            raise ValueError(f"{parts.scheme}: parameter {name!r} is given twice")
        values[name] = _value(parts.scheme, name, text, fields[name].type)
    return values


def _value(scheme: str, name: str, text: str, kind: Any) -> Any:
    if name in _TUPLES:
        return tuple(part for part in text.split(",") if part)
    types = msgspec.inspect.type_info(kind)
    options = types.types if isinstance(types, msgspec.inspect.UnionType) else (types,)
    for option in options:
        if isinstance(option, msgspec.inspect.BoolType):
            if text.lower() in _TRUE | _FALSE:
                return text.lower() in _TRUE
        elif isinstance(option, msgspec.inspect.IntType | msgspec.inspect.FloatType):
            try:
                return int(text) if isinstance(option, msgspec.inspect.IntType) else float(text)
            except ValueError:
                raise ValueError(f"{scheme}: {name} is {text!r}, expected a number") from None
        elif isinstance(option, msgspec.inspect.StrType | msgspec.inspect.LiteralType):
            return text
    raise ValueError(f"{scheme}: {name} is {text!r}, expected true or false")


def _kafka(parts: SplitResult) -> tuple[type[Any], dict[str, Any]]:
    if "@" in parts.netloc:
        raise ValueError("kafka: give user and password as sasl_username and sasl_password")
    if not parts.netloc:
        raise ValueError("kafka: the address names no host:port")
    hosts = [h if _has_port(h) else f"{h}:9092" for h in parts.netloc.split(",")]
    values: dict[str, Any] = {"bootstrap": ",".join(hosts)}
    topics = tuple(topic for topic in unquote(parts.path.strip("/")).split(",") if topic)
    if topics:
        values["topics"] = topics
    return KafkaOptions, values


def _has_port(host: str) -> bool:
    return ":" in host.rpartition("]")[2]


def _redis(parts: SplitResult) -> tuple[type[Any], dict[str, Any]]:
    try:
        port = parts.port
    except ValueError:
        raise ValueError("redis: the port is no number from 1 to 65535") from None
    values: dict[str, Any] = {"tls": parts.scheme == "rediss"}
    if parts.hostname:
        values["host"] = parts.hostname
    if port is not None:
        values["port"] = port
    if parts.username:
        values["username"] = unquote(parts.username)
    if parts.password is not None:
        values["password"] = unquote(parts.password)
    stream = unquote(parts.path.lstrip("/"))
    if stream:
        values["stream"] = stream
    return RedisOptions, values


def _inproc(parts: SplitResult) -> tuple[type[Any], dict[str, Any]]:
    name = unquote(parts.netloc + parts.path)
    return InprocOptions, {"name": name} if name else {}


def _file(parts: SplitResult) -> tuple[type[Any], dict[str, Any]]:
    if parts.netloc not in ("", "localhost"):
        raise ValueError(
            f"file: {parts.netloc!r} is no local path: write file:///absolute/path.jsonl"
        )
    path = unquote(parts.path)
    if not path:
        raise ValueError("file: the address names no path; use - for standard input")
    return FileOptions, {"path": path}


_BUILDERS = {
    "kafka": _kafka,
    "redis": _redis,
    "rediss": _redis,
    "inproc": _inproc,
    "file": _file,
}
