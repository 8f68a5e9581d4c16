"""The GPU check runs in small on the CPU, fails when numbers are wrong, and says when there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks._gpu_verdict import verdicts
from gpu.attention import SdpaBackend


def test_dry_run(tmp_path: Path) -> None:
    assert gpu_check.main(["--dry-run", "--json", str(tmp_path / "rows.json")]) == 0
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["about"]["dry_run"] is True and document["bad"] == []
    sections = {row["section"] for row in document["rows"]}
    assert sections == {
        "numbers", "invariance", "nan", "model", "runner", "layer", "staging", "graphs", "mfu",
    }  # fmt: skip
    sizes = [row["what"] for row in document["rows"] if row["section"] == "mfu" and "mfu" in row]
    assert len(sizes) == 12 and all("graphs o" in what for what in sizes)
    words = {verdict["module"]: verdict["word"] for verdict in document["verdicts"]}
    assert words.pop("gpu/attention/sdpa.py") == "keep"
    assert words.pop("gpu/attention/flashinfer.py") == "undecided"
    assert words.pop("gpu/attention/varlen.py") == "undecided"
    assert set(words) == {"gpu/device/staging.py", "gpu/forward/cuda_graphs.py"}
    assert "undecided" not in words.values()  # whatever the CPU's timings say, they were there
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


def row(section: str, what: str, *, ok: bool | None = None, **figures: Any) -> dict[str, Any]:
    return {"section": section, "what": what, "ok": ok, **figures}


def word_of(module: str, rows: list[dict[str, Any]]) -> tuple[str, str]:
    (found,) = [one for one in verdicts(rows) if one.module == module]
    return found.word, found.why


def layers(flashinfer_ms: float, sdpa_ms: float) -> list[dict[str, Any]]:
    return [
        row("numbers", "flashinfer: causal", ok=True),
        row("layer", "flashinfer: long items, causal", run_ms=flashinfer_ms),
        row("layer", "sdpa: long items, causal", run_ms=sdpa_ms),
    ]


def test_a_backend_stays_for_a_gain_and_goes_without_one() -> None:
    module = "gpu/attention/flashinfer.py"
    assert word_of(module, layers(1.0, 2.0))[0] == "keep"
    assert word_of(module, layers(1.0, 1.01))[0] == "remove"


def test_a_wrong_number_outweighs_any_gain() -> None:
    rows = [*layers(1.0, 9.0), row("nan", "flashinfer: causal", ok=False)]
    assert word_of("gpu/attention/flashinfer.py", rows) == (
        "remove", "wrong in 1 rows, first: flashinfer: causal",
    )  # fmt: skip
    served = [*layers(1.0, 9.0), row("model", "bert", ok=False, served_by="flashinfer+sdpa")]
    assert word_of("gpu/attention/flashinfer.py", served)[0] == "remove"


def test_what_did_not_run_is_undecided_with_the_reason() -> None:
    refused = [row("numbers", "varlen: causal", why="refused: no such torch")]
    assert word_of("gpu/attention/varlen.py", refused) == ("undecided", "refused: no such torch")
    for verdict in verdicts([]):
        assert verdict.word == "undecided"


@pytest.mark.parametrize(("with_ms", "word"), [(1.0, "keep"), (1.95, "remove")])
def test_graphs_stay_for_what_small_packs_gain(with_ms: float, word: str) -> None:
    rows = [
        row("mfu", "bert: bfloat16, 128 tokens, graphs off", pack_ms=2.0),
        row("mfu", "bert: bfloat16, 128 tokens, graphs on", pack_ms=with_ms),
        row("mfu", "bert: bfloat16, 4096 tokens, graphs off", pack_ms=9.0),
        row("mfu", "bert: bfloat16, 4096 tokens, graphs on", pack_ms=1.0),
    ]
    assert word_of("gpu/forward/cuda_graphs.py", rows)[0] == word
    rows.append(row("graphs", "bert: float32, recorded", ok=False))
    assert word_of("gpu/forward/cuda_graphs.py", rows)[0] == "remove"


@pytest.mark.parametrize(("eight_ms", "word"), [(3.0, "keep"), (1.0, "remove")])
def test_one_copy_stays_when_it_is_faster_than_eight(eight_ms: float, word: str) -> None:
    rows = [row("staging", "8 groups", ok=True, one_ms=1.0, eight_ms=eight_ms)]
    assert word_of("gpu/device/staging.py", rows)[0] == word
