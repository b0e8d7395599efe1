"""bench/runs.py: results files, which may be damaged or not be results files, and the pages that show them."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\xff", "decode"),
        (b"[" * 100_000, "recursion"),
        (b"9" * 5000, "digits"),
        (b"[]", "its JSON is of type list"),
        (b"3", "its JSON is of type int"),
        (b"null", "its JSON is of type NoneType"),
    ],
)
def test_what_is_no_results_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as refused:
        runs.begun(path, resume=True)
    assert f"{path} is not a results file" in str(refused.value) and reason in str(refused.value)
    assert path.read_bytes() == content


@pytest.mark.processes
def test_a_results_file_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "results.json"
    document = {"machine": {"cpu": "one", "commit": "first"}, "rows": [{"ranks": 2}]}
    for commit in ("first", "second", "second"):
        monkeypatch.setattr(runs, "commit", lambda commit=commit: commit)
        runs.store(path, document)
    assert document["machine"]["commit"] == "first, second"
    assert runs.begun(path, resume=True) == document
    assert runs.begun(path, resume=False)["rows"] == []


def test_a_measured_table_takes_its_place_in_a_page(tmp_path: Path):
    page, command = tmp_path / "page.md", "python bench/links.py --ranks 2"
    page.write_text(f"before\n<!-- measured by {command} -->\nold\n<!-- end of {command} -->\nafter\n")
    for _ in range(2):
        runs.rewrite_table(str(page), command, "the table")
        begin, middle, end = page.read_text().partition("the table")
        assert begin.startswith("before\n<!--") and middle and end.endswith(f"<!-- end of {command} -->\nafter\n")
        assert "old" not in page.read_text() and "the table" not in end
    with pytest.raises(SystemExit, match="has no lines '<!-- measured by python other"):
        runs.rewrite_table(str(page), "python other.py", "the table")
