"""The paper's evaluations: extract features once, score them, keep the results.

`protocols/` has one file per protocol; the rest is shared by all. Scorers of plain tensors live in `ops.scoring`.
"""
