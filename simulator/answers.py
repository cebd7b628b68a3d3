"""The shapes of a vLLM 0.32 server's answers. Fields that it always leaves null are there, as null."""

import time
from collections.abc import Sequence

import msgspec

from kvroute.simulator.errors import Json

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-simulated"
DONE = b"data: [DONE]\n\n"


def event(data: Json) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def tool_call(number: int, name: str) -> Json:
    return {"id": f"chatcmpl-tool-{number:016x}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, created_tokens: int | None) -> Json:
    """`created_tokens`: prompt tokens that were put into the cache; vLLM tells them for chats only."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "created_cache_tokens": created_tokens},
    }


def models(name: str, max_model_len: int, created: int) -> Json:
    """`created`: seconds since the epoch."""
    permission = {
        "id": "modelperm-0000000000000000",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
    return {"object": "list", "data": [card]}


class Style:
    """One answer of a generating route: /v1/chat/completions, or else /v1/completions."""

    def __init__(self, number: int, model: str, *, chat: bool) -> None:
        """`number` makes the id."""
        self._chat = chat
        self._base: Json = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number:016x}",
            "object": "",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, calls: Sequence[Json], finish: str, used: Json) -> bytes:
        choice: Json = {"index": 0}
        if self._chat:
            choice["message"] = {
                "role": "assistant",
                "content": None if calls else text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                **({"tool_calls": calls} if calls else {}),
                "reasoning": None,
            }
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": None}
        if not self._chat:
            choice |= {"prompt_logprobs": None, "prompt_token_ids": None}
        choice["routed_experts"] = None
        details = used["prompt_tokens_details"]
        assert isinstance(details, dict)
        answer = self._base | {
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": used
            | {
                "prompt_tokens_details": details | {"multimodal_tokens": None},
                "completion_tokens_details": None,
            },
        }
        if self._chat:
            answer |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        answer |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
        return msgspec.json.encode(answer)

    def opening(self, used: Json | None) -> Json:
        """A chat's first chunk, which names the role. `used`, here and below, for continuous_usage_stats."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk([choice], used) | {"prompt_token_ids": None, "prompt_text": None}

    def piece(self, text: str, finish: str | None, used: Json | None) -> Json:
        return self._piece({"delta": {"content": text}} if self._chat else {"text": text}, finish, used)

    def calls(self, calls: Sequence[Json], used: Json | None) -> Json:
        """The last chunk of a chat that ends in calls."""
        delta = {"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}
        return self._piece({"delta": delta}, "tool_calls", used)

    def closing(self, used: Json) -> Json:
        """The chunk that include_usage asks for."""
        return self._chunk([], used) | {"system_fingerprint": FINGERPRINT}

    def _piece(self, content: Json, finish: str | None, used: Json | None) -> Json:
        choice: Json = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = None
        choice["token_ids"] = None
        return self._chunk([choice], used)

    def _chunk(self, choices: list[Json], used: Json | None) -> Json:
        chunk = self._base | {
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": choices,
        }
        return chunk if used is None else chunk | {"usage": used}
