"""Training text as flat token arrays, and the batches of anchors and labels drawn from it.

Everything here is numpy on the host and a pure function of its arguments: batch `step` of a
`BatchSampler` depends on (dataset, seed, step) alone, so that every arm of a comparison sees the
same sequences and the same anchors, and a resumed run continues where it stopped.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluate import MAX_PERIOD, MIN_REPEATS, MIN_TAIL
from ..files import replacing


@dataclass(frozen=True)
class TokenDataset:
    """Sequences back to back.

    tokens: uint16 or int32 [T]; offsets: int64 [n + 1], sequence i is tokens[offsets[i]:offsets[i +
    1]]; loss_mask: bool [T], True where the token is the target's own output (what a drafter must
    predict).
    """

    tokens: np.ndarray
    offsets: np.ndarray
    loss_mask: np.ndarray

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or not np.issubdtype(self.tokens.dtype, np.integer):
            raise ValueError(
                f"TokenDataset: tokens: got {self.tokens.dtype} {self.tokens.shape}, expected "
                "a flat integer array"
            )
        if self.loss_mask.shape != self.tokens.shape or self.loss_mask.dtype != np.bool_:
            raise ValueError(
                f"TokenDataset: loss_mask: got {self.loss_mask.dtype} {self.loss_mask.shape}, "
                f"expected bool {self.tokens.shape}"
            )
        o = self.offsets
        if (
            o.ndim != 1
            or len(o) < 1
            or o[0] != 0
            or o[-1] != len(self.tokens)
            or (o[1:] < o[:-1]).any()
        ):
            raise ValueError(
                "TokenDataset: offsets: got a sequence that does not rise from 0 to "
                f"{len(self.tokens)}, expected the n + 1 bounds of n sequences"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[span], self.loss_mask[span]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @classmethod
    def from_sequences(
        cls, sequences: Iterable[tuple[Sequence[int], Sequence[bool]]]
    ) -> TokenDataset:
        """From (tokens, loss mask) pairs."""
        pairs = [(np.asarray(t, np.int32), np.asarray(m, bool)) for t, m in sequences]
        tokens = np.concatenate([t for t, _ in pairs]) if pairs else np.zeros(0, np.int32)
        mask = np.concatenate([m for _, m in pairs]) if pairs else np.zeros(0, bool)
        offsets = np.cumsum([0] + [len(t) for t, _ in pairs], dtype=np.int64)
        if tokens.size == 0 or (tokens.min() >= 0 and tokens.max() < 2**16):
            tokens = tokens.astype(np.uint16)
        return cls(tokens, offsets, mask)

    def take(self, index: np.ndarray, ends: np.ndarray | None = None) -> TokenDataset:
        """The sequences `index` (integers or a bool mask); `ends`: their new lengths (shorter or
        equal).
        """
        index = np.flatnonzero(index) if index.dtype == np.bool_ else index
        length = self.lengths[index] if ends is None else np.minimum(self.lengths[index], ends)
        offsets = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
        flat = np.arange(offsets[-1]) + np.repeat(self.offsets[index] - offsets[:-1], length)
        return TokenDataset(self.tokens[flat], offsets, self.loss_mask[flat])

    def usable(self) -> np.ndarray:
        """bool [n]: sequences with two consecutive supervised tokens, so with at least one
        anchor.
        """
        total = len(self.tokens)
        count = np.zeros(total + 1, np.int64)  # count[j]: pairs (t, t + 1) with t < j
        if total > 1:
            pair = self.loss_mask[:-1] & self.loss_mask[1:]
            bounds = self.offsets[(self.offsets > 0) & (self.offsets < total)]
            pair[bounds - 1] = False
            count[1:total] = np.cumsum(pair)
            count[total] = count[total - 1]
        return count[self.offsets[1:]] > count[self.offsets[:-1]]

    def truncated(self, max_length: int) -> TokenDataset:
        """Every sequence cut to its first `max_length` tokens."""
        if (self.lengths <= max_length).all():
            return self
        return self.take(np.arange(len(self)), np.full(len(self), max_length))

    def split(self, held_out: int, seed: int) -> tuple[TokenDataset, TokenDataset]:
        """(training, held-out) sequences; the choice depends on `seed` and the number of sequences
        alone.
        """
        if not 0 <= held_out < len(self):
            raise ValueError(
                f"split: held_out: got {held_out}, expected 0 <= held_out < {len(self)} sequences"
            )
        order = _rng(seed, 0xE7A1, 0).permutation(len(self))
        return self.take(np.sort(order[held_out:])), self.take(np.sort(order[:held_out]))

    def save(self, path: str | os.PathLike) -> None:
        """Write one .npz (temporary name, then renamed): tokens, offsets, loss_mask."""
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, tokens=self.tokens, offsets=self.offsets, loss_mask=self.loss_mask)

    @classmethod
    def load(cls, path: str | os.PathLike) -> TokenDataset:
        """Read .npz or .safetensors: `tokens`, `offsets`, and `loss_mask` or `prompt_lengths`.

        With `prompt_lengths` (int [n], also accepted as `prompt_lens`) every token of a sequence
        from that index on is supervised.
        """
        arrays = read_arrays(Path(path))
        for name in ("tokens", "offsets"):
            if name not in arrays:
                raise ValueError(f"TokenDataset: {name}: missing in {path}, expected an array")
        for name, array in arrays.items():  # a cast would cut the numbers and say nothing
            kinds = "biu" if name == "loss_mask" else "iu"
            if name in _ARRAYS and array.dtype.kind not in kinds:
                raise TypeError(
                    f"TokenDataset: {name}: got {array.dtype} in {path}, expected integers"
                )
        tokens, offsets = arrays["tokens"], arrays["offsets"].astype(np.int64)
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31:
            raise ValueError(
                f"TokenDataset: tokens: got {tokens.min()} to {tokens.max()} in {path}, expected "
                "token ids"
            )
        if tokens.dtype not in (np.uint16, np.int32):
            tokens = tokens.astype(np.int32)
        if "loss_mask" in arrays:
            mask = arrays["loss_mask"].astype(bool)
        else:
            prompts = arrays.get("prompt_lengths", arrays.get("prompt_lens"))
            if prompts is None:
                raise ValueError(
                    f"TokenDataset: loss_mask: missing in {path}, expected it or prompt_lengths"
                )
            if len(prompts) != len(offsets) - 1:
                raise ValueError(
                    f"TokenDataset: prompt_lengths: got {len(prompts)}, expected {len(offsets) - 1}"
                )
            lengths = np.diff(offsets)
            position = np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths)
            mask = position >= np.repeat(prompts.astype(np.int64), lengths)
        return cls(tokens, offsets, mask)


_ARRAYS = ("tokens", "offsets", "loss_mask", "prompt_lengths", "prompt_lens")


def concatenate(parts: Sequence[TokenDataset]) -> TokenDataset:
    """The sequences of several datasets, in order."""
    shift = np.cumsum([0] + [len(p.tokens) for p in parts])
    wide = any(p.tokens.dtype != np.uint16 for p in parts)
    return TokenDataset(
        np.concatenate([p.tokens.astype(np.int32 if wide else np.uint16) for p in parts]),
        np.concatenate([[0]] + [p.offsets[1:] + s for p, s in zip(parts, shift)]).astype(np.int64),
        np.concatenate([p.loss_mask for p in parts]),
    )


def load_any(path: str | os.PathLike, tokenizer: Any, max_length: int) -> TokenDataset:
    """A dataset from .npz / .safetensors arrays, .jsonl chats or a plain-text file (by its
    suffix).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"train: data: got {str(path)!r}, expected an existing file")
    if path.suffix in (".npz", ".safetensors"):
        return TokenDataset.load(path)
    if tokenizer is None:
        raise ValueError(f"train: data: got {path.name}, expected a tokenizer for text")
    if path.suffix == ".jsonl":
        return from_jsonl(path, tokenizer, max_length)
    return from_text(path.read_text(encoding="utf-8"), tokenizer, max_length)


def from_jsonl(path: str | os.PathLike, tokenizer: Any, max_length: int) -> TokenDataset:
    """Chats, one JSON object a line: `messages` (role, content), ShareGPT `conversations` (from,
    value), `prompt` + `response`, or `text` (every token supervised). Only assistant turns are
    supervised.
    """
    sequences = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{Path(path).name}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"from_jsonl: {where}: got no JSON ({error})") from error
            if isinstance(record, dict) and "text" in record:
                text = _string(record, "text", where)
                sequences += _text_sequences(text, tokenizer, max_length)
                continue
            ids, mask = tokenize_chat(_messages(record, where), tokenizer, where)
            sequences.append((ids[:max_length], mask[:max_length]))
    return TokenDataset.from_sequences(sequences)


def from_text(text: str, tokenizer: Any, max_length: int) -> TokenDataset:
    """Plain text in pieces of `max_length` tokens, every token supervised."""
    return TokenDataset.from_sequences(_text_sequences(text, tokenizer, max_length))


def tokenize_chat(
    messages: Sequence[dict[str, str]], tokenizer: Any, where: str = "chat"
) -> tuple[list[int], list[bool]]:
    """Token ids by the tokenizer's chat template and the mask of what the assistant itself would
    emit.

    An assistant turn is supervised from the end of the generation prompt to its end-of-sequence
    token; what the template adds after that (a newline, say) is never generated and so never a
    label. Ids after the last supervised token are dropped. The template must extend a conversation
    without rewriting what came before it.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _template(tokenizer, messages[:i], True)
        full = _template(tokenizer, messages[: i + 1], False)
        if prompt[: len(ids)] != ids or full[: len(prompt)] != prompt:
            raise ValueError(
                f"tokenize_chat: {where}: got a chat template that rewrites earlier turns, "
                "expected one that only appends"
            )
        end = len(full)
        if tokenizer.eos_token_id in full[len(prompt) :]:
            end -= full[::-1].index(tokenizer.eos_token_id)
        mask += [False] * (len(prompt) - len(ids)) + [True] * (end - len(prompt))
        ids = full[:end]
    return ids, mask


def trim_tails(data: TokenDataset, *, chunk: int = 2048) -> TokenDataset:
    """Cut every response that ends in a loop after one period of it (`evaluate.repetitive_tail`).

    A target stuck in a loop is trivially easy to draft for; left in, loops dominate the loss.
    """
    ends = data.lengths.copy()
    first = np.where(data.loss_mask, np.arange(len(data.tokens)), len(data.tokens))
    first = np.append(first, len(data.tokens))
    prompts = np.minimum.reduceat(first, data.offsets[:-1]) - data.offsets[:-1]
    order = np.argsort(ends, kind="stable")  # rows of a chunk are of like length
    for lo in range(0, len(order), chunk):
        rows = order[lo : lo + chunk]
        length = data.lengths[rows]
        width = int(length.max(initial=0))
        # Right-aligned, so that the last token is one column.
        column = np.arange(width) - (width - length)[:, None]
        ids = data.tokens[np.maximum(data.offsets[rows][:, None] + column, 0)].astype(np.int32)
        outside = column < prompts[rows][:, None]
        for period in range(1, min(MAX_PERIOD, width - 1) + 1):
            differs = (ids[:, period:] != ids[:, :-period]) | outside[:, :-period]
            run = np.where(differs.any(1), differs[:, ::-1].argmax(1), width - period)
            loop = run + period >= max(MIN_REPEATS * period, MIN_TAIL)
            ends[rows] = np.where(loop, np.minimum(ends[rows], length - run), ends[rows])
    return data.take(np.arange(len(data)), ends)


def overlaps(data: TokenDataset, evaluation: Iterable[Sequence[int]], n: int = 13) -> np.ndarray:
    """bool [n sequences]: shares a token n-gram with one of the evaluation prompts (by 64-bit
    hash).
    """
    known = [_ngram_hashes(np.asarray(e), n) for e in evaluation]
    known = np.unique(np.concatenate(known)) if known else np.zeros(0, np.uint64)
    hashes = _ngram_hashes(data.tokens, n)
    if not len(hashes) or not len(known):
        return np.zeros(len(data), bool)
    hit = np.zeros(len(data.tokens) + 1, np.int64)
    place = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    hit[1 : len(hashes) + 1] = known[place] == hashes
    hit = np.cumsum(hit)
    # An n-gram starting at t lies inside its sequence iff t <= end - n.
    last = np.maximum(data.offsets[1:] - n + 1, data.offsets[:-1])
    return hit[last] - hit[data.offsets[:-1]] > 0


@dataclass(frozen=True)
class Batch:
    """One training batch; B sequences, N blocks a sequence, S slots a block.

    tokens int64 [B, L] (right-padded with 0); anchors int64 [B, N] absolute positions, sorted, 0 in
    an unused block; inputs int64 [B, N, S]: the block's true tokens x_a .. x_{a+S-1} (teacher
    forcing); rows int64 [R]: flat indices into [B, N, S] of the slots that have a label; labels
    int64 [R]; weights float32 [R], normalised so that they add up to one; tokens_used: real tokens
    in the batch.
    """

    tokens: np.ndarray
    anchors: np.ndarray
    inputs: np.ndarray
    rows: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    tokens_used: int


def slot_weights(block_size: int, gamma: float, shift_label: bool) -> np.ndarray:
    """float64 [S]: exp(-max(k - o, 0) / gamma) with o = 0 (shift) or 1 (no shift; slot 0 weighs
    0).
    """
    k = np.arange(block_size)
    first = 0 if shift_label else 1
    weights = np.exp(-np.maximum(k - first, 0) / gamma)
    weights[:first] = 0.0
    return weights


def block_labels(
    tokens: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
    anchors: np.ndarray,
    valid: np.ndarray,
    block_size: int,
    shift_label: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Teacher-forcing inputs, labels and which slots have one, each [B, N, S].

    Slot k is labelled with x_{a+k+1} (shift) or x_{a+k} (no shift; slot 0 has none). A slot whose
    label lies past the end of the sequence or is not supervised has none (its label reads 0).
    """
    position = anchors[:, :, None] + np.arange(block_size)
    row = np.arange(len(tokens))[:, None, None]
    inside = position < lengths[:, None, None]
    inputs = np.where(inside, tokens[row, np.minimum(position, tokens.shape[1] - 1)], 0)
    target = position + 1 if shift_label else position
    clipped = np.minimum(target, tokens.shape[1] - 1)
    has = (target < lengths[:, None, None]) & mask[row, clipped] & valid[:, :, None]
    if not shift_label:
        has[:, :, 0] = False
    return inputs, np.where(has, tokens[row, clipped], 0), has


class BatchSampler:
    """Batches of a dataset, by step number.

    Sequences come in a new random order every epoch; anchors are uniform without replacement among
    the positions t with t and t + 1 supervised, sorted, at most `num_anchors` a sequence. Without
    `shuffle` they come once, in order: what fills the last batch up has no label.
    """

    def __init__(
        self,
        data: TokenDataset,
        *,
        batch_size: int,
        seq_len: int,
        num_anchors: int,
        block_size: int,
        gamma: float,
        shift_label: bool,
        seed: int,
        shuffle: bool = True,
    ):
        data = data.truncated(seq_len)
        self.data = data.take(data.usable())
        if len(self.data) == 0:
            raise ValueError(
                "BatchSampler: data: got no sequence with two consecutive supervised tokens within "
                f"{seq_len} tokens, expected at least 1"
            )
        for name, value in (
            ("batch_size", batch_size), ("num_anchors", num_anchors), ("seq_len", seq_len - 1),
        ):  # fmt: skip
            if value < 1:
                raise ValueError(f"BatchSampler: {name}: got {value}, expected at least 1")
        self.batch_size, self.seq_len, self.num_anchors = batch_size, seq_len, num_anchors
        self.block_size, self.shift_label, self.seed = block_size, shift_label, seed
        self.shuffle = shuffle
        self.slot_weights = slot_weights(block_size, gamma, shift_label)
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def sequences(self, step: int) -> np.ndarray:
        """Indices of the batch's sequences."""
        flat = step * self.batch_size + np.arange(self.batch_size)
        if not self.shuffle:
            return flat % len(self.data)
        out = np.empty(self.batch_size, np.int64)
        epochs = flat // len(self.data)
        for epoch in np.unique(epochs):
            if self._order[0] != epoch:
                order = _rng(self.seed, 0x0DE7, int(epoch)).permutation(len(self.data))
                self._order = (int(epoch), order)
            here = epochs == epoch
            out[here] = self._order[1][flat[here] % len(self.data)]
        return out

    def batch(self, step: int) -> Batch:
        index = self.sequences(step)
        data, width, count = self.data, self.seq_len, self.num_anchors
        lengths = data.lengths[index]
        column = np.arange(width)
        inside = column < lengths[:, None]
        flat = np.where(inside, data.offsets[index][:, None] + column, 0)
        tokens = np.where(inside, data.tokens[flat], 0).astype(np.int64)
        mask = inside & data.loss_mask[flat]
        if not self.shuffle:
            mask[len(data) - min(step * self.batch_size, len(data)) :] = False
        eligible = np.zeros_like(mask)
        eligible[:, :-1] = mask[:, :-1] & mask[:, 1:]
        key = _rng(self.seed, 0xA9C4, step).random(tokens.shape, dtype=np.float32)
        key[~eligible] = 2.0
        if count < width:
            chosen = np.argpartition(key, count - 1, axis=1)[:, :count]
        else:
            chosen = np.broadcast_to(column, key.shape)
        picked = np.take_along_axis(key, chosen, 1) < 2.0
        anchors = np.sort(np.where(picked, chosen, width), axis=1)
        valid = anchors < width
        anchors = np.where(valid, anchors, 0)
        if count > width:
            pad = ((0, 0), (0, count - width))
            anchors, valid = np.pad(anchors, pad), np.pad(valid, pad)
        inputs, labels, has = block_labels(
            tokens, mask, lengths, anchors, valid, self.block_size, self.shift_label
        )
        rows = np.flatnonzero(has)
        weights = self.slot_weights[rows % self.block_size]
        return Batch(
            tokens=tokens,
            anchors=anchors.astype(np.int64),
            inputs=inputs,
            rows=rows,
            labels=labels.reshape(-1)[rows],
            weights=(weights / (weights.sum() + 1e-6)).astype(np.float32),
            tokens_used=int(lengths.sum()),
        )


def _rng(seed: int, purpose: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, purpose, index])))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        damage: tuple[type[Exception], ...] = (SafetensorError, ValueError)
    else:
        damage = (zipfile.BadZipFile, zlib.error, ValueError, EOFError)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except damage as error:
        raise ValueError(f"TokenDataset: {path}: got a damaged file ({error})") from error


def _messages(record: Any, where: str) -> list[dict[str, str]]:
    if isinstance(record, dict) and "messages" in record:
        return [
            {"role": _string(m, "role", where), "content": _string(m, "content", where)}
            for m in _turns(record, "messages", where)
        ]
    if isinstance(record, dict) and "conversations" in record:
        roles = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
                 "system": "system"}  # fmt: skip
        turns = _turns(record, "conversations", where)
        for turn in turns:
            if _string(turn, "from", where) not in roles:
                raise ValueError(
                    f"from_jsonl: {where}: got speaker {turn['from']!r}, expected one of "
                    f"{sorted(roles)}"
                )
        return [{"role": roles[t["from"]], "content": _string(t, "value", where)} for t in turns]
    if isinstance(record, dict) and "prompt" in record and "response" in record:
        return [
            {"role": "user", "content": _string(record, "prompt", where)},
            {"role": "assistant", "content": _string(record, "response", where)},
        ]
    raise ValueError(
        f"from_jsonl: {where}: got {type(record).__name__} without messages, conversations, "
        "prompt + response or text, expected one of them"
    )


def _turns(record: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    turns = record[name]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"from_jsonl: {where}: {name}: got {turns!r}, expected a list of objects")
    return turns


def _string(record: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(record.get(name), str):
        raise ValueError(
            f"from_jsonl: {where}: {name}: got {record.get(name)!r}, expected a string"
        )
    return record[name]


def _template(tokenizer: Any, messages: Sequence[dict], generation_prompt: bool) -> list[int]:
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=generation_prompt
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _text_sequences(text: str, tokenizer: Any, max_length: int):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [ids[i : i + max_length] for i in range(0, len(ids), max_length)]
    return [(p, [True] * len(p)) for p in pieces]


def _ngram_hashes(tokens: np.ndarray, n: int) -> np.ndarray:
    """uint64 hash of every n-gram of a flat array (polynomial, modulo 2^64, then mixed)."""
    if len(tokens) < n:
        return np.zeros(0, np.uint64)
    count = len(tokens) - n + 1
    hashes = np.zeros(count, np.uint64)
    with np.errstate(over="ignore"):
        for i in range(n):
            hashes *= np.uint64(0x9E3779B97F4A7C15)
            hashes += tokens[i : i + count].astype(np.uint64) + np.uint64(0x632BE59BD9B4E019)
            hashes ^= hashes >> np.uint64(29)
    return hashes
