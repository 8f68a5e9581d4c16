"""Every acceptance case that the issues name is proved by a test that cites it."""

from __future__ import annotations

from tests.support.cases import REQUIRED, ROOT, cited_tests, markdown


def test_every_required_case_is_cited_by_a_test() -> None:
    cited = cited_tests()
    assert [case for case in REQUIRED if case not in cited] == []


def test_the_page_of_cases_is_current() -> None:
    page = (ROOT / "docs" / "cases.md").read_text()
    assert page == markdown(), "run: python -m tests.support.cases > docs/cases.md"
