"""Errors of the store. Each message says what to change."""


class StoreError(Exception):
    """Base class of the store's errors."""


class StoreUnusable(StoreError):
    """The database cannot be used; it was left unchanged."""


class StoreInUse(StoreUnusable):
    """Another process has the database open for writing."""


class NotFound(StoreError):
    """The named object does not exist (in the named run)."""


class Conflict(StoreError):
    """The object exists already and differs, or has ended."""


class NotStorable(StoreError):
    """A value cannot be stored."""


class StoreUnavailable(StoreError):
    """The database failed (a full disk, a lost connection); the operation was rolled back."""


class StoreLost(StoreUnavailable):
    """The store is no longer this process's: its files were deleted or replaced, or another server has taken it over.

    What was written last is not acknowledged. To try again is useless, and a new store would be empty.
    """


class StoreClosed(StoreUnavailable):
    """The store was closed before the operation began: to try again is useless."""
