"""What `embedstream up` prints can be copied from any terminal."""

from __future__ import annotations

import ast
import io

import pytest
from rich.console import Console

from pipeline.local.up import Addresses, _print, snippets

ADDRESSES = Addresses(
    pid=1,
    kafka="127.0.0.1:49152",
    kafka_kind="packaged",
    redis="redis://127.0.0.1:49153",
    redis_kind="system",
    health="http://127.0.0.1:49154",
)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_code_is_printed_as_it_must_be_copied(columns: int) -> None:
    """K34: a wrapped line is a syntax error."""
    screen = io.StringIO()
    _print(Console(file=screen, width=columns, force_terminal=False), ADDRESSES)
    printed = screen.getvalue()
    for code in snippets(ADDRESSES).values():
        ast.parse(code)
        assert f"\n{code}\n" in printed
        assert max(map(len, code.splitlines())) <= 100
