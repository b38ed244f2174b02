"""`python -m tests.reliability`: program.py, in a process with a single thread."""

import os
import signal
import sys

if __name__ == "__main__":
    # Before numpy and torch are imported: workers are forked from this process.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Ignored by shells for what they start in the background, and by nohup; so would every run that a case interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    from tests.reliability.program import main

    sys.exit(main())
