"""Limited-memory BFGS: minimises a smooth function of a tensor, on the tensor's device.

Two-loop recursion of Nocedal (1980) with the scaling of Liu & Nocedal (1989), and a line search for the Wolfe
conditions, so that every remembered pair has positive curvature. Near the minimum, where rounding hides differences of
values, a decrease is judged by slopes ("approximate Wolfe", Hager & Zhang, 2005).
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]  # point -> value [], gradient of the point's shape
LinearMap = Callable[[Tensor], Tensor]  # a tensor of the point's shape -> another: symmetric and positive definite

_DECREASE = 1e-4  # share of the decrease promised by the slope that a step must deliver
_CURVATURE = 0.9  # share of the starting slope below which the slope must have fallen in size
_MAX_TRIALS = 40  # of one line search; 40 doublings or halvings span 24 orders of magnitude
_ROUNDING = 1e-10  # relative size of a change of the value that may be rounding, also of sums whose terms cancel


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """Where the search ended."""

    point: Tensor
    value: float
    gradient_norm: float
    num_iterations: int
    num_evaluations: int
    converged: bool  # False: out of iterations, or no step goes down any further


@dataclass(frozen=True)
class _Pair:
    """What one iteration taught about the curvature."""

    step: Tensor
    change: Tensor  # of the gradient
    product: float  # of the two; positive


@dataclass(frozen=True)
class _Trial:
    """The objective at one step along a direction."""

    step: float
    value: float
    slope: float  # derivative along the direction
    point: Tensor
    gradient: Tensor


def minimise(
    objective: Objective,
    start: Tensor,
    *,
    is_converged: Callable[[float, float], bool],  # (value, Euclidean norm of the gradient)
    max_iterations: int,
    num_remembered: int = 20,
    preconditioner_at: Callable[[Tensor], LinearMap] | None = None,
    refresh_every: int = 10,
) -> Minimum:
    """Descend from `start` until `is_converged`; the objective must be smooth and bounded below.

    `preconditioner_at(point)` is an approximate inverse Hessian, computed again every `refresh_every` iterations.
    """
    point = start
    precondition: LinearMap = _identity
    value_tensor, gradient = objective(point)
    value, gradient_norm = float(value_tensor), float(gradient.norm())
    pairs: deque[_Pair] = deque(maxlen=num_remembered)
    num_iterations, num_evaluations = 0, 1
    while gradient_norm > 0.0 and num_iterations < max_iterations and not is_converged(value, gradient_norm):
        if preconditioner_at is not None and num_iterations % refresh_every == 0:
            precondition = preconditioner_at(point)
        direction = -_times_inverse_hessian(gradient, pairs, precondition)
        slope = float(_dot(gradient, direction))
        first_step = 1.0 if pairs or preconditioner_at is not None else 1.0 / gradient_norm
        found, num_trials = _line_search(
            objective, _Trial(0.0, value, slope, point, gradient), direction, first_step=first_step
        )
        num_evaluations += num_trials
        if found is None:
            break
        # From slopes, which the line search has checked, the product of step and change is positive despite rounding.
        pairs.append(_Pair(found.point - point, found.gradient - gradient, found.step * (found.slope - slope)))
        point, value, gradient, gradient_norm = found.point, found.value, found.gradient, float(found.gradient.norm())
        num_iterations += 1
    return Minimum(
        point=point,
        value=value,
        gradient_norm=gradient_norm,
        num_iterations=num_iterations,
        num_evaluations=num_evaluations,
        converged=gradient_norm == 0.0 or is_converged(value, gradient_norm),
    )


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _dot(first: Tensor, second: Tensor) -> Tensor:  # -> [], on the device
    return torch.dot(first.flatten(), second.flatten())


def _times_inverse_hessian(gradient: Tensor, pairs: deque[_Pair], precondition: LinearMap) -> Tensor:
    """The gradient times the approximate inverse Hessian; all scalars stay on the device."""
    result = gradient
    shares: list[Tensor] = []
    for pair in reversed(pairs):
        shares.append(_dot(pair.step, result) / pair.product)
        result = result - shares[-1] * pair.change
    result = precondition(result)
    if pairs:  # scaled to fit the newest pair; a step of length 1 is then nearly always accepted
        newest = pairs[-1].change
        result = result * (pairs[-1].product / _dot(newest, precondition(newest)))
    for pair, share in zip(pairs, reversed(shares), strict=True):
        result = result + (share - _dot(pair.change, result) / pair.product) * pair.step
    return result


def _line_search(
    objective: Objective, start: _Trial, direction: Tensor, *, first_step: float
) -> tuple[_Trial | None, int]:
    """A step that meets the weak Wolfe conditions (None if rounding hides them), and the number of trials."""
    if not start.slope < 0.0:  # also where it is not a number
        return None, 0
    low, step = start, first_step
    high: _Trial | None = None
    for num_trials in range(1, _MAX_TRIALS + 1):
        trial_point = torch.add(start.point, direction, alpha=step)
        trial_value, trial_gradient = objective(trial_point)
        trial = _Trial(step, float(trial_value), float(_dot(trial_gradient, direction)), trial_point, trial_gradient)
        if not _is_lower(trial, start):
            high = trial  # too far
        elif trial.slope < _CURVATURE * start.slope:
            low = trial  # still steeply downhill: not far enough
        else:
            return trial, num_trials
        step = 4.0 * low.step if high is None else _between(low, high)
    return None, _MAX_TRIALS


def _is_lower(trial: _Trial, start: _Trial) -> bool:
    """Whether the value fell enough, or the slope if the change of the value may be rounding."""
    if trial.value <= start.value + _DECREASE * trial.step * start.slope:
        return True
    is_rounding = trial.value <= start.value + _ROUNDING * abs(start.value)
    return is_rounding and trial.slope <= (2.0 * _DECREASE - 1.0) * start.slope


def _between(low: _Trial, high: _Trial) -> float:
    """The minimum of the cubic through both values and slopes, away from either end; halfway if there is none."""
    width = high.step - low.step
    fraction = 0.5
    if math.isfinite(high.value) and math.isfinite(high.slope):
        mean_slope = low.slope + high.slope - 3.0 * (high.value - low.value) / width
        discriminant = mean_slope * mean_slope - low.slope * high.slope
        denominator = high.slope - low.slope + 2.0 * math.sqrt(max(discriminant, 0.0))
        if discriminant >= 0.0 and denominator > 0.0:
            fraction = 1.0 - (high.slope + math.sqrt(discriminant) - mean_slope) / denominator
    return low.step + min(max(fraction, 0.1), 0.9) * width
