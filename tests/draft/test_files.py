"""Files are written whole or not at all."""

import pytest
from domino_draft.files import replacing


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
