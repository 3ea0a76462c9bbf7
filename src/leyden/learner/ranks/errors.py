"""The error of a learner that has lost a rank."""

from leyden.learner.errors import TrainingError


class RankLost(TrainingError):
    """A rank ended, hangs or has no memory left. The others cannot go on; the run can, from its checkpoint."""
