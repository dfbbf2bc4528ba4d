import random

import pytest
import torch
from domino_draft.drafter import Batch
from domino_draft.ngram import NgramDrafter


def propose(session, rows, num_drafts):
    batch = Batch(rows, torch.tensor([row[-1] for row in rows]), list(range(len(rows))))
    return session.propose(batch, num_drafts)


def begin(rows, **options):
    return NgramDrafter(**options).begin(None, len(rows), 100)


@pytest.mark.parametrize(
    "row, expected",
    [
        ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], [4, 9, 2, 3]),  # three tokens win over a later two
        ([7, 3, 4, 8, 3, 5, 6, 3], [5, 6, 3, 5]),  # the latest place, then on into the copy
        ([1, 1], [1, 1, 1, 1]),
        ([5, 6, 5, 6], [5, 6, 5, 6]),
        ([1, 2, 3], []),
        ([4], []),
    ],
)
def test_proposals(row, expected):
    found = propose(begin([row]), [row], 4)
    assert found.dtype == torch.int64 and found.tolist() == [expected]


def latest_place(tokens, max_ngram, count):
    """The definition, by search."""
    for n in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


def test_growing_rows_match_the_definition_and_rows_can_leave():
    rng = random.Random(0)
    rows = [[rng.randrange(5) for _ in range(rng.randint(1, 6))] for _ in range(4)]
    session = begin(rows)
    for step in range(30):
        found = propose(session, rows, 7)
        for row, ids in zip(rows, found.tolist()):
            assert [i for i in ids if i >= 0] == latest_place(row, 3, 7)
        if step == 12:
            session.select([3, 1])
            rows = [rows[3], rows[1]]
        for row in rows:
            row += [rng.randrange(5) for _ in range(rng.randint(1, 4))]


def test_rows_without_a_match_are_padded():
    rows = [[1, 2, 1], [3, 4, 5]]
    assert propose(begin(rows), rows, 2).tolist() == [[2, 1], [-1, -1]]
    assert propose(begin([[3, 4, 5]]), [[3, 4, 5]], 2).shape == (1, 0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="max_drafts: got 3, 0"):
        NgramDrafter(max_drafts=0)
