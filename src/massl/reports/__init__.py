"""Run folders and results as tables, figures and one HTML page. Trains nothing and measures nothing.

`run_reader` reads run folders; `published/` holds the paper's and peers' numbers; `comparison/`, `ablation/`,
`pictures/` and `page/` each make one kind of output.
"""
