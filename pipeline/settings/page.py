"""Writes docs/settings.md from the settings records and the transport options.

Who calls it: `python -m pipeline.settings.page > docs/settings.md`; a test fails when the file differs.
What must stay true: nothing is described here that the code does not have; every setting, its range,
its default and its environment name are derived.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import msgspec.inspect as mi

from gpu.settings import ModelSettings
from pipeline.indexing.options import ChunkOptions, DocumentOptions
from pipeline.settings.build import fields_of, unwrap
from pipeline.settings.records import LimitsOverride, RouteSettings, Settings
from pipeline.settings.sources import ENVIRONMENT_PREFIX
from pipeline.transports.options import declared
from pipeline.transports.registry import KINDS, Kind

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
those of Kafka are `sasl_username` and `sasl_password`. The path of a Redis address is the stream, or,
when it is a number, the database as in every Redis URL: `redis://host/jobs?db=3` and
`redis://host/3?stream=jobs` are the same.

In an address, `/`, `?`, `#`, `&`, `%` and `@` inside a value or a password are written as %2F, %3F, %23,
%26, %25 and %40. A `+` is a plus; a space is written %20.
"""


def document() -> str:
    """The whole of docs/settings.md."""
    parts = [HEAD]
    for heading, record, default in _tables():
        parts.append(_section(heading, record, default))
    parts.append(TRANSPORT_HEAD)
    parts += [_transport_section(kind) for kind in KINDS]
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
            yield "routes.N.document", DocumentOptions, None
            yield "routes.N.chunk", ChunkOptions, None
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
            told = (
                "as `[limits]` | The names of `[limits]`, for this route."
                if kind.cls is LimitsOverride
                else "see below | For a route into a collection."
            )
            lines.append(f"| `{name}` | table | {told} |")
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
    return "[[routes]]" if heading == "routes.N" else f"[{heading.replace('.N', '')}]"


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


def _transport_section(kind: Kind) -> str:
    lines = [f"## {kind.title}", "", f"Address: `{kind.form}`", ""]
    lines += ["| option | value | default | meaning |", "|---|---|---|---|"]
    for name, spec in declared(kind.options).items():
        default = "from the address" if spec.required else _shown_default(spec, spec.default)
        values = _kind(spec.type).replace("list of text", "texts, with commas")
        lines.append(f"| `{name}` | {values} | {default} | {_cell(_description(spec.type))} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(document())
