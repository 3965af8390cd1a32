"""Streams of the rocm backend: torch's own, of the lowest priority, one for each lane."""

from kvoffload.backends._driver import handle_of, new_lane_stream

__all__ = ["handle_of", "new_lane_stream"]
