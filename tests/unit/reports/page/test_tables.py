import pytest

from massl.reports.page.tables import Cell, Line, PageTable, number_in, page_table, table_markup
from massl.reports.tables import ResultsTable

TABLE = ResultsTable(
    title="Ours",
    columns=("model", "k-NN", "paper", "empty"),
    lines=(("2nd", "9.25 ± 0.10", "", ""), ("1st", "71.50", "72.70¹", "--")),
    footnotes=("¹ a note",),
    text_columns=frozenset({"model"}),
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("44.80 ± 0.40", 44.8),
        ("1,024 (k=20)", 1024.0),
        ("−3.5", -3.5),
        ("2e-06", 2e-6),
        ("1/8", 0.125),
        ("72.70¹", 72.7),
        ("k=20", None),
        ("", None),
        ("–", None),
    ],
)
def test_texts_are_sorted_by_the_number_they_begin_with(text: str, number: float | None) -> None:
    assert number_in(text) == number


def test_empty_columns_go_and_missing_values_are_marked() -> None:
    table = page_table(TABLE)
    assert table.columns == ("model", "k-NN", "paper")
    assert [[cell.text for cell in line.cells] for line in table.lines] == [
        ["2nd", "9.25 ± 0.10", "–"],
        ["1st", "71.50", "72.70¹"],
    ]
    assert table.has_numbers == (False, True, True)
    assert page_table(TABLE, without=("k-NN",)).columns == ("model", "paper")


def test_markup_says_what_is_a_number_and_whose_row_it_is() -> None:
    table = PageTable(
        columns=("method", "top-1"), lines=(Line(cells=(Cell(text="<b>"), Cell(text="3.0", number=3.0)), is_ours=True),)
    )
    html = str(table_markup(table))
    assert '<td class="word">&lt;b&gt;<span class="badge">ours</span></td>' in html
    assert '<td class="number" data-number="3.0">3.0</td>' in html
    assert '<tr class="ours">' in html
    assert html.count('aria-sort="none"') == 2


def test_footnotes_stand_below_the_table() -> None:
    html = str(table_markup(page_table(TABLE)))
    assert html.index("</table>") < html.index("<li>¹ a note</li>")
    assert "<caption>Ours</caption>" in html
