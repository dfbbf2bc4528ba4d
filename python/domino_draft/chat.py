"""A conversation: turns, the answer to the next one, what it took. The terminal is `cli.py`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .decode import Stats, follow
from .engine import Engine
from .loading import TextStream
from .requests import seed_bits
from .smollm2 import chat_prompt

if TYPE_CHECKING:
    from .drafter import Drafter
    from .target import Target


class Chat:
    """Turns in the tokenizer's chat template; every answer sees all turns before it.

    One engine serves the answers, so that what it has captured and learned is not made anew for
    each. Its caches grow with the conversation, by doubling. One answer at a time: asking for
    another ends it, and it is forgotten.

    thinking: see `chat_text`. law: filters, penalties and biases of `Engine.add`.

    Attributes:
        turns: {"role", "content"} so far; without a system turn the template adds its own, if any.
        stats: of the last answer. context: tokens that it was an answer to.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        max_new_tokens: int,
        system: str | None = None,
        seed: int = 0,
        num_drafts: int | str | None = None,
        thinking: bool | None = None,
        **law,
    ):
        self.target, self.drafter, self.system = target, drafter, system
        self.thinking = thinking
        self.max_new_tokens = max_new_tokens
        self.law = law
        self.num_drafts, self._seed = num_drafts, seed
        self._engine: Engine | None = None
        self._request = -1
        self.stats, self.context = Stats(), 0
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system's."""
        self.turns = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the answer to a user's turn, as they are decoded.

        An answer that is broken off (the iterator is closed) stays in the turns as far as it came.

        Raises:
            ValueError: the conversation and max_new_tokens do not fit the target; the turn is not
                taken.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        ids = chat_prompt(self.target.tokenizer, turns, self.thinking)
        self.stats, self.context = Stats(accepted=[[]]), len(ids)
        engine = self._engine_for(len(ids) + self.max_new_tokens)
        engine.cancel(self._request)
        # Two equal turns are not to get one and the same answer: each has noise of its own.
        seed = self._seed + sum(turn["role"] == "assistant" for turn in turns)
        self._request = engine.add(ids, self.max_new_tokens, seed=seed_bits(seed), **self.law)
        return self._answer(turns, engine, self._request)

    def _engine_for(self, length: int) -> Engine:
        if self._engine is None or length > self._engine.max_length:
            self._engine = None  # its caches, before the next ones
            limit = self.target.max_length
            room = max(2 * length, 1024)
            self._engine = Engine(
                self.target,
                self.drafter,
                max_batch=1,
                max_length=room if limit is None else min(room, limit),
                num_drafts=self.num_drafts,
            )
        return self._engine

    def _answer(self, turns, engine: Engine, request: int) -> Iterator[str]:
        shown, said = TextStream(self.target.tokenizer), ""
        try:
            for chunk in follow(engine, self.stats, {request: 0}):
                if chunk.error is not None:
                    raise chunk.error
                piece = shown.push(chunk.tokens, last=chunk.finish is not None)
                said += piece
                if piece:
                    yield piece
        except GeneratorExit:
            engine.cancel(request)
            raise
        except BaseException:  # Ctrl-C may have come anywhere in a step
            self._engine = None
            raise
        finally:
            if request == self._request:
                self.turns = [*turns, {"role": "assistant", "content": said}]
