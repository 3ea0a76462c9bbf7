"""A model's tokenizer without transformers: what text it makes of tokens, and which tokens of text.

Some tokens are marks that give a conversation its form (`<|im_end|>`, `<tool_call>`). `encode` reads them in text, as
transformers does; `encode_text` never does: whatever a text says, none of its tokens is a mark.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from leyden.rendering import chat_template

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MARK = re.compile(r"[<\[｜|].*[>\]｜|]", re.DOTALL)
"""How an added token looks that gives form rather than text, where it is not declared special."""
_BYTE_OF = {
    char: byte
    for byte, char in zip(
        [*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173],
        [*map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)]), *map(chr, range(256, 324))],
        strict=True,
    )
}
"""The alphabet in which byte-level tokenizers write bytes."""


LONG_TEXT = 4096
"""Characters that take some milliseconds to encode: worth a thread (0.1 ms), and an encoding that lets others run."""


class TokenizerError(Exception):
    """The files of a tokenizer are missing or not what they should be, in one line."""


class Tokenizer:
    """A tokenizer as its files describe it: also all that `renderers` asks of one that is brought along."""

    def __init__(self, document: Mapping[str, Any], config: Mapping[str, Any], name: str) -> None:
        self.name_or_path = name
        self.config = dict(config)
        self._document = document
        try:
            self._backend = _backend(document)
        except Exception as error:  # tokenizers raises Exception itself
            raise TokenizerError(f"{name}: tokenizer.json is not a tokenizer: {error}") from error
        added = document.get("added_tokens") or []
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self.marks: Mapping[str, int] = {
            token["content"]: token["id"] for token in added if token["special"] or _MARK.fullmatch(token["content"])
        }
        """The tokens that text must never become, with their ids."""
        self._mark_pattern = re.compile("|".join(map(re.escape, sorted(self.marks, key=len, reverse=True))) or "(?!)")
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str | Path, name: str | None = None) -> "Tokenizer":
        """Read a model's folder, or its tokenizer.json; `name` is what the model is known by."""
        folder = Path(path)
        if folder.is_file():
            folder = folder.parent
        if not (folder / "tokenizer.json").is_file():
            raise TokenizerError(f"{folder}: there is no tokenizer.json in it; name a model's folder")
        config = _read(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        if (folder / "chat_template.jinja").is_file():
            config["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(_read(folder / "tokenizer.json"), config, name or str(folder))

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or of each; the unknown token's where there is none such."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._backend.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    @cached_property
    def eos_token_id(self) -> int | None:
        """The token that ends a sequence, if the configuration names one."""
        return self._named("eos_token")

    @cached_property
    def unk_token_id(self) -> int | None:
        """The token for what has none, if the configuration names one."""
        return self._named("unk_token")

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """The tokens that a decoder may leave out."""
        return [text for text, id in self.marks.items() if id in self.special_ids]

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; None where the model has none."""
        return self._template(tools=False)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """The tokens of a text in which marks are marks."""
        return _encode(self._backend, text, add_special_tokens).ids

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text in which nothing is a mark."""
        return _encode(self._markless, text).ids

    def encode_text(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text in which nothing is a mark, and the characters that each of them covers."""
        encoding = _encode(self._markless, text, offsets=True)
        return encoding.ids, encoding.offsets

    def split(self, text: str) -> list[str | int]:
        """A text cut at its marks: text, and the ids of marks."""
        parts: list[str | int] = []
        end = 0
        for found in self._mark_pattern.finditer(text):
            if found.start() > end:
                parts.append(text[end : found.start()])
            parts.append(self.marks[found.group()])
            end = found.end()
        if end < len(text):
            parts.append(text[end:])
        return parts

    def __call__(self, text: str, add_special_tokens: bool = False, **_: Any) -> dict[str, Any]:
        """`encode` in the form that carries character offsets."""
        encoding = _encode(self._backend, text, add_special_tokens, offsets=True)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of tokens; bytes that are no character become U+FFFD."""
        return self._backend.decode([ids] if isinstance(ids, int) else list(ids), skip_special_tokens)

    def token_bytes(self, id: int) -> bytes:
        """What a token stands for; not always whole characters. Exact for byte-level tokenizers only."""
        known = self._bytes.get(id)
        if known is None:
            token = self._backend.id_to_token(id) or ""
            mapped = [_BYTE_OF.get(char) for char in token]
            known = token.encode() if None in mapped else bytes(b for b in mapped if b is not None)
            self._bytes[id] = known
        return known

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a text is its tokens' bytes, one after another."""
        decoder = self._document.get("decoder") or {}
        return [part.get("type") for part in decoder.get("decoders", [decoder])] == ["ByteLevel"]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation as the model's own template writes it: the text, or its tokens."""
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
    def marked(self) -> str:
        """The tokenizer.json in which the marks, and nothing else, are special."""
        added = self._document.get("added_tokens") or []
        told = [{**token, "special": token["content"] in self.marks} for token in added]
        return json.dumps({**self._document, "added_tokens": told})

    @cached_property
    def _markless(self) -> Backend:
        backend = Backend.from_str(self.marked)
        backend.encode_special_tokens = True
        return backend


class TextStream:
    """Tokens in as they come, text out as soon as it stands: all that came out is the whole decode of all that went in.

    A byte-level token may end inside a character; the character comes out with the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        self._ids: list[int] = []
        self._out = 0

    def feed(self, ids: Iterable[int]) -> str:
        """Take up tokens; the text that they complete."""
        kept = [id for id in ids if id not in self._skipped]
        if self._utf8 is not None:
            return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, kept)))
        self._ids.extend(kept)
        return self._whole(self._tokenizer.decode(self._ids).rstrip("\ufffd"))

    def end(self) -> str:
        """What is left when no more tokens come: an unfinished character is U+FFFD."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._whole(self._tokenizer.decode(self._ids))

    def _whole(self, text: str) -> str:
        # Other decoders look at neighbours (leading spaces), so they are asked about all of it again.
        new, self._out = text[self._out :], max(self._out, len(text))
        return new


def _encode(backend: Backend, text: str, add_special_tokens: bool = False, offsets: bool = False) -> Encoding:
    """The library holds Python's lock while it encodes one text, and lets it go for a batch of them."""
    text = _sound(text)
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    batch = backend.encode_batch if offsets else backend.encode_batch_fast
    return batch([text], add_special_tokens=add_special_tokens)[0]


def _backend(document: Mapping[str, Any]) -> Backend:
    return Backend.from_str(json.dumps(document))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: this is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise TokenizerError(f"{path}: this is not a JSON object")
    return document


def _content(token: Any) -> str:
    """Some exports write a special token as an object."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _sound(text: str) -> str:
    """Text that UTF-8 can hold: JSON lets half a surrogate pair through."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
