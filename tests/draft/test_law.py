"""Sampled text follows the target's autoregressive law, exactly enumerated."""

import itertools

import pytest
import torch
from domino_draft import DominoDrafter, Target, generate

from .conftest import tiny_model
from .test_decode import Oracle

VOCAB, LENGTH, ROWS, PROMPT = 12, 5, 6000, [3, 7]
ALARM = 1e-9


@pytest.fixture(scope="module")
def target():
    model = tiny_model("Qwen3", vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.25)
    return Target(model)


@torch.no_grad()
def exact_law(target, temperature):
    """fp64 probability of every text of LENGTH - 1 tokens, then of the last one given the rest."""
    law = torch.ones(1, dtype=torch.float64)
    for length in range(LENGTH):
        prefixes = list(itertools.product(range(VOCAB), repeat=length))
        rows = []
        for part in torch.tensor([PROMPT + list(p) for p in prefixes]).split(4096):
            logits = target.model(part, logits_to_keep=1).logits[:, 0].double()
            rows.append(torch.softmax(logits / temperature, -1))
        law = (law[:, None] * torch.cat(rows)).flatten()
    return law  # index: base-VOCAB number of the text


def g_test(counts, law, cells):
    """p-value of counts against a law after pooling both into the given cells."""
    size = int(cells.max()) + 1
    seen = torch.zeros(size, dtype=torch.float64).index_add_(0, cells, counts)
    expected = torch.zeros(size, dtype=torch.float64).index_add_(0, cells, law) * counts.sum()
    small = expected < 8  # pool thin cells into one
    seen = torch.cat((seen[~small], seen[small].sum()[None]))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    keep = expected > 0
    assert seen[~keep].sum() == 0
    seen, expected = seen[keep], expected[keep]
    g = 2 * torch.where(seen > 0, seen * (seen / expected).log(), 0).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, g.clamp(min=0) / 2).item()


def worst_p(texts, law):
    """Least p over the law of each adjacent pair and of the whole text in 150 random cells."""
    base = VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    index = (torch.tensor(texts) * base).sum(1)
    counts = torch.bincount(index, minlength=len(law)).double()
    every = torch.arange(len(law))
    digits = (every[:, None] // base) % VOCAB
    tables = [digits[:, i] * VOCAB + digits[:, i + 1] for i in range(LENGTH - 1)]
    tables.append(torch.randint(0, 150, (len(law),), generator=torch.Generator().manual_seed(1)))
    return min(g_test(counts, law, cells) for cells in tables)


def sample(target, drafter, temperature, seed=100):
    settings = dict(max_new_tokens=LENGTH, temperature=temperature, seed=seed)
    return generate(target, drafter, [PROMPT] * ROWS, **settings)


class Bigram(Oracle):
    """Drafts what the target likes best after the last two tokens alone: often kept, never random.

    Two drafts a cycle, so that five tokens take cycles that end in a rejection and in a bonus.
    """

    default_drafts = 2

    def __init__(self, target):
        pairs = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
        with torch.no_grad():
            best = target.model(pairs, logits_to_keep=1).logits[:, 0].argmax(-1)
        self.best = best.view(VOCAB, VOCAB)
        super().__init__([[]] * ROWS)

    def propose(self, batch, num_drafts):
        state = torch.tensor([tokens[-2:] for tokens in batch.tokens])
        for _ in range(num_drafts):
            state = torch.cat((state, self.best[state[:, -2], state[:, -1]][:, None]), dim=1)
        return state[:, 2:]


@pytest.mark.parametrize("kind", ["none", "bigram", "domino", "dflash-plain"])
def test_law(target, tiny_config, kind):
    temperature = 0.8
    shape = dict(vocab_size=VOCAB, mask_token_id=11, num_target_layers=2, target_layer_ids=(0, 1))
    torch.manual_seed(4)
    drafter = {
        "none": None,
        "bigram": Bigram(target),
        "domino": DominoDrafter(tiny_config(**shape)),
        "dflash-plain": DominoDrafter(
            tiny_config(projector_type="dflash", shift_label=False, **shape)
        ),
    }[kind]
    law = exact_law(target, temperature)
    assert law.sum() == pytest.approx(1, abs=1e-9)
    result = sample(target, drafter, temperature)
    p = worst_p(result.sequences, law)
    print(f"{kind}: p {p:.3g}, accepted length {result.stats.accepted_length:.2f}")
    assert p > ALARM
    assert result.stats.accepted_length > {"none": 0.99, "bigram": 1.2}.get(kind, 1.03)


def test_the_test_can_fail(target):
    """Control: a temperature 10% off; every tenth draft believed unseen."""
    law = exact_law(target, 0.8)
    assert worst_p(sample(target, None, 0.88).sequences, law) < ALARM
    believed = sample(target, None, 0.8).sequences
    best = Bigram(target).best
    for text in believed[::10]:
        text[1] = int(best[PROMPT[-1], text[0]])
    assert worst_p(believed, law) < ALARM
