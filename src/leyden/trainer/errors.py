"""What ends a training before its time."""


class TrainingError(Exception):
    """Training cannot go on; the message says what to change."""
