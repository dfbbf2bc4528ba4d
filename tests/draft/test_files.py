"""Files are written whole or not at all; lines end at line feeds alone."""

import pytest
from domino_draft.files import lines_of, replacing


def test_a_file_is_replaced_whole_or_kept(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as temporary:
        temporary.write_text("old")
        assert not path.exists() and temporary.parent == tmp_path
    assert path.read_text() == "old"
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_failed_rename_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError), replacing(tmp_path / "folder") as temporary:
        temporary.write_text("x")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_lines_end_at_line_feeds_alone(tmp_path):
    """str.splitlines also splits at U+2028 and U+0085, which JSON writes as they are."""
    path = tmp_path / "a.jsonl"
    path.write_bytes("\ufeffa\u2028b\r\nc\x85d\n\ne\x0cf\n".encode())
    assert lines_of(path) == ["a\u2028b", "c\x85d", "", "e\x0cf"]
    path.write_bytes(b"a\xff\n")
    with pytest.raises(ValueError, match=r"a\.jsonl: got .*expected text in UTF-8"):
        lines_of(path)
