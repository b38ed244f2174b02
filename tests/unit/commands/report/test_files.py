from pathlib import Path

import pytest

from massl.commands.report.files import runs_of_comparison
from massl.config import MasslError


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"runs": [{"folder": 5}], "failed": {}}',
        '{"runs": [], "failed": {"' + "x" * 5000 + '": "no data"}}',
        '{"runs": 5, "failed": {}}',
        "x" * (17 * 2**20),
    ],
    ids=lambda text: text[:40],
)
def test_what_massl_compare_did_not_write_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "comparison.json").write_text(text)
    with pytest.raises(MasslError, match=r"comparison.json is not what massl compare writes"):
        runs_of_comparison(tmp_path)


def test_runs_that_are_gone_are_named_in_few_words(tmp_path: Path) -> None:
    names = ", ".join(f'"run{number}": "no data"' for number in range(10_000))
    (tmp_path / "comparison.json").write_text('{"runs": [], "failed": {' + names + "}}")
    with pytest.raises(MasslError, match="run0, run1") as raised:
        runs_of_comparison(tmp_path)
    assert len(str(raised.value)) < 1000
