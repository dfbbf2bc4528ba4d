"""Reference of verify_chain, float64, with the noise of domino_kernels.rng."""

import numpy as np

from domino_kernels import rng

NON_FINITE, EMPTY_ROW, BAD_ID, ZERO_RESIDUAL, BAD_DRAFT_LAW, BAD_PARAMETER, BAD_ROWS = (
    1 << n for n in range(7)
)


def law(logits, temperature):
    """softmax(logits / temperature) [V] and 0, or None and the status bit that says why not."""
    logits = np.asarray(logits, np.float64)
    if np.isnan(logits).any() or np.isposinf(logits).any():
        return None, NON_FINITE
    if np.isneginf(logits).all():
        return None, EMPTY_ROW
    with np.errstate(over="ignore", under="ignore"):
        power = (logits - logits.max()) / temperature
        weight = np.where(power * np.log2(np.e) >= -100.0, np.exp(power), 0.0)
    return weight / weight.sum(), 0


def verify_request(target, drafts, temperature, seed, block_start, draft=None, draft_temperature=0):
    """One request: target [n + 1, V] logits, drafts [n], draft [n, V] logits or None (one-hot).

    Returns (emitted tokens, their log-probabilities, number of accepted drafts, status).
    """
    vocab = target.shape[1]
    tokens, logprobs, status = [], [], 0
    temperatures = [temperature, draft_temperature if draft is not None and temperature else 0.0]
    if not all(np.isfinite(t) and t >= 0 for t in temperatures):
        return tokens, logprobs, 0, BAD_PARAMETER

    def done(token, p):
        if token is not None:
            tokens.append(int(token))
            logprobs.append(float(np.log(p[token])))
        return tokens, logprobs, i, status

    for i in range(len(target)):
        p, fault = law(target[i], temperature or 1.0)
        if fault:
            status |= fault
            return done(None, p)
        x = int(drafts[i]) if i < len(drafts) else -1
        if not 0 <= x < vocab:
            status |= BAD_ID if x != -1 else 0
            x = -1
        if temperature == 0:
            best = int(np.argmax(target[i]))
            if x != best:
                return done(best, p)
            tokens.append(x)
            logprobs.append(float(np.log(p[x])))
            continue
        if x < 0:
            return done(rng.race(p, seed, block_start, i, rng.BONUS_DRAW), p)
        q = np.eye(1, vocab, x)[0]
        if draft is not None and draft_temperature > 0:
            dense, fault = law(draft[i], draft_temperature)
            if fault or dense[x] == 0:
                status |= BAD_DRAFT_LAW
            else:
                q = dense
        u = rng.uniform(rng.words(seed, block_start, i, rng.VERIFY_COIN, 0))[0]
        if p[x] > 0 and u * q[x] <= p[x]:
            tokens.append(x)
            logprobs.append(float(np.log(p[x])))
            continue
        rest = np.maximum(p - q, 0.0)
        token = rng.race(rest, seed, block_start, i, rng.RESIDUAL_DRAW)
        if token < 0:
            status |= ZERO_RESIDUAL
            token = rng.race(p, seed, block_start, i, rng.BONUS_DRAW)
        return done(token, p)
    raise AssertionError("the last row has no draft, so it returns")


def verify_chain(
    target_logits,
    draft_tokens,
    *,
    temperature=None,
    seed=None,
    block_start=None,
    draft_logits=None,
    draft_temperature=None,
    cu_rows=None,
):
    """Arguments as domino_kernels.verify_chain, NumPy arrays; temperature None: greedy.

    Returns (tokens, num_accepted, num_emitted, chosen_logprob, status).
    """
    batch, drafts = draft_tokens.shape
    tokens = np.full((batch, drafts + 1), -1, np.int64)
    logprob = np.zeros((batch, drafts + 1))
    accepted, emitted, status = np.zeros((3, batch), np.int64)
    for b in range(batch):
        if cu_rows is None:
            rows = target_logits[b]
        else:
            first, last = int(cu_rows[b]), int(cu_rows[b + 1])
            if first == last:
                continue
            if not 0 <= first < last <= len(target_logits) or last - first > drafts + 1:
                status[b] = BAD_ROWS
                continue
            rows = target_logits[first:last]
        t = 0.0 if temperature is None else temperature[b]
        out, chosen, accepted[b], status[b] = verify_request(
            rows,
            draft_tokens[b, : len(rows) - 1],
            t,
            0 if seed is None else int(seed[b]),
            0 if block_start is None else int(block_start[b]),
            None if draft_logits is None else draft_logits[b],
            t if draft_temperature is None else draft_temperature[b],
        )
        emitted[b] = len(out)
        tokens[b, : len(out)] = out
        logprob[b, : len(out)] = chosen
    return tokens, accepted, emitted, logprob, status
