from collections.abc import Callable
from pathlib import Path

from massl.reports.page.sections.verdicts import verdicts_section
from massl.reports.run_reader import read_run
from massl.reports.verdict import verdict


def test_each_run_has_its_verdict_with_command_and_page(make_run: Callable[..., Path]) -> None:
    runs = [read_run(make_run("first"), label="the <first>"), read_run(make_run("second"))]
    html = verdicts_section(runs).html
    for run in runs:
        found = verdict(run)
        assert found.headline in html
        assert found.page in html
        assert found.next_step.command in html
    assert "the &lt;first&gt;" in html


def test_the_only_run_is_not_named(make_run: Callable[..., Path]) -> None:
    section = verdicts_section([read_run(make_run("a"), label="only-one")])
    assert "only-one:" not in section.html
    assert section.title == "Verdict"
