"""Every error kvoffload raises or reports: one class per condition.

Three families tell a caller what to do:

* :class:`ConfigurationError`, :class:`SpecError`: the arguments are wrong. Raised at once; nothing
  was started. Both are also ``ValueError``.
* :class:`TransferError`: a job that was accepted has failed. Never raised by the engine; it is the
  ``error`` of a :class:`~kvoffload.core.engine.TransferResult`.
* :class:`BackendError`: a backend could not be found, chosen or used.

:class:`StateError` (and ``RuntimeError``) says that the object is not in a state to do this now.
"""

from __future__ import annotations


class KVOffloadError(Exception):
    """Base of every error of this package."""


# ------------------------------------------------------------------------- the caller's arguments
class ConfigurationError(KVOffloadError, ValueError):
    """A setting is missing, malformed or contradicts another."""


class CapacityError(ConfigurationError):
    """A memory budget cannot be met: too small, too large, or not a number of bytes."""


class UnsupportedVersionError(ConfigurationError):
    """The engine's version is none that its integration was written for."""


class LayoutError(ConfigurationError):
    """An engine's tensors cannot be described as blocks of pages."""


class UnsupportedStateError(LayoutError):
    """A layer's kind of state is not known; it can be registered."""


class AmbiguousLayoutError(LayoutError):
    """A tensor can be read as blocks in more than one way; the message says what to declare."""


class OverlapError(LayoutError):
    """Two layers share a part of their bytes, but not all."""


class SpecError(KVOffloadError, ValueError):
    """A transfer's arguments are wrong; no job was created."""


class BlockRangeError(SpecError):
    """A block or chunk id lies outside what was registered."""


class DuplicateBlockError(SpecError):
    """One transfer names the same destination twice."""


class BlockCountError(SpecError):
    """The two sides of a transfer do not describe the same number of blocks."""


class BlockWithheldError(SpecError):
    """A block or chunk may still be written by a job that stalled; it cannot be used."""


class DuplicateJobError(SpecError):
    """The job id is already in flight."""


class UnroutableError(SpecError):
    """No handler serves this pair of spec types."""


# -------------------------------------------------------------------------------- failed transfers
class TransferError(KVOffloadError, RuntimeError):
    """Base of the errors of a failed job."""


class SubmitError(TransferError):
    """The job could not be enqueued completely; what was enqueued has stopped."""


class CopyError(TransferError):
    """The device or the copy reported an error while the job ran."""


class DependencyError(TransferError):
    """The job read what a failed job should have written."""


class CancelledError(TransferError):
    """The job was cancelled; it has stopped."""


class StalledError(TransferError):
    """The job passed its deadline, and may still be running; its blocks are withheld until then."""


# -------------------------------------------------------------------------------- wrong moment
class StateError(KVOffloadError, RuntimeError):
    """The object cannot do this in its present state."""


class ClosedError(StateError):
    """The object was shut down."""


class GraphCaptureError(StateError):
    """The caller's stream is being captured into a graph; transfers cannot be part of it."""


class ForkedError(StateError):
    """The object belongs to the process that made it; this one was forked from it."""


class AlreadyBoundError(StateError):
    """The backend already serves a set of caches; unregister those first."""


# -------------------------------------------------------------------------------- scheduler
class ManagerError(KVOffloadError, RuntimeError):
    """The manager was called in an order its contract does not allow."""


class KeyNotReadyError(ManagerError):
    """A load names a key whose bytes are not in place."""


class UnknownGroupError(ManagerError):
    """A key names a group that the manager was not made for."""


class UnknownTransferError(ManagerError):
    """A completion names a key that this request is not moving."""


class UnexpectedAcknowledgementError(ManagerError):
    """A worker acknowledged what is not in flight, or more workers did than there are."""


# -------------------------------------------------------------------------------- backends
class BackendError(KVOffloadError, RuntimeError):
    """A backend could not be found, chosen or used."""


class BackendNotFoundError(BackendError):
    """No installed distribution provides a backend of this name."""


class BackendUnavailableError(BackendError):
    """The backend is installed, but cannot run on this machine; the message says why."""


class AmbiguousBackendError(BackendError):
    """Several accelerators are available and none was named."""


class DuplicateBackendError(BackendError):
    """Two distributions claim the same backend name."""


class BrokenBackendError(BackendError):
    """The backend's package could not be imported, or its hook failed."""


class HookError(BackendError):
    """The plugin's hooks do not match the specification: a misspelt name, a wrong argument."""


class InterfaceVersionError(BackendError):
    """The plugin was written for another version of the backend interface."""
