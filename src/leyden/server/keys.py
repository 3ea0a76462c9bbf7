"""Keys: who a caller is, and the one table of what each kind may do.

A key is signed and carries its own scope, so checking one needs no look-up. A key that names an attempt, or speaks for
one, is good only while that attempt's lease is in force (leases.py).
"""

import hmac
import os
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from leyden.server.leases import ActiveLeases


class KeyKind(StrEnum):
    """The kinds of key."""

    ADMIN = "admin"
    WORKER = "worker"
    POOL = "pool"
    ATTEMPT = "attempt"
    VIEWER = "viewer"


class Permission(StrEnum):
    """What a request does."""

    SEE = "see"
    OVERSEE = "oversee"
    REVIEW = "review"
    STEER = "steer"
    DELETE = "delete"
    WORK = "work"
    RECORD = "record"
    REWARD = "reward"
    TRACE = "trace"
    CALL = "call"
    MINT = "mint"


_EVERY = frozenset(KeyKind)
_TRUSTED = frozenset({KeyKind.ADMIN, KeyKind.WORKER})

MAY: dict[Permission, frozenset[KeyKind]] = {
    Permission.SEE: frozenset({KeyKind.ADMIN, KeyKind.VIEWER}),  # read runs and what they hold
    Permission.OVERSEE: frozenset(
        {KeyKind.ADMIN, KeyKind.VIEWER}
    ),  # read what concerns all runs: no key of a single run
    Permission.REVIEW: frozenset(
        {KeyKind.ADMIN, KeyKind.VIEWER, KeyKind.WORKER}
    ),  # read what an attempt left: a reward may ask for it
    Permission.STEER: frozenset({KeyKind.ADMIN}),  # make runs, queue and cancel rollouts, publish versions and metrics
    Permission.DELETE: frozenset({KeyKind.ADMIN}),  # delete runs
    Permission.WORK: _TRUSTED,  # lease, keep alive, finish
    Permission.RECORD: _TRUSTED,  # record model calls: an agent could invent its tokens
    Permission.REWARD: _EVERY - {KeyKind.VIEWER},  # give rewards: an agent's key only where its run allows it
    Permission.TRACE: _EVERY - {KeyKind.VIEWER},  # send spans
    Permission.CALL: frozenset({KeyKind.POOL, KeyKind.ATTEMPT}),  # call models: what an agent is there for
    Permission.MINT: _TRUSTED,  # make keys: a worker only those of its pools
}
AGENTS = frozenset({KeyKind.POOL, KeyKind.ATTEMPT})
"""The keys that agent code gets to see."""


class Key(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a key says. None in a place means: not confined to one."""

    kind: KeyKind
    id: str
    expires: float
    run: str | None = None
    rollout: str | None = None
    attempt: str | None = None
    started: float | None = None
    """When that attempt started: one of the same name, in a run that was deleted and made again, is another."""
    pool: str | None = None


class KeyRefused(Exception):
    """A request that its key does not permit; 401 where the key itself is no good, 403 where it is not enough."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


class Keyring:
    """Makes and checks keys with one server's secret."""

    _PREFIX = "leyden-"
    _REMEMBERED = 4096

    def __init__(self, secret: bytes, clock: Callable[[], float]) -> None:
        self._secret = secret
        self.clock = clock
        self._known: dict[str, Key] = {}
        self._decode = msgspec.msgpack.Decoder(Key).decode

    @classmethod
    def from_file(cls, path: Path, clock: Callable[[], float]) -> "Keyring":
        """The secret of a home folder, made on the first start and readable by its owner alone."""
        if not path.exists():
            write_private(path, secrets.token_hex(32))
        text = path.read_text().strip()
        if not re.fullmatch("[0-9a-f]{64}", text):  # an empty one, say, would make keys that anybody can make
            raise ValueError(f"{path} is damaged: put it back, or delete it, and every key with it, to have a new one")
        return cls(bytes.fromhex(text), clock)

    def make(
        self,
        kind: KeyKind,
        ttl_s: float,
        *,
        run: str | None = None,
        rollout: str | None = None,
        attempt: str | None = None,
        started: float | None = None,
        pool: str | None = None,
        id: str | None = None,
    ) -> tuple[str, Key]:
        """A new key, as text and as what it says."""
        expires = self.clock() + ttl_s
        key = Key(kind, id or secrets.token_hex(8), expires, run, rollout, attempt, started, pool)
        payload = urlsafe_b64encode(msgspec.msgpack.encode(key)).rstrip(b"=")
        return f"{self._PREFIX}{payload.decode()}.{self._sign(payload)}", key

    def read(self, text: str) -> Key:
        """What a key says, if it is one of ours and has not expired."""
        key = self._known.get(text)
        if key is None:
            key = self._verify(text)
            if len(self._known) >= self._REMEMBERED:
                self._known.clear()
            self._known[text] = key
        if key.expires <= self.clock():
            raise KeyRefused(401, "key_expired", "this key has expired: ask for a new one")
        return key

    def _verify(self, text: str) -> Key:
        payload, _, signature = text.removeprefix(self._PREFIX).partition(".")
        genuine = text.startswith(self._PREFIX) and text.isascii()
        if not genuine or not hmac.compare_digest(self._sign(payload.encode()), signature):
            raise KeyRefused(
                401, "invalid_api_key", "this is not a key of this server: check the key and the server's URL"
            )
        return self._decode(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))

    def _sign(self, payload: bytes) -> str:
        return hmac.digest(self._secret, payload, "sha256").hex()


def permit(key: Key, act: Permission, leases: ActiveLeases, *, run: str | None, attempt: str | None) -> None:
    """Raise unless the key may do this to this run or attempt (None: the request names none)."""
    if key.kind is KeyKind.ATTEMPT and not leases.alive(key.attempt, key.started):
        raise KeyRefused(403, "attempt_ended", f"attempt {key.attempt} has ended, and this key with it")
    if key.kind not in MAY[act]:
        kinds = ", ".join(sorted(MAY[act]))
        raise KeyRefused(403, "not_permitted", f"a key of kind {key.kind} may not {act} here: it takes one of {kinds}")
    if key.run is not None and run is not None and key.run != run:
        raise KeyRefused(403, "not_permitted", f"this key is for run {key.run}, not {run}")
    if act is Permission.OVERSEE and key.run is not None:
        raise KeyRefused(403, "not_permitted", f"this key is for run {key.run} alone")
    if attempt is not None:
        speak_for(key, leases, attempt)
        if act is Permission.REWARD and key.kind in AGENTS and not leases.takes_rewards(attempt):
            message = "this run takes no rewards from the agent: set agent_rewards, or return one"
            raise KeyRefused(403, "not_permitted", message)


def speak_for(key: Key, leases: ActiveLeases, attempt: str) -> None:
    """Raise unless the key may speak for this attempt."""
    if key.kind is KeyKind.ATTEMPT and key.attempt != attempt:
        raise KeyRefused(403, "not_permitted", f"this key is for attempt {key.attempt}, not {attempt}")
    if key.kind is KeyKind.POOL and not leases.hosted(attempt, key.pool):
        raise KeyRefused(403, "not_permitted", f"attempt {attempt} is not a live lease of pool {key.pool}")


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
