"""The filter by which a robust rule replaces the means of uploads, in rounds and in asynchronous runs."""

from __future__ import annotations

from collections.abc import Mapping

from mpifl.aggregation.mixer import Mixer
from mpifl.aggregation.update_filter import UpdateFilter
from mpifl.core.parameters import VectorParts

from .robust_mixer import RobustMixer
from .robust_rules import Rule


class RobustMeans(UpdateFilter):
    """Replaces means of uploads by a robust rule.

    Args:
        rule: the robust rule.
        no_weights: names of uploads that do not represent parameters.
        parts: which numbers of a vector are running statistics.
    """

    at_server = True

    def __init__(self, rule: Rule, no_weights: tuple[str, ...], parts: VectorParts) -> None:
        self.rule, self.no_weights, self.parts = rule, no_weights, parts
        self._mixers: list[RobustMixer] = []  # over ranks, and on rank 0 in asynchronous runs

    def mixer(self, mixer: Mixer) -> RobustMixer:
        """Return what carries out the mixings of steps by the rule."""
        self._mixers.append(RobustMixer(mixer.transport, mixer, self.rule, self.no_weights, self.parts))
        return self._mixers[-1]

    def figures(self) -> Mapping[str, float]:
        """Return the number of rows in the last step whose groups were too small for the rule."""
        return {"robust_too_small": float(sum(mixer.num_too_small for mixer in self._mixers))}
