"""Streams of the cpu backend: worker threads, from the base."""

from kvoffload.backends.thread_base import ThreadBackend, ThreadEvent, ThreadStream

__all__ = ["ThreadBackend", "ThreadEvent", "ThreadStream"]
