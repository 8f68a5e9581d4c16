"""Files of documents: every form is read row by row, and what is wrong is told with its place."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from actors.ports import SourceClosed
from pipeline.indexing.decoder import version_of
from pipeline.indexing.files import FailureSink, FileSource, rows_of
from pipeline.indexing.records import DUMP, Version

ROWS = [{"id": 1, "title": "one, two"}, {"id": 2, "title": 'a "quote"\nand a line'}]


def decoded(path: Path | str) -> list[Any]:
    """Keys and documents."""
    return [(key, json.loads(body)) for _, key, body in rows_of(str(path))]


def test_tables_of_every_form_give_the_same_documents(tmp_path: Path) -> None:
    import csv

    import pyarrow as pa
    import pyarrow.parquet as parquet

    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.parquet"):
        assert decoded(tmp_path / name) == [(None, row) for row in ROWS]
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["id", "title"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
        as_text = [{**row, "id": str(row["id"])} for row in ROWS]
        assert decoded(tmp_path / name) == [(None, row) for row in as_text]


def test_a_folder_gives_its_texts_with_paths_as_keys_and_of_pages_the_text(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("# B\n\ntext")
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "c.bin").write_bytes(b"\x00")
    (tmp_path / "p.html").write_text(
        "<html><head><title>T &amp; t</title><style>x{}</style></head><body><h2>Head</h2>"
        "<script>alert(1)</script><p>One <b>two</b>.<p>Three&lt;</body></html>"
    )
    found = dict(decoded(tmp_path))
    assert list(found) == ["a.txt", "p.html", "sub/b.md"]
    assert found["sub/b.md"] == {"path": "sub/b.md", "title": "b", "text": "# B\n\ntext"}
    assert found["p.html"]["title"] == "T & t"
    assert found["p.html"]["text"].split("\n") == ["## Head", "", "One two.", "", "Three<"]


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.json", b"{", "no JSON"),
        ("a.csv", b"id,title\n1,2,3\n", "more cells"),
        ("a.csv", b'id\n"open', "cannot be read"),
        ("a.csv", b"id\n\xff\n", "cannot be read"),
        ("a.parquet", b"PAR1 no", "cannot be read"),
        ("a.zip", b"", "nobody knows"),
    ],
)
def test_a_damaged_file_is_told_with_its_name(
    name: str, data: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError, match=reason) as caught:
        decoded(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="no such file"):
        decoded(tmp_path / "absent.jsonl")


async def test_the_end_comes_after_every_row_is_done_and_later_rows_are_newer(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 300)
    settled: list[int] = []
    source = FileSource(
        [str(tmp_path / "a.jsonl")], on_settled=lambda: settled.append(1), max_in_flight=200
    )
    seen = []
    while len(seen) < 300:
        rows = await source.receive()
        assert source.status().in_flight <= 200
        seen += [version_of(row) for row in rows]
        for row in rows:
            row.settle()
            row.release("the first call wins")
    with pytest.raises(SourceClosed):
        await source.receive()
    assert source.n_settled == len(settled) == 300 and source.n_released == 0
    assert all(a.older_than(b) for a, b in itertools.pairwise(seen))
    assert all(one.older_than(Version("topic/0", 0)) for one in seen)
    assert not Version("topic/0", 0).older_than(seen[0]) and seen[0].source == DUMP


async def test_a_failure_is_told_with_the_place_of_its_row() -> None:
    told: list[str] = []
    sink = FailureSink(told.append)
    origin = json.dumps({"transport": "file", "stream": "docs.jsonl:7", "id": 7}).encode()
    headers = {
        "embedstream-error-message": b"$.title is missing",
        "embedstream-origin": origin,
    }
    await sink.publish("failures", "k", b"secret", headers)
    assert told == ["docs.jsonl:7: $.title is missing"] and sink.n_failed == 1
