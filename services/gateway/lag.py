"""Whether a gateway keeps up with what workers send: frames that wait here for long, or heartbeats that come late, say no."""

from __future__ import annotations

from common.runtime import logs

log = logs.get("gateway")

BEHIND_S = 0.3
"""A frame that has waited so long, or a heartbeat so late, says that silence of workers may be our own."""
SHED_S = 2.0
SHED_AFTER_S = 3.0
"""When that is as much as `SHED_S`, and for so long that smaller windows did not help, new requests are refused. One late
heartbeat is not enough, however late: this process was stopped, and had nothing to keep up with."""
BEHIND_FOR_S = 1.0


class Lag:
    """`measure` once a heartbeat."""

    def __init__(self, *, heartbeat_s: float, now: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._measured_at = self._kept_up_at = self._busy_until = self._shed_until = now
        self._was_late = False

    def is_behind(self, now: float) -> bool:
        """Whether silence of workers says nothing of them."""
        return now < self._busy_until

    def sheds(self, now: float) -> bool:
        """Whether new requests are refused."""
        return now < self._shed_until

    def measure(self, frames_waited_s: float, now: float) -> None:
        """`frames_waited_s`: how long the oldest frame has been waiting here."""
        beat_late_s = now - self._measured_at - self._heartbeat_s
        late_s = max(frames_waited_s, beat_late_s)
        self._measured_at = now
        if late_s > BEHIND_S:
            self._busy_until = now + BEHIND_FOR_S
        was_late, self._was_late = self._was_late, late_s > SHED_S
        if not self._was_late:
            self._kept_up_at = now
        elif was_late and now - self._kept_up_at > SHED_AFTER_S:
            if now >= self._shed_until:
                log.warning(
                    "can_not_keep_up", frames_waited_s=round(frames_waited_s, 2), heartbeat_late_s=round(beat_late_s, 2)
                )
            self._shed_until = now + BEHIND_FOR_S
