"""Data sets, filters, anchors and labels."""

import json

import numpy as np
import pytest
from domino_draft.evaluate import repetitive_tail
from domino_draft.train.data import (
    BatchSampler,
    TokenDataset,
    block_labels,
    concatenate,
    from_jsonl,
    from_text,
    overlaps,
    slot_weights,
    tokenize_chat,
    trim_tails,
)


def dataset(lengths, prompt=3, seed=0, vocab=900):
    rng = np.random.default_rng(seed)
    return TokenDataset.from_sequences(
        (rng.integers(0, vocab, n), np.arange(n) >= prompt) for n in lengths
    )


def sampler(data, **overrides):
    options = dict(
        batch_size=3, seq_len=64, num_anchors=8, block_size=4, gamma=7.0, shift_label=True, seed=5
    )
    return BatchSampler(data, **(options | overrides))


@pytest.mark.parametrize("shift", [True, False])
def test_labels_name_the_position_after_or_at_the_slot(shift):
    # Token = its own position, so a label says where it was taken from.
    length, slots = 40, 6
    tokens = np.arange(length)[None]
    mask = np.ones((1, length), bool)
    anchors = np.array([[0, 7, 33, 37]])
    inputs, labels, has = block_labels(
        tokens, mask, np.array([length]), anchors, np.ones_like(anchors, bool), slots, shift
    )
    for n, a in enumerate(anchors[0]):
        for k in range(slots):
            at = a + k + 1 if shift else a + k
            exists = at < length and (shift or k >= 1)
            assert has[0, n, k] == exists
            assert labels[0, n, k] == (at if exists else 0)
            assert inputs[0, n, k] == (a + k if a + k < length else 0)


def test_unsupervised_labels_and_unused_blocks_have_no_label():
    tokens = np.arange(12)[None]
    mask = np.ones((1, 12), bool)
    mask[0, 6] = False
    anchors, valid = np.array([[4, 0]]), np.array([[True, False]])
    _, _, has = block_labels(tokens, mask, np.array([12]), anchors, valid, 4, True)
    assert has.tolist() == [[[True, False, True, True], [False] * 4]]


@pytest.mark.parametrize("shift", [True, False])
def test_slot_weights(shift):
    w = slot_weights(16, 7.0, shift)
    first = 0 if shift else 1
    assert (w[:first] == 0).all() and w[first] == 1.0
    assert w[first + 7] == pytest.approx(np.exp(-1.0))


def test_batches_depend_on_seed_and_step_alone():
    data = dataset([20, 40, 64, 100, 30, 9, 11])
    a, b = sampler(data), sampler(data)
    b.batch(0), b.batch(11)
    for step in (7, 0, 3):
        for name in ("tokens", "anchors", "inputs", "rows", "labels", "weights"):
            assert np.array_equal(getattr(a.batch(step), name), getattr(b.batch(step), name)), name
    assert not np.array_equal(a.batch(3).anchors, a.batch(4).anchors)
    assert not np.array_equal(a.batch(3).anchors, sampler(data, seed=6).batch(3).anchors)


def test_every_sequence_once_an_epoch_in_a_new_order():
    data = dataset([20] * 7)
    s = sampler(data, batch_size=2)
    flat = np.concatenate([s.sequences(i) for i in range(7)])
    assert sorted(flat[:7]) == list(range(7)) == sorted(flat[7:])
    assert not np.array_equal(flat[:7], flat[7:])


def test_without_shuffling_every_sequence_counts_once():
    data = dataset([20] * 5)
    s = sampler(data, batch_size=3, shuffle=False)
    per_row = 8 * 4
    seen = [
        s.sequences(step)[row]
        for step in range(3)
        for row in np.unique(s.batch(step).rows // per_row)
    ]
    assert seen == list(range(5))


@pytest.mark.parametrize("shift", [True, False])
def test_anchors_are_supervised_pairs_and_weights_add_up_to_one(shift):
    data = dataset([20, 64, 9, 200])
    s = sampler(data, batch_size=4, num_anchors=12, shift_label=shift)
    seen = set()
    for step in range(30):
        batch = s.batch(step)
        for row, index in enumerate(s.sequences(step)):
            tokens, mask = s.data[index]
            anchors = batch.anchors[row]
            used = anchors[anchors > 0]
            assert len(set(used)) == len(used) and (np.diff(used) > 0).all()
            assert len(used) == min(12, int((mask[:-1] & mask[1:]).sum()))
            assert (mask[used] & mask[used + 1]).all()
            assert (batch.inputs[row, : len(used), 0] == tokens[used]).all()
            if index == 0:
                seen |= set(used)
        assert batch.weights.sum() == pytest.approx(1.0, abs=1e-5)
        slot = batch.rows % 4
        assert (slot >= (0 if shift else 1)).all()
        expected = slot_weights(4, 7.0, shift)[slot]
        assert np.allclose(batch.weights, expected / expected.sum(), rtol=1e-5)
    assert seen == set(range(3, 19)), "every eligible position must be drawn at some time"


def test_filter_needs_two_consecutive_supervised_tokens_of_one_sequence():
    sequences = [
        ([1, 2, 3], [False, True, False]),
        ([4, 5], [False, True]),
        ([6, 7], [True, False]),
        ([8, 9, 9], [False, True, True]),
        ([], []),
        ([5], [True]),
    ]
    data = TokenDataset.from_sequences(sequences)
    assert data.usable().tolist() == [False, False, False, True, False, False]
    with pytest.raises(ValueError, match="BatchSampler: data"):
        sampler(data.take(np.array([0, 1, 2])))


def test_take_truncate_split_concatenate(tmp_path):
    data = dataset([5, 9, 7, 30])
    part = data.take(np.array([3, 1]), np.array([4, 100]))
    assert part.lengths.tolist() == [4, 9]
    assert np.array_equal(part[0][0], data[3][0][:4]) and np.array_equal(part[1][1], data[1][1])
    assert data.truncated(6).lengths.tolist() == [5, 6, 6, 6]
    train, held_out = data.split(1, seed=0)
    assert len(train) == 3 and len(held_out) == 1
    both = {tuple(d[i][0]) for d in (train, held_out) for i in range(len(d))}
    assert both == {tuple(data[i][0]) for i in range(4)}
    joined = concatenate([data, part])
    assert len(joined) == 6 and np.array_equal(joined[4][0], part[0][0])
    joined.save(tmp_path / "d.npz")
    again = TokenDataset.load(tmp_path / "d.npz")
    assert np.array_equal(again.tokens, joined.tokens) and again.tokens.dtype == np.uint16
    assert np.array_equal(again.loss_mask, joined.loss_mask)
    assert list(tmp_path.iterdir()) == [tmp_path / "d.npz"]


def test_prompt_lengths_file_and_its_errors(tmp_path):
    data = dataset([5, 9], prompt=3)
    np.savez(tmp_path / "p.npz", tokens=data.tokens, offsets=data.offsets, prompt_lengths=[3, 3])
    assert np.array_equal(TokenDataset.load(tmp_path / "p.npz").loss_mask, data.loss_mask)
    np.savez(tmp_path / "q.npz", tokens=data.tokens, offsets=data.offsets)
    with pytest.raises(ValueError, match="loss_mask: missing"):
        TokenDataset.load(tmp_path / "q.npz")
    arrays = dict(tokens=data.tokens, offsets=data.offsets, prompt_lengths=np.array([3, 3]))
    for change, error, message in (
        ({"tokens": data.tokens + 0.5}, TypeError, "tokens: got float64"),
        ({"offsets": data.offsets / 1}, TypeError, "offsets: got float64"),
        ({"prompt_lengths": np.array([3.5, 3])}, TypeError, "prompt_lengths: got float64"),
        ({"tokens": data.tokens.astype(np.int64) - 900}, ValueError, "tokens: got -"),
        ({"tokens": data.tokens + np.int64(2**32)}, ValueError, "tokens: got 4294967"),
    ):
        np.savez(tmp_path / "r.npz", **(arrays | change))
        with pytest.raises(error, match=f"TokenDataset: {message}"):
            TokenDataset.load(tmp_path / "r.npz")
    whole = (tmp_path / "p.npz").read_bytes()
    for name, content in (
        ("s.npz", whole[:-40]), ("t.npz", b""), ("u.npz", b"text"), ("v.safetensors", b"text"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}: got a damaged file"):
            TokenDataset.load(tmp_path / name)
    with pytest.raises(ValueError, match="offsets"):
        TokenDataset(data.tokens, data.offsets[:-1], data.loss_mask)


class WordTokenizer:
    """Words to ids; a chat template with a newline after the end token, which is never
    generated.
    """

    eos_token_id = 1

    def __init__(self):
        self.ids = {"<start>": 0, "<end>": 1, "\n": 2}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        text = "".join(f"<start> {m['role']} {m['content']} <end> \n " for m in messages)
        return text + ("<start> assistant " if add_generation_prompt else "")

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [self.ids.setdefault(w, len(self.ids)) for w in text.split(" ") if w]}


def test_chat_mask_is_what_the_assistant_emits(tmp_path):
    tok = WordTokenizer()
    chat = [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c d e"},
        {"role": "user", "content": "f"},
        {"role": "assistant", "content": "g"},
        {"role": "user", "content": "unanswered"},
    ]
    ids, mask = tokenize_chat(chat, tok)
    words = {v: k for k, v in tok.ids.items()}
    assert [words[i] for i, m in zip(ids, mask) if m] == ["c", "d", "e", "<end>", "g", "<end>"]
    text = [words[i] for i in ids]
    assert text[:3] == ["<start>", "user", "a"] and text[-2:] == ["g", "<end>"]

    lines = [
        {"messages": chat[:2]},
        {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d e"}]},
        {"prompt": "a b", "response": "c d e"},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    data = from_jsonl(path, tok, 64)
    assert len(data) == 3
    for i in range(3):
        assert np.array_equal(data[i][0], data[0][0]) and data[i][1].sum() == 4
    for line, message in (
        ('{"nothing": 1}', "without messages"),
        ('{"messages": [', "got no JSON"),
        ('{"messages": null}', "messages: got None, expected a list"),
        ('{"messages": ["hi"]}', r"messages: got \['hi'\], expected a list of objects"),
        ('{"messages": [{"role": "user"}]}', "content: got None, expected a string"),
        ('{"conversations": [{"value": "a"}]}', "from: got None"),
        ('{"conversations": [{"from": "gpt", "value": 1}]}', "value: got 1"),
        ('{"prompt": "a", "response": null}', "response: got None"),
        ('{"text": 5}', "text: got 5"),
    ):
        path.write_text('{"text": "fine"}\n' + line)
        with pytest.raises(ValueError, match=rf"chats\.jsonl:2: {message}|:2: got dict {message}"):
            from_jsonl(path, tok, 64)

    tok.apply_chat_template = lambda messages, tokenize, add_generation_prompt: (
        f"{len(messages)} " + " ".join(m["content"] for m in messages)
    )
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        tokenize_chat(chat, tok)


def test_empty_and_odd_data_is_no_accident():
    """No sequence, an empty one, one of the prompt alone, one shorter than a block."""
    tok = WordTokenizer()
    empty = from_text("", tok, 8)
    assert len(empty) == len(trim_tails(empty)) == len(empty.truncated(3)) == 0
    assert len(concatenate([empty, empty])) == 0 and empty.usable().tolist() == []
    odd = TokenDataset.from_sequences(
        [([], []), ([5, 6, 7], [False] * 3), ([5, 6, 7], [False, True, True]), ([], [])]
    )
    assert trim_tails(odd).lengths.tolist() == [0, 3, 3, 0]
    assert odd.usable().tolist() == [False, False, True, False]
    for shift, slots, labels in ((True, [0], [7]), (False, [1], [7])):
        batch = sampler(odd, batch_size=2, block_size=16, shift_label=shift).batch(0)
        assert batch.anchors[:, 0].tolist() == [1, 1] and (batch.anchors[:, 1:] == 0).all()
        assert (batch.rows % 16).tolist() == slots * 2 and batch.labels.tolist() == labels * 2
        assert batch.weights.sum() == pytest.approx(1.0, abs=1e-5) and batch.tokens_used == 6
    for few in (empty, odd.take(np.array([0, 1]))):
        with pytest.raises(ValueError, match="BatchSampler: data: got no sequence"):
            sampler(few)


def test_plain_text_is_supervised_everywhere():
    data = from_text("a b c d e", WordTokenizer(), 2)
    assert data.lengths.tolist() == [2, 2, 1] and data.loss_mask.all()


def test_trimming_is_that_of_the_evaluation():
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(300):
        prompt, text = rng.integers(0, 9, rng.integers(1, 30)), rng.integers(0, 9, rng.integers(40))
        loop = rng.integers(0, 9, rng.integers(1, 36))
        loop = np.resize(loop, rng.integers(len(loop) * 5))
        end = rng.integers(0, 9, rng.integers(2))
        tokens = np.concatenate([prompt, text, loop, end])
        sequences.append((tokens, np.arange(len(tokens)) >= len(prompt)))
    data = TokenDataset.from_sequences(sequences)
    want = [int((~m).sum()) + repetitive_tail(t[m]) for t, m in sequences]
    assert sum(w < n for w, n in zip(want, data.lengths)) > 40
    trimmed = trim_tails(data, chunk=64)
    assert trimmed.lengths.tolist() == want
    assert all(np.array_equal(trimmed[i][0], t[: want[i]]) for i, (t, _) in enumerate(sequences))


def test_thirteen_gram_overlap():
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(0, 49152, 50) for _ in range(3))
    shared = rng.integers(0, 49152, 13)
    data = TokenDataset.from_sequences(
        (s, np.ones(len(s), bool))
        for s in (np.r_[a, shared], b, np.r_[c[:20], shared[:12], c[20:]], shared[:6], shared[6:])
    )
    # Sequences 3 and 4 hold the n-gram only across their common bound.
    evaluation = [np.r_[[3, 4], shared, [5]], [1, 2]]
    assert overlaps(data, evaluation).tolist() == [True, False, False, False, False]
    assert overlaps(data, evaluation, n=12).tolist() == [True, False, True, False, False]
    assert not overlaps(data, []).any()
