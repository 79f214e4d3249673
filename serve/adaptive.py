"""How many drafts are worth verifying: by batch size and by what was accepted lately.

Never changes a token: any number of drafts gives what no drafts give.
"""

# Candidate numbers of drafts by generating requests; the largest size that fits counts. Verifying
# is nearly free for few rows and costs as much as decoding for many.
CANDIDATES = ((1, (1, 3, 5, 7)), (8, (0, 1, 3)), (32, (0, 1)), (64, (0,)))
WARM_UP_ROUNDS = 10
ROUNDS_BETWEEN = 5
NEW_WEIGHT = 0.2
# Fewer drafts only if that much less is accepted than the number in use needs: no flutter.
HYSTERESIS = 0.25


class AdaptiveLength:
    """Chooses the number of drafts of a step."""

    def __init__(self, num_drafts: int):
        """Start from the most.

        Args:
          num_drafts: what the drafter can give at most.
        """
        self._most = num_drafts
        self._mean = float(num_drafts)
        self._num_rounds = self._num_since = 0
        self._wanted = float(num_drafts)

    def length(self, batch_size: int) -> int:
        """Drafts for each of some generating requests."""
        candidates = next(c for size, c in reversed(CANDIDATES) if size <= max(batch_size, 1))
        fitting = [n for n in candidates if n <= self._most] or [self._most]
        return next((n for n in fitting if n + HYSTERESIS >= self._wanted), fitting[-1])

    def saw(self, num_accepted: int, num_drafts: int) -> None:
        """Take in a round of a request; one without drafts says nothing."""
        if num_drafts == 0:
            return
        self._num_rounds += 1
        self._num_since += 1
        self._mean += NEW_WEIGHT * (num_accepted - self._mean)
        if self._num_rounds >= WARM_UP_ROUNDS and self._num_since >= ROUNDS_BETWEEN:
            self._num_since = 0
            target = self._mean + 1
            if target > self._wanted or target < self._wanted - HYSTERESIS:
                self._wanted = min(target, float(self._most))
