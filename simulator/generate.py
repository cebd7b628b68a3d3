"""The two generating routes of a simulated engine."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kvroute.simulator import answers, errors
from kvroute.simulator.answers import Style
from kvroute.simulator.engine import Engine, Generation
from kvroute.simulator.errors import Json
from kvroute.simulator.faults import Cut, Fault, FaultKind, disconnected
from kvroute.simulator.prompts import Prompts

COMPLETION_TOKENS = 16
"""What /v1/completions generates when the body does not say; vLLM's default."""
CHAT_TOKENS = 32
"""Length of a chat's answer when the body sets no limit: then it ends by itself, with finish_reason "stop". A limit is
always used up, as if with ignore_eos, so that the client decides how long a request runs."""
INLINE_BYTES = 16_384
"""Bodies up to this size are tokenized where they are: a thread would take longer."""


def json_object(raw: bytes) -> Json:
    """The body. Raises Refusal."""
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        raise errors.bad_json(error.pos, error.msg) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise errors.bad_json(0, str(error)) from error
    if not isinstance(body, dict):
        raise errors.invalid("dict_type", "", "Input should be a valid dictionary", body)
    return body


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is fit to run."""

    generation: Generation
    style: Style
    calls: Sequence[Json]
    """Tool calls that are the answer, instead of the text."""
    finish: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    cut_after: int | None
    """The connection is to be cut after so many pieces."""


class Generate:
    """An ASGI application of its own, so that it hears at once when the client leaves."""

    def __init__(self, engine: Engine, prompts: Prompts, *, model: str, max_model_len: int, chat: bool) -> None:
        """`max_model_len`: tokens of prompt and answer together."""
        self._engine = engine
        self._prompts = prompts
        self._model = model
        self._room = min(max_model_len, engine.cache.capacity_blocks * engine.cache.block_tokens)
        self._chat = chat
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        # From here on receive() tells of nothing but the disconnect.
        gone = asyncio.create_task(disconnected(receive))
        work = asyncio.create_task(self._serve(raw, scope["state"]["fault"], send))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _serve(self, raw: bytes, fault: Fault, send: Send) -> None:
        if len(raw) > INLINE_BYTES:
            asked = await asyncio.to_thread(self._read, raw, fault)
        else:
            asked = self._read(raw, fault)
        self._engine.start(asked.generation)
        try:
            if asked.stream:
                await self._stream(asked, send)
            else:
                await self._whole(asked, send)
        finally:
            self._engine.leave(asked.generation)

    def _read(self, raw: bytes, fault: Fault) -> Asked:
        """Runs in any thread. Raises Refusal."""
        body = json_object(raw)
        prompt = self._prompts.read_chat(body) if self._chat else self._prompts.read_completion(body)
        model = body.get("model")
        if model is not None and model != self._model:
            raise errors.unknown_model(str(model), self._model)
        limit = self._answer_limit(body, len(prompt))
        default = min(CHAT_TOKENS if self._chat else COMPLETION_TOKENS, self._room - len(prompt))
        salt = body.get("cache_salt")
        calls = self._tool_calls(body)
        stops = self._chat and limit is None
        generation = self._engine.prepare(
            prompt,
            default if limit is None else limit,
            cache_salt=salt if isinstance(salt, str) else "",
            stops=stops or bool(calls),
            slowdown=fault.factor if fault.kind is FaultKind.SLOW else 1.0,
        )
        options = body.get("stream_options")
        options = options if isinstance(options, dict) else {}
        include_usage = options.get("include_usage") is True
        return Asked(
            generation=generation,
            style=Style(next(self._numbers), self._model, chat=self._chat),
            calls=calls,
            finish="tool_calls" if calls else "stop" if stops else "length",
            stream=body.get("stream") is True,
            include_usage=include_usage,
            continuous_usage=include_usage and options.get("continuous_usage_stats") is True,
            cut_after=fault.after_chunks if fault.kind is FaultKind.DROP_MID_STREAM else None,
        )

    def _answer_limit(self, body: Json, prompt_tokens: int) -> int | None:
        """Tokens that the body asks for, as far as there is room."""
        given = body.get("max_completion_tokens")
        if given is None:
            given = body.get("max_tokens")
        if given is not None and type(given) is not int:
            raise errors.invalid("int_type", "max_tokens", "Input should be a valid integer", given)
        if prompt_tokens >= self._room:
            raise errors.too_long(self._room)
        if given is None:
            return None
        if given < 1:
            raise errors.bad_max_tokens(given)
        return min(given, self._room - prompt_tokens)

    def _tool_calls(self, body: Json) -> list[Json]:
        """The first of `tools` is called, without arguments, when the last message is a user's with "tool" in it. A
        result that has come back is answered with text."""
        tools, messages = body.get("tools"), body.get("messages")
        if not self._chat or not isinstance(tools, list) or not tools or body.get("tool_choice") == "none":
            return []
        assert isinstance(messages, list)
        last = messages[-1]
        if last["role"] != "user" or "tool" not in str(last.get("content")).lower():
            return []
        function = tools[0].get("function") if isinstance(tools[0], dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise errors.missing("tools.0.function.name", body)
        return [answers.tool_call(0, name)]

    def _usage(self, generation: Generation, completion_tokens: int) -> Json:
        prompt = generation.job.prompt_tokens
        size = self._engine.cache.block_tokens
        created = max(0, prompt // size * size - generation.cached_tokens) if self._chat else None
        return answers.usage(prompt, completion_tokens, generation.cached_tokens, created)

    async def _whole(self, asked: Asked, send: Send) -> None:
        text = ""
        count = 0
        async for piece in asked.generation.pieces():
            text += self._prompts.text(piece)
            count += len(piece)
        used = self._usage(asked.generation, count)
        answer = asked.style.whole(text, asked.calls, asked.finish, used)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if asked.cut_after is not None:
            await send({"type": "http.response.body", "body": answer[: len(answer) // 2], "more_body": True})
            raise Cut
        await send({"type": "http.response.body", "body": answer})

    async def _stream(self, asked: Asked, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        total = len(asked.generation.tokens) - asked.generation.job.prompt_tokens
        count = 0
        async for piece in asked.generation.pieces():
            events = []
            if count == 0 and self._chat:
                events.append(asked.style.opening(self._continuous(asked, 0)))
            for token in piece:
                if count == asked.cut_after:
                    await self._put(events, send)
                    raise Cut
                count += 1
                used = self._continuous(asked, count)
                if not asked.calls:
                    finish = asked.finish if count == total else None
                    events.append(asked.style.piece(self._prompts.text([token]), finish, used))
                elif count == total:
                    events.append(asked.style.calls(asked.calls, used))
            await self._put(events, send)
        closing = [asked.style.closing(self._usage(asked.generation, count))] if asked.include_usage else []
        await self._put(closing, send)
        await send({"type": "http.response.body", "body": answers.DONE})

    def _continuous(self, asked: Asked, count: int) -> Json | None:
        return self._usage(asked.generation, count) if asked.continuous_usage else None

    @staticmethod
    async def _put(events: Sequence[Json], send: Send) -> None:
        if events:
            data = b"".join(map(answers.event, events))
            await send({"type": "http.response.body", "body": data, "more_body": True})
