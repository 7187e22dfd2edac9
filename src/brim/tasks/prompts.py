"""How a question becomes the text that a language model reads."""

from __future__ import annotations

from typing import Any

from brim.errors import RequestError
from brim.settings.caller import named, switched_off
from brim.tasks.base import TaskSettings

__all__ = ["PromptWriter"]


class PromptWriter:
    """Puts prompts into the model's chat template, where it has one and the settings do not say otherwise."""

    def __init__(self, tokenizer: Any, processor: Any, settings: TaskSettings) -> None:
        self._tokenizer = tokenizer
        self._processor = processor
        self._settings = settings
        holder = processor if processor is not None else tokenizer
        has_template = getattr(holder, "chat_template", None) is not None
        self.chat = has_template if settings.chat is None else settings.chat
        if self.chat and not has_template:
            raise RequestError(
                f"{named('chat')}: the model has no chat template; leave it out, and prompts are read as they are"
            )

    def text(self, prompt: str, *, images: int = 0) -> str:
        """The prompt as the model reads it, with a placeholder for every image."""
        if self.chat:
            return self._templated(self._messages(prompt, images))
        if self._settings.system:
            prompt = f"{self._settings.system}\n\n{prompt}"
        return self._image_places(images) + prompt

    def _templated(self, messages: list[dict[str, Any]]) -> str:
        holder = self._processor if self._processor is not None else self._tokenizer
        try:
            written: str = holder.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs, and some refuse a system prompt
            asked = f"{named('system')}: " if self._settings.system else ""
            raise RequestError(
                f"{asked}the model's chat template refuses ({error}); leave it out with {switched_off('chat')}"
            ) from error
        return written

    def _messages(self, prompt: str, images: int) -> list[dict[str, Any]]:
        content: Any = prompt
        if self._processor is not None:
            content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self._settings.system:
            system: Any = self._settings.system
            system = system if self._processor is None else [{"type": "text", "text": system}]
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def _image_places(self, images: int) -> str:
        token = getattr(self._processor, "image_token", None) or getattr(self._tokenizer, "image_token", None)
        return f"{token}\n" * images if images and isinstance(token, str) else ""

    def token_ids(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text; texts from a chat template contain their special tokens already."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=not self.chat)["input_ids"]
        return ids
