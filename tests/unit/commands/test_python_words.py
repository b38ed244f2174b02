import pytest

from massl.commands.python_words import in_python


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("choose another --output", "choose another output"),
        ("lower --trainer.batch_size or add images", "lower trainer.batch_size or add images"),
        ("set --data.source to a folder", "set data to a folder"),
        ("leave out --data or --no-figures", "leave out data or figures=False"),
        ("--again True measures it again", "again=True measures it again"),
        ("try --set trainer.accumulation_steps=2", "try overrides trainer.accumulation_steps=2"),
        ("train it with massl pretrain --recipe a, then --runs", "train it with massl pretrain --recipe a, then runs"),
        ("enlarge it (docker run --shm-size), or lower --num_workers", None),
        ("a name such as a--b or -- alone", "a name such as a--b or -- alone"),
    ],
)
def test_options_become_arguments_and_command_lines_stay(message: str, expected: str | None) -> None:
    assert in_python(message) == (expected or message.replace("--num_workers", "num_workers"))
