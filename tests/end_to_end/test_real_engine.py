"""Against running vLLM servers that serve one model, named by KVROUTE_REAL_ENGINES (two or more URLs, comma separated).

Run with `KVROUTE_REAL_ENGINES=http://127.0.0.1:9100,http://127.0.0.1:9101 pytest -m real_engine`. The gateway hashes
text, or tokens where KVROUTE_REAL_TOKENIZER names the model's folder.
"""

import os
import random
from pathlib import Path

import openai
import pytest

from tests.support.gateway import GatewayProcess

pytestmark = pytest.mark.real_engine

ENGINES = [url for url in os.environ.get("KVROUTE_REAL_ENGINES", "").split(",") if url]
WORDS = "amber river harbor signal forest copper violet engine candle winter garden stone".split()


@pytest.mark.timeout(300)
async def test_a_conversation_returns_to_the_engine_that_holds_it(tmp_path: Path) -> None:
    tokenizer = os.environ.get("KVROUTE_REAL_TOKENIZER")
    model_settings = {"tokenizer": tokenizer} if tokenizer else {}
    settings = {"server": {"decision_headers": "always"}, "health": {"interval": 0.5, "timeout": 5.0}}
    async with GatewayProcess(
        tmp_path, ENGINES, model="*", settings=settings, model_settings=model_settings
    ) as gateway:
        client = openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0, timeout=120)
        model = (await client.models.list()).data[0].id
        seed = random.Random()
        conversations = []
        for number in range(6):
            text = " ".join(seed.choices(WORDS, k=900))
            messages = [{"role": "user", "content": f"{number} {text}"}]
            first = await client.chat.completions.with_raw_response.create(
                model=model, messages=messages, max_tokens=8, temperature=0
            )
            answer = first.parse()
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 0
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "go on"})
            conversations.append((first.headers["x-kvroute-instance"], answer.usage.prompt_tokens, messages))
        assert len({instance for instance, _, _ in conversations}) == 2
        for instance, prompt_tokens, messages in conversations:
            second = await client.chat.completions.with_raw_response.create(
                model=model, messages=messages, max_tokens=8, temperature=0
            )
            usage = second.parse().usage
            assert second.headers["x-kvroute-instance"] == instance
            assert second.headers["x-kvroute-reason"] == "gpu hit"
            # All but what does not fill one of the engine's blocks (128 tokens on a CPU).
            assert usage.prompt_tokens_details.cached_tokens > prompt_tokens - 256
        stream = await client.chat.completions.create(
            model=model,
            messages=conversations[0][2],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 8
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
        completion = await client.completions.create(model=model, prompt="hello", max_tokens=4)
        assert completion.usage.completion_tokens == 4
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=model, messages="x")  # type: ignore[arg-type]
        assert "list_type" in str(refused.value)
        await client.close()
