"""Is a verifier lossless? Exact laws of toy models, and tests that any verifier can be put to.

Three questions, each with functions here:

1. Is the RULE right? `enumerate_rule` adds up, in float64, everything that drafter, coins and
   replacement draws can do with a model of a few tokens. The law of the emitted tokens has to be
   the target's own: `total_variation` of about 1e-15. The rules: domino_kernels.testing.rules.
2. Is the IMPLEMENTATION right, with its own random numbers? `sample` decodes many runs with the
   verifier, over as many blocks as the sequence needs, each run with its own seed; `g_test`
   compares the counts of whole sequences with the law. One block cannot see noise that is used
   twice, so sequences have to be longer than a block's first rejection: use length >= 4.
3. Could the test have noticed? The same calls with a broken verifier must fail. 1e6 runs at
   p < 1e-9 see a total variation of about 4e-3, 1e8 runs 4e-4.

A verifier is any callable

    verify(target_logits [N, K + 1, V], draft_tokens [N, K], *, temperature [N], seed [N],
           block_start [N], draft_logits [N, K, V], draft_temperature [N], sampling, counts [N, V])
        -> tokens [N, >= K + 1] int64 (what follows the emitted ones is ignored), num_emitted [N]

and may ignore any keyword: a verifier with its own generator is tested in the same way. Draft -1
means that a request has no more drafts. With a drafter that draws from a pool, draft_ids [N, K, M]
comes too and draft_logits is [N, K, M]. `sampling` is the reference.law.Sampling of the whole test,
counts how often each token was generated so far; a verifier without filters and penalties may be
tested with the default. `chain_verifier` is domino_kernels.verify_chain.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from domino_kernels import rng
from domino_kernels.reference.law import PLAIN, Sampling, edit
from domino_kernels.reference.law import law as row_law
from domino_kernels.testing.rules import coupling, token_rule

__all__ = [
    "Drafter",
    "GTest",
    "Model",
    "Sampling",
    "chain_verifier",
    "enumerate_coupled",
    "enumerate_rule",
    "g_test",
    "sample",
    "softmax",
    "token_rule",
    "total_variation",
]

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

    def next_law(self, sampling, prefix):
        """The target's law [V] of the token after `prefix`, all of which counts as generated."""
        logits = self.target[self.context(prefix)]
        if sampling.penalises:
            logits = edit(logits, sampling, counts=np.bincount(prefix, minlength=self.vocab))
        return row_law(logits, sampling)[0]

    def law(self, sampling, length, prefix=()):
        """The target's law of the next `length` tokens, [V ** length] in lexicographic order.

        sampling: a Sampling or a temperature.
        """
        if not isinstance(sampling, Sampling):
            sampling = Sampling(temperature=sampling)
        if sampling.penalises:  # the law depends on all tokens, not on the context alone
            return self._law_of_text(sampling, length, tuple(prefix))
        rows = np.stack([row_law(logits, sampling)[0] for logits in self.target])
        codes, law = np.array([self.context(prefix)]), np.ones(1)
        for _ in range(length):
            law = (law[:, None] * rows[codes]).ravel()
            codes = self.advance(codes[:, None], np.arange(self.vocab)).ravel()
        return law

    def _law_of_text(self, sampling, length, prefix):
        if length == 0:
            return np.ones(1)
        p = self.next_law(sampling, np.array(prefix, np.int64))
        parts = [
            p[x] * self._law_of_text(sampling, length - 1, (*prefix, x)) for x in range(self.vocab)
        ]
        return np.concatenate(parts)


# --- rules, exactly -----------------------------------------------------------------------------


def enumerate_rule(
    model,
    rule,
    drafts,
    *,
    sampling=PLAIN,
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
    law = _OpenLaw(model, sampling, length)

    def chains(drafted, probability):
        if len(drafted) == drafts or (stop is not None and stop(drafted)):
            yield drafted, probability
            return
        q = softmax(model.draft[model.context(drafted)], draft_temperature)
        q = np.eye(vocab)[q.argmax()] if argmax else q
        for x in np.flatnonzero(q):
            yield from chains((*drafted, int(x)), probability * q[x])

    for drafted, probability in chains((), 1.0):
        prefixes = [np.array(drafted[:i], np.int64) for i in range(len(drafted) + 1)]
        p_rows = np.stack([law.next(prefix) for prefix in prefixes])
        q_rows = softmax(model.draft[[model.context(p) for p in prefixes]], draft_temperature)
        if one_hot:
            q_rows = np.eye(vocab)[list(drafted)]
        for weight, emitted in rule(p_rows, q_rows, drafted):
            law.add(probability * weight, emitted)
    return law.total


def enumerate_coupled(model, drafts, *, sampling=PLAIN, draft_temperature=1.0):
    """The same for the gumbel rule: draft and target race with one noise, keyed by position."""
    law = _OpenLaw(model, sampling, drafts + 1)

    def walk(prefix, probability):
        p = law.next(np.array(prefix, np.int64))
        if len(prefix) == drafts:
            for y in np.flatnonzero(p):
                law.add(probability * p[y], (*prefix, int(y)))
            return
        joint = coupling(p, softmax(model.draft[model.context(prefix)], draft_temperature))
        for x, y in zip(*np.nonzero(joint)):
            if x == y:
                walk((*prefix, int(x)), probability * joint[x, x])
            else:
                law.add(probability * joint[x, y], (*prefix, int(y)))

    walk((), 1.0)
    return law.total


class _OpenLaw:
    """Adds up outcomes; what an outcome leaves open follows the target's law."""

    def __init__(self, model, sampling, length):
        self.model, self.sampling, self.length = model, sampling, length
        self.total = np.zeros(model.vocab**length)
        self._rows, self._rest = {}, {}

    def next(self, prefix):
        key = tuple(prefix)
        if key not in self._rows:
            self._rows[key] = self.model.next_law(self.sampling, prefix)
        return self._rows[key]

    def rest(self, emitted):
        """The law of what is left of the text after `emitted`."""
        if len(emitted) == self.length:
            return np.ones(1)
        if emitted not in self._rest:
            p = self.next(np.array(emitted, np.int64))
            parts = [p[x] * self.rest((*emitted, x)) for x in range(self.model.vocab)]
            self._rest[emitted] = np.concatenate(parts)
        return self._rest[emitted]

    def add(self, probability, emitted):
        vocab, left = self.model.vocab, self.length - len(emitted)
        at = sum(t * vocab ** (self.length - 1 - n) for n, t in enumerate(emitted))
        self.total[at : at + vocab**left] += probability * self.rest(emitted)


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
    pool: int = 0  # draws from its likeliest tokens only, and says so by draft_ids
    coupled: bool = False  # races with the noise of the position, as the gumbel rule expects
    purpose: int = rng.DRAFT_TOKEN
    told_temperature: float | None = None  # what the verifier is told instead
    fixed_start: bool = False  # every block is keyed as block 0: noise is used again
    by_position: bool = False  # draft noise keyed by position: what look-ahead rules cannot bear


def chain_verifier(rule="token", *, dense=False, dtype=torch.float32):
    """domino_kernels.verify_chain; `dense` passes q as it is told, otherwise drafts are one-hot."""
    from domino_kernels import verify_chain

    def verify(
        target_logits,
        draft_tokens,
        *,
        draft_logits,
        draft_temperature,
        sampling,
        counts,
        draft_ids=None,
        **keywords,
    ):
        if dense:
            keywords |= dict(draft_logits=draft_logits, draft_temperature=draft_temperature)
            if draft_ids is not None:
                keywords |= dict(draft_ids=draft_ids)
        like = keywords["temperature"]
        if sampling.top_k:
            keywords["top_k"] = torch.full_like(like, sampling.top_k, dtype=torch.int32)
        if sampling.top_p < 1:
            keywords["top_p"] = torch.full_like(like, sampling.top_p)
        if sampling.min_p:
            keywords["min_p"] = torch.full_like(like, sampling.min_p)
        if sampling.order != "transformers":
            keywords["filter_order"] = sampling.order
        if sampling.penalises:
            keywords["output_counts"] = counts
            keywords["repetition_penalty"] = torch.full_like(like, sampling.repetition)
            keywords["presence_penalty"] = torch.full_like(like, sampling.presence)
            keywords["frequency_penalty"] = torch.full_like(like, sampling.frequency)
        result = verify_chain(target_logits.to(dtype), draft_tokens, rule=rule, **keywords)
        return result.tokens, result.num_emitted

    return verify


def _draft(drafter, logits, seed, start, i):
    """Tokens [N] of slot i, logits [N, V]: a race over the draft's law."""
    from domino_kernels import noise

    if drafter.argmax:
        return logits.argmax(-1)
    key, purpose = (start, i), drafter.purpose
    if drafter.coupled or drafter.by_position:
        key = (start + 1 + i, 0)
        purpose = rng.POSITION_DRAW if drafter.coupled else purpose
    race = noise(seed, *key, purpose, logits.size(-1), kind="exponential")
    law = (logits / drafter.temperature).softmax(-1)
    return (race / law).argmin(-1)  # E / 0 = inf: a masked token never wins


def _decode(model, verify, drafter, sampling, length, seeds, device):
    """Sequences [N, length] of the runs with these seeds."""
    target = torch.from_numpy(model.target).to(device)
    draft = torch.from_numpy(model.draft).to(device)
    if drafter.pool:
        pool_logits, pool_ids = draft.topk(drafter.pool, -1)
        draft = torch.full_like(draft, -torch.inf).scatter(-1, pool_ids, pool_logits)
    runs, drafts = len(seeds), drafter.drafts
    out = torch.zeros(runs, length + drafts + 1, dtype=torch.int64, device=device)
    count = torch.zeros(runs, dtype=torch.int64, device=device)
    counts = torch.zeros(runs, model.vocab, dtype=torch.int32, device=device)
    code = torch.full_like(count, model.start)
    active = torch.arange(runs, device=device)
    block = 0
    while len(active):
        seed, start, context = seeds[active], count[active], code[active]
        if drafter.fixed_start:
            start = torch.zeros_like(start)
        contexts, tokens = [context], []
        for i in range(drafts):
            tokens.append(_draft(drafter, draft[contexts[-1]], seed, start, i))
            contexts.append(model.advance(contexts[-1], tokens[-1]))
        contexts = torch.stack(contexts, 1)
        tokens = torch.stack(tokens, 1) if drafts else context.new_empty(len(active), 0)
        if drafter.ragged:
            keep = (seed + block) % (drafts + 1)
            tokens[torch.arange(drafts, device=device) >= keep[:, None]] = -1
        q = {"draft_logits": draft[contexts[:, :drafts]]}
        if drafter.pool:
            q = {"draft_logits": pool_logits[contexts[:, :drafts]]}
            q["draft_ids"] = pool_ids[contexts[:, :drafts]].int()
        like = torch.ones(len(active), device=device)
        told = drafter.temperature if drafter.told_temperature is None else drafter.told_temperature
        emitted, number = verify(
            target[contexts],
            tokens,
            temperature=like * sampling.temperature,
            seed=seed,
            block_start=start,
            draft_temperature=like * told,
            sampling=sampling,
            counts=counts[active],
            **q,
        )
        assert bool((number >= 1).all()), "the verifier emitted nothing for a healthy request"
        for j in range(drafts + 1):
            has = j < number
            rows, token = active[has], emitted[:, j][has]
            assert bool(((token >= 0) & (token < model.vocab)).all()), "an id that does not exist"
            out[rows, count[rows] + j] = token
            counts[rows, token] += 1
            code[rows] = model.advance(code[rows], token)
        count[active] += number
        active = active[count[active] < length]
        block += 1
    return out[:, :length]


def sample(model, verify, drafter, *, runs, length, sampling=PLAIN, device="cpu", first_seed=0):
    """Counts [V ** length] of the sequences of `runs` runs, seeds first_seed .. + runs - 1.

    Blocks are verified until each run has `length` tokens; the block start is the number of tokens
    so far. The draft sits at `drafter.temperature`, the target at `sampling` (or a temperature).
    """
    if not isinstance(sampling, Sampling):
        sampling = Sampling(temperature=sampling)
    counts = torch.zeros(model.vocab**length, dtype=torch.int64, device=device)
    place = model.vocab ** torch.arange(length - 1, -1, -1, device=device)
    for first in range(0, runs, CHUNK):
        last = min(first + CHUNK, runs)
        seeds = torch.arange(first_seed + first, first_seed + last, device=device)
        sequences = _decode(model, verify, drafter, sampling, length, seeds, device)
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
