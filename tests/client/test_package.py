"""The distribution: what wheel and sdist hold, what it needs, and what it does not import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import msgpack
import msgspec
import pytest

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients" / "python"
PROJECT = tomllib.loads((CLIENT / "pyproject.toml").read_text("utf-8"))["project"]
SERVER = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), built from the tree."""
    out = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out)],
        cwd=CLIENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def clean_python(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel, msgpack and msgspec, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(site)
    for package in (msgpack, msgspec):
        (site / package.__name__).symlink_to(Path(package.__file__).parent)
    return folder / "bin" / "python"


def run(python: Path, code: str) -> str:
    done = subprocess.run(
        [str(python), "-I", "-W", "error", "-c", code],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_and_sdist_hold_real_files(built: tuple[Path, Path]) -> None:
    """The wire contract is a link in the tree; what is installed must not be."""
    wheel, sdist = built
    contract = {path.name: path.read_bytes() for path in (ROOT / "schemas").glob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        for name, data in contract.items():
            assert archive.read(f"embedstream_client/_wire/{name}") == data
        names = archive.namelist()
        assert "embedstream_client/py.typed" in names
        assert any(name.endswith("licenses/LICENSE") for name in names)
        assert all(name.startswith("embedstream_client") for name in names)
    assert wheel.stat().st_size < 100_000
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[1]: member for member in archive.getmembers()}
        for name in contract:
            assert members[f"src/embedstream_client/_wire/{name}"].isreg()
        assert members["LICENSE"].isreg() and members["README.md"].isreg()


def test_it_works_in_a_clean_environment(clean_python: Path) -> None:
    loaded = json.loads(
        run(
            clean_python,
            "import json, sys, embedstream_client as e\n"
            "assert e.parse_url('redis://host/3').db == 3\n"
            "print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))",
        )
    )
    assert "embedstream_client" in loaded
    ours = {"schemas", "gpu", "actors", "pipeline"}
    heavy = {"torch", "numpy", "redis", "aiokafka", "transformers", "structlog"}
    assert not (ours | heavy) & set(loaded)


def test_vectors_are_lists_without_numpy(clean_python: Path) -> None:
    out = run(
        clean_python,
        "from embedstream_client.results import Embedding\n"
        "from embedstream_client._wire.results import ItemReply\n"
        "import struct\n"
        "for dtype, form, values in (('float32', '<2f', (1.5, -2)), ('float16', '<2e', (1.5, -2)),\n"
        "                            ('int8', '2b', (3, -4)), ('binary', '2B', (255, 1))):\n"
        "    item = ItemReply(index=0, embedding=struct.pack(form, *values))\n"
        "    vector = Embedding(item, dtype).vector\n"
        "    assert type(vector) is list and vector == list(values), vector\n"
        "print('lists')",
    )
    assert out == "lists\n"


def test_a_missing_broker_client_names_the_extra(clean_python: Path) -> None:
    out = run(
        clean_python,
        "from embedstream_client import Client\n"
        "for url in ('redis://h', 'kafka://h'):\n"
        "    try:\n"
        "        Client.from_url(url)\n"
        "    except ImportError as error:\n"
        "        print(error)",
    )
    assert "embedstream-client[redis]" in out and "embedstream-client[kafka]" in out


def test_the_source_is_python_3_10(built: tuple[Path, Path]) -> None:
    """By its grammar, and without what the standard library has only since 3.11."""
    newer = re.compile(
        r"asyncio\.(timeout|TaskGroup|Runner)\b|import tomllib|\bStrEnum\b|ExceptionGroup\b"
        r"|from typing import .*\b(Self|Unpack|Never|LiteralString|assert_never|override)\b"
    )
    for folder in (CLIENT / "src" / "embedstream_client", ROOT / "schemas"):
        for path in folder.glob("*.py"):
            text = path.read_text("utf-8")
            ast.parse(text, feature_version=(3, 10))
            assert not newer.search(text), path


def test_client_and_service_agree_on_what_they_share() -> None:
    def floors(requirements: list[str]) -> dict[str, str]:
        return {re.split(r"[\[>=<;]", r)[0].strip(): r for r in requirements}

    ours, theirs = floors(PROJECT["dependencies"]), floors(SERVER["dependencies"])
    assert set(ours) == {"msgpack", "msgspec"}
    assert {name: theirs[name] for name in ours} == ours
    assert PROJECT["version"] == SERVER["version"] and PROJECT["license"] == SERVER["license"]
    assert (CLIENT / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
