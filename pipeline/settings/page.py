"""Writes docs/settings.md from the settings records and the transport options.

Who calls it: `python -m pipeline.settings.page > docs/settings.md`; a test fails when the file differs.
What must stay true: nothing is described here that the code does not have; every setting, its range,
its default and its environment name are derived.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as mi

from gpu.settings import ModelSettings
from pipeline.settings.build import fields_of, unwrap
from pipeline.settings.records import RouteSettings, Settings
from pipeline.settings.sources import ENVIRONMENT_PREFIX
from pipeline.transports import options as transport_options

HEAD = """\
# Settings

<!-- Written by `python -m pipeline.settings.page > docs/settings.md`; do not edit by hand. -->

Settings come from four places; each beats the one before, setting by setting:

1. the defaults below;
2. a TOML file: `embedstream serve --config service.toml`, or `EMBEDSTREAM_CONFIG=service.toml`;
3. the environment: `EMBEDSTREAM_` and the name in capitals, tables joined by two underscores
   (`EMBEDSTREAM_BATCHING__LINGER_MS=2`);
4. flags: `--set batching.linger_ms=2`, and the flags of each command.

They are read once, before anything starts. A name that is not known, a value out of its range or two
settings that contradict each other stop the start with exit status 2; every problem is told at once,
each with the setting's name, where the value came from and what to do. `embedstream config` prints
every effective value and where it came from; `embedstream check` also reaches the brokers and loads
the models. Passwords are masked in every print and log.

Booleans are the same everywhere: `true`/`false`, `1`/`0`, `yes`/`no`, `on`/`off`, in any case.
Lists are TOML lists in the file, and separated by commas in flags and in the environment. Routes go
by position or by name there: `--set routes.redis-rpc.lane=bulk`,
`EMBEDSTREAM_ROUTES__0__MODEL=minilm`; a name that is new makes a new route
(`EMBEDSTREAM_ROUTES__JOBS__SOURCE=redis://localhost:6379/jobs`).

```toml
[models.minilm]
path = "sentence-transformers/all-MiniLM-L6-v2"
default_for = ["embed"]

[[routes]]
name = "kafka-requests"
source = "kafka://localhost:9092/embedstream.requests?group=embedstream"

[[routes]]
name = "redis-rpc"
source = "redis://localhost:6379/embedstream.requests?group=embedstream"

[batching]
linger_ms = 5

[health]
host = "0.0.0.0"
```

Environment names that are no settings: `EMBEDSTREAM_CONFIG` (the file), `EMBEDSTREAM_MODELS` (where
fetched models lie), `EMBEDSTREAM_TEST_...` (test servers), and what Kubernetes injects for a Service
called `embedstream`.
"""

TRANSPORT_HEAD = """
# Transport options

Every option is a query parameter of the address in `routes.source`, and of `--via`:
`kafka://localhost:9092/embedstream.requests?group=embedstream&session_timeout_ms=6000`.
User and password of Redis stand in front of the host (`redis://user:password@host:6379/stream`);
those of Kafka are `sasl_username` and `sasl_password`.
"""

MEANINGS: dict[str, str] = {
    "auto_offset_reset": "Where a group without commits begins.",
    "block_ms": "Longest wait of one XREADGROUP.",
    "claim_interval_ms": "How often entries of silent owners are looked for.",
    "client_id": "As the broker's log shows it.",
    "close_timeout_s": "Bound of disconnecting.",
    "commit_interval_ms": "How often settled offsets are committed.",
    "compression": "Of replies and dead letters.",
    "connect_timeout_s": "Bound of connecting.",
    "db": "Number of the database.",
    "dead_letter_maxlen": "Dead letters kept, roughly; older ones go.",
    "dead_letter_stream": "Where dead letters go.",
    "dead_letter_topic": "Where dead letters go.",
    "dead_letter_ttl_s": "How long dead letters are kept.",
    "fetch_max_bytes": "Bytes of one fetch over all partitions.",
    "fetch_max_wait_ms": "Longest wait of one fetch; 10 to 20 for the packaged broker.",
    "group": "Consumer group: members share the requests.",
    "heartbeat_interval_ms": "At most half of session_timeout_ms.",
    "host": "Name or address of the server.",
    "linger_ms": "How long replies gather before they are sent.",
    "max_in_flight": "Records handed out or buffered.",
    "max_in_flight_bytes": "Bytes handed out or buffered.",
    "max_partition_fetch_bytes": "Bytes of one fetch per partition; one larger record still comes.",
    "max_poll_interval_ms": "The broker gives partitions away when nothing was polled this long.",
    "max_record_bytes": "Largest reply taken; none: no limit.",
    "max_receive": "Records handed out at once, at most.",
    "max_request_size": "Largest record the producer sends.",
    "name": "Name of the broker inside the process.",
    "open_timeout_s": "Bound of the first look at the cluster.",
    "password": "From the address.",
    "path": "File of requests, one a line; `-` is standard input.",
    "port": "Port of the server.",
    "release_backoff_max_ms": "Longest wait before a released delivery comes again.",
    "release_backoff_ms": "First wait before a released delivery comes again; doubles.",
    "replication_factor": "Of topics that `auto_create` makes.",
    "reply_stream_maxlen": "Replies a reply stream keeps, roughly; older ones go.",
    "reply_topic": "Where replies go when a request names no `reply_to`.",
    "reply_ttl_s": "How long an unread reply is kept.",
    "request_timeout_ms": "Bound of one request to a broker.",
    "sasl_mechanism": "How the login is sent.",
    "sasl_password": "Login.",
    "sasl_username": "Login.",
    "security_protocol": "Encryption and login.",
    "session_timeout_ms": "A member that is silent this long is taken for dead.",
    "socket_timeout_s": "Bound of one answer; above block_ms.",
    "ssl_cafile": "Certificate authorities, PEM.",
    "ssl_certfile": "Our certificate, PEM.",
    "ssl_check_hostname": "Whether the certificate must name the host.",
    "ssl_keyfile": "Our key, PEM.",
    "ssl_password": "Of the key.",
    "stream": "The request stream.",
    "tls": "From the address: rediss://.",
    "topics": "From the address: the request topics.",
    "username": "From the address.",
}
"""Sentences for options whose field has none of its own."""

TRANSPORTS: tuple[tuple[str, str, type[msgspec.Struct], dict[str, tuple[float, float]]], ...] = (
    ("Kafka", "kafka://host:port[,host:port]/topic[,topic]", transport_options.KafkaOptions,
     transport_options._KAFKA_RANGES),
    ("Redis and Valkey", "redis://[user:password@]host[:port]/stream (rediss:// for TLS)",
     transport_options.RedisOptions, transport_options._REDIS_RANGES),
    ("Files", "file:///path.jsonl, or - for stdin to stdout", transport_options.FileOptions,
     transport_options._FILE_RANGES),
    ("In process", "inproc://name", transport_options.InprocOptions,
     transport_options._INPROC_RANGES),
)  # fmt: skip


def document() -> str:
    """The whole of docs/settings.md."""
    parts = [HEAD]
    for heading, record, default in _tables():
        parts.append(_section(heading, record, default))
    parts.append(TRANSPORT_HEAD)
    for name, address, options, ranges in TRANSPORTS:
        parts.append(_transport_section(name, address, options, ranges))
    return "\n".join(parts)


def _tables() -> Iterator[tuple[str, type[msgspec.Struct], Any]]:
    """Every table: its name, its record, and the instance that holds its defaults."""
    defaults = Settings()
    for name, spec in fields_of(Settings).items():
        kind = unwrap(spec.type)
        if isinstance(kind, mi.DictType):
            yield "models.NAME", ModelSettings, None
        elif isinstance(kind, mi.VarTupleType):
            yield "routes.N", RouteSettings, None
        else:
            yield from _nested(name, getattr(defaults, name))


def _nested(name: str, value: msgspec.Struct) -> Iterator[tuple[str, type[msgspec.Struct], Any]]:
    tables = [f for f in value.__struct_fields__ if isinstance(getattr(value, f), msgspec.Struct)]
    if not tables:
        yield name, type(value), value
    for field in tables:
        yield from _nested(f"{name}.{field}", getattr(value, field))


def _section(heading: str, record: type[msgspec.Struct], default: Any) -> str:
    first_line = (record.__doc__ or "").strip().splitlines()[0]
    lines = [f"## `{_toml_header(heading)}`", "", _after_colon(first_line), ""]
    lines += ["| setting | value | default | meaning |", "|---|---|---|---|"]
    for name, spec in fields_of(record).items():
        kind = unwrap(spec.type)
        if isinstance(kind, mi.StructType):
            lines.append(
                f"| `{name}` | table | as `[limits]` | The names of `[limits]`, for this route. |"
            )
            continue
        meaning = _description(spec.type)
        value = getattr(default, name) if default is not None else spec.default
        lines.append(
            f"| `{name}` | {_kind(kind)} | {_shown_default(spec, value)} | {_cell(meaning)} |"
        )
    environment = ENVIRONMENT_PREFIX + heading.replace(".", "__").upper()
    lines += ["", f"Environment: `{environment}__...`", ""]
    return "\n".join(lines)


def _toml_header(heading: str) -> str:
    return "[[routes]]" if heading.startswith("routes") else f"[{heading}]"


def _after_colon(line: str) -> str:
    text = line.split("`: ", 1)[-1]
    return text[:1].upper() + text[1:]


def _description(kind: mi.Type) -> str:
    while isinstance(kind, mi.Metadata):
        text = (kind.extra_json_schema or {}).get("description")
        if text:
            return str(text)
        kind = kind.type
    return ""


def _kind(kind: mi.Type) -> str:
    kind = unwrap(kind)
    if isinstance(kind, mi.UnionType):
        return " or ".join(_kind(m) for m in kind.types if not isinstance(unwrap(m), mi.NoneType))
    if isinstance(kind, mi.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, mi.IntType):
        return f"{kind.ge} to {kind.le}"
    if isinstance(kind, mi.FloatType):
        return f"{kind.ge:g} to {kind.le:g}"
    if isinstance(kind, mi.BoolType):
        return "boolean"
    if isinstance(kind, mi.VarTupleType):
        return f"list of {_kind(kind.item_type)}"
    if isinstance(kind, mi.DictType):
        return "table of texts"
    return "text"


def _shown_default(spec: mi.Field, value: Any) -> str:
    if spec.required:
        return "required"
    if value is msgspec.NODEFAULT or value is None or value in ((), {}):
        return "none"
    return _literal(value)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if isinstance(value, tuple):
        return ", ".join(f"`{entry}`" for entry in value) or "none"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _transport_section(
    name: str,
    address: str,
    options: type[msgspec.Struct],
    ranges: dict[str, tuple[float, float]],
) -> str:
    sentences = _field_docstrings(options)
    lines = [f"## {name}", "", f"Address: `{address}`", ""]
    lines += ["| option | value | default | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(options):
        value = _option_values(field.type, ranges.get(field.name))
        default = field.default
        sentence = sentences.get(field.name) or MEANINGS.get(field.name, "")
        shown = "from the address" if default is msgspec.NODEFAULT else "none"
        if default is not msgspec.NODEFAULT and default is not None:
            shown = _literal(default)
        lines.append(f"| `{field.name}` | {value} | {shown} | {_cell(sentence)} |")
    return "\n".join([*lines, ""])


def _option_values(kind: Any, bounds: tuple[float, float] | None) -> str:
    if bounds is not None:
        low, high = (f"{int(b)}" if b == int(b) else f"{b:g}" for b in bounds)
        return f"{low} to {high}"
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    if kind is bool:
        return "boolean"
    if bool in typing.get_args(kind):
        return "boolean or `auto`"
    if typing.get_origin(kind) is tuple:
        return "texts, with commas"
    return "text" if kind is str or str in typing.get_args(kind) else "number"


def _field_docstrings(record: type[Any]) -> dict[str, str]:
    """The text that stands below a field, which Python itself does not keep."""
    tree = ast.parse(inspect.getsource(record))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for above, below in itertools.pairwise(body):
        if (
            isinstance(above, ast.AnnAssign)
            and isinstance(above.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[above.target.id] = " ".join(str(below.value.value).split())
    return found


if __name__ == "__main__":
    sys.stdout.write(document())
