"""A request's body to token ids, as the engine's API server does it."""

import contextlib
import json
from array import array
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as RawTokenizer

from kvroute.prompt.template import ChatTemplate, TemplateError
from kvroute.prompt.tokenizer import Tokenizer
from kvroute.simulator import errors
from kvroute.simulator.errors import Json
from kvroute.simulator.words import WORDS

MODEL_FOLDER = Path(__file__).parent / "model"


class Prompts:
    """The small model's tokenizer and chat template. Thread-safe."""

    def __init__(self) -> None:
        raw = RawTokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
        settings = json.loads((MODEL_FOLDER / "tokenizer_config.json").read_text("utf-8"))
        self._raw = raw
        self._tokenizer = Tokenizer(raw)
        self._template = ChatTemplate(settings["chat_template"], {"eos_token": settings["eos_token"]})
        self.vocabulary: Sequence[int] = [raw.encode(" " + word).ids[0] for word in WORDS]
        """What answers consist of: words, each with the space before it. A text of them has these tokens again when it
        comes back in a conversation."""
        self._size = raw.get_vocab_size()

    def read_chat(self, body: Json) -> list[int]:
        """Token ids of `body["messages"]`, for /v1/chat/completions. Raises Refusal."""
        messages = [_prepared(position, each) for position, each in enumerate(_messages(body))]
        tools, extra = body.get("tools"), body.get("chat_template_kwargs")
        try:
            text = self._template.render(
                messages,
                tools=tools if isinstance(tools, list) and tools else None,
                add_generation_prompt=body.get("add_generation_prompt") is not False,
                extra=extra if isinstance(extra, dict) else None,
            )
        except TemplateError as error:
            raise errors.bad_messages(str(error)) from error
        return self._tokenizer.encode(text, add_special_tokens=body.get("add_special_tokens") is True)

    def read_completion(self, body: Json) -> list[int]:
        """Token ids of `body["prompt"]`, for /v1/completions: text, ids, or a list of one of these. Raises Refusal."""
        prompt = body.get("prompt")
        if prompt is None:
            raise errors.missing("prompt", body)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            return self._tokenizer.encode(prompt, add_special_tokens=body.get("add_special_tokens") is not False)
        if isinstance(prompt, list) and prompt and _is_token_ids(prompt):
            return prompt
        # Several prompts in one request are beyond this engine.
        raise errors.invalid("prompt_type", "prompt", "Input should be one text or one list of token ids", prompt)

    def text(self, tokens: Sequence[int]) -> str:
        """Of any ids; unknown ones have none."""
        return self._raw.decode([each for each in tokens if each < self._size], skip_special_tokens=False)


def _messages(body: Json) -> list[object]:
    messages = body.get("messages")
    if messages is None:
        raise errors.missing("messages", body)
    if not isinstance(messages, list):
        raise errors.invalid("list_type", "messages", "Input should be a valid list", messages)
    if not messages:
        raise errors.bad_messages("Please provide at least one message.")
    return messages


def _prepared(position: int, message: object) -> Json:
    """The message as the template takes it: content as text, a call's arguments as an object."""
    if not isinstance(message, dict):
        raise errors.invalid("dict_type", f"messages.{position}", "Input should be a valid dictionary", message)
    if not isinstance(message.get("role"), str):
        raise errors.missing(f"messages.{position}.role", message)
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "\n".join(text for text in texts if isinstance(text, str))
    elif content is not None and not isinstance(content, str):
        where = f"messages.{position}.content"
        raise errors.invalid("string_type", where, "Input should be a valid string", content)
    calls = message.get("tool_calls")
    prepared = [_call(each) for each in calls] if isinstance(calls, list) else []
    return {**message, "content": content, "tool_calls": prepared}


def _call(call: object) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {"function": {}}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {"function": {**function, "arguments": arguments}}


def _is_token_ids(prompt: list[object]) -> bool:
    try:
        array("I", prompt)  # type: ignore[type-var]  # it checks each one
    except (TypeError, OverflowError):
        return False
    return True
