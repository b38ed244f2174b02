import hypothesis
import torch

# The tensors of these tests are tiny: more threads only wait for each other (a suite of 60 s on two busy cores instead of 7 s).
torch.set_num_threads(1)
# No deadline: how long an example takes says how busy the machine is, not whether the code is right.
hypothesis.settings.register_profile("massl", deadline=None)
hypothesis.settings.load_profile("massl")
