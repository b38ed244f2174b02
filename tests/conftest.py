import os

import hypothesis
import torch

# Before anything imports Triton (torchvision does): its kernels then run on the CPU, as Python, where there is no GPU
# to run them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The tensors of these tests are tiny: more threads only wait for each other (a suite of 60 s on two busy cores instead
# of 7 s).
torch.set_num_threads(1)
# No deadline: how long an example takes says how busy the machine is, not whether the code is right.
hypothesis.settings.register_profile("massl", deadline=None)
hypothesis.settings.load_profile("massl")
