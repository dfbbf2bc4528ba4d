"""Is a verifier lossless? Exact laws of toy models, and tests that any verifier can be put to.

Three questions, each with functions here:

1. Is the RULE right? `enumerate_rule` adds up, in float64, everything that drafter, coins and
   replacement draws can do with a model of a few tokens. The law of the emitted tokens has to be
   the target's own: `total_variation` of about 1e-15.
2. Is the IMPLEMENTATION right, with its own random numbers? `sample` decodes many runs with the
   verifier, over as many blocks as the sequence needs, each run with its own seed; `g_test`
   compares the counts of whole sequences with the law. One block cannot see noise that is used
   twice, so sequences have to be longer than a block's first rejection: use length >= 4.
3. Could the test have noticed? The same calls with a broken verifier must fail.

A verifier is any callable

    verify(target_logits [N, K + 1, V], draft_tokens [N, K], *, temperature [N], seed [N],
           block_start [N], draft_logits [N, K, V], draft_temperature [N])
        -> tokens [N, >= K + 1] int64 (what follows the emitted ones is ignored), num_emitted [N]

and may ignore any keyword: a verifier with its own generator is tested in the same way. Draft -1
means that a request has no more drafts. `chain_verifier` is domino_kernels.verify_chain.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from domino_kernels import rng

CHUNK = 1 << 22  # runs decoded together


def softmax(logits, temperature):
    """float64, over the last axis; -inf is a masked token."""
    logits = np.asarray(logits, np.float64) / temperature
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


@dataclass(frozen=True)
class Model:
    """A target and a draft whose next-token logits depend on the last `order` tokens.

    target, draft: [(V + 1) ** order, V] float32 by context code; missing tokens count as V.
    """

    target: np.ndarray
    draft: np.ndarray
    order: int

    @classmethod
    def random(cls, vocab, order, seed, *, spread=1.5, distance=1.0, draft_top_k=None, masked=0):
        """Normal logits of deviation `spread`; the draft's differ by `distance`.

        draft_top_k: the draft keeps its k likeliest tokens. masked: that many tokens per context
        are impossible for the target.
        """
        generator = np.random.default_rng(seed)
        shape = ((vocab + 1) ** order, vocab)
        target = generator.normal(scale=spread, size=shape)
        draft = target + generator.normal(scale=distance, size=shape)
        if draft_top_k is not None:
            least = np.sort(draft, -1)[:, -draft_top_k, None]
            draft = np.where(draft >= least, draft, -np.inf)
        if masked:
            drawn = generator.permuted(np.tile(np.arange(vocab), (shape[0], 1)), axis=1)
            np.put_along_axis(target, drawn[:, :masked], -np.inf, 1)
        return cls(target.astype(np.float32), draft.astype(np.float32), order)

    @property
    def vocab(self):
        return self.target.shape[1]

    @property
    def start(self):
        """Context code of the empty sequence."""
        return (self.vocab + 1) ** self.order - 1

    def advance(self, code, token):
        return (code * (self.vocab + 1) + token) % (self.vocab + 1) ** self.order

    def context(self, tokens):
        code = self.start
        for token in tokens:
            code = self.advance(code, token)
        return code

    def law(self, temperature, length, prefix=()):
        """The target's law of the next `length` tokens, [V ** length] in lexicographic order."""
        codes, law = np.array([self.context(prefix)]), np.ones(1)
        for _ in range(length):
            law = (law[:, None] * softmax(self.target[codes], temperature)).ravel()
            codes = self.advance(codes[:, None], np.arange(self.vocab)).ravel()
        return law


# --- rules, exactly -----------------------------------------------------------------------------


def token_rule(p_rows, q_rows, drafts):
    """Yields (probability, emitted tokens) for one chain of drafts; q one-hot is the one-hot rule.

    p_rows: laws of the target, one more than drafts; q_rows: laws that the drafts came from.
    """
    reached = 1.0
    for i, x in enumerate(drafts):
        p, q = p_rows[i], q_rows[i]
        accept = min(1.0, p[x] / q[x])
        rest = np.maximum(p - q, 0.0)
        if accept < 1.0:
            for y in np.flatnonzero(rest):
                yield reached * (1.0 - accept) * rest[y] / rest.sum(), (*drafts[:i], int(y))
        reached *= accept
    for y in np.flatnonzero(p_rows[-1]):
        yield reached * p_rows[-1][y], (*drafts, int(y))


def enumerate_rule(
    model,
    rule,
    drafts,
    *,
    temperature=1.0,
    draft_temperature=1.0,
    argmax=False,
    one_hot=False,
    stop=None,
):
    """The exact law of the first `drafts` + 1 tokens that a rule emits, [V ** (drafts + 1)].

    What the rule leaves open (it emits fewer tokens) follows the target's law, as later blocks
    would. argmax: the drafter takes its likeliest token instead of sampling. one_hot: the rule is
    given a one-hot q. stop(drafted) -> True ends the chain after these tokens (ragged blocks).
    """
    vocab, length = model.vocab, drafts + 1
    total = np.zeros(vocab**length)

    def chains(drafted, probability):
        if len(drafted) == drafts or (stop is not None and stop(drafted)):
            yield drafted, probability
            return
        q = softmax(model.draft[model.context(drafted)], draft_temperature)
        q = np.eye(vocab)[q.argmax()] if argmax else q
        for x in np.flatnonzero(q):
            yield from chains((*drafted, int(x)), probability * q[x])

    for drafted, probability in chains((), 1.0):
        contexts = [model.context(drafted[:i]) for i in range(len(drafted) + 1)]
        p_rows = softmax(model.target[contexts], temperature)
        q_rows = softmax(model.draft[contexts], draft_temperature)
        if one_hot:
            q_rows = np.eye(vocab)[list(drafted)]
        for weight, emitted in rule(p_rows, q_rows, drafted):
            open_ends = vocab ** (length - len(emitted))
            at = sum(t * vocab ** (length - 1 - n) for n, t in enumerate(emitted))
            rest = model.law(temperature, length - len(emitted), emitted)
            total[at : at + open_ends] += probability * weight * rest
    return total


def total_variation(law, expected):
    return 0.5 * float(np.abs(law - expected).sum())


# --- implementations, by sampling -----------------------------------------------------------------


@dataclass(frozen=True)
class Drafter:
    """How drafts are made. The defaults are right; the rest is for controls that must fail."""

    drafts: int
    temperature: float = 1.0
    argmax: bool = False
    ragged: bool = False  # the number of drafts goes round 0 .. drafts with the seed and the block
    purpose: int = rng.DRAFT_TOKEN
    told_temperature: float | None = None  # what the verifier is told instead
    fixed_start: bool = False  # every block is keyed as block 0: noise is used again


def chain_verifier(*, dense, dtype=torch.float32):
    """domino_kernels.verify_chain with the token rule; `dense` passes q, else one-hot drafts."""
    from domino_kernels import verify_chain

    def verify(target_logits, draft_tokens, *, draft_logits, draft_temperature, **keywords):
        if dense:
            keywords |= dict(draft_logits=draft_logits, draft_temperature=draft_temperature)
        result = verify_chain(target_logits.to(dtype), draft_tokens, rule="token", **keywords)
        return result.tokens, result.num_emitted

    return verify


def _decode(model, verify, drafter, temperature, length, seeds, device):
    """Sequences [N, length] of the runs with these seeds."""
    from domino_kernels import noise

    target = torch.from_numpy(model.target).to(device)
    draft = torch.from_numpy(model.draft).to(device)
    runs, drafts = len(seeds), drafter.drafts
    out = torch.zeros(runs, length + drafts + 1, dtype=torch.int64, device=device)
    count = torch.zeros(runs, dtype=torch.int64, device=device)
    code = torch.full_like(count, model.start)
    active = torch.arange(runs, device=device)
    block = 0
    while len(active):
        seed, start, context = seeds[active], count[active], code[active]
        if drafter.fixed_start:
            start = torch.zeros_like(start)
        contexts, tokens = [context], []
        for i in range(drafts):
            logits = draft[contexts[-1]]
            if drafter.argmax:
                tokens.append(logits.argmax(-1))
            else:
                race = noise(seed, start, i, drafter.purpose, model.vocab, kind="exponential")
                law = (logits / drafter.temperature).softmax(-1)
                tokens.append((race / law).argmin(-1))  # E / 0 = inf: a masked token never wins
            contexts.append(model.advance(contexts[-1], tokens[-1]))
        contexts = torch.stack(contexts, 1)
        tokens = torch.stack(tokens, 1) if drafts else context.new_empty(len(active), 0)
        if drafter.ragged:
            keep = (seed + block) % (drafts + 1)
            tokens[torch.arange(drafts, device=device) >= keep[:, None]] = -1
        like = torch.ones(len(active), device=device)
        told = drafter.temperature if drafter.told_temperature is None else drafter.told_temperature
        emitted, number = verify(
            target[contexts],
            tokens,
            temperature=like * temperature,
            seed=seed,
            block_start=start,
            draft_logits=draft[contexts[:, :drafts]],
            draft_temperature=like * told,
        )
        assert bool((number >= 1).all()), "the verifier emitted nothing for a healthy request"
        for j in range(drafts + 1):
            has = j < number
            rows, token = active[has], emitted[:, j][has]
            assert bool(((token >= 0) & (token < model.vocab)).all()), "an id that does not exist"
            out[rows, count[rows] + j] = token
            code[rows] = model.advance(code[rows], token)
        count[active] += number
        active = active[count[active] < length]
        block += 1
    return out[:, :length]


def sample(model, verify, drafter, *, runs, length, temperature=1.0, device="cpu", first_seed=0):
    """Counts [V ** length] of the sequences of `runs` runs, seeds first_seed .. + runs - 1.

    Blocks are verified until each run has `length` tokens; the block start is the number of tokens
    so far. The draft sits at `drafter.temperature`, the target at `temperature`.
    """
    counts = torch.zeros(model.vocab**length, dtype=torch.int64, device=device)
    place = model.vocab ** torch.arange(length - 1, -1, -1, device=device)
    for first in range(0, runs, CHUNK):
        last = min(first + CHUNK, runs)
        seeds = torch.arange(first_seed + first, first_seed + last, device=device)
        sequences = _decode(model, verify, drafter, temperature, length, seeds, device)
        counts += torch.bincount((sequences * place).sum(-1), minlength=len(counts))
    return counts.cpu().numpy()


class GTest(NamedTuple):
    p_value: float  # of a deviation this large or larger, if the law is right
    statistic: float
    degrees: int
    total_variation: float  # of the observed frequencies

    def __str__(self):
        return (
            f"G = {self.statistic:.1f} with {self.degrees} degrees of freedom, "
            f"p = {self.p_value:.3g}, total variation {self.total_variation:.2e}"
        )


def g_test(counts, law, least=20):
    """Likelihood-ratio test of counts against a law; rare cells are pooled to `least` expected.

    A count where the law is zero gives p = 0. Reject at p < 1e-9: a false alarm in 1e9 tests.
    """
    counts, law = np.asarray(counts, np.float64), np.asarray(law, np.float64)
    runs = counts.sum()
    distance = total_variation(counts / runs, law)
    if counts[law == 0].any():
        return GTest(0.0, np.inf, 0, distance)
    order = np.argsort(law)
    expected, counts = runs * law[order], counts[order]
    # pools are runs of cells in rising order, closed as soon as they are large enough
    edges, mass = [0], 0.0
    for n, cell in enumerate(expected):
        mass += cell
        if mass >= least:
            edges.append(n + 1)
            mass = 0.0
    edges = edges[:-1] or [0]  # what is left over joins the last pool
    expected, counts = np.add.reduceat(expected, edges), np.add.reduceat(counts, edges)
    seen = counts > 0
    statistic = 2 * float((counts[seen] * np.log(counts[seen] / expected[seen])).sum())
    degrees = len(edges) - 1
    half = torch.tensor([degrees / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1])) if degrees else 1.0
    return GTest(p_value, statistic, degrees, distance)
