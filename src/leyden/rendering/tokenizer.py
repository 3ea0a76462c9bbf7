"""A model's tokenizer, loaded without transformers.

Control tokens structure a conversation (`<|im_end|>`, `<tool_call>`). `encode` recognises them in text, as transformers
does; `encode_text` never does, so no text of a user or a tool can become one.
"""

import json
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from leyden.rendering import chat_template

_MAX_BYTES, _MAX_ENTRIES = 24 << 20, 1 << 14
"""Of all texts that are remembered together, with their tokens."""
_MAX_TEXT = 1 << 16
"""Longer texts are not remembered, so that a few of them do not displace all others."""
_ENTRY_BYTES = 200
"""What an entry takes in the dictionary."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTROL_TOKEN = re.compile(r"[<\[｜|].*[>\]｜|]", re.DOTALL)
"""The form of added tokens that are control tokens although they are not declared special."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that stands for one byte in vocabularies of characters."""
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(256)}.difference(_PRINTABLE))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
"""The byte that each character stands for in the tokens of byte-level vocabularies."""
RENDERER_FILE = "renderer.json"
"""In a checkpoint: which model of the `renderers` package it is rendered like (`leyden.rendering.known_models`)."""


class EncodingCache:
    """Encodes texts, those that it remembers without the tokenizer. Safe to use from several threads.

    The rollouts of a group and the turns of an agent repeat most of their texts.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], max_bytes: int = _MAX_BYTES, max_entries: int = _MAX_ENTRIES
    ) -> None:
        self._encode, self._max_bytes, self._max_entries = encode, max_bytes, max_entries
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        with self._lock:
            known = self._known.get(text)
            if known is not None:
                self._known.move_to_end(text)
                return known.tolist()
        ids = self._encode(text)
        if len(text) <= _MAX_TEXT:
            self._remember(text, array("I", ids))
        return ids

    def _remember(self, text: str, ids: "array[int]") -> None:
        with self._lock:
            if text in self._known:  # another thread was faster
                return
            self._known[text] = ids
            self._bytes += _size(text, ids)
            while self._bytes > self._max_bytes or len(self._known) > self._max_entries:
                self._bytes -= _size(*self._known.popitem(last=False))


def _size(text: str, ids: "array[int]") -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids) + _ENTRY_BYTES


class TokenizerError(Exception):
    """The files of a tokenizer are missing or invalid."""


class Tokenizer:
    """A tokenizer loaded from its files, with the interface that the `renderers` package requires."""

    def __init__(self, document: Mapping[str, Any], config: Mapping[str, Any], name: str) -> None:
        self.name_or_path = name
        self.config = dict(config)
        self._document = document
        try:
            self._backend = Backend.from_str(json.dumps(document))
        except Exception as error:  # tokenizers raises Exception itself
            raise TokenizerError(f"{name}: tokenizer.json is not a tokenizer: {error}") from error
        added = document.get("added_tokens") or []
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self.control_tokens: Mapping[str, int] = {
            token["content"]: token["id"]
            for token in added
            if token["special"] or _CONTROL_TOKEN.fullmatch(token["content"])
        }
        """The ids of the tokens that text must never become."""
        self._control_pattern = re.compile(
            "|".join(map(re.escape, sorted(self.control_tokens, key=len, reverse=True))) or "(?!)"
        )

    @classmethod
    def load(cls, path: str | Path, name: str | None = None) -> "Tokenizer":
        """Load from a model's folder or its tokenizer.json; `name` is the model's name.

        A checkpoint that remembers a model for rendering has that model's name.
        """
        folder = Path(path)
        if folder.is_file():
            folder = folder.parent
        if not (folder / "tokenizer.json").is_file():
            raise TokenizerError(f"{folder}: it has no tokenizer.json; give the folder of a model")
        config = _read(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        if (folder / "chat_template.jinja").is_file():
            config["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        if (folder / RENDERER_FILE).is_file():
            name = str(_read(folder / RENDERER_FILE)["model"])
        return cls(_read(folder / "tokenizer.json"), config, name or str(folder))

    def renamed(self, name: str) -> "Tokenizer":
        """Return the same tokenizer under another name."""
        renamed = copy(self)
        renamed.name_or_path = name
        return renamed

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or of each of several; the unknown token's id for tokens that do not exist."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._backend.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    @cached_property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if the configuration names one."""
        return self._named("eos_token")

    @cached_property
    def unk_token_id(self) -> int | None:
        """The unknown token, if the configuration names one."""
        return self._named("unk_token")

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """The tokens that `skip_special_tokens` leaves out."""
        return [text for text, id in self.control_tokens.items() if id in self.special_ids]

    @property
    def chat_template(self) -> str | None:
        """The chat template; None if the model has none."""
        return self._template(tools=False)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Encode a text and recognise control tokens in it."""
        return _encode(self._backend, text, True).ids if add_special_tokens else self._marked_ids(text)

    def text_ids(self, text: str) -> list[int]:
        """Encode a text as plain text, without control tokens."""
        return self._text_ids(text)

    def encode_text(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a text as plain text; return the ids and the character offsets of each."""
        encoding = _encode(self._plain_backend, text, offsets=True)
        return encoding.ids, encoding.offsets

    def split(self, text: str) -> list[str | int]:
        """Split a text at its control tokens into texts and the ids of control tokens."""
        parts: list[str | int] = []
        end = 0
        for found in self._control_pattern.finditer(text):
            if found.start() > end:
                parts.append(text[end : found.start()])
            parts.append(self.control_tokens[found.group()])
            end = found.end()
        if end < len(text):
            parts.append(text[end:])
        return parts

    def __call__(self, text: str, add_special_tokens: bool = False, **_: Any) -> dict[str, Any]:
        """Encode like `encode`; return ids and character offsets."""
        encoding = _encode(self._backend, text, add_special_tokens, offsets=True)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode tokens; bytes that are no character become U+FFFD."""
        return self._backend.decode([ids] if isinstance(ids, int) else list(ids), skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        text = self.decode(id)
        if "\ufffd" not in text:
            return text.encode()
        token = self._backend.id_to_token(id) or ""
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return bytes(map(_BYTE_OF.__getitem__, token)) if all(map(_BYTE_OF.__contains__, token)) else text.encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Render a conversation with the model's own template; return its text or its tokens."""
        template = self._template(tools=bool(tools))
        if template is None:
            raise TokenizerError(
                f"{self.name_or_path}: the model has no chat template; add chat_template to tokenizer_config.json"
            )
        named = {name: _content(self.config[name]) for name in _SPECIAL if self.config.get(name) is not None}
        given = {"tools": list(tools) if tools is not None else None, "add_generation_prompt": add_generation_prompt}
        text = chat_template.render(template, messages, **{**named, "documents": None, **given, **variables})
        if not tokenize:
            return text
        ids = self.encode(text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids

    def _template(self, tools: bool) -> str | None:
        given = self.config.get("chat_template")
        if isinstance(given, list):  # older exports name several
            named = {entry["name"]: entry["template"] for entry in given}
            given = named.get("tool_use" if tools and "tool_use" in named else "default")
        return given if isinstance(given, str) else None

    def _named(self, name: str) -> int | None:
        token = self.config.get(name)
        return None if token is None else self._backend.token_to_id(_content(token))

    @cached_property
    def longest_token(self) -> int:
        """The length of the longest token: a text has at least its length divided by this of tokens."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @cached_property
    def control_json(self) -> str:
        """The tokenizer.json with exactly the control tokens marked as special, for grammars."""
        added = self._document.get("added_tokens") or []
        added = [{**token, "special": token["content"] in self.control_tokens} for token in added]
        return json.dumps({**self._document, "added_tokens": added})

    @cached_property
    def _plain_backend(self) -> Backend:
        backend = Backend.from_str(self.control_json)
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _text_ids(self) -> EncodingCache:
        return EncodingCache(lambda text: _encode(self._plain_backend, text).ids)

    @cached_property
    def _marked_ids(self) -> EncodingCache:
        """Encodes texts with control tokens."""
        return EncodingCache(lambda text: _encode(self._backend, text).ids)


def _encode(backend: Backend, text: str, add_special_tokens: bool = False, offsets: bool = False) -> Encoding:
    """Encode a text, as a batch: for these the library lets other threads run."""
    batch = backend.encode_batch if offsets else backend.encode_batch_fast
    return batch([_valid_unicode(text)], add_special_tokens=add_special_tokens)[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return document


def _content(token: Any) -> str:
    """Return the text of a special token, which some exports write as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _valid_unicode(text: str) -> str:
    """Replace lone surrogates, which JSON allows and UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
