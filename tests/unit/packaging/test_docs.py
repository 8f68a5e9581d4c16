"""README and docs: short, and what they name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from pipeline.cli.commands import app
from pipeline.transports import broker_names

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def test_the_readme_fits_its_bound() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    for line in page.read_text("utf-8").splitlines():
        for target in re.findall(r"(?:^|`)make ([a-z]+)\b", line):
            assert re.search(rf"^{target}:", MAKEFILE, re.M), f"{page.name}: make {target}"


def commands() -> set[str]:
    return set(getattr(get_command(app), "commands", {}))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    known = commands()
    assert {"demo", "up", "serve", "embed", "rerank", "classify", "check", "models"} <= known
    text = page.read_text("utf-8")
    code = re.findall(r"`([^`\n]+)`", text) + "\n".join(blocks(text, "sh")).splitlines()
    for line in code:
        match = re.match(r"(?:\.venv/bin/)?embedstream ([a-z-]+)(.*)", line.strip())
        if match is None:
            continue
        assert match[1] in known, f"{page.name}: {line}"
        command = get_command(app).commands[match[1]]
        below = getattr(command, "commands", {}).values()
        options = {n for one in (command, *below) for p in one.params for n in p.opts}
        for option in re.findall(r"(--[a-z][a-z-]*)", match[2].split("#")[0]):
            assert option in options, f"{page.name}: {line}"


def test_files_that_the_guides_name_exist() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    files = re.findall(r"`((?:gpu|actors|pipeline|tests|docs)/[A-Za-z_/.*]*)`", guide)
    assert len(files) > 15
    for file in files:
        assert list(ROOT.glob(file)) or "KIND" in file, file


def test_files_of_the_idea_table_exist() -> None:
    table = README[README.index("| idea | file |") :]
    files = re.findall(r"`([a-z_]+/[^`]*)`", table)
    assert len(files) > 15
    for file in files:
        assert (ROOT / file).exists(), file


def test_client_code_in_the_readme_is_code_and_uses_the_real_names() -> None:
    code = blocks(README, "python")
    assert len(code) == 2
    for block in code:
        ast.parse(block)
    assert "from embedstream_client import" in code[0]
    assert broker_names.REQUESTS in code[1] and broker_names.REPLIES in code[1]
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    assert "localhost:${KAFKA_PORT:-9092}" in str(compose["services"]["kafka"]["environment"])


def test_the_index_lists_every_page_once() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[([a-z-]+\.md)\]\(\1\)", index, re.M)
    assert sorted(rows) == sorted(
        p.name for p in PAGES if p.parent.name == "docs" and p.stem != "README"
    )
    heads = re.findall(r"^## (\w+)", index, re.M)
    assert heads == ["Try", "Use", "Run", "Understand", "Reference"]
