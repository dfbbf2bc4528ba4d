"""A conversation: turns, the answer to the next one, what it took. The terminal is `cli.py`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .decode import Stats, stream
from .loading import TextStream
from .smollm2 import chat_prompt

if TYPE_CHECKING:
    from .drafter import Drafter
    from .target import Target


class Chat:
    """Turns in the tokenizer's chat template; every answer sees all turns before it.

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
        temperature: float = 0.0,
        seed: int = 0,
        num_drafts: int | None = None,
    ):
        self.target, self.drafter, self.system = target, drafter, system
        self.settings = dict(
            max_new_tokens=max_new_tokens, temperature=temperature, num_drafts=num_drafts
        )
        self._seed = seed
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
        ids = chat_prompt(self.target.tokenizer, turns)
        self.stats, self.context = Stats(), len(ids)
        # Two equal turns are not to get one and the same answer: each has noise of its own.
        seed = self._seed + sum(turn["role"] == "assistant" for turn in turns)
        chunks = stream(
            self.target, self.drafter, [ids], seed=seed, stats=self.stats, **self.settings
        )
        return self._answer(turns, chunks)

    def _answer(self, turns, chunks) -> Iterator[str]:
        shown, said = TextStream(self.target.tokenizer), ""
        try:
            for chunk in chunks:
                piece = shown.push(chunk.tokens, last=chunk.finish is not None)
                said += piece
                if piece:
                    yield piece
        finally:
            self.turns = [*turns, {"role": "assistant", "content": said}]
