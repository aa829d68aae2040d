"""Why tests of TransformerLens fail on models of ours, where they are bound to."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["INHERENT", "Inherent"]


@dataclass(frozen=True)
class Inherent:
    """A reason, and the tests that it explains.

    Attributes:
        why: for the page.
        tests: by layout, node ids of tests, or of the modules and classes that they are in.
    """

    why: str
    tests: Mapping[str, tuple[str, ...]]

    @staticmethod
    def matches(named: str, test: str) -> bool:
        """Whether a node id is that of a test, or of what it is in or a case of."""
        return test == named or test.startswith((f"{named}::", f"{named}["))

    def covers(self, test: str, layout: str) -> bool:
        """Whether it explains this test."""
        return any(self.matches(named, test) for named in self.tests.get(layout, ()))


INHERENT: tuple[Inherent, ...] = ()
