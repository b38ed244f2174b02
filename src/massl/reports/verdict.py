"""Did a run learn? The verdict in words, with the numbers behind it, the next command and a page of the docs."""

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from massl.reports.runs import PROBE_METRICS, KnnPoint, Run
from massl.training.probes import chance_margin, general_collapse_signs, is_learning

Kind = Literal[
    "too early",
    "no labels",
    "collapsed",
    "not improved",
    "worse than its start",
    "below raw pixels",
    "still rising",
    "learnt",
]
_PAGE = "docs/troubleshooting.md"
_SECTIONS: dict[Kind, str] = {
    "too early": "signs-of-life",
    "no labels": "without-labels-accuracy-is-unknown",
    "collapsed": "it-collapsed",
    "not improved": "it-did-not-improve-on-random-weights",
    "worse than its start": "training-makes-the-features-worse-than-those-it-started-from",
    "below raw pixels": "it-is-below-raw-pixels",
    "still rising": "it-is-still-rising",
    "learnt": "it-learnt",
}
_DEFAULT_QUERIES = 2_000  # probes.max_queries of runs that did not record a number
_FEW_STEPS = 3_000  # for memory-based training a few thousand steps are the very beginning (docs/results)
_LEAST_RECENT = 3  # probes that a trend needs
_LEAST_RISE = 0.5  # points; a smaller rise, however certain, is not worth another run
_PROBED = frozenset(PROBE_METRICS)
_COLLAPSED, _SEE = "training may have collapsed: ", f". See {_PAGE}."  # around a sign in warnings.jsonl


class NextStep(NamedTuple):
    purpose: str  # "train longer"
    command: str  # to type in a shell


@dataclass(frozen=True, kw_only=True)
class Verdict:
    kind: Kind
    headline: str  # a few words
    reasons: tuple[str, ...]  # sentences with the numbers
    next_step: NextStep

    @property
    def page(self) -> str:
        """Section of the docs that helps."""
        return f"{_PAGE}#{_SECTIONS[self.kind]}"


def verdict(run: Run) -> Verdict:
    """Judge a run, finished or not, by its probes."""
    if not any(row["step"] > 0 and _PROBED & row.keys() for row in run.rows):
        if run.finished and not run.settings.get("probes.every_epochs", 1):
            off = ("Probes were off (probes.every_epochs 0).",)
            return Verdict(kind="too early", headline="not probed", reasons=off, next_step=_look_at_neighbours(run))
        none = ("No probe has been made in training yet.",)
        return Verdict(kind="too early", headline="too early to tell", reasons=none, next_step=_train_on(run))
    if signs := _collapse_signs(run):
        reasons = (*signs, *_accuracy_words(run))
        return Verdict(kind="collapsed", headline="collapsed", reasons=reasons, next_step=_look_at_curves(run))
    return _with_labels(run) if len(run.probes) > 1 else _without_labels(run)


def _with_labels(run: Run) -> Verdict:
    margin, is_rising = _margin(run), _is_rising(run)
    gain = run.last.knn_top1 - run.first.knn_top1
    reasons = _accuracy_words(run)
    trend = ", still rising" if is_rising else "" if run.finished else " so far"
    is_short = is_rising or not run.finished or run.rows[-1]["step"] < _FEW_STEPS
    advice = _train_on(run) if is_short else _look_at_curves(run)
    if gain < margin:
        headline = f"{'worse than' if gain < -margin else 'did not improve on'} {run.start_words}"
        reasons += () if is_rising else _best_words(run)
        kind: Kind = "not improved"
        if gain < -margin and run.is_continued:
            kind, advice = "worse than its start", _look_at_curves(run)
        return Verdict(kind=kind, headline=headline + trend, reasons=reasons, next_step=advice)
    if run.raw_pixel_knn is not None and run.last.knn_top1 < run.raw_pixel_knn - margin:
        headline = f"learnt, but below raw pixels{trend}"
        reasons += _best_words(run)
        return Verdict(kind="below raw pixels", headline=headline, reasons=reasons, next_step=advice)
    if is_rising:
        return Verdict(kind="still rising", headline="learnt, still rising", reasons=reasons, next_step=_train_on(run))
    embed = _command("massl", "embed", run.folder, "--data", _source(run), "--output", run.folder / "features.npz")
    next_step = NextStep("use the features", embed) if run.finished else _train_on(run)
    return Verdict(kind="learnt", headline=f"learnt{trend}", reasons=reasons + _best_words(run), next_step=next_step)


def _without_labels(run: Run) -> Verdict:
    """No accuracy: only whether it collapsed, and how often the network finds an image by another view of it."""
    reasons: list[str] = []
    for key, words, form in (
        ("other_view_top1", "Images found again by another view of them, in percent", ".1f"),
        ("effective_rank", "Effective rank", ".1f"),
        ("loss", "Loss", ".3g"),
    ):
        values = [row[key] for row in run.rows if key in row]
        if len(values) > 1:
            reasons.append(f"{words}: {values[0]:{form}} with {run.start_words}, {values[-1]:{form}} {_when(run)}.")
    headline, next_step = "no sign of collapse", _look_at_neighbours(run)
    found = [row["other_view_top1"] for row in run.rows if "other_view_top1" in row]
    if len(found) > 1:
        margin, change = chance_margin(found[-1], num_queries=_num_queries(run)), found[-1] - found[0]
        how = "more often than" if change > margin else "less often than" if change < -margin else "as often as"
        headline = f"images are found again {how} with {run.start_words}"
        reasons.append(_chance_words(run, margin, "Differences of images found"))
        next_step = _look_at_curves(run) if change < -margin else next_step
    headline += "; without labels the accuracy is unknown"
    return Verdict(kind="no labels", headline=headline, reasons=tuple(reasons), next_step=next_step)


# ---- judgement -------------------------------------------------------------------------------------------------------


def _margin(run: Run) -> float:
    """Differences of accuracy below this, in points, may be chance."""
    return chance_margin(run.last.knn_top1, num_queries=_num_queries(run))


def _num_queries(run: Run) -> int:
    most = run.settings.get("probes.max_queries")
    return run.num_queries or (most if isinstance(most, int) and most > 0 else _DEFAULT_QUERIES)


def _is_rising(run: Run) -> bool:
    """Whether the line through the last third of the probes rises by more than a standard error, up to the last one.

    One standard error, not two: a line through several probes is surer than the difference of two.
    """
    recent, error = _recent(run.probes), max(_margin(run) / 2, _LEAST_RISE)
    if len(recent) < _LEAST_RECENT or recent[-1].epoch == recent[0].epoch:
        return False
    if run.last.knn_top1 < max(probe.knn_top1 for probe in recent) - error:
        return False
    fit = statistics.linear_regression([probe.epoch for probe in recent], [probe.knn_top1 for probe in recent])
    return fit.slope * (recent[-1].epoch - recent[0].epoch) > error


def _recent(probes: Sequence[KnnPoint]) -> Sequence[KnnPoint]:
    """The last third of the probes in training, at least three of them; the untrained network does not count."""
    trained = probes[1:]
    return trained[-max(_LEAST_RECENT, len(trained) // 3) :]


def _collapse_signs(run: Run) -> list[str]:
    """Signs at the last probe: those of any method, and the method's own, which training wrote as warnings."""
    last = next(row for row in reversed(run.rows) if _PROBED & row.keys())
    if is_learning(run.rows, num_queries=_num_queries(run)):
        return []
    known = general_collapse_signs(dict(last)) if "effective_rank" in last else []
    own = [warning.text for warning in run.warnings if warning.step == last["step"] and _COLLAPSED in warning.text]
    known += [text.removesuffix(_SEE).removeprefix(_COLLAPSED) for text in own]
    return [f"{sign[0].upper()}{sign[1:].rstrip('.')}." for sign in dict.fromkeys(known)]


# ---- words -----------------------------------------------------------------------------------------------------------


def _accuracy_words(run: Run) -> tuple[str, ...]:
    if len(run.probes) < 2:
        return ()
    first, last = run.first.knn_top1, run.last.knn_top1
    pixels = "" if run.raw_pixel_knn is None else f" Raw pixels reach {run.raw_pixel_knn:.1f} %."
    gain = f"{last:.1f} % {_when(run)} ({last - first:+.1f} points)"
    return (
        f"k-NN accuracy: {first:.1f} % with {run.start_words}, {gain}.{pixels} "
        f"{_chance_words(run, _margin(run), 'Differences')}",
    )


def _chance_words(run: Run, margin: float, what: str) -> str:
    queries = "" if run.num_queries is None else f" on {run.num_queries:,} images"
    return f"{what} below {margin:.1f} points may be chance{queries}."


def _when(run: Run) -> str:
    return "at the end" if run.finished else "now"


def _best_words(run: Run) -> tuple[str, ...]:
    """A comment if the last probe is not the best one."""
    best = run.best
    if run.is_best_untrained:
        return (f"The best probe is the first, {best.knn_top1:.1f} % before training: no later one is better.",)
    if best.knn_top1 - run.last.knn_top1 > _margin(run):
        return (f"It was better before: {best.knn_top1:.1f} % at {run.place_of(best)}.",)
    return ()


# ---- the next command ------------------------------------------------------------------------------------------------


def _train_on(run: Run) -> NextStep:
    """Continue the run if it can be continued, else a longer one in a new folder: schedules depend on the length."""
    recipe, folder = run.folder / "recipe.yaml", run.folder
    if not run.finished:
        command = _command(*run.launcher, "pretrain", "--output", folder)
        return NextStep("continue it, unless it is running", command)
    if not run.has_all_epochs:
        early = ("--trainer.stop_when_flat", "0", "--trainer.guard", "warn") if run.ended_early else ()
        options = ("--trainer.max_steps", "None", *early)
        command = _command(*run.launcher, "pretrain", "--output", folder, *options)
        return NextStep("train to the end of the schedule", command)
    options = ("--trainer.epochs", str(2 * run.num_epochs))
    start = ("--init", folder) if run.is_continued else ("--recipe", recipe)
    command = _command(*run.launcher, "pretrain", *start, "--output", f"{folder}-longer", *options)
    return NextStep("train longer, in a new folder", command)


def _look_at_curves(run: Run) -> NextStep:
    return NextStep(
        "look at the curves", _command("massl", "report", run.folder, "--output", run.folder / "report.html")
    )


def _look_at_neighbours(run: Run) -> NextStep:
    options = ("--data", _source(run), "--output", run.folder / "figures")
    return NextStep(
        "look whether neighbours are alike", _command("massl", "visualize", run.folder, "neighbours", *options)
    )


def _source(run: Run) -> str:
    return str(run.settings["data.source"])


def _command(*words: object) -> str:
    return shlex.join(map(str, words))
