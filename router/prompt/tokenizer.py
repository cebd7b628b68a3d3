"""Text to token ids, with the model's own tokenizer."""

from pathlib import Path

import tokenizers


class PromptSetupError(Exception):
    """A model folder from which no tokenizer or template can be had; the text names the file and the reason."""


class Tokenizer:
    """A Hugging Face tokenizer.json. Thread-safe, and lets other threads run while it works."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Raises PromptSetupError."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:
            # The library raises bare Exception, for a missing file as for a malformed one.
            raise PromptSetupError(f"{path}: not a readable tokenizer: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Lone surrogates, which JSON can carry, have no UTF-8 form.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = self._tokenizer.encode(clean, add_special_tokens=add_special_tokens).ids
        return ids
