"""`massl ablate`, the paper's ablations: `grids` plans the runs, `command` trains them, `outcomes` reads them."""
