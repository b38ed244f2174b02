from collections.abc import Callable
from typing import Any

import pytest

# The same small world and the same way of starting processes as in tests/endtoend.
from tests.endtoend import conftest as world

server, recipe, runs, massl_here = world.server, world.recipe, world.runs, world.massl_here
make_folder, end_processes = world.make_folder, world.end_processes


@pytest.fixture
def start_ranks(server: Any) -> Callable[..., list[Any]]:
    """start_ranks(2, "pretrain", ...): the processes that torchrun would start, as massl sees them."""
    start: Callable[..., list[Any]] = server.start_ranks
    return start
