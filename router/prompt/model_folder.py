"""What a model's folder tells: its tokenizer, its chat template, and the size of its KV.

File names and fields are those of Hugging Face model repositories.
"""

import json
from pathlib import Path
from typing import cast

from kvroute.prompt.reader import PromptReader
from kvroute.prompt.template import ChatTemplate, TemplateError
from kvroute.prompt.tokenizer import PromptSetupError, Tokenizer

Fields = dict[str, object]


def load_reader(folder: Path | None, *, block_tokens: int, chat_template: Path | None = None) -> PromptReader:
    """The reader for the model in `folder`; for None, one that hashes text.

    `chat_template`: a Jinja file to take instead of the folder's own, as engines do with --chat-template. Raises
    PromptSetupError.
    """
    if folder is None:
        return PromptReader(block_tokens=block_tokens)
    if not folder.is_dir():
        raise PromptSetupError(f"{folder}: no such folder")
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    settings = _read_json(folder / "tokenizer_config.json") or {}
    source = _template_source(folder, settings, chat_template)
    template = None
    if source is not None:
        try:
            template = ChatTemplate(source, _special_tokens(settings))
        except TemplateError as error:
            raise PromptSetupError(f"{chat_template or folder}: {error}") from error
    return PromptReader(block_tokens=block_tokens, tokenizer=tokenizer, template=template)


def kv_bytes_per_token(folder: Path, kv_dtype_bytes: int = 2) -> int | None:
    """KV bytes of one token over all layers and ranks, from config.json; None where it does not tell.

    Layers x 2 (K and V) x KV heads x head size x bytes per number; with multi-head latent attention, layers x
    (kv_lora_rank + qk_rope_head_dim) x bytes per number, since one compressed vector stands for both.
    """
    config = _read_json(folder / "config.json")
    if config is None:
        return None
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = config | nested
    layers = _int(config, "num_hidden_layers")
    if layers is None:
        return None
    latent = _int(config, "kv_lora_rank")
    if latent is not None:
        return layers * (latent + (_int(config, "qk_rope_head_dim") or 0)) * kv_dtype_bytes
    heads = _int(config, "num_attention_heads")
    kv_heads = _int(config, "num_key_value_heads") or heads
    hidden = _int(config, "hidden_size")
    head_size = _int(config, "head_dim") or (hidden // heads if hidden and heads else None)
    if kv_heads is None or head_size is None:
        return None
    return layers * 2 * kv_heads * head_size * kv_dtype_bytes


def _template_source(folder: Path, settings: Fields, override: Path | None) -> str | None:
    if override is not None:
        try:
            return override.read_text("utf-8")
        except OSError as error:
            raise PromptSetupError(f"{override}: {error.strerror}") from error
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several under names; engines take the one called "default".
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(settings: Fields) -> dict[str, str]:
    found = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str):
                found[name] = token
    return found


def _read_json(path: Path) -> Fields | None:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PromptSetupError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise PromptSetupError(f"{path}: not a JSON object")
    return cast(Fields, value)


def _int(fields: Fields, name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) else None
