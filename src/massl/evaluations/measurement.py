"""One number of an evaluation and what distinguishes it from the others. Without PyTorch, so that tables load fast."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from massl.config import MasslError

AS_PUBLISHED = "as published"
Statistic = Literal["", "mean", "deviation"]


class EvaluationError(MasslError, ValueError):
    """An evaluation is impossible with these arguments; the message says what to change."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What distinguishes a number from the protocol's other numbers.

    As text, in results.jsonl and tables: "NAME k=K (NOTE), REMARK, REMARK STATISTIC". Equal texts are equal settings.
    """

    name: str = ""  # "medium", "only_fg", "1% logreg"
    k: int | None = None  # number of neighbours or clusters
    note: str = ""  # "all 50 images", "not converged"; AS_PUBLISHED is not shown beside remarks
    remarks: tuple[str, ...] = ()  # subgroup, and deviations from the published protocol: "crop ratio 1"
    statistic: Statistic = ""  # over several draws of the training images

    def __str__(self) -> str:
        note = "" if self.note == AS_PUBLISHED and self.remarks else self.note
        words = [self.name, "" if self.k is None else f"k={self.k}", f"({note})" if note else ""]
        text = ", ".join([" ".join(filter(None, words)), *self.remarks])
        return f"{text} {self.statistic}" if self.statistic else text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def with_remarks(self, remarks: list[str]) -> "Setting":
        """Append deviations from the published protocol, so that results are not mixed; none is repeated."""
        return replace(self, remarks=(*self.remarks, *(remark for remark in remarks if remark not in self.remarks)))

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Read the text of results.jsonl; `str` of the outcome is the same text."""
        statistic: Statistic = "mean" if text.endswith(" mean") else "deviation" if text.endswith(" deviation") else ""
        head, *remarks = _split_at_commas(text.removesuffix(f" {statistic}"))
        parts = re.fullmatch(r"(.*?)(?:(?:^| )k=(\d+))?(?: \(([^()]*)\))?", head, re.DOTALL)
        assert parts is not None
        name, k, note = parts.groups()
        setting = cls(
            name=name,
            k=None if k is None else int(k),
            note=note or "",
            remarks=tuple(remarks),
            statistic=statistic,
        )
        return setting if str(setting) == text else cls(name=text)


def _split_at_commas(text: str) -> list[str]:
    """The parts between commas, but not those inside parentheses."""
    parts: list[str] = []
    current: list[str] = []  # pieces of the last part
    pieces = re.split(r"([()])", text)
    for piece, parenthesis in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        first, *others = [piece] if parenthesis == ")" else piece.split(", ")
        current.append(first)
        for other in others:
            parts.append("".join(current))
            current = [other]
        current.append(parenthesis)
    return [*parts, "".join(current)]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One number of a protocol."""

    data: str  # "ImageNet", "Pets", or the URI a user gave
    setting: Setting
    metric: str  # "top1", "mAP", "NMI" ...
    value: float  # accuracies and scores in percent
    num_samples: int  # test images or queries
