"""A share of each class's cases; `make reliability` runs them all (tests/reliability/README.md)."""

import pytest

from tests.reliability.frame import FaultClass, all_classes, assert_survived

classes = pytest.mark.parametrize("found", all_classes("faults"), ids=lambda found: found.name)


@classes
def test_first_cases_are_survived(found: FaultClass) -> None:
    assert_survived(found, range(found.quick))


@pytest.mark.slow
@classes
def test_more_cases_are_survived(found: FaultClass) -> None:
    assert_survived(found, range(found.quick, found.more))
