"""Peak and steady memory of a load, in a process of its own per model.

    python -m benchmarks.load [FOLDER ...] [--layers 12] [--hidden 768]

Who calls it: a person; without folders: the packaged all-MiniLM-L6-v2 and a seeded BERT of base size, written
to a temporary folder, whose weights are large beside the libraries.
What must stay true: the peak is the kernel's own high-water mark, reset after the imports; "beyond the
imports" subtracts what the process held before it read the model, so that the libraries hide nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._common import machine_kind, table, write_results

LIMIT = 1.3  # of peak to steady, all of the process
MIB = 1024.0


def measure(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load once, in this process. KiB of resident memory; seconds."""
    import torch  # noqa: F401

    import gpu.model_runner  # noqa: F401
    from gpu.load import make_runner_factory

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = _status()["VmRSS"]
    started = time.perf_counter()
    runner = make_runner_factory("m", folder, **settings)()
    took = time.perf_counter() - started
    after = _status()
    assert runner.info.packed
    return {
        "before": before,
        "steady": after["VmRSS"],
        "peak": after["VmHWM"],
        "seconds": took,
        "linears": runner.info.linears,
        "weights": _weight_bytes(Path(folder)) // 1024,
    }


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name: int(value.split()[0]) for name, _, value in pairs if value.strip().endswith("kB")}


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def seeded_bert(folder: Path, source: Path, *, layers: int, hidden: int) -> Path:
    """A BERT of this size with random weights and `source`'s tokenizer."""
    import shutil

    import torch
    from transformers import BertConfig, BertModel

    shutil.copytree(source, folder)
    (folder / "model.safetensors").unlink()
    sizes = json.loads((source / "config.json").read_text("utf-8"))
    config = BertConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    pooling = folder / "1_Pooling" / "config.json"
    known = json.loads(pooling.read_text("utf-8"))
    pooling.write_text(json.dumps(known | {"word_embedding_dimension": hidden}), "utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--speed", default="off")
    arguments = parser.parse_args()
    if arguments.one:
        json.dump(measure(arguments.one, {"speed": arguments.speed}), sys.stdout)
        return
    from gpu.forward.speed import cpu_has_bf16
    from pipeline.demo.fetch import resolve_model

    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(folder) for folder in arguments.folders]
        if not folders:
            small = Path(resolve_model("all-MiniLM-L6-v2"))
            name = f"seeded BERT {arguments.layers} x {arguments.hidden}"
            large = Path(temporary) / name
            seeded_bert(large, small, layers=arguments.layers, hidden=arguments.hidden)
            folders = [small, large]
        rows, data = [], {}
        for folder in folders:
            for speed in ("off", "bf16") if cpu_has_bf16() else ("off",):
                found = _in_a_process(folder, speed)
                data[f"{folder.name}, speed {speed}"] = found
                rows.append(_row(folder.name, speed, found))
                print(rows[-1])
    header = ["model", "speed", "weights MiB", "before MiB", "peak MiB", "steady MiB",
              "peak / steady", "beyond the imports", "seconds"]  # fmt: skip
    path = write_results(f"load-{machine_kind()}", "Memory of a load", [table(header, rows)], data)
    print(f"written to {path}")
    if any(found["peak"] > LIMIT * found["steady"] for found in data.values()):
        raise SystemExit(f"a load took more than {LIMIT} times what the model needs afterwards")


def _in_a_process(folder: Path, speed: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load", "--one", str(folder), "--speed", speed]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(ran.stdout[ran.stdout.index("{") :])
    return found


def _row(name: str, speed: str, found: dict[str, Any]) -> list[object]:
    before, peak, steady = found["before"], found["peak"], found["steady"]
    beyond = (peak - before) / max(1, steady - before)
    return [
        name, speed, f"{found['weights'] / MIB:.0f}", f"{before / MIB:.0f}", f"{peak / MIB:.0f}",
        f"{steady / MIB:.0f}", f"{peak / steady:.2f}", f"{beyond:.2f}", f"{found['seconds']:.1f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
