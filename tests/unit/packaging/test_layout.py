"""What keeps the house readable: short files, and no two modules that need each other."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[3]
ROOMS = ("schemas", "gpu", "actors", "pipeline")
MAX_LINES = 400


def test_no_file_of_the_product_is_longer_than_a_reader_holds_in_mind() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    lines = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in files}
    assert len(lines) > 100
    assert {name: n for name, n in lines.items() if n > MAX_LINES} == {}


def test_no_two_modules_import_each_other() -> None:
    graph = grimp.build_graph(*ROOMS, exclude_type_checking_imports=True, cache_dir=None)
    needs = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle
