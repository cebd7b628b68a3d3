"""A request's body to the prompt as routing sees it."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from kvroute.prompt.hashing import chain, chain_bytes, root_hash
from kvroute.prompt.template import ChatTemplate, TemplateError
from kvroute.prompt.tokenizer import Tokenizer
from kvroute.prompt.types import Grade, Prompt


class PromptKind(StrEnum):
    """Where in the body the prompt is."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    OTHER = "other"
    """On a route whose bodies are not read."""


# An enumeration's members are slow to reach by name, and these are looked at in every request.
_CHAT, _COMPLETIONS = PromptKind.CHAT, PromptKind.COMPLETIONS


class _Unreadable(Exception):
    """The body is not as its route demands. The engine will say so; routing does without."""


Body = Mapping[str, object]


class PromptReader:
    """Reads prompts for one model. Pure, thread-safe, and never raises: a body that it cannot read has grade NONE."""

    def __init__(
        self,
        *,
        block_tokens: int = 64,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | None = None,
        bytes_per_token: float = 4.0,
    ) -> None:
        """`bytes_per_token`: UTF-8 bytes that a token stands for on average, where there is no tokenizer to count."""
        self.block_tokens = block_tokens
        self.tokenizer = tokenizer
        self._template = template
        self._bytes_per_token = bytes_per_token
        self._block_bytes = max(1, round(block_tokens * bytes_per_token))

    def read(self, kind: PromptKind, model: str, body: Body) -> Prompt:
        """The prompt in `body`, a JSON object, for the model of that name."""
        try:
            salt = body.get("cache_salt")
            root = root_hash(model, cache_salt=salt if isinstance(salt, str) else "")
            if kind is _CHAT:
                return self._read_chat(root, body)
            if kind is _COMPLETIONS:
                return self._read_completion(root, body)
        except (_Unreadable, RecursionError):
            pass
        return Prompt(0, (), self.block_tokens, Grade.NONE)

    def _read_chat(self, root: int, body: Body) -> Prompt:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise _Unreadable
        # Engines ignore a request's own template unless told to trust it, so what they will render is not known.
        if self.tokenizer is not None and self._template is not None and body.get("chat_template") is None:
            prepared = _prepare(messages, self._template.takes_parts)
            if prepared is not None:
                try:
                    text = self._render(self._template, prepared, body)
                except TemplateError:
                    # The engine's template is this one, so it will refuse as well; but let it say so.
                    return self._of_text(root, _chat_bytes(messages, body))
                tokens = self.tokenizer.encode(text, add_special_tokens=body.get("add_special_tokens") is True)
                return self._of_tokens(root, tokens, len(tokens))
        return self._of_text(root, _chat_bytes(messages, body))

    @staticmethod
    def _render(template: ChatTemplate, messages: list[Body], body: Body) -> str:
        tools = body.get("tools")
        documents = body.get("documents")
        extra = body.get("chat_template_kwargs")
        variables: dict[str, object] = dict(extra) if isinstance(extra, dict) else {}
        effort = body.get("reasoning_effort")
        if effort is not None:
            variables.setdefault("reasoning_effort", effort)
            variables.setdefault("enable_thinking", effort != "none")
        continue_final = body.get("continue_final_message") is True
        text = template.render(
            messages,
            tools=tools if isinstance(tools, list) and tools else None,
            documents=documents if isinstance(documents, list) else None,
            add_generation_prompt=body.get("add_generation_prompt") is not False and not continue_final,
            extra=variables,
        )
        if continue_final:
            # As transformers does: the text ends where the last message's content does.
            last = messages[-1].get("content")
            if isinstance(last, str) and last.strip():
                end = text.rfind(last.strip())
                if end >= 0:
                    text = text[: end + len(last.strip())]
        return text

    def _read_completion(self, root: int, body: Body) -> Prompt:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return self._of_completion_text(root, prompt, body)
        if not isinstance(prompt, list) or not prompt:
            raise _Unreadable
        if all(isinstance(each, str) for each in prompt):
            first = self._of_completion_text(root, prompt[0], body)
            more = sum(len(each) for each in prompt[1:]) / self._bytes_per_token
            return msgspec.structs.replace(first, tokens=first.tokens + int(more))
        if all(isinstance(each, list) and each for each in prompt):
            return self._of_tokens(root, prompt[0], sum(map(len, prompt)))
        return self._of_tokens(root, prompt, len(prompt))

    def _of_completion_text(self, root: int, text: str, body: Body) -> Prompt:
        if self.tokenizer is None:
            return self._of_text(root, text.encode("utf-8", "replace"))
        tokens = self.tokenizer.encode(text, add_special_tokens=body.get("add_special_tokens") is not False)
        return self._of_tokens(root, tokens, len(tokens))

    def _of_tokens(self, root: int, tokens: Sequence[object], total: int) -> Prompt:
        try:
            hashes = chain(root, tokens, self.block_tokens)  # type: ignore[arg-type]  # array() checks each one
        except (TypeError, OverflowError):
            raise _Unreadable from None
        return Prompt(total, hashes, self.block_tokens, Grade.TOKENS)

    def _of_text(self, root: int, data: bytes) -> Prompt:
        hashes = chain_bytes(root, data, self._block_bytes)
        return Prompt(max(1, round(len(data) / self._bytes_per_token)), hashes, self.block_tokens, Grade.TEXT)


def _prepare(messages: list[Body], takes_parts: bool) -> list[Body] | None:
    """The messages as an engine hands them to the template; None when a part is not text, since what the engine makes
    of an image is not known here."""
    prepared: list[Body] = []
    for message in messages:
        changes: dict[str, object] = {}
        content = message.get("content")
        if isinstance(content, list):
            texts = []
            for part in content:
                text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
                if not isinstance(text, str) or (isinstance(part, dict) and part.get("type") not in _TEXT_PARTS):
                    return None
                texts.append(text)
            changes["content"] = [{"type": "text", "text": text} for text in texts] if takes_parts else "\n".join(texts)
        elif isinstance(content, str) and takes_parts:
            changes["content"] = [{"type": "text", "text": content}]
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            changes["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        prepared.append({**message, **changes} if changes else message)
    return prepared


_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


def _with_parsed_arguments(call: object) -> object:
    """Templates expect a tool call's arguments as an object; the API carries them as JSON text. vLLM parses them."""
    if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = msgspec.json.decode(arguments or "{}")
            except (msgspec.DecodeError, RecursionError):
                return call
            return {**call, "function": {**function, "arguments": parsed}}
    return call


def _chat_bytes(messages: list[Body], body: Body) -> bytes:
    """A canonical form of a conversation that only grows at its end when the conversation does.

    Tools and template variables stand first, as in most templates. A plain message is its role, name and text with
    separators that JSON text cannot hold unescaped; whatever else a message has follows as JSON.
    """
    ahead = (body.get(key) for key in ("tools", "documents", "chat_template", "chat_template_kwargs"))
    parts = [b"\x01" + _json(value) for value in ahead if value is not None]
    for message in messages:
        content = message.get("content")
        parts += (b"\x02", _plain(message.get("role")), b"\x03")
        parts.append(content.encode("utf-8", "replace") if isinstance(content, str) else _json(content))
        rest = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
        if rest:
            parts += (b"\x04", _json(rest))
    return b"".join(parts)


def _plain(value: object) -> bytes:
    return value.encode("utf-8", "replace") if isinstance(value, str) else _json(value)


def _json(value: object) -> bytes:
    try:
        return msgspec.json.encode(value, order="sorted")
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError):
        # Lone surrogates, overlong integers: anything that comes out the same every time will do.
        return repr(value).encode("utf-8", "backslashreplace")
