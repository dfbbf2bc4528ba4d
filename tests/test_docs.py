"""Every path, test, command and Python example on these pages exists and runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench import registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "docs/integrate.md", "docs/numerics.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
QUOTE = re.compile(r"^<!-- from (\S+) -->\n```python\n(.*?)^```$", re.M | re.S)


def text(page):
    return (ROOT / page).read_text()


def paths(page):
    """Link targets, and words in backticks that look like a file or folder of this repository."""
    prose = BLOCK.sub("", text(page))
    folder = (ROOT / page).parent
    links = [folder / t for t in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in t]
    words = re.findall(r"`([\w./-]+)`", prose)
    tops = {path.name for path in ROOT.iterdir()}
    files = [w for w in words if w.split("/")[0] in tops and ("/" in w or "." in w)]
    return links + files


def commands(page):
    for language, body in BLOCK.findall(text(page)):
        if language == "sh":
            for line in body.splitlines():
                if words := shlex.split(line, comments=True):
                    yield words


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    found = paths(page)
    assert found
    assert not [path for path in found if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page):
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text(page))
    assert not [name for name in named if f"def {name}(" not in code]
    assert named or "/" not in page


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    targets = re.findall(r"^([\w-]+):", text("Makefile"), re.M)
    found = list(commands(page))
    assert found
    for words in found:
        line = shlex.join(words)
        match words:
            case ["make", target, *_]:
                assert target in targets, line
            case ["python", "-m", "bench", suite, *_]:
                assert suite in registry.SUITES, line
            case ["python", "-m", "pytest", path, *_] | ["python", path, *_] if path[0] != "-":
                assert (ROOT / path).exists(), line
            case ["python", "-c", code]:
                subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            case ["domino-draft", command, *options]:
                from domino_draft.cli import main

                assert command in main.commands, line
                known = {o for p in main.commands[command].params for o in p.opts}
                assert {o for o in options if o.startswith("--")} <= known, line
            case ["pip", "install", *_] | ["git", "clone", *_] | ["cd", *_]:
                pass
            case [program, *_]:
                assert (ROOT / program).exists(), f"{page}: unknown command: {line}"


QUOTES = [(page, *quote) for page in PAGES for quote in QUOTE.findall(text(page))]
EXAMPLES = [
    (page, code)
    for page in PAGES
    for language, code in BLOCK.findall(QUOTE.sub("", text(page)))
    if language == "python"
]


@pytest.mark.parametrize("page, source, code", QUOTES, ids=[source for _, source, _ in QUOTES])
def test_quotes_agree_with_their_files(page, source, code):
    assert code in text(source)


@pytest.mark.parametrize("page, code", EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_examples_run(page, code):
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_contributing_stays_short():
    assert len(text("CONTRIBUTING.md").splitlines()) <= 120


def test_pre_commit_formats_as_make_lint_does():
    hooks = re.findall(
        r"(ruff|clang-format)(?:-pre-commit)?\n +rev: v(.+)", text(".pre-commit-config.yaml")
    )
    assert len(hooks) == 2
    for tool, version in hooks:
        assert f'"{tool}=={version}"' in text("pyproject.toml")
