"""API keys, the table of permissions of each kind of key, and the active attempts that keys are checked against.

A key is signed and carries its scope, so that checking one needs no query. The key of an attempt, and a pool's key when
used for an attempt, is valid only while that attempt is active.
"""

import hmac
import os
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

import msgspec

from leyden.api.endpoint import Permission
from leyden.api.wire import KEY_PREFIX
from leyden.records import Attempt, Event, EventKind, trace_id


class ActiveLeases:
    """Every attempt that has not ended, by its id and by its trace id; kept current by the store's events."""

    def __init__(self, active: Iterable[Attempt] = ()) -> None:
        self._by_id: dict[str, Attempt] = {}
        self._by_trace: dict[str, Attempt] = {}
        for attempt in active:
            self._add(attempt)

    def __len__(self) -> int:
        return len(self._by_id)

    def on_event(self, event: Event) -> None:
        """Update from the log."""
        if event.kind is EventKind.ATTEMPT_STARTED:
            self._add(msgspec.convert(event.data, Attempt))
        elif event.kind is EventKind.ATTEMPT_ENDED:
            self._by_id.pop(event.subject, None)
            self._by_trace.pop(trace_id(event.subject), None)

    def is_active(self, attempt: str | None, started: float | None) -> bool:
        """Whether an attempt is active and started at this time."""
        found = self._by_id.get(attempt or "")
        return found is not None and found.started == started

    def in_pool(self, attempt: str, pool: str | None) -> bool:
        """Whether an attempt is active and was leased to a pool."""
        found = self._by_id.get(attempt)
        return found is not None and pool is not None and found.pool == pool

    def get(self, attempt: str) -> Attempt | None:
        """Return an active attempt by its id."""
        return self._by_id.get(attempt)

    def by_trace(self, trace: str) -> Attempt | None:
        """Return an active attempt by its trace id."""
        return self._by_trace.get(trace)

    def _add(self, attempt: Attempt) -> None:
        self._by_id[attempt.id] = attempt
        self._by_trace[attempt.trace_id] = attempt


class KeyKind(StrEnum):
    """Kinds of keys."""

    ADMIN = "admin"
    WORKER = "worker"
    POOL = "pool"
    ATTEMPT = "attempt"
    VIEWER = "viewer"
    CLIENT = "client"


_REPORTING = frozenset({KeyKind.ADMIN, KeyKind.WORKER, KeyKind.POOL, KeyKind.ATTEMPT})
TRUSTED_KINDS = frozenset({KeyKind.ADMIN, KeyKind.WORKER})

ALLOWED_KINDS: dict[Permission, frozenset[KeyKind]] = {
    Permission.READ: frozenset({KeyKind.ADMIN, KeyKind.VIEWER}),
    Permission.READ_ALL: frozenset({KeyKind.ADMIN, KeyKind.VIEWER}),
    Permission.VIEW: frozenset({KeyKind.ADMIN, KeyKind.VIEWER}),
    Permission.READ_EPISODES: frozenset({KeyKind.ADMIN, KeyKind.VIEWER, KeyKind.WORKER}),
    Permission.MANAGE: frozenset({KeyKind.ADMIN}),
    Permission.DELETE: frozenset({KeyKind.ADMIN}),
    Permission.WORK: TRUSTED_KINDS,
    Permission.RECORD: TRUSTED_KINDS,
    Permission.REWARD: _REPORTING,
    Permission.TRACE: _REPORTING,
    Permission.CALL_MODELS: frozenset({KeyKind.POOL, KeyKind.ATTEMPT, KeyKind.CLIENT}),
    Permission.CREATE_KEYS: TRUSTED_KINDS,
}
AGENT_KINDS = frozenset({KeyKind.POOL, KeyKind.ATTEMPT})
"""The keys that agent code receives."""


class Key(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The content of a key. A field that is None does not restrict it."""

    kind: KeyKind
    id: str
    expires: float
    run: str | None = None
    rollout: str | None = None
    attempt: str | None = None
    started: float | None = None
    """When the attempt started: in a run that was deleted and recreated, another attempt can have the same id."""
    pool: str | None = None

    def check_run(self, run: str) -> None:
        """Raise `KeyRefused` if the key is for another run."""
        if self.run not in (None, run):
            raise KeyRefused(f"this key is for run {self.run}, not {run}: name that run, or use another key")


class KeyRefused(Exception):
    """A request without sufficient permission: 401 if the key is invalid, 403 if it lacks the permission."""

    def __init__(self, message: str, reason: str = "not_permitted", status: int = 403) -> None:
        super().__init__(message)
        self.message, self.reason, self.status = message, reason, status


class Keyring:
    """Creates and verifies keys with the server's secret."""

    _CACHE_SIZE = 4096

    def __init__(self, secret: bytes, clock: Callable[[], float]) -> None:
        self._secret = secret
        self.clock = clock
        self.cookie = f"leyden-{hmac.digest(secret, b'cookie', 'sha256').hex()[:12]}"
        """Name of the cookie of a viewer's key; servers differ, because browsers share cookies between ports."""
        self._verified: dict[str, Key] = {}
        self._decode = msgspec.msgpack.Decoder(Key).decode

    @classmethod
    def from_file(cls, path: Path, clock: Callable[[], float]) -> "Keyring":
        """Load the secret from a home folder; it is created on the first start, readable by its owner only."""
        if not path.exists():
            write_private(path, secrets.token_hex(32))
        text = path.read_text().strip()
        if not re.fullmatch("[0-9a-f]{64}", text):  # with an empty secret anybody could create keys
            raise ValueError(
                f"{path} is damaged: restore it, or delete it to have a new one, which invalidates every key"
            )
        return cls(bytes.fromhex(text), clock)

    def create(
        self,
        kind: KeyKind,
        ttl_s: float,
        *,
        run: str | None = None,
        rollout: str | None = None,
        attempt: str | None = None,
        started: float | None = None,
        pool: str | None = None,
    ) -> tuple[str, Key]:
        """Create a key; returns its text and its content."""
        expires = self.clock() + ttl_s
        key = Key(kind, secrets.token_hex(8), expires, run, rollout, attempt, started, pool)
        payload = urlsafe_b64encode(msgspec.msgpack.encode(key)).rstrip(b"=")
        return f"{KEY_PREFIX}{payload.decode()}.{self._sign(payload)}", key

    def verify(self, text: str) -> Key:
        """Return the content of a key, if this server signed it and it has not expired."""
        key = self._verified.get(text)
        if key is None:
            key = self._check_signature(text)
            if len(self._verified) >= self._CACHE_SIZE:
                self._verified.clear()
            self._verified[text] = key
        if key.expires <= self.clock():
            raise KeyRefused("this key has expired: create a new one", "key_expired", 401)
        return key

    def _check_signature(self, text: str) -> Key:
        payload, _, signature = text.removeprefix(KEY_PREFIX).partition(".")
        genuine = text.startswith(KEY_PREFIX) and text.isascii()
        if not genuine or not hmac.compare_digest(self._sign(payload.encode()), signature):
            raise KeyRefused(
                "this is not a key of this server: check the key and the server's URL", "invalid_api_key", 401
            )
        return self._decode(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))

    def _sign(self, payload: bytes) -> str:
        return hmac.digest(self._secret, payload, "sha256").hex()


def check_permission(
    key: Key, permission: Permission, leases: ActiveLeases, *, run: str | None, attempt: str | None
) -> None:
    """Raise `KeyRefused` unless the key has a permission for the run and the attempt in a request's path."""
    if key.kind is KeyKind.ATTEMPT and not leases.is_active(key.attempt, key.started):
        raise KeyRefused(f"attempt {key.attempt} has ended, so its key is no longer valid", "attempt_ended")
    if key.kind not in ALLOWED_KINDS[permission]:
        kinds = ", ".join(sorted(ALLOWED_KINDS[permission]))
        raise KeyRefused(f"a key of kind {key.kind} lacks the permission {permission}: use a key of kind {kinds}")
    if run is not None:
        key.check_run(run)
    if permission is Permission.READ_ALL and key.run is not None:
        raise KeyRefused(f"this key is for run {key.run} alone")
    if attempt is not None:
        check_attempt(key, leases, attempt)


def check_attempt(key: Key, leases: ActiveLeases, attempt: str) -> None:
    """Raise `KeyRefused` unless the key may act for this attempt."""
    if key.kind is KeyKind.ATTEMPT and key.attempt != attempt:
        raise KeyRefused(f"this key is for attempt {key.attempt}, not {attempt}")
    if key.kind is KeyKind.POOL and not leases.in_pool(attempt, key.pool):
        raise KeyRefused(f"attempt {attempt} is not an active lease of pool {key.pool}")


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
