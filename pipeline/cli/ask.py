"""`embed`, `rerank`, `classify`: one-off questions to a model in this process or to a service.

Who calls it: `pipeline.cli.commands`.
What must stay true: results come out in the order of the questions, as soon as they can; at most
`MAX_CONCURRENT` questions are in flight however long stdin is; one bad line never stops the others;
ids on the wire are ours, so that equal ids of two lines or two runs never meet.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from pipeline.cli.console import (
    ItemProgress,
    byte_progress,
    configure_one_off_logging,
    load_settings,
    note_error,
    run_async,
    usage_error,
    working,
)
from pipeline.cli.output import Failures, Question, Writer, open_writer
from pipeline.lifecycle import ExitStatus, OperatorError
from schemas.codec import decode_reply, join_parts
from schemas.errors import ContentType, EmbedstreamError, Expired, InvalidRequest
from schemas.headers import CONTENT_TYPE, MSGPACK
from schemas.results import FailureReply, Reply

if TYPE_CHECKING:
    from gpu.settings import ModelSettings
    from pipeline.oneoff import InprocService
    from pipeline.settings.load import Settings

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_CONCURRENT = 32
DRAIN_BUDGET_S = 2.0
"""When a person presses Ctrl-C; a run that ends by itself has nothing left to drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskCommand:
    """The arguments of one command."""

    task: Literal["embed", "rerank", "classify"]
    texts: Sequence[str]
    options: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    via: str | None = None
    output: Literal["table", "jsonl", "npz"] = "table"
    out: Path | None = None
    timeout_s: float = 60.0
    config: Path | None = None
    overrides: Sequence[str] = ()

    @property
    def from_stdin(self) -> bool:
        return list(self.texts) == ["-"]


class _Ask(Protocol):
    async def ask(
        self, request_id: str, body: bytes, content_type: ContentType, timeout_s: float
    ) -> Reply | FailureReply: ...


def run(command: AskCommand) -> int:
    """Ask, write, and say what failed; the exit status."""
    if command.task == "rerank" and not command.from_stdin and len(command.texts) < 2:
        raise usage_error(
            "rerank needs a query and at least one document: "
            'embedstream rerank "a question" "a document" "another"'
        )
    configure_one_off_logging()
    with open_writer(command.task, command.output, command.out) as writer:
        failures = run_async(_run(command, writer))
    for line in failures.lines():
        note_error(line)
    return ExitStatus.ERROR if failures else ExitStatus.OK


async def _run(command: AskCommand, writer: Writer) -> Failures:
    failures = Failures()
    try:
        async with opened(command) as asker, asyncio.TaskGroup() as group:
            questions: asyncio.Queue[_Pending | None] = asyncio.Queue(MAX_CONCURRENT)
            total = None if command.from_stdin else 1
            group.create_task(_produce(command, asker, group, questions, failures))
            lines_on_screen = command.output == "jsonl" and command.out is None
            shown = not (lines_on_screen and sys.stdout.isatty())
            with ItemProgress(command.task, total, shown=shown) as progress:
                while (pending := await questions.get()) is not None:
                    reply = await pending.reply
                    reply = msgspec.structs.replace(reply, id=pending.question.user_id)
                    failures.note(reply)
                    writer.write(pending.question, reply)
                    progress.advance()
            writer.finish()
    except BaseExceptionGroup as group_error:
        error = _first_of(group_error)
        if isinstance(error, ConnectionError):
            error = OperatorError(str(error))
        raise error from None
    return failures


@dataclass(frozen=True, slots=True)
class _Pending:
    question: Question
    reply: asyncio.Task[Reply | FailureReply]


async def _produce(
    command: AskCommand,
    asker: _Ask,
    group: asyncio.TaskGroup,
    questions: asyncio.Queue[_Pending | None],
    failures: Failures,
) -> None:
    async for question in _questions(command):
        reply = group.create_task(_answer(command, asker, question, failures))
        await questions.put(_Pending(question, reply))
    await questions.put(None)


async def _answer(
    command: AskCommand, asker: _Ask, question: Question, failures: Failures
) -> Reply | FailureReply:
    """One reply. A silent service fails a line of many, but ends a run that had no answer yet."""
    if question.refused is not None:
        return FailureReply(id=question.wire_id, error=question.refused)
    try:
        body = msgspec.msgpack.encode(question.record)
    except (UnicodeEncodeError, OverflowError):
        error = InvalidRequest("the request holds text that is not UTF-8, or a huge number")
        return FailureReply(id=question.wire_id, error=error)
    try:
        return await asker.ask(question.wire_id, body, MSGPACK, command.timeout_s)
    except TimeoutError as silence:
        if failures.n_answered == 0:
            raise OperatorError(str(silence)) from None
        return FailureReply(id=question.wire_id, error=Expired(str(silence)))
    except ConnectionError as lost:
        raise OperatorError(str(lost)) from None


def _first_of(error: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error worth telling: the first that is no mere cancellation."""
    for inner in error.exceptions:
        if isinstance(inner, BaseExceptionGroup):
            return _first_of(inner)
        if not isinstance(inner, asyncio.CancelledError):
            return inner
    return error.exceptions[0]


# --- questions ---------------------------------------------------------------------------------------


async def _questions(command: AskCommand) -> AsyncIterator[Question]:
    run_id = uuid.uuid4().hex[:12]
    if not command.from_stdin:
        if command.task == "rerank":
            record: dict[str, Any] = {
                "query": command.texts[0],
                "documents": list(command.texts[1:]),
            }
        else:
            record = {"input": list(command.texts)}
        yield _question(command, record, f"cli-{run_id}", f"cli-{run_id}")
        return
    number = 0
    async for line in _stdin_lines():
        number += 1
        if not line.strip():
            continue
        wire_id = f"cli-{run_id}-{number}"
        try:
            record = _record_of(line)
        except EmbedstreamError as error:
            refused = InvalidRequest(f"line {number}: {error.message}", path=error.path)
            yield Question(f"line-{number}", wire_id, {}, refused)
            continue
        yield _question(command, record, str(record.get("id", f"line-{number}")), wire_id)


def _record_of(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidRequest(f"longer than {MAX_LINE_BYTES} bytes; split the request")
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest('no JSON; a line is {"id": "...", "input": "a text"}') from None
    if not isinstance(record, dict):
        raise InvalidRequest("no JSON object", path="$")
    if not isinstance(record.get("id", ""), str):
        raise InvalidRequest("must be a text", path="$.id")
    if record.get("task") == "cancel":
        raise InvalidRequest("a cancel record gets no reply of its own", path="$.task")
    return record


def _question(command: AskCommand, record: dict[str, Any], user_id: str, wire_id: str) -> Question:
    """A whole wire request: the line wins over the command's options."""
    task = record.get("task", "rerank" if "query" in record else command.task)
    options = command.options if task == command.task else {}
    full = {**options, **record, "task": task, "id": wire_id}
    if command.via is not None and command.model is not None:
        full.setdefault("model", command.model)
    for name in ("encoding", "encoding_format"):  # replies are decoded here, whatever their form
        if full.get(name) in ("bytes", "float", "base64"):
            del full[name]
    return Question(user_id, wire_id, full)


async def _stdin_lines() -> AsyncIterator[bytes]:
    """Lines of standard input without a thread that could outlive a Ctrl-C.

    An over-long line is handed out cut to one byte above the limit, and refused by the caller.
    """
    stream = sys.stdin.buffer
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        while line := stream.readline(MAX_LINE_BYTES + 1):
            yield line
            while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE_BYTES + 1)
            await asyncio.sleep(0)
        return
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES + 1)
    loop = asyncio.get_running_loop()
    own = os.fdopen(os.dup(stream.fileno()), "rb", buffering=0)  # the transport closes what it got
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), own)
    try:
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as end:
                if end.partial:
                    yield end.partial
                return
            except asyncio.LimitOverrunError:
                yield await _skip_long_line(reader)
                continue
            yield line
    finally:
        transport.close()
        os.set_blocking(stream.fileno(), True)  # the terminal is shared with the shell


async def _skip_long_line(reader: asyncio.StreamReader) -> bytes:
    """Read to the end of the line; only its first `MAX_LINE_BYTES` + 1 bytes are kept."""
    kept = await reader.readexactly(MAX_LINE_BYTES + 1)
    while True:
        try:
            await reader.readuntil(b"\n")
            return kept
        except asyncio.LimitOverrunError as overrun:
            await reader.readexactly(overrun.consumed)
        except asyncio.IncompleteReadError:
            return kept


# --- who is asked ------------------------------------------------------------------------------------


@asynccontextmanager
async def opened(command: AskCommand) -> AsyncIterator[_Ask]:
    if command.via is None:
        async with _in_process(command) as asker:
            yield asker
        return
    from pipeline.transports.registry import open_asker

    try:
        asker = await open_asker(command.via)
    except (ConnectionError, ValueError) as error:
        raise OperatorError(f"--via: {error}") from None
    try:
        yield asker
    finally:
        await asker.aclose()


class _InProcess:
    """A running service inside this process, asked like one behind a broker."""

    def __init__(self, service: InprocService) -> None:
        self.service = service

    async def ask(
        self, request_id: str, body: bytes, content_type: ContentType, timeout_s: float
    ) -> Reply | FailureReply:
        try:
            async with asyncio.timeout(timeout_s):
                records = await self.service.request(body, {CONTENT_TYPE: content_type.encode()})
        except TimeoutError:
            raise TimeoutError(
                f"no answer within {timeout_s:g} s: raise --timeout or send less at once"
            ) from None
        replies = [decode_reply(record.body) for record in records]
        whole = [reply for reply in replies if isinstance(reply, Reply)]
        for reply in replies:
            if isinstance(reply, FailureReply):
                return reply
        return join_parts(whole)


@asynccontextmanager
async def _in_process(command: AskCommand) -> AsyncIterator[_Ask]:
    settings = await _one_off_settings(command)
    from pipeline.oneoff import run_inproc

    service_context = run_inproc(settings)
    with working(f"loading {', '.join(settings.models)}"):
        service = await service_context.__aenter__()
    try:
        yield _InProcess(service)
    except BaseException as error:
        await service_context.__aexit__(type(error), error, error.__traceback__)
        raise
    else:
        await service_context.__aexit__(None, None, None)


async def _one_off_settings(command: AskCommand) -> Settings:
    """Settings whose pool holds what this command needs, fetched: one model if it is known which."""
    from pipeline.demo.catalog import demo_models
    from pipeline.demo.fetch import ModelFetchError, fetch_model

    settings = load_settings(command.config, command.overrides, default_models=demo_models())
    pool = _pool_of(command, settings)
    with byte_progress() as progress:
        for name, model in pool.items():
            try:
                path = await fetch_model(model.path, progress=progress)
            except ModelFetchError as error:
                raise OperatorError(f"--model: {error}" if command.model else str(error)) from None
            pool[name] = msgspec.structs.replace(model, path=path)
    return msgspec.structs.replace(
        settings,
        models=pool,
        routes=(),
        lifecycle=msgspec.structs.replace(settings.lifecycle, drain_budget_s=DRAIN_BUDGET_S),
    )


def _pool_of(command: AskCommand, settings: Settings) -> dict[str, ModelSettings]:
    """The model that is named or the default of the task, else every one that might have it."""
    from gpu.settings import ModelSettings

    if command.model is not None:
        name = command.model
        if name in settings.models:
            return {name: settings.models[name]}
        return {Path(name).name or name: ModelSettings(path=name)}
    default = settings.model_for(None, command.task)
    if default is not None:
        return {default: settings.models[default]}
    if command.config is None and command.task == "classify":
        raise usage_error(
            "no packaged model classifies: name one with --model DIR, or ask a service with --via"
        )
    return dict(settings.models)
