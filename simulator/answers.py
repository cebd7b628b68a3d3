"""The words of the API: answers, chunks, errors and metrics as a vLLM 0.32 server forms them."""

import time
from collections.abc import Mapping

import msgspec

Json = dict[str, object]


class Refusal(Exception):
    """An error answer."""

    def __init__(self, status: int, message: str, kind: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.body: Json = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def unknown_model(name: str, served: str) -> Refusal:
    message = f"The model `{name}` does not exist. Valid aliases: {served}."
    return Refusal(404, message, "NotFoundError", "model")


def invalid(kind: str, where: str, message: str, given: object) -> Refusal:
    """A body of the wrong shape, in the words of pydantic that vLLM passes on."""
    detail = {"type": kind, "loc": f"body.{where}", "msg": message, "input": given}
    return Refusal(400, f"1 validation error:\n  {detail}", "Bad Request", f"body.{where}")


def bad_json(position: int, reason: str) -> Refusal:
    detail = {
        "type": "json_invalid",
        "loc": f"body.{position}",
        "msg": "JSON decode error",
        "input": "<dict of 0 items>",
        "ctx": {"error": reason},
    }
    return Refusal(400, f"1 validation error:\n  {detail}", "Bad Request", f"body.{position}")


def too_long(limit: int) -> Refusal:
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {limit + 1} "
        "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
        f"prompt. (parameter=input_tokens, value={limit + 1})"
    )
    return Refusal(400, message, "BadRequestError", "input_tokens")


def bad_max_tokens(value: int) -> Refusal:
    message = f"max_tokens must be at least 1, got {value}. (parameter=max_tokens, value={value})"
    return Refusal(400, message, "BadRequestError", "max_tokens")


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, created: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "created_cache_tokens": created,
            "multimodal_tokens": None,
        },
    }


def model_card(name: str, max_model_len: int, created: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }


class Style:
    """The shapes of one route's answers."""

    def __init__(self, request_id: str, model: str, *, chat: bool) -> None:
        self._base: Json = {"id": request_id, "created": int(time.time()), "model": model}
        self._chat = chat

    def whole(self, text: str, tool_calls: list[Json], finish: str, used: Json) -> Json:
        choice: Json = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        if self._chat:
            choice["message"] = {
                "role": "assistant",
                "content": None if tool_calls else text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
                **({"tool_calls": tool_calls} if tool_calls else {}),
            }
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._base, "object": kind, "choices": [choice], "usage": used}

    def opening(self) -> Json | None:
        """The chunk that names the role, ahead of a chat's first token."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self._chat else None

    def piece(self, text: str, finish: str | None) -> Json:
        return self._chunk({"delta": {"content": text}} if self._chat else {"text": text}, finish)

    def calls(self, tool_calls: list[Json]) -> Json:
        delta = {"tool_calls": [{"index": number, **call} for number, call in enumerate(tool_calls)]}
        return self._chunk({"delta": delta}, "tool_calls")

    def closing(self, used: Json) -> Json:
        return {**self._chunk({}, None), "choices": [], "usage": used}

    def _chunk(self, content: Json, finish: str | None) -> Json:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return {**self._base, "object": kind, "choices": [choice]}


def event(data: Json) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def metrics_text(
    model: str,
    gauges: Mapping[str, float],
    counters: Mapping[str, float],
    ttft_s: list[float],
    block_tokens: int,
    blocks: int,
) -> str:
    """Prometheus text with vLLM's names."""
    labels = f'{{engine="0",model_name="{model}"}}'
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{labels} {float(value)}"]
    for name, value in counters.items():
        lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{labels} {float(value)}"]
    lines.append("# TYPE vllm:cache_config_info gauge")
    lines.append(f'vllm:cache_config_info{{block_size="{block_tokens}",engine="0",num_gpu_blocks="{blocks}"}} 1.0')
    lines.append("# TYPE vllm:time_to_first_token_seconds histogram")
    for bound in (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0):
        count = sum(1 for each in ttft_s if each <= bound)
        lines.append(f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="{bound}",model_name="{model}"}} {count}')
    lines.append(f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="{model}"}} {len(ttft_s)}')
    lines.append(f"vllm:time_to_first_token_seconds_count{labels} {len(ttft_s)}")
    lines.append(f"vllm:time_to_first_token_seconds_sum{labels} {sum(ttft_s)}")
    return "\n".join(lines) + "\n"
