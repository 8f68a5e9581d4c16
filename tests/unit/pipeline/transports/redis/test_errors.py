"""What is told of an error: never the library's text."""

from __future__ import annotations

import pytest
from redis.exceptions import (
    AuthenticationError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import ConnectionError as ConnectionFailed

from pipeline.transports.redis.errors import code_of, describe

MARK = "XYZZY-what-a-sender-wrote"
QUOTED = f"Command # 1 (XADD s * data {MARK} READONLY) of pipeline caused error: "


def refused() -> ConnectionFailed:
    try:
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except OSError as error:
            raise ConnectionFailed(f"Error {MARK}") from error
    except ConnectionFailed as failed:
        return failed


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ResponseError("WRONGTYPE Operation against a key"), "WRONGTYPE"),
        (ResponseError(QUOTED + "('NOGROUP No such key',)"), "NOGROUP"),
        (ReadOnlyError(QUOTED + "('You can't write',)"), "READONLY"),
        (AuthenticationError("Authentication required."), "WRONGPASS"),
        (
            ResponseError(
                "ERR The user executing the script can't run this command or subcommand "
                "script: 53c, on @user_script:1."
            ),
            "NOPERM",
        ),
        (ResponseError("ACL failure in script: User a has no permissions to run 'xadd'"), "NOPERM"),
        (
            ResponseError(
                "ERR Error running script (call to f_1): @user_script:12: @user_script: 12: "
                "-READONLY You can't write against a read only replica."
            ),
            "READONLY",
        ),
        (ResponseError(f"no code, {MARK}"), ""),
        (TimeoutError(), ""),
    ],
)
def test_code_of_an_answer(error: Exception, code: str) -> None:
    """K40, K04: the server's word, wherever its version or the library put it."""
    assert code_of(error) == code
    assert MARK not in describe(error)


def test_the_reason_of_the_system_is_told() -> None:
    """K40: a message of the library is not repeated; what the operator needs is."""
    assert describe(refused()) == "ConnectionError (Connection refused)"
