"""`massl COMMAND`: a table of commands. Only the module of the command that is called is imported."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module

from massl.failures import ToldElsewhere, is_lost_connection, tell, tell_lost_connection
from massl.interrupts import Interrupts
from massl.version import version

# command -> (summary, module with `main(arguments) -> exit status`)
COMMANDS = {
    "demo": ("try massl on bundled images: train, evaluate, report", "massl.commands.demo"),
    "pretrain": ("learn features from unlabelled images", "massl.commands.pretrain"),
    "plan": ("say what a run would choose and cost, without training", "massl.commands.plan"),
    "evaluate": ("judge a model by the paper's protocols", "massl.commands.evaluate.command"),
    "embed": ("write a model's features of your images to a file", "massl.commands.embed"),
    "visualize": ("draw attention maps, correspondences or nearest neighbours", "massl.commands.visualize"),
    "export": ("write a model for timm, transformers, ONNX Runtime or torch.hub", "massl.commands.export"),
    "compare": ("put runs or methods side by side: accuracy, time, memory", "massl.commands.compare.command"),
    "ablate": (
        "repeat the paper's ablations: memory size, block size, block sampling",
        "massl.commands.ablate.command",
    ),
    "report": ("put runs and their results on one HTML page", "massl.commands.report.command"),
    "import": ("turn another project's weights into a model that every command opens", "massl.commands.import_weights"),
    "recipes": ("list the recipes that come with massl", "massl.commands.recipes"),
}

_SLOW_SECONDS = 2.0


def usage() -> str:
    lines = "\n".join(f"  {name:<12}{summary}" for name, (summary, _) in COMMANDS.items())
    return f"""usage: massl COMMAND [options]

{lines}

massl COMMAND --help explains a command's options.
massl --version prints the version, massl --completion bash a script that completes commands and options."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `massl` command; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0 if given else 2
    if given == ["--version"]:
        print(f"massl {version()}")
        return 0
    if given[0] not in (*COMMANDS, "--completion"):
        from massl.config import closest  # imports pydantic, which takes longer than `massl --help` should

        print(f"massl: no command {given[0]!r}.{closest(given[0], COMMANDS)}\n\n{usage()}", file=sys.stderr)
        return 2
    interrupts = Interrupts()
    interrupts.__enter__()
    try:
        return _run(interrupts, *given)
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be gone
            print("massl: interrupted; what was saved so far is intact", file=sys.stderr)
        return 130
    finally:
        # A command of its own stays so to its very end: Python waits for threads, which may be stuck.
        if arguments is None:
            interrupts.ending()
        else:
            interrupts.__exit__(None, None, None)


@contextmanager
def _said_if_slow(text: str) -> Iterator[None]:
    """Print the text if what is inside takes longer than a moment: on a busy machine imports take ten seconds."""
    timer = threading.Timer(_SLOW_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if os.environ.get("RANK", "0") == "0":  # one of several processes speaks
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _status_of(command: Callable[[Sequence[str]], int], arguments: Sequence[str], interrupts: Interrupts) -> int:
    try:
        return command(arguments)
    except Exception:
        if interrupts.is_interrupted:  # safetensors and others turn KeyboardInterrupt into an error of their own
            raise KeyboardInterrupt from None
        raise


def _run(interrupts: Interrupts, command: str, *arguments: str) -> int:
    # Not at the top of the file: they take longer than `massl --help` should.
    from pydantic import ValidationError
    from safetensors import SafetensorError

    from massl.config import MasslError, UsageError, explain

    with _said_if_slow(f"massl {command}: loading PyTorch"):
        module = import_module("massl.commands.completion" if command == "--completion" else COMMANDS[command][1])
    interrupts.started()
    try:
        return _status_of(module.main, arguments, interrupts)
    except ValidationError as error:
        tell(f"massl: error: {explain(error)}")
        return 2
    except MasslError as error:
        tell(f"massl: error: {error}", is_told_elsewhere=isinstance(error, ToldElsewhere))
        return 2 if isinstance(error, UsageError) else 1
    except (OSError, SafetensorError) as error:  # SafetensorError: the disk is full while safetensors writes
        tell(f"massl: error: {error}. What was saved so far is intact; the same command continues.")
        return 1
    except ImportError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # what a C++ module makes of Ctrl-C while it is imported
            raise KeyboardInterrupt from None
        raise
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        tell_lost_connection(error)
        return 1
