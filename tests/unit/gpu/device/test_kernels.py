"""Which library computes a linear: measured once, remembered, forced; same bits at any row count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpu.device import kernels, linears, mlas
from gpu.device.kernels import DEFAULT, KernelChoice, candidates, remembered
from gpu.device.linears import prepack
from gpu.faults import ModelLoadError

SHAPE = (1536, 384)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process."""
    monkeypatch.setattr(kernels, "_MEMO", {})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # under which bits are promised
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "linears.json"


class Block(nn.Module):
    """`act(dense(x))` under the names that BERT-like classes use."""

    def __init__(self, out: int = SHAPE[0], features: int = SHAPE[1]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(features, out).requires_grad_(False)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.intermediate_act_fn(self.dense(x))
        return out


def times(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[tuple[int, ...]]:
    """Measurements that come out as told (dashes as underscores); what was measured, as it happens."""
    measured: list[tuple[int, ...]] = []

    def told(made: dict[str, Any], *shape: int) -> dict[str, float]:
        measured.append(shape)
        return {name: seconds.get(name.replace("-", "_"), 9.0) for name in made}

    monkeypatch.setattr(kernels, "_timed", told)
    return measured


def chosen(file: Path | None, setting: str = "auto", block: Block | None = None) -> str:
    report = prepack(block or Block(), choice=KernelChoice(setting, file))
    (kernel,) = report.kernels.values()
    return kernel


@pytest.mark.parametrize("kernel", candidates(gelu=True))
def test_every_kernel_gives_torchs_numbers_and_the_same_bits_at_any_row_count(kernel: str) -> None:
    """A06: GELU included, rows 1 to 40 and some larger, from any offset."""
    plain, block = Block(), Block()
    report = prepack(block, choice=KernelChoice(kernel))
    assert set(report.kernels.values()) == {kernel} and not report.unstable
    x = torch.randn(600, SHAPE[1])
    whole = block(x)
    assert torch.allclose(whole, plain(x), atol=2e-5, rtol=1e-5)
    assert block(x[:0]).shape == (0, SHAPE[0])
    assert block(x[None, :3]).shape == (1, 3, SHAPE[0])
    for rows in [*range(1, 41), 63, 64, 65, 127, 255, 257, 512]:
        for start in (0, 3, 31):
            assert torch.equal(block(x[start : start + rows]), whole[start : start + rows]), rows


def test_the_fastest_is_taken_and_remembered(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    measured = times(monkeypatch, onednn=1.0, torch=0.8, onednn_apart=0.9)
    assert chosen(file) == "torch"
    monkeypatch.setattr(kernels, "_MEMO", {})  # a new process
    assert chosen(file) == "torch"
    assert len(measured) == 1
    file.unlink()
    monkeypatch.setattr(kernels, "_MEMO", {})
    assert chosen(file) == "torch"
    assert len(measured) == 2


def test_a_small_gain_is_noise(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    times(monkeypatch, onednn=1.0, torch=0.97)
    assert chosen(file) == DEFAULT


def test_a_kernel_whose_rows_depend_on_their_number_is_dropped(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    """Seen with some libraries: another summation order from so many rows on."""
    times(monkeypatch, onednn=1.0, torch=0.5, onednn_apart=0.7)

    class Moody(linears.TorchLinear):
        def product(self, flat: torch.Tensor) -> torch.Tensor:
            return super().product(flat) * (1.0 + 1e-6 * (flat.shape[0] > 400))

    monkeypatch.setattr(linears, "TorchLinear", Moody)
    assert chosen(file) == "onednn-apart"


def test_a_kernel_with_other_numbers_is_dropped(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    times(monkeypatch, onednn=1.0, torch=0.5)

    class Wrong(linears.TorchLinear):
        def product(self, flat: torch.Tensor) -> torch.Tensor:
            return super().product(flat) * 1.01

    monkeypatch.setattr(linears, "TorchLinear", Wrong)
    assert chosen(file) == DEFAULT


def test_a_named_kernel_is_not_measured(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    measured = times(monkeypatch)
    assert chosen(file, "torch") == "torch"
    assert measured == [] and not file.exists()


def test_small_linears_are_not_measured(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    measured = times(monkeypatch, onednn=1.0, torch=0.1)
    assert chosen(file, block=Block(64, 32)) == DEFAULT and measured == []


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"m": []}', '{"m": {"1536x384 gelu": "cuda"}}']
)
def test_a_damaged_file_is_measured_over(
    monkeypatch: pytest.MonkeyPatch, file: Path, content: str
) -> None:
    monkeypatch.setattr(kernels, "_machine", lambda: "m")
    times(monkeypatch, onednn=1.0, torch=0.5)
    file.parent.mkdir()
    file.write_text(content)
    assert chosen(file) == "torch"
    assert json.loads(file.read_text())["m"] == {"1536x384 gelu": "torch"}


def test_another_machines_choices_stay_and_do_not_count(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    times(monkeypatch, onednn=1.0, torch=0.5)
    file.parent.mkdir()
    file.write_text(json.dumps({"another": {"1536x384 gelu": "onednn"}}))
    assert chosen(file) == "torch"
    assert json.loads(file.read_text())["another"] == {"1536x384 gelu": "onednn"}


def test_what_another_process_wrote_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    """Two services that start at once must not answer with different bits."""
    monkeypatch.setattr(kernels, "_machine", lambda: "m")

    def slow(made: dict[str, Any], *shape: int) -> dict[str, float]:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"m": {"1536x384 gelu": "onednn-apart"}}))
        return dict.fromkeys(made, 1.0) | {"torch": 0.5}

    monkeypatch.setattr(kernels, "_timed", slow)
    assert chosen(file) == "onednn-apart"


def test_what_cannot_be_remembered_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A restart would measure again and might answer with other bits."""
    times(monkeypatch, onednn=1.0, torch=0.5)
    (tmp_path / "taken").write_text("a file where the folder should be")
    assert chosen(tmp_path / "taken" / "linears.json") == DEFAULT
    assert chosen(None) == DEFAULT


def test_a_library_that_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlas, "version", lambda: None)
    assert "mlas" not in candidates(gelu=True)
    with pytest.raises(ModelLoadError, match="onnxruntime"):
        KernelChoice("mlas")


def test_a_measurement_takes_turns_on_one_thread(file: Path) -> None:
    torch.set_num_threads(2)
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def product(name: str) -> Any:
        return lambda x: (seen[name].append(torch.get_num_threads()), x)[1]

    found = kernels._timed({"a": product("a"), "b": product("b")}, 8, 32)  # type: ignore[dict-item]
    assert set(found) == {"a", "b"} and all(0 <= seconds < 60 for seconds in found.values())
    assert seen == {name: [1] * kernels.ROUNDS for name in ("a", "b")}
    assert torch.get_num_threads() == 2


def test_the_file_lies_in_the_users_cache(tmp_path: Path) -> None:
    assert remembered({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "embedstream/linears.json"
    assert remembered({}).parts[-3:] == (".cache", "embedstream", "linears.json")


def test_gelu_in_place_is_torchs_own() -> None:
    x = torch.randn(513, 7)
    assert torch.equal(torch.ops.aten.gelu_(x.clone()), functional.gelu(x))
