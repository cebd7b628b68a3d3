"""Chat templates, rendered as vLLM and SGLang render them: through the Jinja environment of transformers.

The template comes with the model and is code, so it runs in Jinja's immutable sandbox.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(Exception):
    """A template that does not compile, or that refuses or fails on these messages."""


class _Generation(Extension):
    """transformers' `{% generation %}` block, which marks the assistant's tokens for training: here, its content."""

    tags = {"generation"}  # noqa: RUF012  (declared without ClassVar by jinja2)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it escapes nothing for HTML, and keeps characters beyond ASCII as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: names such as bos_token and eos_token that the template may use. Raises TemplateError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            syntax = environment.parse(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens or {})
        self.takes_parts = _iterates_content(syntax)
        """Whether the template goes through a message's content parts itself (vLLM's content format "openai"); else
        they are joined to a string before it sees them."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        documents: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text. `extra`: chat_template_kwargs. Raises TemplateError."""
        variables: dict[str, object] = {**self._special_tokens, **(extra or {})}
        variables |= {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except RecursionError as error:
            raise TemplateError("the messages are nested too deeply") from error
        except Exception as error:
            # Whatever the template's code raises on unexpected input: KeyError, TypeError, its own raise_exception.
            raise TemplateError(f"the chat template failed: {error}") from error


def _iterates_content(template: nodes.Template) -> bool:
    """Whether some loop runs over `message.content` or `message['content']`, vLLM's test for its "auto" format."""
    for loop in template.find_all(nodes.For):
        target = loop.iter
        if isinstance(target, nodes.Getattr) and target.attr == "content":
            return True
        if isinstance(target, nodes.Getitem) and isinstance(target.arg, nodes.Const) and target.arg.value == "content":
            return True
    return False
