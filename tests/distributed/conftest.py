import importlib.util
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

# The same small world and the same way of starting processes as in tests/endtoend.
_specification = importlib.util.spec_from_file_location(
    "massl_endtoend_world", Path(__file__).parents[1] / "endtoend" / "conftest.py"
)
assert _specification is not None
assert _specification.loader is not None
_world = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(_world)

server, recipe, runs, massl_here = _world.server, _world.recipe, _world.runs, _world.massl_here
make_folder = _world.make_folder


@pytest.fixture
def start_ranks(server: Any) -> Callable[..., list[Any]]:
    """start_ranks(2, "pretrain", ...): the processes that torchrun would start, as massl sees them.

    `of_last` are further arguments of the last rank alone, as of a command given on another machine.
    """

    def start(num_ranks: int, *arguments: str | Path, of_last: Sequence[str | Path] = ()) -> list[Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(num_ranks),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
        further = [()] * (num_ranks - 1) + [tuple(of_last)]
        pairs = zip(environments, further, strict=True)
        return [server.start(*arguments, *own, environment=environment) for environment, own in pairs]

    return start
