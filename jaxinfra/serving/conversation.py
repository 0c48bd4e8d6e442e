"""A dialogue with a model, whose engine caches the keys and values of earlier messages."""

import dataclasses
from collections.abc import Iterator
from typing import final

import jax

from jaxinfra.data.chat_template import ChatTemplate
from jaxinfra.serving.engine.engine import Engine
from jaxinfra.serving.engine.options import options_on
from jaxinfra.serving.engine.requests import EndReason
from jaxinfra.serving.generate import request_of
from jaxinfra.serving.load import LoadedModel
from jaxinfra.serving.sampling import SamplingConfig


@final
class Conversation:
    """A dialogue with a model, where each message computes only its new tokens. The model's weights
    belong to the dialogue afterwards.

    Args:
        template: chat template that renders messages; None: the dialogue is one text that the model
            continues.
        system: system message at the start of the conversation.
        context: most tokens that the conversation may have.
    """

    def __init__(
        self,
        model: LoadedModel,
        template: ChatTemplate | None,
        *,
        sampling: SamplingConfig,
        max_new_tokens: int = 512,
        seed: int = 0,
        system: str | None = None,
        context: int = 8192,
    ):
        self._model, self._template = model, template
        self._settings = {"sampling": sampling, "max_new_tokens": max_new_tokens, "seed": seed}
        self._system = system
        options = dataclasses.replace(
            options_on(jax.default_backend()), max_running=1, max_context=context
        )
        self._engine = Engine.of(model, options=options, consumes=True)
        self.messages: list[dict[str, str]] = []
        self.num_cached = 0  # of the last prompt's tokens: not computed again
        self.end: EndReason | None = None  # why the last answer ended
        self.forget()

    def forget(self) -> None:
        """Clears the conversation, except for its system message."""
        self.messages = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def ask(self, text: str) -> Iterator[str]:
        """Adds a message, and yields the model's answer in pieces as tokens are sampled.

        Raises:
            DataError: the conversation has become longer than the context.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            number = self._engine.submit(
                request_of(self._model, self._prompt(), **self._settings)  # pyrefly: ignore
            )
        except Exception:
            self.messages.pop()  # the message was not taken
            raise
        return self._answer(number)

    def _prompt(self) -> list[int]:
        if self._template is not None:
            return self._template.encode(self._model.tokenizer, self.messages)
        return self._model.prompt("".join(each["content"] for each in self.messages))

    def _answer(self, number: int) -> Iterator[str]:
        pieces: list[str] = []
        try:
            while self._engine.is_busy:
                for progress in self._engine.step():
                    if progress.text:
                        pieces.append(progress.text)
                        yield progress.text
                    if progress.end is not None:
                        self.num_cached, self.end = progress.num_cached, progress.end
        finally:
            self._engine.cancel(number)  # where nobody wants the rest
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
