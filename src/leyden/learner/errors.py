"""The errors that end a training early."""


class TrainingError(Exception):
    """Training cannot continue; the message says what to change."""


class OutOfDeviceMemory(TrainingError):
    """A device has no memory left for what is computed on it."""


class RankLost(TrainingError):
    """A rank ended, hangs or has no memory left. The others cannot go on; the run can, from its checkpoint."""
