"""Reply destinations that only the holder of a signature may name."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from actors.ports import ListSink, Record, Told
from pipeline.cli import commands as cli
from pipeline.transports.signed import SignedDestinations, read_keys, sign

KEY, OLD = b"k" * 32, b"o" * 32


class RecordingSink:
    max_record_bytes: int | None = 100
    dead_letter_destination = "dead"

    def __init__(self) -> None:
        self.published: list[tuple[str, str | None]] = []

    def default_destination(self, request_id: str) -> str:
        return "default"

    def check_destination(self, destination: str) -> str | None:
        return None if destination.startswith("ok") else "reply_to must start with ok"

    async def publish(
        self,
        destination: str,
        key: str,
        body: bytes,
        headers: Mapping[str, bytes],
        *,
        order_key: str | None = None,
    ) -> None:
        self.published.append((destination, order_key))

    async def aclose(self) -> None:
        pass


def test_only_a_signature_of_that_name_and_key_passes() -> None:
    sink = SignedDestinations(RecordingSink(), (KEY, OLD))
    assert sink.check_destination(sign("ok.shop", KEY)) is None
    assert sink.check_destination(sign("ok.shop", OLD)) is None, "keys are changed one at a time"
    refusal = sink.check_destination(sign("bad", KEY))
    assert refusal is not None and "start with" in refusal, "no signature overrules the allow-list"
    signature = sign("ok.shop", KEY).rpartition("=")[2]
    expected = hmac.new(KEY, b"embedstream reply_to\0ok.shop", hashlib.sha256).hexdigest()
    assert signature == expected
    for refused in (
        "ok.shop",
        "default",
        f"ok.other?sig={signature}",
        f"ok.shop?sig={signature[:-1]}",
        f"ok.shop?sig={signature.upper()}",
        "ok.shop?sig=",
        "?sig=",
        "",
        sign("ok.shop", b"x" * 32),
        f"ok.shop?sig={signature}?sig={signature}",
        "ok\udcff?sig=\udcff",
    ):
        assert sink.check_destination(refused) is not None, refused


@given(st.text(max_size=80), st.text(max_size=80))
def test_nothing_made_up_passes(name: str, signature: str) -> None:
    sink = SignedDestinations(RecordingSink(), (KEY,))
    assert sink.check_destination(f"ok{name}?sig={signature}") is not None


async def test_it_is_written_under_its_plain_name() -> None:
    inner = RecordingSink()
    sink = SignedDestinations(inner, (KEY,))
    await sink.publish(sign("ok.shop", KEY), "k", b"", {}, order_key="o")
    await sink.publish(sink.default_destination("r"), "k", b"", {})
    await sink.publish(sink.dead_letter_destination, "k", b"", {})
    assert inner.published == [("ok.shop", "o"), ("default", None), ("dead", None)]


def test_a_file_that_cannot_sign_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConnectionError, match=r"reply_key_file .*FileNotFoundError"):
        read_keys(str(path))
    for content in (b"", b"\n\n", b"short\n", KEY + b"\nshort\n"):
        path.write_bytes(content)
        with pytest.raises(ConnectionError, match="16 bytes or more"):
            read_keys(str(path))
    path.write_bytes(b"\n" + KEY + b"\r\n" + OLD)
    assert read_keys(str(path)) == (KEY, OLD)


def test_the_command_signs_with_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(KEY + b"\n" + OLD + b"\n")
    result = CliRunner().invoke(cli.app, ["sign", "ok.shop", "--key-file", str(path)])
    assert result.output == sign("ok.shop", KEY) + "\n"
    assert cli.main(["sign", "ok.shop", "--key-file", str(tmp_path / "none")]) != 0


async def test_lists_go_to_the_bare_names_where_the_sink_takes_lists() -> None:
    assert not isinstance(SignedDestinations(RecordingSink(), (KEY,)), ListSink)

    class RecordingListSink(RecordingSink):
        async def publish_all(self, records: Sequence[Record], tell: Told) -> None:
            for number, record in enumerate(records):
                self.published.append((record.destination, record.key))
                tell(number, None)

    inner, told = RecordingListSink(), []
    sink = SignedDestinations(inner, (KEY,))
    assert isinstance(sink, ListSink)
    records = [Record(sign("ok.shop", KEY), "k", b"x", {}), Record("default", "l", b"y", {})]
    await sink.publish_all(records, lambda number, error: told.append((number, error)))
    assert inner.published == [("ok.shop", "k"), ("default", "l")]
    assert told == [(0, None), (1, None)]
