"""docs/models.md is generated; this compares its families with the registry, and its figures with the bounds."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.parity import EXAMPLES, SCORERS, UNMEASURED
from gpu.folder.families import FAMILIES, VISION_FAMILIES
from gpu.folder.static import STATIC_TYPES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text()
HOW = "run: python -m benchmarks.parity"
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_the_page_has_a_row_for_every_family_and_no_other() -> None:
    registry = {*FAMILIES, *VISION_FAMILIES, *STATIC_TYPES}
    assert set(ROWS) == registry, HOW
    assert set(EXAMPLES) == registry, "benchmarks/parity.py: EXAMPLES"


def test_a_shared_name_never_hides_a_family() -> None:
    assert not set(FAMILIES) & set(VISION_FAMILIES)


def test_the_figures_hold_the_bounds() -> None:
    """A06, A11: 1e-5 and 1e-6 in fp32, the same bytes anywhere, everything packed."""
    for name, (_, run, diff, lost, same, logits, sparse, _) in ROWS.items():
        if name in UNMEASURED:
            continue
        assert name in SCORERS or (float(diff) <= 1e-5 and float(lost) <= 1e-6), name
        assert same == "yes", name
        assert run == ("" if name in STATIC_TYPES else "packed"), name
        family = {**FAMILIES, **VISION_FAMILIES}.get(name)
        if family is not None:
            assert (logits != "") == (family.head is not None), (name, HOW)
            assert (sparse == "yes") == (family.mlm is not None), (name, HOW)
            assert logits == "" or float(logits) <= 1e-5, name


def test_the_page_is_the_filled_in_template() -> None:
    """Prose is edited in the template, figures by the script: neither drifts on the page alone."""
    template = (ROOT / "benchmarks" / "models_page.md").read_text()
    pieces = re.split(r"\{(?:versions|bits|rows|real)\}", template)
    at = 0
    for piece in pieces:
        found = PAGE.find(piece, at)
        assert found >= 0, HOW
        at = found + len(piece)
    assert not re.search(r"\{(?:versions|bits|rows|real)\}", PAGE)


def test_what_was_only_checked_with_seeded_weights_is_said() -> None:
    assert "seeded\n  tiny models" in PAGE or "seeded tiny" in PAGE.replace("\n  ", " ")
    assert "never checked with real weights" in PAGE
