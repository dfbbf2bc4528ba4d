"""The Triton kernels of row_stats and verify_chain; verify_chain.py launches them.

A row is named by (request, slot) and found through a table of element offsets, -1 where a request
has no such row. A row's law: scale = log2(e) / temperature, greatest logit, mass relative to it,
and the last token that the filters keep in (logit falling, id rising) order with the mass kept.
"""

import triton
import triton.language as tl

from domino_kernels.triton_kernels import noise

GREEDY, MATCH, BLOCK_RULE = tl.constexpr(0), tl.constexpr(3), tl.constexpr(4)
VERIFY_COIN, RESIDUAL_DRAW = tl.constexpr(2), tl.constexpr(3)
BONUS_DRAW, POSITION_DRAW = tl.constexpr(4), tl.constexpr(5)
NON_FINITE, EMPTY_ROW, BAD_ID = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
ZERO_RESIDUAL, BAD_DRAFT_LAW = tl.constexpr(8), tl.constexpr(16)
INF = tl.constexpr(float("inf"))
LN2 = tl.constexpr(0.6931471805599453)
LAST_ID = tl.constexpr(2147483647)


@triton.jit
def _weight(z, top, scale):
    """2^((z - top) scale), 0 below 2^-100; z may be -inf, top is finite."""
    exponent = (z - top) * scale
    return tl.where(exponent >= -100.0, tl.exp2(exponent), 0.0)


@triton.jit
def partial_kernel(
    logits, offsets, scales, top, mass, best, vocab, splits, BLOCK: tl.constexpr
):  # fmt: skip
    """Of one part of a row: greatest logit (NaN where a logit is NaN or +inf), weight, its id."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offset = tl.load(offsets + row)
    if offset >= 0:
        columns = split * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + offset + columns, mask=columns < vocab, other=-INF).to(tl.float32)
        bad = tl.max(tl.where(z < INF, 0, 1), axis=0)
        value = tl.max(z, axis=0)
        safe = tl.where(value > -INF, value, 0.0)
        at = row * splits + split
        tl.store(top + at, tl.where(bad != 0, float("nan"), value))
        tl.store(mass + at, tl.sum(_weight(z, safe, tl.load(scales + row)), axis=0))
        first = tl.min(tl.where(z == value, columns, LAST_ID), axis=0)
        tl.store(best + at, first)


@triton.jit
def combine_kernel(
    offsets, scales, top, mass, best, out_top, out_mass, out_argmax, out_faults, splits,
    PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(offsets + row) >= 0:
        at = tl.arange(0, PADDED)
        inside = at < splits
        tops = tl.load(top + row * splits + at, mask=inside, other=-INF)
        masses = tl.load(mass + row * splits + at, mask=inside, other=0.0)
        ids = tl.load(best + row * splits + at, mask=inside, other=LAST_ID)
        bad = tl.max(tl.where(tops == tops, 0, 1), axis=0)
        finite = tl.where(tops == tops, tops, -INF)
        most = tl.max(finite, axis=0)
        safe = tl.where(most > -INF, most, 0.0)
        total = tl.sum(masses * _weight(finite, safe, tl.load(scales + row)), axis=0)
        tl.store(out_top + row, safe)
        tl.store(out_mass + row, total)
        tl.store(out_argmax + row, tl.min(tl.where(finite == most, ids, LAST_ID), axis=0))
        tl.store(
            out_faults + row, tl.where(bad != 0, NON_FINITE, tl.where(most == -INF, EMPTY_ROW, 0))
        )


@triton.jit
def _above(logits, offset, vocab, floor, top, scale, BLOCK: tl.constexpr):
    """(number, mass) of the tokens with a logit above `floor`."""
    number, mass = 0, 0.0
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(logits + offset + columns, mask=columns < vocab, other=-INF).to(tl.float32)
        number += tl.sum((z > floor).to(tl.int32), axis=0)
        mass += tl.sum(tl.where(z > floor, _weight(z, top, scale), 0.0), axis=0)
    return number, mass


@triton.jit
def _logit(order):
    """The float of an order: unsigned integers that ascend as the floats do."""
    bits = tl.where(order >= 0x80000000, order - 0x80000000, 0xFFFFFFFF - order)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def cut_kernel(
    logits, offsets, scales, top, mass, faults, top_k, top_p, min_p, cut_logit, cut_id, kept,
    vocab, SLOTS: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last token that top-k, top-p and min-p keep, in (logit falling, id rising) order."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.load(offsets + row)
    if offset >= 0:
        if tl.load(faults + row) == 0:
            b = row // SLOTS
            k, p, m = tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b)
            p = tl.where(p >= 1.0, p, tl.where(p > 0.0, p, 0.0))  # NaN keeps the first token only
            highest, scale, whole = tl.load(top + row), tl.load(scales + row), tl.load(mass + row)
            # top-k and min-p keep what is above `floor`: the greatest logit with k tokens above
            # or equal to it, found bit by bit in the order of floats
            low, high = tl.full((), 0x007FFFFF, tl.int64), tl.full((), 0xFF800000, tl.int64)
            if (k > 0) & (k < vocab):
                for _ in range(32):
                    middle = (low + high) // 2
                    number, _mass = _above(
                        logits, offset, vocab, _logit(middle), highest, scale, BLOCK
                    )
                    enough = number >= k  # then the k-th value lies above `middle`
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
            by_rank = _logit(low)  # keeps z > by_rank
            share = tl.minimum(tl.maximum(m, 1e-37), 1.0)
            by_weight = tl.where(m > 0, highest + tl.log2(share) / scale, -INF)  # keeps z >= this
            base = whole
            if ORDER != 2:
                number, ranked = _above(logits, offset, vocab, by_rank, highest, scale, BLOCK)
                base = tl.where((k > 0) & (k < vocab), ranked, whole)
            if ORDER == 1:
                ranked = 0.0
                for start in range(0, vocab, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    z = tl.load(logits + offset + columns, mask=columns < vocab, other=-INF)
                    z = z.to(tl.float32)
                    inside = (z > by_rank) & (z >= by_weight)
                    ranked += tl.sum(tl.where(inside, _weight(z, highest, scale), 0.0), axis=0)
                base = ranked
            target = tl.where(p < 1.0, p * base, INF)
            # the nucleus: the greatest floor with at least `target` above or at it
            low, high = tl.full((), 0x007FFFFF, tl.int64), tl.full((), 0xFF800000, tl.int64)
            if p < 1.0:
                for _ in range(32):
                    middle = (low + high) // 2
                    number, above = _above(
                        logits, offset, vocab, _logit(middle), highest, scale, BLOCK
                    )
                    enough = (above >= target) & (number > 0)
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
            # `high` is the order of the last value of the nucleus: above it lies less than target
            edge = tl.where(p < 1.0, _logit(high), -INF)
            number, above = _above(logits, offset, vocab, edge, highest, scale, BLOCK)
            last_id = LAST_ID
            if p < 1.0:
                need = target - above
                each = tl.maximum(_weight(edge, highest, scale), 1e-38)
                ties = tl.maximum(tl.ceil(need / each), 1.0)
                low_id, high_id = -1, vocab - 1
                while high_id - low_id > 1:
                    middle_id = (low_id + high_id) // 2
                    found = 0.0
                    for start in range(0, middle_id + 1, BLOCK):
                        columns = start + tl.arange(0, BLOCK)
                        z = tl.load(
                            logits + offset + columns, mask=columns <= middle_id, other=-INF
                        ).to(tl.float32)
                        found += tl.sum((z == edge).to(tl.float32), axis=0)
                    low_id = tl.where(found >= ties, low_id, middle_id)
                    high_id = tl.where(found >= ties, middle_id, high_id)
                last_id = high_id
            # the strictest of the three, and its mass
            mass_kept, lowest = 0.0, INF
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                z = tl.load(logits + offset + columns, mask=columns < vocab, other=-INF)
                z = z.to(tl.float32)
                inside = (z > by_rank) & (z >= by_weight) & (z > -INF)
                inside = inside & ((z > edge) | ((z == edge) & (columns <= last_id)))
                mass_kept += tl.sum(tl.where(inside, _weight(z, highest, scale), 0.0), axis=0)
                lowest = tl.minimum(lowest, tl.min(tl.where(inside, z, INF), axis=0))
            tl.store(cut_logit + row, lowest)
            tl.store(cut_id + row, tl.where(lowest == edge, last_id, LAST_ID))
            tl.store(kept + row, mass_kept)


@triton.jit
def _keeps(z, columns, cut, cut_at):
    return (z > cut) | ((z == cut) & (columns <= cut_at))


@triton.jit
def _probability(logits, offset, x, top, scale, cut, cut_at, kept):
    z = tl.load(logits + offset + x).to(tl.float32)
    return tl.where(_keeps(z, x, cut, cut_at), _weight(z, top, scale) / kept, 0.0)


@triton.jit
def judge_kernel(
    target, offsets, scales, top, kept, cut_logit, cut_id, faults, draft, draft_offsets,
    draft_scales, draft_top, draft_mass, draft_faults, drafts, drafts_stride, out_p, out_q,
    out_status, vocab, SLOTS: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """p(x) and q(x) of every slot; q < 0: one-hot, or the slot has no draft (p < 0)."""
    row = tl.program_id(0).to(tl.int64)
    b, slot = row // SLOTS, row % SLOTS
    offset = tl.load(offsets + row)
    p, q, status = -1.0, -1.0, 0
    if offset >= 0:
        status = tl.load(faults + row)
        x = tl.full((), -1, tl.int64)
        if slot < SLOTS - 1:
            has_row = tl.load(offsets + row + 1) >= 0  # the last row of a request has no draft
            x = tl.where(has_row, tl.load(drafts + b * drafts_stride + slot), -1)
        bad_id = (x < -1) | (x >= vocab)
        if (status == 0) & (x >= 0) & (x < vocab):
            p = _probability(
                target, offset, x, tl.load(top + row), tl.load(scales + row),
                tl.load(cut_logit + row), tl.load(cut_id + row), tl.load(kept + row),
            )  # fmt: skip
            if DENSE:
                at = b * (SLOTS - 1) + slot
                scale = tl.load(draft_scales + at)
                if scale > 0.0:
                    mass = 0.0
                    if tl.load(draft_faults + at) == 0:
                        z = tl.load(draft + tl.load(draft_offsets + at) + x).to(tl.float32)
                        mass = _weight(z, tl.load(draft_top + at), scale) / tl.load(draft_mass + at)
                    q = tl.where(mass > 0.0, mass, -1.0)
                    status |= tl.where(mass > 0.0, 0, BAD_DRAFT_LAW)
        status |= tl.where((status == 0) & bad_id, BAD_ID, 0)
    tl.store(out_p + row, p)
    tl.store(out_q + row, q)
    tl.store(out_status + row, status)


@triton.jit
def reach_kernel(p, q, reach, SLOTS: tl.constexpr):
    """reach[i + 1] = min(1, reach[i] p / q) up to the first slot without a draft."""
    b = tl.program_id(0).to(tl.int64)
    value = 1.0
    for slot in range(SLOTS):
        row = b * SLOTS + slot
        tl.store(reach + row, value)
        p_x, q_x = tl.load(p + row), tl.load(q + row)
        value = tl.minimum(1.0, value * (tl.maximum(p_x, 0.0) / tl.where(q_x > 0.0, q_x, 1.0)))


@triton.jit
def rest_kernel(
    target, offsets, scales, top, kept, cut_logit, cut_id, draft, draft_offsets, draft_scales,
    draft_top, draft_mass, drafts, drafts_stride, p, q, reach, rest, vocab, splits,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Part of sum relu(reach p - q) of the slots that have a draft."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(p + row) >= 0.0:
        b, slot = row // SLOTS, row % SLOTS
        at = b * (SLOTS - 1) + slot
        columns = split * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        z = tl.load(target + tl.load(offsets + row) + columns, mask=inside, other=-INF)
        z = z.to(tl.float32)
        weight = _weight(z, tl.load(top + row), tl.load(scales + row)) / tl.load(kept + row)
        keeps = _keeps(z, columns, tl.load(cut_logit + row), tl.load(cut_id + row))
        law = tl.where(keeps, weight, 0.0)
        if tl.load(q + row) > 0.0:
            d = tl.load(draft + tl.load(draft_offsets + at) + columns, mask=inside, other=-INF)
            scale = tl.load(draft_scales + at)
            other = _weight(d.to(tl.float32), tl.load(draft_top + at), scale)
            other = other / tl.load(draft_mass + at)
        else:
            other = (columns == tl.load(drafts + b * drafts_stride + slot)).to(tl.float32)
        left = tl.maximum(tl.load(reach + row) * law - other, 0.0)
        tl.store(rest + row * splits + split, tl.sum(left, axis=0))


@triton.jit
def race_kernel(
    target, offsets, scales, top, kept, cut_logit, cut_id, draft, draft_offsets, draft_scales,
    draft_top, draft_mass, unit_row, unit_draft, unit_without, unit_reach, unit_purpose,
    seed, unit_start, unit_i, value, winner, vocab, splits, SLOTS: tl.constexpr,
    DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least E / weight of one part of a unit's row; a unit without a row does nothing."""
    unit, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(unit_row + unit)
    if row >= 0:
        offset, request = tl.load(offsets + row), row // SLOTS
        highest, scale = tl.load(top + row), tl.load(scales + row)
        cut, cut_at, mass = tl.load(cut_logit + row), tl.load(cut_id + row), tl.load(kept + row)
        of = tl.load(unit_draft + unit)
        without, reach = tl.load(unit_without + unit), tl.load(unit_reach + unit)
        groups = split * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        four = noise.words(
            tl.load(seed + request), tl.load(unit_start + unit), tl.load(unit_i + unit),
            tl.load(unit_purpose + unit), groups,
        )  # fmt: skip
        best, best_id = INF, LAST_ID
        for lane in tl.static_range(4):
            columns = 4 * groups + lane
            inside = columns < vocab
            z = tl.load(target + offset + columns, mask=inside, other=-INF).to(tl.float32)
            weight = _weight(z, highest, scale)
            weight = tl.where(_keeps(z, columns, cut, cut_at) & (columns != without), weight, 0.0)
            if DENSE:
                if of >= 0:
                    d = tl.load(
                        draft + tl.load(draft_offsets + of) + columns, mask=inside, other=-INF
                    )
                    q = _weight(
                        d.to(tl.float32), tl.load(draft_top + of), tl.load(draft_scales + of)
                    )
                    weight = reach * (weight / mass) - q / tl.load(draft_mass + of)
            key = tl.where(weight > 0.0, noise.exponential(four[lane]) / weight, INF)
            least = tl.min(key, axis=0)
            where = tl.min(tl.where(key == least, columns, LAST_ID), axis=0)
            take = (least < best) | ((least == best) & (where < best_id))
            best_id = tl.where(take, where, best_id)
            best = tl.where(take, least, best)
        tl.store(value + unit * splits + split, best)
        tl.store(winner + unit * splits + split, best_id)


@triton.jit
def _winner(value, winner, unit, splits, PADDED: tl.constexpr):
    """The token of the least key, -1 where nothing had weight."""
    at = tl.arange(0, PADDED)
    values = tl.load(value + unit * splits + at, mask=at < splits, other=INF)
    ids = tl.load(winner + unit * splits + at, mask=at < splits, other=LAST_ID)
    least = tl.min(values, axis=0)
    where = tl.min(tl.where(values == least, ids, LAST_ID), axis=0)
    return tl.where(least < INF, where, -1)


@triton.jit
def walk_kernel(
    p, q, status, argmax, drafts, drafts_stride, rule, seed, start, reach, rest, rest_splits,
    value, winner, race_splits, offsets, stop, last, out_status, unit_row, unit_draft,
    unit_without, unit_reach, unit_purpose, unit_start, unit_i,
    SLOTS: tl.constexpr, PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """Where each request stops, and the race that its last token takes, if any."""
    b = tl.program_id(0).to(tl.int64)
    kind = tl.load(rule + b)
    seed_b, start_b = tl.load(seed + b), tl.load(start + b)
    unit = tl.full((), -1, tl.int64)
    of, without = unit, unit
    scale, purpose, found = 1.0, BONUS_DRAW, 0
    at, token = 0, tl.full((), -1, tl.int64)
    if tl.load(offsets + b * SLOTS) >= 0:
        going = 1
        if kind == BLOCK_RULE:
            slots = 0
            chain = 1
            for slot in range(SLOTS):
                row = b * SLOTS + slot
                chain = chain * (tl.load(p + row) >= 0.0).to(tl.int32)
                slots += chain
            # prefix i is kept by the coin of draft i - 1; the longest that passes wins
            for i in range(1, SLOTS):
                if i <= slots:
                    row = b * SLOTS + i
                    r = tl.load(reach + row)
                    h = r
                    if i < slots:
                        parts = tl.arange(0, REST_PADDED)
                        z = tl.sum(
                            tl.load(
                                rest + row * rest_splits + parts,
                                mask=parts < rest_splits,
                                other=0.0,
                            ),
                            axis=0,
                        )
                        below = z + (1.0 - r)
                        h = tl.where(below > 0.0, z / tl.where(below > 0.0, below, 1.0), 1.0)
                    word = noise.words(
                        seed_b, start_b, i - 1, VERIFY_COIN, tl.full((), 0, tl.int32)
                    )
                    at = tl.where(noise.uniform(word[0]) <= h, i, at)
            for slot in range(SLOTS):
                if slot <= at:
                    found |= tl.load(status + b * SLOTS + slot)
            row = b * SLOTS + at
            if at < slots:
                scale, purpose, unit = tl.load(reach + row), RESIDUAL_DRAW, row
            elif (tl.load(status + row) & (NON_FINITE | EMPTY_ROW)) == 0:
                unit = row
            going = 0
        for slot in range(SLOTS):
            if going != 0:
                row = b * SLOTS + slot
                at = slot
                bad = tl.load(status + row)
                found |= bad
                x = tl.full((), -1, tl.int64)
                p_x, q_x = tl.load(p + row), tl.load(q + row)
                if p_x >= 0.0:
                    x = tl.load(drafts + b * drafts_stride + slot)
                going = 0
                if (bad & (NON_FINITE | EMPTY_ROW)) == 0:
                    if kind == GREEDY:
                        token = tl.load(argmax + row).to(tl.int64)
                        going = (token == x).to(tl.int32)
                    elif kind == MATCH:
                        token = _winner(value, winner, row, race_splits, PADDED).to(tl.int64)
                        going = (token == x).to(tl.int32)
                    elif p_x >= 0.0:
                        word = noise.words(
                            seed_b, start_b, slot, VERIFY_COIN, tl.full((), 0, tl.int32)
                        )
                        share = noise.uniform(word[0]) * tl.where(q_x > 0.0, q_x, 1.0)
                        going = ((p_x > 0.0) & (share <= p_x)).to(tl.int32)
                        if going == 0:
                            unit, purpose = row, RESIDUAL_DRAW
                    else:
                        unit = row
                if going != 0:
                    token = tl.full((), -1, tl.int64)
        if purpose == RESIDUAL_DRAW:
            if tl.load(q + b * SLOTS + at) > 0.0:
                of = b * (SLOTS - 1) + at
            else:
                without = tl.load(drafts + b * drafts_stride + at)
    tl.store(stop + b, at)
    tl.store(last + b, token)
    tl.store(out_status + b, found)
    tl.store(unit_row + b, unit)
    tl.store(unit_draft + b, of)
    tl.store(unit_without + b, without)
    tl.store(unit_reach + b, scale)
    tl.store(unit_purpose + b, purpose)
    tl.store(unit_start + b, start_b)
    tl.store(unit_i + b, at)


@triton.jit
def again_kernel(
    value, winner, splits, unit_row, unit_draft, unit_without, unit_purpose, status, last, again,
    PADDED: tl.constexpr,
):  # fmt: skip
    """The winner of a race; where nothing had weight, a race of p itself (`again`)."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(unit_row + b)
    tl.store(again + b, tl.full((), -1, tl.int64))
    if row >= 0:
        token = _winner(value, winner, b, splits, PADDED).to(tl.int64)
        if (token < 0) & (tl.load(unit_purpose + b) == RESIDUAL_DRAW):
            tl.store(status + b, tl.load(status + b) | ZERO_RESIDUAL)
            tl.store(unit_draft + b, tl.full((), -1, tl.int64))
            tl.store(unit_without + b, tl.full((), -1, tl.int64))
            tl.store(unit_purpose + b, BONUS_DRAW)
            tl.store(again + b, row)
        tl.store(last + b, token)


@triton.jit
def emit_kernel(
    target, offsets, scales, top, mass, drafts, drafts_stride, stop, last, again, value, winner,
    splits, status, tokens, accepted, emitted, logprob, out_status,
    SLOTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    at, token = tl.load(stop + b), tl.load(last + b)
    if tl.load(again + b) >= 0:
        token = _winner(value, winner, b, splits, PADDED).to(tl.int64)
    for slot in range(SLOTS):
        row = b * SLOTS + slot
        x = tl.full((), -1, tl.int64)
        if slot < at:
            x = tl.load(drafts + b * drafts_stride + slot)
        elif slot == at:
            x = token
        chosen = 0.0
        if x >= 0:
            z = tl.load(target + tl.load(offsets + row) + x).to(tl.float32)
            exponent = (z - tl.load(top + row)) * tl.load(scales + row)
            chosen = (exponent - tl.log2(tl.load(mass + row))) * LN2
        tl.store(tokens + row, x)
        tl.store(logprob + row, chosen)
    tl.store(accepted + b, at)
    tl.store(emitted + b, at + (token >= 0).to(tl.int32))
    tl.store(out_status + b, tl.load(status + b).to(tl.uint8))
