import io

import pytest
from rich.console import Console

from massl.commands.console import print_table
from massl.reports.tables import ResultsTable

COMPARISON = ResultsTable(
    title="vit_small_patch16_224 on photos",
    columns=(
        *("run", "method", "epochs done", "k-NN start", "k-NN last", "k-NN best (epoch)"),
        *("k-NN at 12.3 GPU min (probe at)", "GPU min", "time ×", "images a second", "GiB a GPU", "GiB ×"),
    ),
    lines=(
        *(
            ("massl-imagenette-again", "massl", "100/100", "35.8", "62.6", "62.7 (98)"),
            ("supervised-imagenette", "supervised", "33.5/100", "35.9", "62.8", "62.9 (33.5)"),
        ),
    ),
    footnotes=(),
    text_columns=frozenset({"run", "method"}),
)
COSTS = (
    ("61.2 (11.48)", "1,234", "1.00", "13,200", "101.1", "1.01"),
    ("61.3 (12.34)", "5,678", "12.34", "14,300", "102.2", "12.35"),
)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_wide_table_keeps_numbers_whole_and_names_readable(width: int) -> None:
    lines = tuple(line + costs for line, costs in zip(COMPARISON.lines, COSTS, strict=True))
    table = ResultsTable(**{**vars(COMPARISON), "lines": lines})
    screen = io.StringIO()
    print_table(Console(file=screen, width=width, color_system=None), table)
    printed = screen.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert all(cell in printed for line in lines for cell in line[2:])
    assert "massl-imag" in printed  # at least ten characters of a name on a line
    assert printed.count(table.title) == 1
    assert printed.count("run ") == (1 if width == 160 else 2)
