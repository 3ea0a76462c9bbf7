"""The error that ends a training early."""


class TrainingError(Exception):
    """Training cannot continue; the message says what to change."""
