"""`massl demo`: a first run on bundled images, from training to the page of a report."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from massl.commands.arguments import exit_status, parse
from massl.commands.console import message_console, print_line
from massl.config import MasslError, Settings

DESCRIPTION = """Pre-train on bundled images, evaluate the features and show both on one HTML page. It needs no GPU.

massl demo
massl demo --steps 60 --output runs/short"""

PAGE_FILE, RESULTS_FOLDER = "report.html", "results"


class DemoSettings(Settings):
    """How long the demo trains, and where it writes."""

    steps: int | None = Field(
        None, ge=1, description="stop after this many steps; default: all, four minutes on two CPU cores"
    )
    output: str = Field("runs/demo", description=f"folder of the run; {RESULTS_FOLDER} and {PAGE_FILE} are put in it")


def main(arguments: Sequence[str]) -> int:
    return run_demo(parse(DemoSettings, "demo", DESCRIPTION, arguments))


def run_demo(settings: DemoSettings) -> int:
    """Train, evaluate, report; prints the command of each step, and at the end where the page is."""
    # not at the top of the file: --help would wait for torch
    from massl.commands.evaluate.command import evaluate
    from massl.commands.pretrain import RunInterrupted, pretrain
    from massl.commands.report.command import report

    run, train, test = Path(settings.output).expanduser(), "demo:train", "demo:test"
    results, page = run / RESULTS_FOLDER, run / PAGE_FILE
    if results.is_symlink():  # of a stranger's folder: it could lead to results of the user
        raise MasslError(f"{results} is a link, through which massl does not write; choose another --output")
    stop = {} if settings.steps is None else {"trainer.max_steps": settings.steps}
    stop_words = [word for key, value in stop.items() for word in (f"--{key}", str(value))]
    _announce("pretrain", "--recipe", "demo", *stop_words, "--output", run)
    try:
        trained = pretrain(recipe="demo", output=run, overrides=stop)
    except RunInterrupted as interrupted:
        trained = interrupted.result
    if not trained.finished:
        return exit_status(trained.signal_number)
    images = ("--train", train, "--test", test)
    _announce("evaluate", run, "--protocol", "knn", *images, "--output", results)
    evaluate(run, protocol="knn", train=train, test=test, output=results)
    _announce("report", run, "--output", page)
    print(report([run], output=page).file.absolute().as_uri())
    return 0


def _announce(*words: str | Path) -> None:
    print_line(message_console(), f"\n$ {shlex.join(['massl', *map(str, words)])}", style="bold")
