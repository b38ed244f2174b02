"""The paper's evaluations: extract features once, score them, keep the results.

`protocols/` holds one file per protocol; everything beside it is shared by all protocols. Scorers on plain tensors
live in `ops.scoring`.
"""
