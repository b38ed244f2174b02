"""`massl ablate`: repeat one of the paper's ablations. `command` runs it, `grids` lists the runs, `outcomes` reads them."""
