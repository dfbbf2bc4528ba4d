"""Word lists and templates kept as text: ``[section]`` headings, one entry a line."""

from pathlib import Path


def load(name):
    """Sections of the file `name` next to this one, as a dict of lists.

    An empty entry is written ``(empty)``; leading blanks of an entry count.
    """
    sections = {}
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            sections[line.strip("[]")] = entries = []
        elif line and not line.startswith("#"):
            entries.append("" if line == "(empty)" else line)
    return sections
