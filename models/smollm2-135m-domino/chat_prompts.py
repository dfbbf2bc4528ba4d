"""Chat prompts over the eight categories that MT-Bench names, all from our own wording."""

import tables

TABLES = tables.load("chat_tables.txt")
CATEGORIES = [entries for name, entries in TABLES.items() if name.startswith("category ")]
FOLLOW_UPS = TABLES["follow_ups"]


def _fill(template, rng):
    t, t2 = rng.sample(TABLES["topics"], 2)
    r, r2 = rng.sample(TABLES["roles"], 2)
    p, q, o = rng.sample(TABLES["nouns"], 3)
    x, y, z = rng.sample(sorted(set(TABLES["things"])), 3)
    return template.format(
        t=t,
        t2=t2,
        r=r,
        r2=r2,
        p=p,
        q=q,
        o=o,
        x=x,
        y=y,
        z=z,
        l=rng.choice(TABLES["languages"]),
        task=rng.choice(TABLES["tasks"]),
        a=rng.randint(2, 30),
        b=rng.randint(2, 9),
        c=rng.randint(2, 9),
        adj=rng.choice(
            ("wonderful", "boring", "a waste of time", "better than I hoped", "too long")
        ),
    )


def build(counts, rng):
    """(kind, text) records."""
    complete, opened = {}, {}
    while len(complete) < counts["complete"]:
        text = _fill(rng.choice(rng.choice(CATEGORIES)), rng)
        complete[text + rng.choice(TABLES["endings"]).format(n=10 * rng.randint(3, 30))] = None
    while len(opened) < counts["open"]:
        words = _fill(rng.choice(rng.choice(CATEGORIES)), rng).split()
        opened[" ".join(words[: rng.randint(1, max(1, len(words) - 1))])] = None
    records = [(0, text) for text in complete] + [(1, text) for text in opened]
    return records + [(1, rng.choice(TABLES["openings"])) for _ in range(counts["bare"])]
