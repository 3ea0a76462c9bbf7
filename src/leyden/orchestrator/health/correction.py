"""Detects that the correction for the difference between sampler and policy leaves little to learn from."""

from collections.abc import Mapping

from leyden.config import Config

_STEPS = 3
"""So many steps in a row count: one may be chance."""
_LEAST = 0.5
"""Share of the data that must be left."""


class CorrectionDetector:
    """Follows the effective sample size at the level of the correction, and the share of tokens that it cuts."""

    def __init__(self, config: Config) -> None:
        algorithm, training = config.algorithm, config.training
        self._ess = "ess_token" if algorithm.correction_level == "token" else "ess_call"
        self._advice = "lower `training.max_staleness` or `training.learning_rate`"
        if not training.max_staleness:
            self._advice = "engine and trainer disagree: see `training/kl_sampler_k3`"
        if self._ess == "ess_call" and algorithm.correction_ratio == "geometric":
            self._ess = ""  # that of geometric means is not computed
        elif self._ess == "ess_call":
            self._advice += ', or set `algorithm.correction_ratio = "geometric"`'
        self._steps = 0

    def add_step(self, statistics: Mapping[str, float]) -> str | None:
        """Add the statistics of a step; return what is wrong and what to change, the first time that it is."""
        if "corrected" not in statistics:  # there is no correction
            return None
        shares = {"training/corrected": 1 - statistics["corrected"]}
        if self._ess:
            shares[f"training/{self._ess}"] = statistics[self._ess]
        name, left = min(shares.items(), key=lambda item: item[1])
        if self._steps < _STEPS:
            self._steps = self._steps + 1 if left < _LEAST else 0
            if self._steps == _STEPS:
                return (
                    f"the correction leaves little to learn from: {left:.0%} of the data by `{name}`, and less than "
                    f"{_LEAST:.0%} in {_STEPS} steps in a row ({self._advice})"
                )
        return None
