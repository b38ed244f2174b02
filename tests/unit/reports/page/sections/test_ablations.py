import json
import re
from pathlib import Path

import pytest

from massl.reports.ablation.documents import ablation_values
from massl.reports.ablation.records import RunOutcome, report_of
from massl.reports.page.sections.ablations import PageError, ablation_files, ablations_section, read_ablation


def outcome(value: int, accuracy: float) -> RunOutcome:
    return RunOutcome(
        value=value,
        strategy="random",
        num_rows=value,
        block_size=1024,
        seed=0,
        folder=f"runs/K-{value}",
        state="finished",
        knn_start=10.0,
        knn_last=accuracy,
        evaluated={10: accuracy - 1, 20: accuracy},
        collapse_signs=("all alike",) if accuracy < 20 else (),
    )


REPORT = report_of(
    "memory-size", [outcome(2048, 15.0), outcome(16_384, 40.0)], default=16_384, measured="knn, k=20", num_classes=10
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An --output of massl ablate with one kind in it."""
    plain = ablation_values(REPORT, command="massl ablate memory-size", ours="demo <tiny>", cautions=["few steps"])
    (tmp_path / "memory-size").mkdir()
    (tmp_path / "memory-size/ablation.json").write_text(json.dumps(plain))
    return tmp_path


def test_an_ablation_is_read_as_it_was_written(folder: Path) -> None:
    (file,) = ablation_files(folder)
    assert read_ablation(json.loads(file.read_text())) == REPORT
    assert ablation_files(folder / "memory-size") == [file]
    assert ablation_files(file.parent.parent.parent / "none") == []


def test_the_section_has_figure_table_sentences_and_command(folder: Path) -> None:
    html = ablations_section(ablation_files(folder)).html
    assert "Size K of the memory" in html
    assert "demo &lt;tiny&gt;" in html
    assert "few steps" in html
    assert "massl ablate memory-size" in html
    assert '<td class="number" data-number="16384.0">16,384</td>' in html
    assert '<td class="number" data-number="0.125">1/8</td>' in html
    assert "k-NN accuracy rises from K=2,048 (15.0 %)" in html


def test_figures_follow_the_colours_of_the_page_and_share_no_ids(folder: Path) -> None:
    (file,) = ablation_files(folder)
    html = ablations_section([file, file]).html
    assert html.count("<svg role") == 2
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) > 10
    for target in set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)):
        assert target in ids
    assert "var(--ink)" in html
    assert "var(--run-0)" in html
    assert not re.findall(r"#[0-9a-f]{6}\b", html)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "not what massl ablate writes"),
        ("{}", "KeyError"),
        ("[" * 100_000, "nested too deep"),
        ('{"points": [{"runs": [[1]]}]}', "AttributeError"),
        (
            '{"points": [], "kind": "memory-size", "default": 1, "measured": "knn", "chance": 0}',
            "not what massl ablate writes",
        ),
    ],
)
def test_a_broken_file_is_refused_with_advice(folder: Path, content: str, said: str) -> None:
    (file,) = ablation_files(folder)
    file.write_text(content)
    with pytest.raises(PageError, match=said):
        ablations_section([file])
