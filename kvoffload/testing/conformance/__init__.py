"""The conformance kit: what every backend must do, as checks that anybody can run.

``kvoffload verify NAME`` runs it on an installed backend. In a test suite, subclass
:class:`kvoffload.testing.conformance.suite.BackendConformance`.
"""

from kvoffload.testing.conformance import checks as _checks  # noqa: F401 - registers them
from kvoffload.testing.conformance.check import CHECKS, Check, Guarantee, MakeBackend
from kvoffload.testing.conformance.lab import Cache, Lab
from kvoffload.testing.conformance.run import Outcome, run_check

__all__ = ["CHECKS", "Cache", "Check", "Guarantee", "Lab", "MakeBackend", "Outcome", "run_check"]
