"""What the store refuses, by the reason. Each message says what to change."""


class StoreError(Exception):
    """Anything the store refuses."""


class StoreUnusable(StoreError):
    """The database cannot be used at all; it was left as it is."""


class StoreInUse(StoreUnusable):
    """Another process has the database open for writing."""


class NotFound(StoreError):
    """The thing named does not exist (in the run named)."""


class Conflict(StoreError):
    """It exists already and is different, or it is over."""


class NotStorable(StoreError):
    """What was given cannot be kept."""


class StoreUnavailable(StoreError):
    """The database failed (a full disk, a lost connection); nothing of the operation was kept."""
