"""Logging: one event per line on stderr, never the text or the vector of a request.

Who calls it: the CLI, once, before anything else logs. Modules log through
`structlog.get_logger(__name__)`; other libraries' `logging` records take the same way.
What must stay true: nothing a sender wrote reaches a line at any level; no secret
does either; writing a line never raises into its caller; stdout is left to results.
"""

from __future__ import annotations

import logging
import math
import sys
import traceback
from collections import OrderedDict
from collections.abc import MutableMapping, Sequence
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from pipeline.lifecycle import OperatorError
from pipeline.redact import MASK, is_secret_name, redact
from schemas.errors import EmbedstreamError

MAX_VALUE_CHARS = 500
MAX_FRAMES = 8
MAX_DEPTH = 4
REPEAT_S = 10.0
"""How often one place in another library's source may write a line."""

USER_FIELDS = frozenset(
    {
        "text", "texts", "input", "inputs", "query", "queries", "document", "documents", "prompt",
        "instruction", "body", "record", "metadata", "embedding", "vector", "value", "data",
    }
)  # fmt: skip
"""Field names that could only hold what a sender wrote: withheld even when somebody logs them."""

# Errors whose message is ours, or the system's, and holds no user text by contract.
_SAFE_ERRORS = (EmbedstreamError, OperatorError, ConnectionError, TimeoutError, FileNotFoundError)
_QUOTING_LIBRARIES = frozenset({"redis", "aiokafka"})


def configure_logging(
    level: Literal["debug", "info", "warning", "error"] = "info",
    format: Literal["auto", "console", "json"] = "auto",
    *,
    stream: TextIO | None = None,
    foreign_level: int = logging.WARNING,
    process: int | None = None,
) -> None:
    """Set up structlog and the standard library's logging. May be called again.

    Args:
        level: lowest level of our own events.
        format: "auto" is console on a terminal and JSON lines otherwise.
        stream: where lines go; standard error when None, looked up at every write.
        foreign_level: lowest level of other libraries' records.
        process: number of this one among several of a service, said in every line.
    """
    out = _Stream(stream)
    if format == "auto":
        format = "console" if out.is_terminal() else "json"
    number = getattr(logging, level.upper())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _Fields({} if process is None else {"process": process}),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Exceptions(with_message=level == "debug"),
        withhold,
    ]
    renderer: Processor = (
        _render_json
        if format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=out.is_terminal(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[_add_logger_name, *shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *args: _LineLogger(out, str(args[0]) if args else ""),
        cache_logger_on_first_use=False,
    )
    handler = _ForeignHandler(out, [*shared, renderer])
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _ForeignHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(number, foreign_level))
    logging.captureWarnings(True)


def withhold(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Processor: no user text, no secrets, no endless values."""
    return {name: _clean(name, value, 0) for name, value in event.items()}


def _clean(name: str, value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if name in USER_FIELDS:
        return f"<{type(value).__name__} withheld>"
    if is_secret_name(name):
        return MASK
    if isinstance(value, str):
        value = redact(value)
        return value if len(value) <= MAX_VALUE_CHARS else f"{value[:MAX_VALUE_CHARS]}..."
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, BaseException):
        return _describe(value, with_message=False)
    if depth >= MAX_DEPTH:
        return f"<{type(value).__name__}>"
    if isinstance(value, MutableMapping | dict):
        return {str(k): _clean(str(k), v, depth + 1) for k, v in list(value.items())[:100]}
    if isinstance(value, Sequence | set | frozenset):
        return [_clean(name, v, depth + 1) for v in list(value)[:100]]
    return f"<{type(value).__name__}>"


class _Fields:
    """Processor: the same fields in every line."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return {**event, **self._fields}


class _Exceptions:
    """Processor: `exc_info` -> type, place and, when it is safe, message.

    The message of a foreign exception may quote its argument, which may be a user's text. It is
    shown only at debug level, and one of a broker's client never: it quotes whole commands.
    """

    def __init__(self, *, with_message: bool) -> None:
        self._with_message = with_message

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        info = event.pop("exc_info", None)
        if info is True:
            info = sys.exc_info()
        error = info[1] if isinstance(info, tuple) else info
        if isinstance(error, BaseException):
            event["error"] = _describe(error, with_message=self._with_message)
            event["frames"] = [
                f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
            ]
        return event


def _describe(error: BaseException, *, with_message: bool) -> str:
    library = type(error).__module__.partition(".")[0]
    if isinstance(error, _SAFE_ERRORS) or (with_message and library not in _QUOTING_LIBRARIES):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


def _add_logger_name(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    event["logger"] = getattr(logger, "name", "")
    return event


def _render_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    ordered = {
        "timestamp": event.pop("timestamp", None),
        "level": event.pop("level", None),
        "event": event.pop("event", None),
        **event,
    }
    return msgspec.json.encode(ordered, enc_hook=lambda v: f"<{type(v).__name__}>").decode()


class _Stream:
    """Standard error, or what a test gave. A closed or broken stream loses lines, nothing else."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def is_terminal(self) -> bool:
        stream = self._stream if self._stream is not None else sys.stderr
        return bool(stream is not None and stream.isatty())

    def write_line(self, line: str) -> None:
        stream = self._stream if self._stream is not None else sys.stderr
        try:
            stream.write(line + "\n")
            stream.flush()
        except (OSError, ValueError, AttributeError):
            return  # the reader of our log went away: the service goes on


class _LineLogger:
    """What structlog calls with the rendered line."""

    def __init__(self, out: _Stream, name: str) -> None:
        self._out = out
        self.name = name

    def msg(self, line: str) -> None:
        self._out.write_line(line)

    debug = info = warning = error = critical = exception = fatal = warn = log = msg


class Repeats:
    """Which lines are new, and how often the others came meanwhile. Bounded; the oldest are forgotten."""

    def __init__(self, every_s: float = REPEAT_S, max_lines: int = 200) -> None:
        self._every_s = every_s
        self._max_lines = max_lines
        self._seen: OrderedDict[object, tuple[float, int]] = OrderedDict()  # written at, held back

    def held_back(self, line: object, now: float) -> int | None:
        """Times that this line was held back since it was last written; None: it is held back now."""
        written_at, count = self._seen.get(line, (-math.inf, 0))
        if now < written_at + self._every_s:
            self._seen[line] = (written_at, count + 1)
            return None
        self._seen[line] = (now, 0)
        self._seen.move_to_end(line)
        if len(self._seen) > self._max_lines:
            self._seen.popitem(last=False)
        return count


class _ForeignHandler(logging.Handler):
    """Records of other libraries, as events of the same shape.

    A client that tries again every 100 ms says so every 100 ms: one place of its source writes a line
    every `REPEAT_S` seconds, with the number of those in between.
    """

    def __init__(self, out: _Stream, processors: list[Processor]) -> None:
        super().__init__()
        self._repeats = Repeats()
        self._out = out
        self._processors = processors

    def emit(self, record: logging.LogRecord) -> None:
        try:
            place = (record.name, record.levelno, record.pathname, record.lineno)
            held_back = self._repeats.held_back(place, record.created)
            if held_back is None and record.levelno < logging.CRITICAL:
                return
            text = record.getMessage()
            if record.name == "asyncio":
                text = text.split("\n", 1)[0]  # the rest is the repr of an exception
            event: Any = {
                "event": text,
                "logger": record.name,
                "exc_info": record.exc_info,
            }
            if held_back:
                event["held_back"] = held_back
            method = record.levelname.lower()
            for processor in self._processors:
                event = processor(None, method, event)
            self._out.write_line(str(event))
        except Exception:  # noqa: BLE001  boundary: a log line never stops the service
            self._out.write_line(f"log record of {record.name} could not be written")
