"""The noise contract of every drafting and verification op, and its NumPy form.

Generator: Philox4x32-10 (Salmon et al., SC 2011), a bijection of a 128-bit counter under a 64-bit
key. There is no state. CUDA and C++ compute the same words (csrc/common/philox.cuh).

    key     = the request's seed, int64 read as 64 bits; (low word, high word)
    counter = (index // 4,  i | purpose << 24,  block_start low word,  block_start high word)
    word    = output[index % 4]

- `index`: token id for a race, 0 for a coin. At most 2**34 - 1.
- `i`: slot in the block: of the draft for coins and draws, the row for a bonus. Below 2**24.
  A tree uses the node index here, never the depth: siblings at one depth need their own noise.
- `block_start`: absolute position of the block's anchor (the last committed token), 64 bits.
  It grows from block to block, so no word is used in two blocks of a request.
- `purpose`: `DRAFT_TOKEN` 1, `VERIFY_COIN` 2, `RESIDUAL_DRAW` 3, `BONUS_DRAW` 4,
  `POSITION_DRAW` 5. The numbers never change.

From words to numbers, k the 32-bit word:

- coins and inverse CDFs: u = (k + 1) * 2**-32, in (0, 1]. Accept when u * q <= p, and p > 0.
- races: v = (k + 1/2) * 2**-32, E = -log1p(-v); the token with the least E / weight wins, ties to
  the lowest id, tokens of weight 0 do not take part. u = 1 would make E = 0, a token that wins
  at any weight, so races never use u. A race over tokens needs no order and no prefix sums: every
  shard of a vocabulary finds its own winner, and the least of these is the winner of the whole.

Why the block and not the position: rules that look beyond the first rejection (block, traversal)
have seen noise of positions that are drafted again in the next block; the same words there would
be conditioned, and the output biased. Draft noise alone does it: three drafts over three tokens,
drafted by position and judged by the block rule, are off by a total variation of 0.015 over five
tokens (tests/losslessness), and a test of one block sees nothing. So all noise is keyed by block,
except `POSITION_DRAW`, for the rules whose output has to be a function of the position alone.
`KEYING` says which is which; `verify_chain(keying=...)` refuses a drafter that did otherwise.

Does the same seed replay the same tokens?

    rule                      keying    batch order,  vocabulary  block    drafter
                                        padding       shards      length
    greedy                    none      yes           yes         yes      yes
    match, gumbel             position  yes           yes         yes      yes
    any rule, no drafts       block     yes           yes         -        -
    onehot, token, block      block     yes           yes         no       no
    trees: greedy, match      as above  yes           yes         yes      yes
    trees: all other rules    block     yes           yes         no       no

Shards have edges at multiples of 128. Where it says no, the law stays and the draws move. Plain
decoding (no drafts) is keyed by block, so its tokens are not those of match; rule "match" with no
drafts gives those.
"""

import numpy as np

__all__ = [
    "BONUS_DRAW",
    "DRAFT_TOKEN",
    "KEYING",
    "POSITION_DRAW",
    "RESIDUAL_DRAW",
    "VERIFY_COIN",
    "exponential",
    "philox4x32",
    "race",
    "uniform",
    "words",
]

DRAFT_TOKEN, VERIFY_COIN, RESIDUAL_DRAW, BONUS_DRAW, POSITION_DRAW = range(1, 6)

# How the noise of a rule of verify_chain is keyed, that of its drafter included.
KEYING = {
    "greedy": None,
    "token": "block",
    "onehot": "block",
    "block": "block",
    "match": "position",
    "gumbel": "position",
}

_LOW = 0xFFFFFFFF


def _integers(*values):
    """The values as arrays of one kind: NumPy uint64, or torch int64 where one is a tensor."""
    if any(type(value).__module__.startswith("torch") for value in values):
        return values
    return tuple(
        np.atleast_1d(value).astype(np.int64).view(np.uint64)
        if not isinstance(value, int)
        else np.array([value % (1 << 64)], np.uint64)
        for value in values
    )


def philox4x32(counter, key):
    """The 4 output words of Philox4x32-10 for 4 counter words and 2 key words.

    Words are NumPy uint64 arrays, or torch int64 tensors, of values below 2**32; they broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The upper half of a wrapped 64-bit product is right after the mask, signed or not.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product1 >> 32 & _LOW) ^ c1 ^ k0, product1 & _LOW
        c2, c3 = (product0 >> 32 & _LOW) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return c0, c1, c2, c3


def words(seed, block_start, i, purpose, index):
    """Noise words, broadcast over the arguments: integers, NumPy int64 arrays or torch tensors.

    Returns uint32 values in a NumPy uint64 array (at least 1-D), or in a torch int64 tensor where
    an argument is one.
    """
    seed, block_start, i, index = _integers(seed, block_start, i, index)
    counter = (index >> 2, i + (purpose << 24), block_start & _LOW, block_start >> 32 & _LOW)
    out = philox4x32(counter, (seed & _LOW, seed >> 32 & _LOW))
    lane = index & 3
    picked = out[0] * (lane == 0)
    for n in (1, 2, 3):
        picked = picked + out[n] * (lane == n)
    return picked


def uniform(word):
    """fp64 uniforms in (0, 1] of noise words; the kernels round them to fp32."""
    return (np.asarray(word, np.float64) + 1.0) * 2.0**-32


def exponential(word):
    """fp64 standard exponentials of noise words, for races; the kernels compute them in fp32."""
    return -np.log1p(-(np.asarray(word, np.float64) + 0.5) * 2.0**-32)


def race(weights, seed, block_start, i, purpose):
    """The token that wins the race of `weights` [V] (>= 0, any scale), -1 where all are zero."""
    weights = np.asarray(weights, np.float64)
    tokens = np.flatnonzero(weights > 0)
    if tokens.size == 0:
        return -1
    noise = exponential(words(seed, block_start, i, purpose, tokens))
    return int(tokens[np.argmin(noise / weights[tokens])])
