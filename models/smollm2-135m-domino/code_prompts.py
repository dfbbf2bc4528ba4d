"""Code prompts shaped like HumanEval: real signatures with their docstrings, and composed tasks."""

import ast
import random
import re
from itertools import pairwise

CODE_TURN = "Complete the following Python function.\n\n```python\n{}```"


def code_turn(function_opening):
    """The user turn of a function opening; evaluation and training use this one wording."""
    if not function_opening.endswith("\n"):
        function_opening += "\n"
    return CODE_TURN.format(function_opening)


def _first_paragraphs(doc, limit):
    kept = ""
    for paragraph in doc.split("\n\n"):
        if kept and len(kept) + len(paragraph) > limit:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    return kept if len(kept) <= limit else ""


def _signature(node):
    arguments = node.args
    for names in (arguments.posonlyargs, arguments.args):
        if names and names[0].arg in ("self", "cls"):
            del names[0]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(arguments)}){returns}:\n"


def harvest(sources, rng):
    """Documented functions of Python `sources` (an iterable of texts).

    Returns (signature, docstring) pairs, docstrings dedented and cut at a paragraph, shuffled.
    """
    found = {}
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or re.fullmatch(r"__\w+__", node.name):
                continue
            doc = ast.get_docstring(node)
            if not doc or '"""' in doc or not doc.isascii():
                continue
            doc = _first_paragraphs(doc, rng.choice((200, 350, 500)))
            if len(doc) < 30:
                continue
            signature = _signature(node)
            if len(signature) > 160:
                continue
            found.setdefault((node.name, doc), (signature, doc))
    pairs = list(found.values())
    rng.shuffle(pairs)
    return pairs


def _indent(text):
    return "\n".join("    " + line if line.strip() else "" for line in text.split("\n"))


def complete_function(signature, doc):
    """A function opening laid out as HumanEval lays it out."""
    body = _indent(doc).strip()
    closing = "\n    " if "\n" in body else ""
    return f'{signature}    """{body}{closing}"""\n'


def open_function(signature, doc, rng):
    """A function opening that stops inside its docstring, for the target to finish."""
    words = doc.split("\n\n")[0].split()
    kept = " ".join(words[: rng.choice((0, 0, 1, 2, 3, 5, 8))])
    return CODE_TURN.split("{}")[0] + f'{signature}    """ {kept}'.rstrip()


# Composed tasks: a filter, a map and a reduction over one input, each with its wording, the
# examples computed by running the composition.
_INT_FILTERS = [
    ("", "numbers", lambda x, k: True),
    ("even", "even numbers", lambda x, k: x % 2 == 0),
    ("odd", "odd numbers", lambda x, k: x % 2 == 1),
    ("positive", "positive numbers", lambda x, k: x > 0),
    ("negative", "negative numbers", lambda x, k: x < 0),
    ("large", "numbers greater than {k}", lambda x, k: x > k),
    ("small", "numbers smaller than {k}", lambda x, k: x < k),
    ("divisible", "numbers that are divisible by {k}", lambda x, k: x % k == 0),
    ("prime", "prime numbers", lambda x, k: x > 1 and all(x % d for d in range(2, x))),
    ("two_digit", "two-digit numbers", lambda x, k: 10 <= abs(x) <= 99),
    ("palindromic", "numbers that read the same backwards", lambda x, k: str(x) == str(x)[::-1]),
    ("square", "perfect squares", lambda x, k: x >= 0 and round(x**0.5) ** 2 == x),
]
_INT_MAPS = [
    ("", "{}", lambda x, k: x),
    ("squared", "the squares of the {}", lambda x, k: x * x),
    ("cubed", "the cubes of the {}", lambda x, k: x**3),
    ("doubled", "the doubled {}", lambda x, k: 2 * x),
    ("absolute", "the absolute values of the {}", lambda x, k: abs(x)),
    ("shifted", "the {} each increased by {k}", lambda x, k: x + k),
    ("scaled", "the {} each multiplied by {k}", lambda x, k: x * k),
    ("remainder", "the remainders modulo {k} of the {}", lambda x, k: x % k),
    ("digit_sum", "the sums of digits of the {}", lambda x, k: sum(map(int, str(abs(x))))),
    ("negated", "the {} with their signs changed", lambda x, k: -x),
]
_INT_REDUCTIONS = [
    ("sum", "int", "the sum of {}", sum),
    (
        "count_distinct",
        "int",
        "how many different values there are among {}",
        lambda v: len(set(v)),
    ),
    (
        "maximum",
        "int",
        "the largest of {}, or None if there is none",
        lambda v: max(v, default=None),
    ),
    (
        "minimum",
        "int",
        "the smallest of {}, or None if there is none",
        lambda v: min(v, default=None),
    ),
    ("list", "List[int]", "a list of {}, in their original order", list),
    ("sorted", "List[int]", "a sorted list of {}", sorted),
    ("unique", "List[int]", "a sorted list of {} without duplicates", lambda v: sorted(set(v))),
    ("reversed", "List[int]", "a list of {} in reverse order", lambda v: v[::-1]),
    (
        "range",
        "int",
        "the difference between the largest and the smallest of {}, or 0 if there is none",
        lambda v: max(v) - min(v) if v else 0,
    ),
    (
        "average",
        "float",
        "the average of {}, or 0.0 for an empty list",
        lambda v: round(sum(v) / len(v), 2) if v else 0.0,
    ),
    (
        "running_total",
        "List[int]",
        "a list of the running totals of {}",
        lambda v: [sum(v[: i + 1]) for i in range(len(v))],
    ),
    (
        "differences",
        "List[int]",
        "a list of the differences between neighbours among {}",
        lambda v: [b - a for a, b in pairwise(v)],
    ),
    (
        "any",
        "bool",
        "True if the list has any of {} that is above 10",
        lambda v: any(x > 10 for x in v),
    ),
    ("all", "bool", "True if all of {} are below 50", lambda v: all(x < 50 for x in v)),
    ("every_other", "List[int]", "every second one of {}", lambda v: v[::2]),
    (
        "top",
        "List[int]",
        "the three largest of {} in descending order",
        lambda v: sorted(v, reverse=True)[:3],
    ),
]
_WORDS = (
    "apple banana river stone cloud mirror level garden python window kayak planet noon silver "
    "orange rocket summer button violin forest radar candle winter bridge tiger eagle copper "
    "engine pencil basket camel echo ocean paper refer salad tower umbrella valley yellow zebra "
    "ant bee cat dog sky tree lamp moon star fish ship road hill wind book"
).split()
_STR_FILTERS = [
    ("", "words", lambda w, k: True),
    ("long", "words longer than {k} letters", lambda w, k: len(w) > k),
    ("short", "words with at most {k} letters", lambda w, k: len(w) <= k),
    ("vowel", "words that start with a vowel", lambda w, k: w[0] in "aeiou"),
    ("consonant", "words that start with a consonant", lambda w, k: w[0] not in "aeiou"),
    ("palindrome", "words that are palindromes", lambda w, k: w == w[::-1]),
    ("even_length", "words of even length", lambda w, k: len(w) % 2 == 0),
    (
        "double",
        "words that contain a letter twice in a row",
        lambda w, k: any(a == b for a, b in pairwise(w)),
    ),
    ("unique_letter", "words in which no letter is repeated", lambda w, k: len(set(w)) == len(w)),
]
_STR_MAPS = [
    ("", "{}", lambda w, k: w),
    ("upper", "the {} in upper case", lambda w, k: w.upper()),
    ("capital", "the {} with a capital first letter", lambda w, k: w.capitalize()),
    ("reversed", "the {} written backwards", lambda w, k: w[::-1]),
    ("first", "the first letters of the {}", lambda w, k: w[0]),
    ("last", "the last letters of the {}", lambda w, k: w[-1]),
    ("no_vowel", "the {} without their vowels", lambda w, k: re.sub("[aeiou]", "", w)),
    ("prefix", "the first three letters of the {}", lambda w, k: w[:3]),
]
_STR_REDUCTIONS = [
    ("list", "List[str]", "a list of {}, in their original order", list),
    ("sorted", "List[str]", "a list of {} in alphabetical order", sorted),
    (
        "by_length",
        "List[str]",
        "a list of {} sorted by length and then alphabetically",
        lambda v: sorted(v, key=lambda w: (len(w), w)),
    ),
    ("joined", "str", "{} joined by single spaces", " ".join),
    ("concatenated", "str", "the concatenation of {}", "".join),
    ("count", "int", "how many {} there are, counting duplicates once", lambda v: len(set(v))),
    (
        "longest",
        "str",
        "the longest of {} (the first one if several have the same length)",
        lambda v: max(v, key=len, default=""),
    ),
    ("lengths", "List[int]", "a list of the lengths of {}", lambda v: [len(w) for w in v]),
    ("length_total", "int", "the total number of letters in {}", lambda v: sum(map(len, v))),
    (
        "length_counts",
        "Dict[str, int]",
        "a dictionary from each of {} to its length",
        lambda v: {w: len(w) for w in v},
    ),
]
_LEADS = (
    "Return {}.",
    "Given a {input}, return {}.",
    "You are given a {input}. Return {}.",
    "Write a function that takes a {input} and returns {}.",
    "This function receives a {input} and should return {}.",
    "For a given {input} find {}.",
    "Find and return {}.",
    "The input of this function is a {input}. Its output is {}.",
    "Create a function which takes a {input} as input and returns {}.",
)


def _example(style, name, value, result):
    return {
        "doctest": f">>> {name}({value!r})\n{result!r}",
        "equal": f"{name}({value!r}) == {result!r}",
        "arrow": f"{name}({value!r}) ➞ {result!r}",
        "for": f"For {value!r} the result should be {result!r}",
    }[style]


def composed(count, rng):
    """`count` distinct function openings with examples that are really what the task gives."""
    made = {}
    while len(made) < count:
        strings = rng.random() < 0.4
        filters, maps, reductions = (
            (_STR_FILTERS, _STR_MAPS, _STR_REDUCTIONS)
            if strings
            else (_INT_FILTERS, _INT_MAPS, _INT_REDUCTIONS)
        )
        chosen, mapped, reduced = rng.choice(filters), rng.choice(maps), rng.choice(reductions)
        k = rng.randint(2, 6) if strings else rng.randint(2, 20)
        argument = rng.choice(
            ("words", "strings", "items", "names")
            if strings
            else ("numbers", "lst", "nums", "values", "arr", "l")
        )

        def draw(strings=strings):
            if strings:
                return [rng.choice(_WORDS) for _ in range(rng.randint(2, 5))]
            low = rng.choice((0, 0, -20))
            return [rng.randint(low, rng.choice((10, 30, 99))) for _ in range(rng.randint(3, 7))]

        parts = [p for p in (reduced[0], chosen[0], mapped[0]) if p]
        rng.shuffle(parts)
        name = "_".join(parts) or "solve"
        if rng.random() < 0.3:
            name = rng.choice(("get_", "find_", "compute_", "make_")) + name
        inner = mapped[1].format(chosen[1].replace("{k}", str(k)), k=k)
        wording = reduced[2].format(inner if inner.startswith("the ") else f"the {inner}")
        kind = "list of " + ("strings" if strings else "integers")
        lead = rng.choice(_LEADS).format(wording, input=kind)
        style = rng.choice(("doctest", "doctest", "equal", "arrow", "for"))
        examples = []
        for _ in range(rng.randint(1, 3)):
            value = draw()
            result = reduced[3]([mapped[2](x, k) for x in value if chosen[2](x, k)])
            examples.append(_example(style, name, value, result))
        typed = rng.random() < 0.6
        element = "str" if strings else "int"
        if typed:
            signature = f"def {name}({argument}: List[{element}]) -> {reduced[1]}:\n"
            used = [t for t in ("Dict", "List") if t in signature]
            signature = f"from typing import {', '.join(used)}\n\n\n" + signature
        else:
            signature = f"def {name}({argument}):\n"
        gap = rng.choice(
            ("\n", "\n\n", "\n\nExamples:\n" if len(examples) > 1 else "\n\nExample:\n")
        )
        lead = rng.choice((" ", "", "\n")) + lead
        doc = lead + gap + "\n".join(examples)
        body = _indent(doc).removeprefix("    ") if not lead.startswith("\n") else _indent(doc)
        made.setdefault(f'{signature}    """{body}\n    """\n', None)
    return list(made)


def build(sources, counts, rng):
    """(kind, text) records: kind 0 complete user turns, kind 1 open ones."""
    pairs = harvest(sources, rng)
    complete = [complete_function(*pair) for pair in pairs[: counts["harvested"]]]
    imports = ("", "", "", "from typing import List\n\n\n", "import math\n\n\n")
    records = [(0, code_turn(rng.choice(imports) + text)) for text in complete]
    records += [(0, code_turn(text)) for text in composed(counts["composed"], rng)]
    opened = [open_function(*rng.choice(pairs), rng) for _ in range(counts["open"])]
    records += [(1, text) for text in dict.fromkeys(opened)]
    return records


if __name__ == "__main__":
    for text in composed(6, random.Random(0)):
        print(code_turn(text))
