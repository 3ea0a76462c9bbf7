"""The errors that end a training early."""


class TrainingError(Exception):
    """Training cannot continue; the message says what to change."""


class OutOfDeviceMemory(TrainingError):
    """A device has no memory left for what is computed on it."""
