"""What has never run on a GPU says so where a reader begins."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
NEVER_RUN = {
    "gpu/attention/flashinfer.py", "gpu/attention/varlen.py", "gpu/device/staging.py",
    "gpu/forward/cuda_graphs.py", "gpu/forward/token_buckets.py",
}  # fmt: skip
# These ask whether there is a device and give its memory back; they compute nothing on it.
ASK_ONLY = {"gpu/device/pick.py", "gpu/runner.py"}
SENTENCE = "Has never run on a GPU"


def test_each_says_so_in_its_first_lines() -> None:
    for name in sorted(NEVER_RUN):
        assert SENTENCE in "\n".join((ROOT / name).read_text("utf-8").splitlines()[:3]), name


def test_no_module_uses_a_gpu_without_being_listed() -> None:
    using = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "gpu").rglob("*.py")
        if "torch.cuda." in path.read_text("utf-8")
    }
    assert using <= NEVER_RUN | ASK_ONLY, using - NEVER_RUN - ASK_ONLY


def test_the_page_that_the_sentence_names_lists_them() -> None:
    page = (ROOT / "docs/attention.md").read_text("utf-8")
    section = page.partition("## What has never run on a GPU")[2]
    for name in sorted(NEVER_RUN):
        assert f"`{name}`" in section, name
