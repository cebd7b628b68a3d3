"""The HTTP side of a simulated engine: vLLM's routes, and /sim for those who test with it."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvroute.prompt.template import ChatTemplate, TemplateError
from kvroute.prompt.tokenizer import Tokenizer
from kvroute.simulator import answers
from kvroute.simulator.answers import Json, Refusal, Style
from kvroute.simulator.engine import Engine, Run
from kvroute.simulator.events import Publisher
from kvroute.simulator.faults import Fault, FaultKind, parse_fault

DEFAULT_MAX_TOKENS = 16


class _Cut(Exception):
    """The connection is to be cut, as a dying engine would."""


@dataclass(slots=True, eq=False)
class EngineApp:
    """The ASGI application. Its engine's loop runs in `running`."""

    engine: Engine
    model: str
    max_model_len: int
    tokenizer: Tokenizer
    template: ChatTemplate
    words: list[str]
    """Text of each token that answers may consist of, by token id."""
    publisher: Publisher | None = None
    fault: Fault = field(default_factory=Fault)
    created: int = field(default_factory=lambda: int(time.time()))
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.engine.run())]
        if self.publisher is not None:
            tasks.append(asyncio.create_task(self.publisher.serve_replays()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.publisher is not None:
                self.publisher.close()

    def asgi(self) -> Starlette:
        async def refused(request: Request, error: Exception) -> Response:
            assert isinstance(error, Refusal)
            return JSONResponse(error.body, error.status)

        async def not_found(request: Request, error: Exception) -> Response:
            return JSONResponse({"detail": "Not Found"}, 404)

        return Starlette(
            routes=[
                Route("/v1/chat/completions", _Generate(self, chat=True), methods=["POST"]),
                Route("/v1/completions", _Generate(self, chat=False), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/ping", self._health),
                Route("/version", self._version),
                Route("/load", self._load),
                Route("/metrics", self._metrics),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/kv_event_sources", self._event_sources),
                Route("/reset_prefix_cache", self._reset, methods=["POST"]),
                Route("/sim/faults", self._set_fault, methods=["POST"]),
                Route("/sim/state", self._state),
            ],
            exception_handlers={Refusal: refused, 404: not_found},
        )

    # Prompts

    def chat_tokens(self, body: Json) -> list[int]:
        messages = body.get("messages")
        if messages is None:
            raise answers.invalid("missing", "messages", "Field required", body)
        if not isinstance(messages, list):
            raise answers.invalid("list_type", "messages", "Input should be a valid list", messages)
        if not messages:
            raise Refusal(400, "List should have at least 1 item", "Bad Request", "body.messages")
        prepared = []
        for position, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise answers.invalid(
                    "dict_type", f"messages.{position}", "Input should be a valid dictionary", message
                )
            content = message.get("content")
            if isinstance(content, list):
                texts = [part.get("text") if isinstance(part, dict) else part for part in content]
                content = "\n".join(text for text in texts if isinstance(text, str))
            elif content is not None and not isinstance(content, str):
                raise answers.invalid(
                    "string_type", f"messages.{position}.content", "Input should be a valid string", content
                )
            calls = []
            for call in message.get("tool_calls") or []:
                function = dict(call.get("function") or {}) if isinstance(call, dict) else {}
                with contextlib.suppress(ValueError, TypeError):
                    function["arguments"] = json.loads(function["arguments"])
                calls.append({"function": function})
            prepared.append({**message, "content": content, "tool_calls": calls})
        tools = body.get("tools")
        try:
            text = self.template.render(
                prepared,
                tools=tools if isinstance(tools, list) and tools else None,
                add_generation_prompt=body.get("add_generation_prompt") is not False,
            )
        except TemplateError as error:
            raise Refusal(400, str(error), "BadRequestError", None) from error
        return self.tokenizer.encode(text, add_special_tokens=False)

    def completion_tokens(self, body: Json) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, list) and prompt and all(type(each) is int and 0 <= each < 2**32 for each in prompt):
            return prompt
        raise answers.invalid("prompt_type", "prompt", "Input should be a valid string or list of tokens", prompt)

    # The small routes

    async def _models(self, request: Request) -> Response:
        card = answers.model_card(self.model, self.max_model_len, self.created)
        return JSONResponse({"object": "list", "data": [card]})

    async def _health(self, request: Request) -> Response:
        if self.fault.kind is FaultKind.STALL:
            await asyncio.sleep(3600)
        return Response()

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": "0.32.0"})

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self.engine.running + self.engine.waiting})

    async def _metrics(self, request: Request) -> Response:
        engine = self.engine
        counters = engine.counters
        text = answers.metrics_text(
            self.model,
            {
                "num_requests_running": engine.running,
                "num_requests_waiting": engine.waiting,
                "kv_cache_usage_perc": engine.cache.usage,
            },
            {
                "prefix_cache_queries": counters["prefix_queries"],
                "prefix_cache_hits": counters["prefix_hits"],
                "external_prefix_cache_queries": counters["external_queries"],
                "external_prefix_cache_hits": counters["external_hits"],
                "prompt_tokens": counters["prompt_tokens"],
                "prompt_tokens_cached": counters["prompt_tokens_cached"],
                "generation_tokens": counters["generation_tokens"],
            },
            engine.ttft_s,
            engine.cache.block_tokens,
            engine.cache.capacity,
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _tokenize(self, request: Request) -> Response:
        body = _json_object(await request.body())
        tokens = self.chat_tokens(body) if "messages" in body else self.completion_tokens(body)
        answer = {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens, "token_strs": None}
        return JSONResponse(answer)

    async def _detokenize(self, request: Request) -> Response:
        tokens = (_json_object(await request.body())).get("tokens")
        if not isinstance(tokens, list):
            raise answers.invalid("list_type", "tokens", "Input should be a valid list", tokens)
        known = [self.words[each] for each in tokens if type(each) is int and 0 <= each < len(self.words)]
        return JSONResponse({"prompt": "".join(known)})

    async def _event_sources(self, request: Request) -> Response:
        if self.publisher is None:
            return JSONResponse({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.publisher.endpoint,
            "replay_endpoint": self.publisher.replay_endpoint,
            "topic": "",
        }
        return JSONResponse({"0": source})

    async def _reset(self, request: Request) -> Response:
        return JSONResponse({"success": self.engine.reset()})

    async def _set_fault(self, request: Request) -> Response:
        try:
            self.fault = parse_fault(await request.body())
        except msgspec.MsgspecError as error:
            return JSONResponse({"error": str(error)}, 400)
        self.engine.slowdown = self.fault.factor if self.fault.kind is FaultKind.SLOW else 1.0
        return JSONResponse({"kind": self.fault.kind})

    async def _state(self, request: Request) -> Response:
        engine = self.engine
        return JSONResponse(
            {
                "running": engine.running,
                "waiting": engine.waiting,
                "requests": engine.counters["requests"],
                "aborted": engine.counters["aborted"],
                "cached_blocks": len(engine.cache.cached),
                "prefix_queries": engine.counters["prefix_queries"],
                "prefix_hits": engine.counters["prefix_hits"],
                "external_hits": engine.counters["external_hits"],
            }
        )


def _json_object(raw: bytes) -> Json:
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        raise answers.bad_json(error.pos, error.msg) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise answers.bad_json(0, str(error)) from error
    if not isinstance(body, dict):
        raise Refusal(400, "Input should be a valid dictionary", "Bad Request", "body")
    return body


class _Generate:
    """The two generating routes. An ASGI application, so that it can cut connections and hear clients leave."""

    def __init__(self, app: EngineApp, *, chat: bool) -> None:
        self._app = app
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            raw = await request.body()
        except ClientDisconnect:
            return
        # From here on receive() tells of nothing but the disconnect.
        work = asyncio.create_task(self._serve(raw, request.headers.get("x-sim-fault"), send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except _Cut:
            # A server that dies says nothing: neither an error nor the end of a chunked body.
            scope["extensions"]["kvroute.simulator.cut"]()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _serve(self, raw: bytes, asked_fault: str | None, send: Send) -> None:
        app = self._app
        fault = app.fault
        if asked_fault is not None:
            fault = parse_fault(asked_fault if asked_fault.startswith("{") else json.dumps({"kind": asked_fault}))
        body = _json_object(raw)
        if fault.kind is FaultKind.REFUSE:
            raise _Cut
        if fault.kind is FaultKind.STALL:
            await asyncio.sleep(3600)
        if fault.kind is FaultKind.STATUS:
            raise Refusal(fault.code, "A fault on demand.", "InternalServerError", None)
        cut_after = fault.after_chunks if fault.kind is FaultKind.DROP_MID_STREAM else None
        model = body.get("model")
        if model is not None and model != app.model:
            raise answers.unknown_model(str(model), app.model)
        read = app.chat_tokens if self._chat else app.completion_tokens
        prompt = await asyncio.to_thread(read, body)
        max_tokens = self._max_tokens(body, len(prompt))
        salt = body.get("cache_salt")
        run: list[Run] = []
        tokens = app.engine.generate(prompt, max_tokens, salt if isinstance(salt, str) else "", run)
        prefix = "chatcmpl" if self._chat else "cmpl"
        style = Style(f"{prefix}-{next(app.numbers):016x}", app.model, chat=self._chat)
        calls = self._tool_calls(body)
        async with contextlib.aclosing(tokens):
            if body.get("stream") is True:
                await self._stream(send, tokens, run, style, calls, body, max_tokens, cut_after)
            else:
                await self._whole(send, tokens, run, style, calls, cut_after)

    def _max_tokens(self, body: Json, prompt_tokens: int) -> int:
        app = self._app
        room = min(app.max_model_len, app.engine.cache.capacity * app.engine.cache.block_tokens)
        if prompt_tokens > room - 1:
            raise answers.too_long(room)
        given = body.get("max_completion_tokens", body.get("max_tokens"))
        if given is None:
            return min(DEFAULT_MAX_TOKENS, room - prompt_tokens)
        if type(given) is not int:
            raise answers.invalid("int_type", "max_tokens", "Input should be a valid integer", given)
        if given < 1:
            raise answers.bad_max_tokens(given)
        return min(given, room - prompt_tokens)

    def _tool_calls(self, body: Json) -> list[Json]:
        """The first tool is called, without arguments, when the last user message holds the word "tool"."""
        tools = body.get("tools")
        if not isinstance(tools, list) or not tools or body.get("tool_choice") == "none":
            return []
        messages = [each for each in body.get("messages") or [] if each.get("role") == "user"]  # type: ignore[attr-defined]
        if not messages or "tool" not in str(messages[-1].get("content")):
            return []
        function = tools[0].get("function", {}) if isinstance(tools[0], dict) else {}
        called = {"name": function.get("name", ""), "arguments": "{}"}
        return [{"id": "chatcmpl-tool-0", "type": "function", "function": called}]

    def _usage(self, run: Run, completion_tokens: int) -> Json:
        prompt = run.job.prompt_tokens
        size = self._app.engine.cache.block_tokens
        created = max(0, prompt // size * size - run.cached_tokens)
        return answers.usage(prompt, completion_tokens, run.cached_tokens, created)

    async def _whole(
        self,
        send: Send,
        tokens: AsyncIterator[int],
        run: list[Run],
        style: Style,
        calls: list[Json],
        cut_after: int | None,
    ) -> None:
        ids = [token async for token in tokens]
        text = "".join(self._app.words[token] for token in ids)
        finish = "tool_calls" if calls else "length"
        answer = msgspec.json.encode(style.whole(text, calls, finish, self._usage(run[0], len(ids))))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if cut_after is not None:
            await send({"type": "http.response.body", "body": answer[: len(answer) // 2], "more_body": True})
            raise _Cut
        await send({"type": "http.response.body", "body": answer})

    async def _stream(
        self,
        send: Send,
        tokens: AsyncIterator[int],
        run: list[Run],
        style: Style,
        calls: list[Json],
        body: Json,
        max_tokens: int,
        cut_after: int | None,
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def put(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        count = 0
        async for token in tokens:
            if count == 0 and (opening := style.opening()) is not None:
                await put(answers.event(opening))
            if cut_after is not None and count >= cut_after:
                raise _Cut
            count += 1
            if not calls:
                finish = "length" if count == max_tokens else None
                await put(answers.event(style.piece(self._app.words[token], finish)))
            elif count == max_tokens:
                await put(answers.event(style.calls(calls)))
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            await put(answers.event(style.closing(self._usage(run[0], count))))
        await send({"type": "http.response.body", "body": answers.DONE})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
