"""The light client vendors this folder: it must import alone, under any name, without numpy."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import schemas

FOLDER = Path(schemas.__file__).parent
ALLOWED = {"msgpack", "msgspec"} | sys.stdlib_module_names


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_imports_are_relative_or_allowed(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None and node.module.split(".")[0] in ALLOWED - {"asyncio"}
        elif isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= ALLOWED - {"asyncio"}


def test_imports_under_another_name_and_loads_nothing_heavy(tmp_path):
    shutil.copytree(
        FOLDER, tmp_path / "client" / "_wire", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "client" / "__init__.py").write_text("")
    program = (
        "import sys\n"
        "from client import _wire\n"
        "request = _wire.EmbedRequest(id='r', input=(_wire.Text('a'),))\n"
        "body, headers = _wire.encode_request(request)\n"
        "assert _wire.decode_request(body, headers, default_id='x') == request\n"
        "heavy = {'numpy', 'torch', 'asyncio', 'schemas', 'aiokafka', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{program}"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_everything_exported_is_there():
    assert sorted(schemas.__all__) == sorted(set(schemas.__all__))
    assert all(hasattr(schemas, name) for name in schemas.__all__)
