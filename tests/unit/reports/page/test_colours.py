import itertools
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from massl.reports.page.series import NUM_COLOURS
from massl.reports.page.templates import asset

# What is left of linear RGB without one kind of cone (Machado, Oliveira and Fernandes, 2009, severity 1).
VISIONS = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no long cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no medium cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no short cones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# Linear RGB -> cones -> Oklab (Ottosson, 2020), in which distances are about as large as they look.
TO_CONES = [
    [0.41222147, 0.53633254, 0.05144599],
    [0.21190350, 0.68069955, 0.10739696],
    [0.08830246, 0.28171884, 0.62997870],
]
TO_LAB = [
    [0.21045426, 0.79361779, -0.00407205],
    [1.97799850, -2.42859221, 0.45059371],
    [0.02590404, 0.78277177, -0.80867577],
]
LEAST_DISTANCE = 0.09


def linear(colour: str) -> NDArray[np.float64]:
    values = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_runs_are_told_apart_by_any_eye(scheme: int, vision: str) -> None:
    colours = re.findall(r"--run-\d: light-dark\((#\w{6}), (#\w{6})\)", asset("page.css"))
    assert len(colours) == NUM_COLOURS
    seen = [np.clip(np.array(VISIONS[vision]) @ linear(pair[scheme]), 0, 1) for pair in colours]
    places = [np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ light) for light in seen]
    near = [float(np.linalg.norm(one - other)) for one, other in itertools.combinations(places, 2)]
    assert min(near) > LEAST_DISTANCE
