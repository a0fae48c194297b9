"""How fast a job is, from coalesced samples of which some may have been lost."""

from __future__ import annotations

import math

from gshare.tui.frames import Sample

#: Seconds after which an older speed counts 1/e: long against a round, short against a change of neighbours.
SMOOTHING_S = 15.0
#: A pause this long is none of the job's speed (paused, moved, waited): it begins anew.
BREAK_S = 120.0


class Speed:
    """Steps a second from step numbers and their times, so that lost samples do not make it slower; tokens a
    second are those times the tokens of a step. The first sample tells by the wall time of its round.
    """

    __slots__ = ("_guessed", "_step", "_time", "_tokens", "steps_per_s")

    def __init__(self) -> None:
        self.steps_per_s: float | None = None
        self._tokens: float | None = None  # a step's, smoothed
        self._guessed = True  # by the time of a round, not by the distance of two samples
        self._step = 0
        self._time: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        if self.steps_per_s is None or self._tokens is None:
            return None
        return self.steps_per_s * self._tokens

    def add(self, sample: Sample) -> None:
        before, self._time = self._time, sample.time
        made, self._step = sample.step - self._step, sample.step
        if before is None or made <= 0 or sample.time - before > BREAK_S:
            self._begin(sample)
            return
        passed = sample.time - before
        if passed <= 0:
            self._time, self._step = before, sample.step - made  # several of one moment count together
            return
        keep = math.exp(-passed / SMOOTHING_S)
        if sample.tokens is not None:
            old = self._tokens if self._tokens is not None else sample.tokens
            self._tokens = keep * old + (1 - keep) * sample.tokens
        now = made / passed
        if self._guessed or self.steps_per_s is None:
            self.steps_per_s, self._guessed = now, False
        else:
            self.steps_per_s = keep * self.steps_per_s + (1 - keep) * now

    def _begin(self, sample: Sample) -> None:
        self._tokens, self._guessed = sample.tokens, True
        self.steps_per_s = 1 / sample.seconds if sample.seconds else None
