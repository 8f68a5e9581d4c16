"""The GPU check runs in small on the CPU, fails when numbers are wrong, and says when there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from gpu.attention import SdpaBackend


def test_dry_run(tmp_path: Path) -> None:
    assert gpu_check.main(["--dry-run", "--json", str(tmp_path / "rows.json")]) == 0
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["about"]["dry_run"] is True and document["bad"] == []
    sections = {row["section"] for row in document["rows"]}
    assert sections == {
        "numbers", "invariance", "nan", "model", "runner", "layer", "staging", "graphs",
    }  # fmt: skip
    refused = [row["why"] for row in document["rows"] if "why" in row]
    assert refused and all(why == "refused: runs on CUDA, not on cpu" for why in refused)


def test_wrong_numbers_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = SdpaBackend.run

    def shifted(self: SdpaBackend, *args: Any) -> torch.Tensor:
        return real(self, *args) + 0.5

    monkeypatch.setattr(SdpaBackend, "run", shifted)
    assert gpu_check.main(["--dry-run", "--sections", "numbers"]) == 1
    assert "BAD numbers: sdpa: bidirectional" in capsys.readouterr().err


def test_no_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == "gpu_check needs a CUDA device, and torch sees none here.\n"


def test_out_of_time_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_check, "LIMIT_S", -1.0)
    target = tmp_path / "rows.json"
    assert gpu_check.main(["--dry-run", "--json", str(target), "--sections", "models,speed"]) == 0
    rows = json.loads(target.read_text())["rows"]
    assert rows and all(row["why"] == "not run: out of time" for row in rows)
