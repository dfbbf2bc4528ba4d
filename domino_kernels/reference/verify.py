"""Reference of verify_chain, float64, with the noise of domino_kernels.rng.

Row i of a request holds the target's law after drafts 0..i-1; the walks below say which drafts are
kept and where the token after them comes from.
"""

from dataclasses import dataclass

import numpy as np

from domino_kernels import rng
from domino_kernels.reference.law import PLAIN, Sampling, edit, law

NON_FINITE, EMPTY_ROW, BAD_ID, ZERO_RESIDUAL, BAD_DRAFT_LAW, BAD_PARAMETER, BAD_ROWS = (
    1 << n for n in range(7)
)
NEEDS_RESIDUAL = 128
NOTHING = -1  # the walk ends without a token
RULES = "greedy", "token", "onehot", "match", "block", "gumbel"  # by number


@dataclass
class Request:
    """One request: target [n + 1, V] logits, drafts [n] and the laws they came from.

    q: None (one-hot), or a function of the slot that gives the draft law [V], None where it is bad.
    log_q [n]: of each draft, in place of q; a rejected draft is then not replaced.
    seen, counts, bias [V]; allowed [n + 1, V]: see reference.law.edit.
    """

    target: np.ndarray
    drafts: np.ndarray
    seed: int = 0
    block_start: int = 0
    sampling: Sampling = PLAIN  # temperature 0: the greedy rule
    q: object = None
    log_q: np.ndarray | None = None
    seen: np.ndarray | None = None
    counts: np.ndarray | None = None
    bias: np.ndarray | None = None
    allowed: np.ndarray | None = None

    def __post_init__(self):
        self.vocab = self.target.shape[1]
        self.rows = {}

    def edited(self, i):
        """Logits of row i: the drafts before it count as generated."""
        counts = np.zeros(self.vocab) if self.counts is None else np.array(self.counts)
        for x in self.drafts[:i]:
            counts[int(x)] += 1
        allowed = None if self.allowed is None else self.allowed[i]
        arguments = dict(bias=self.bias, seen=self.seen, counts=counts, allowed=allowed)
        return edit(self.target[i], self.sampling, **arguments)

    def row(self, i):
        """(law of row i, 0) or (None, status bit). At temperature 0 the law of temperature 1."""
        if i not in self.rows:
            sampling = self.sampling
            if sampling.temperature == 0:
                sampling = PLAIN
            self.rows[i] = law(self.edited(i), sampling)
        return self.rows[i]

    def draft(self, i):
        """(draft at slot i, status): -1 where the chain ends."""
        x = int(self.drafts[i]) if i < len(self.drafts) else -1
        if 0 <= x < self.vocab:
            return x, 0
        return -1, BAD_ID if x != -1 else 0

    def draft_law(self, i, x):
        """(q of slot i, status); one-hot where there is none or it gives its draft no mass."""
        one_hot = np.eye(1, self.vocab, x)[0]
        if self.log_q is not None:  # known at x alone
            q = np.exp(self.log_q[i]) if -69.0 <= self.log_q[i] <= 0.0 else 0.0
            return (one_hot * q, 0) if q > 0 else (one_hot, BAD_DRAFT_LAW)
        if self.q is None:
            return one_hot, 0
        q = self.q(i)
        if q is None or q[x] == 0:
            return one_hot, BAD_DRAFT_LAW
        return q, 0

    def race(self, weights, i, purpose):
        return rng.race(weights, self.seed, self.block_start, i, purpose)

    def coin(self, i):
        words = rng.words(self.seed, self.block_start, i, rng.VERIFY_COIN, 0)
        return rng.uniform(words)[0]

    def position_draw(self, p, i):
        """The token that plain seeded sampling draws from p for slot i: noise by position."""
        return rng.race(p, self.seed, self.block_start + 1 + i, 0, rng.POSITION_DRAW)

    def replacement(self, rest, i):
        """(token drawn from `rest` [V], status); from p itself where nothing is left."""
        token = self.race(rest, i, rng.RESIDUAL_DRAW)
        if token >= 0:
            return token, 0
        return self.race(self.row(i)[0], i, rng.BONUS_DRAW), ZERO_RESIDUAL


def walk_slots(request, decide):
    """Slot by slot up to the first that does not accept.

    decide(i, p, x) -> (None to accept, otherwise the last token; status).
    Returns (accepted drafts, last token or None, status).
    """
    status = 0
    for i in range(len(request.target)):
        p, fault = request.row(i)
        if fault:
            return i, None, status | fault
        x, bad = request.draft(i)
        token, more = decide(i, p, x)
        status |= bad | more
        if token is not None:
            return i, None if token == NOTHING else token, status
    raise AssertionError("the last row has no draft, so it does not accept")


def greedy(request):
    def decide(i, p, x):
        best = int(np.argmax(request.edited(i)))
        return (None if x == best else best), 0

    return walk_slots(request, decide)


def match(request):
    """y = the token of plain seeded sampling; a draft is kept where it is y. Gumbel: the same."""

    def decide(i, p, x):
        y = request.position_draw(p, i)
        return (None if x == y else y), 0

    return walk_slots(request, decide)


def token(request):
    """Leviathan et al. 2211.17192; with a one-hot q the rule that is lossless for any draft."""

    def decide(i, p, x):
        if x < 0:
            return request.race(p, i, rng.BONUS_DRAW), 0
        q, status = request.draft_law(i, x)
        if p[x] > 0 and request.coin(i) * q[x] <= p[x]:
            return None, status
        if request.log_q is not None and not status:
            return NOTHING, NEEDS_RESIDUAL
        last, more = request.replacement(np.maximum(p - q, 0.0), i)
        return last, status | more

    return walk_slots(request, decide)


def block(request):
    """Block verification (Sun et al. 2403.10444): the longest prefix whose coin is below h.

    reach_0 = 1, reach_{i+1} = min(1, reach_i p_i(x_i) / q_i(x_i)). Prefix i < n is kept with
    h_i = Z / (Z + 1 - reach_i), Z = sum relu(reach_i p_i - q_i); all of it with h_n = reach_n.
    """
    if request.q is None:
        return token(request)  # one-hot drafts: the same law
    n, reach, h = 0, [1.0], []
    statuses, laws = [], []
    while True:
        p, fault = request.row(n)
        x, bad = request.draft(n)
        if fault or x < 0:
            statuses.append(fault or bad)
            break
        q, status = request.draft_law(n, x)
        laws.append((p, q))
        statuses.append(status)
        rest = np.maximum(reach[n] * p - q, 0.0).sum()
        below = rest + 1.0 - reach[n]
        h.append(rest / below if below > 0 else 1.0)
        reach.append(min(1.0, reach[n] * p[x] / q[x]))
        n += 1
    h.append(reach[n])
    tau = max((i for i in range(1, n + 1) if request.coin(i - 1) <= h[i]), default=0)
    status = int(np.bitwise_or.reduce(statuses[: tau + 1]))
    if tau == n:
        p, fault = request.row(n)
        return n, None if fault else request.race(p, n, rng.BONUS_DRAW), status
    p, q = laws[tau]
    last, more = request.replacement(np.maximum(reach[tau] * p - q, 0.0), tau)
    return tau, last, status | more


def onehot(request):
    request.q = request.log_q = None
    return token(request)


WALKS = dict(greedy=greedy, match=match, onehot=onehot, token=token, block=block, gumbel=match)


def verify_request(request, rule):
    """(emitted tokens, their log-probabilities, number of accepted drafts, status).

    Log-probabilities are those of the edited logits at the request's temperature (1 for greedy
    requests), before the filters.
    """
    if not (np.isfinite(request.sampling.temperature) and request.sampling.temperature >= 0):
        return [], [], 0, BAD_PARAMETER
    walk = greedy if request.sampling.temperature == 0 else WALKS[rule]
    accepted, last, status = walk(request)
    tokens = [int(x) for x in request.drafts[:accepted]] + ([] if last is None else [int(last)])
    temperature = request.sampling.temperature or 1.0
    logprobs = []
    for i, x in enumerate(tokens):
        with np.errstate(divide="ignore"):
            logprobs.append(float(np.log(law(request.edited(i), temperature)[0][x])))
    return tokens, logprobs, accepted, status


def dense_law(draft_logits, temperature):
    """q of dense draft logits [n, V], a function of the slot."""
    return lambda i: law(draft_logits[i], temperature)[0]


def pool_law(ids, logits, vocab, temperature):
    """q of a sparse pool: ids [n, M], logits [n, M]; an id outside [0, vocab) is no entry."""

    def q(i):
        used = (ids[i] >= 0) & (ids[i] < vocab)
        part, fault = law(np.where(used, logits[i], -np.inf), temperature)
        if fault:
            return None
        out = np.zeros(vocab)
        out[ids[i][used]] = part[used]
        return out

    return q


def unpack(words, vocab):
    """[..., ceil(vocab / 32)] of 32-bit words as [..., vocab] bool."""
    words = np.ascontiguousarray(words).astype(np.int64).astype(np.uint32)
    bits = words[..., None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab].astype(bool)


def verify_chain(
    target_logits,
    draft_tokens,
    *,
    rule="token",
    temperature=None,
    seed=None,
    block_start=None,
    draft_logits=None,
    draft_ids=None,
    draft_logprob=None,
    draft_temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
    filter_order="transformers",
    logit_bias=None,
    repetition_penalty=None,
    presence_penalty=None,
    frequency_penalty=None,
    prompt_mask=None,
    output_counts=None,
    grammar_mask=None,
    vocab_valid=None,
    num_active=None,
    cu_rows=None,
):
    """Arguments as domino_kernels.verify_chain, NumPy arrays; temperature None: greedy.

    Returns (tokens, num_accepted, num_emitted, chosen_logprob, status).
    """
    batch, drafts = draft_tokens.shape
    full = target_logits.shape[-1]
    vocab = full if vocab_valid is None else vocab_valid
    tokens = np.full((batch, drafts + 1), -1, np.int64)
    logprob = np.zeros((batch, drafts + 1))
    accepted, emitted, status = np.zeros((3, batch), np.int64)
    at = lambda value, b: None if value is None else value[b]  # noqa: E731
    bits = lambda value: None if value is None else unpack(value, full)[..., :vocab]  # noqa: E731
    allowed, seen = bits(grammar_mask), bits(prompt_mask)
    for b in range(batch if num_active is None else min(batch, int(num_active[0]))):
        if cu_rows is None:
            rows, allowed_rows = target_logits[b], at(allowed, b)
        else:
            first, last = int(cu_rows[b]), int(cu_rows[b + 1])
            if first == last:
                continue
            if not 0 <= first < last <= len(target_logits) or last - first > drafts + 1:
                status[b] = BAD_ROWS
                continue
            rows, allowed_rows = target_logits[first:last], at(allowed, slice(first, last))
        name = rule if isinstance(rule, str) else RULES[int(rule[b])]
        t = 0.0 if temperature is None or name == "greedy" else float(temperature[b])
        t_draft = t if draft_temperature is None else float(draft_temperature[b])
        q = scalar = None
        if t != 0 and name in ("token", "block"):
            has_q = draft_logits is not None or draft_logprob is not None
            if has_q and not (np.isfinite(t_draft) and t_draft >= 0):
                status[b] = BAD_PARAMETER
                continue
            if has_q and t_draft > 0:
                if draft_logprob is not None:
                    scalar = draft_logprob[b]
                elif draft_ids is None:
                    q = dense_law(draft_logits[b][:, :vocab], t_draft)
                else:
                    q = pool_law(draft_ids[b], draft_logits[b], vocab, t_draft)
        parameters = dict(
            top_k=top_k, top_p=top_p, min_p=min_p, repetition=repetition_penalty,
            presence=presence_penalty, frequency=frequency_penalty,
        )  # fmt: skip
        parameters = {k: v[b].item() for k, v in parameters.items() if v is not None}
        request = Request(
            rows[:, :vocab],
            draft_tokens[b, : len(rows) - 1],
            0 if seed is None else int(seed[b]),
            0 if block_start is None else int(block_start[b]),
            Sampling(temperature=t, order=filter_order, **parameters),
            q,
            scalar,
            at(seen, b),
            None if output_counts is None else output_counts[b][:vocab],
            None if logit_bias is None else logit_bias[b][:vocab],
            allowed_rows,
        )
        out, chosen, accepted[b], status[b] = verify_request(request, name)
        emitted[b] = len(out)
        tokens[b, : len(out)] = out
        logprob[b, : len(out)] = chosen
    return tokens, accepted, emitted, logprob, status
