"""Mathematics prompts: rewritten training questions, word problems from templates, openings."""

import re

import tables

TABLES = tables.load("math_tables.txt")
WOMEN, MEN = TABLES["women"], TABLES["men"]
# {a} {b} {c} {d} {s} are small numbers, {A} {B} {C} {D} middling, {H} {T} large, {P} {Q} per cent;
# {p} {q} {o} are people, {he} {him} go with {p}.
PREFACES = ("", "", "", "", "Solve this problem step by step. ", "Please help me with this: ")


def _values(rng):
    woman = rng.random() < 0.5
    p = rng.choice(WOMEN if woman else MEN)
    q, o = rng.sample([n for n in WOMEN + MEN if n != p], 2)
    x, y = rng.sample(TABLES["items"], 2)
    city, city2 = rng.sample(TABLES["cities"], 2)
    small, middle = (lambda: rng.randint(2, 15)), (lambda: rng.randint(10, 99))
    return {
        "p": p,
        "q": q,
        "o": o,
        "x": x,
        "y": y,
        "city": city,
        "city2": city2,
        "he": "she" if woman else "he",
        "He": "She" if woman else "He",
        "him": "her" if woman else "him",
        "g": rng.choice(TABLES["goods"]),
        "place": rng.choice(TABLES["places"]),
        "job": rng.choice(TABLES["jobs"]),
        "n": rng.choice(TABLES["containers"]),
        "day": rng.choice(TABLES["days"]),
        "a": small(),
        "b": small(),
        "c": rng.randint(2, 9),
        "d": small(),
        "s": rng.randint(2, 8),
        "A": middle(),
        "B": rng.randint(10, 40),
        "C": middle(),
        "D": middle(),
        "H": rng.choice((rng.randint(100, 400), 10 * rng.randint(5, 60))),
        "T": 50 * rng.randint(8, 120),
        "P": 5 * rng.randint(1, 10),
        "Q": 5 * rng.randint(1, 8),
    }


def _fill(template, rng):
    values = _values(rng)
    values |= {f"{k}a": k * values["a"] for k in (2, 3, 4)}
    return template.format(**values)


def rewritten(question, rng):
    """`question` with its integers and first names redrawn (magnitudes and genders kept)."""
    mapping = {}

    def number(match):
        text = match.group()
        if text not in mapping:
            value = int(text.replace(",", ""))
            if value < 2 or 1900 <= value <= 2100:
                mapping[text] = text
            else:
                scale = 10 ** max(len(str(value)) - 2, 0)
                low, high = max(2, value // 2), min(value * 2, 10 * 10 ** len(str(value)))
                drawn = rng.randint(low, high) // scale * scale
                mapping[text] = f"{drawn:,}" if "," in text else str(drawn)
        return mapping[text]

    def name(match):
        text = match.group()
        for group in (WOMEN, MEN):
            if text in group and text not in mapping:
                mapping[text] = rng.choice([n for n in group if n not in mapping.values()])
        return mapping.get(text, text)

    question = re.sub(
        r"(?<![\d.,/])\d{1,3}(?:,\d{3})+(?![\d/])|(?<![\d.,/])\d+(?![\d/]|\.\d)", number, question
    )
    return re.sub(r"\b[A-Z][a-z]+\b", name, question)


def _opening(text, rng):
    """The first sentence or two of a problem, or a cut inside it."""
    sentences = re.split(r"(?<=[.?!])\s+", text)
    if len(sentences) > 2 and rng.random() < 0.6:
        return " ".join(sentences[: rng.randint(1, len(sentences) - 1)])
    words = text.split()
    return " ".join(words[: rng.randint(2, max(2, min(len(words) - 1, 14)))])


def build(questions, counts, rng):
    """(kind, text) records from training-part `questions` and from the templates above."""
    complete = dict.fromkeys(questions)
    while len(complete) < len(questions) + counts["rewritten"]:
        complete[rewritten(rng.choice(questions), rng)] = None
    target = len(complete) + counts["problems"]
    while len(complete) < target:
        complete[rng.choice(PREFACES) + _fill(rng.choice(TABLES["word_problems"]), rng)] = None
    target = len(complete) + counts["exercises"]
    while len(complete) < target:
        complete[_fill(rng.choice(TABLES["exercises"]), rng)] = None
    opened = {}
    while len(opened) < counts["open"]:
        if rng.random() < 0.7:
            source = rewritten(rng.choice(questions), rng)
        else:
            source = _fill(rng.choice(TABLES["word_problems"]), rng)
        opened[_opening(source, rng)] = None
    return [(0, text) for text in complete] + [(1, text) for text in opened]
