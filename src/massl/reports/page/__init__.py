"""The HTML page. `assembly` joins sections, `templates` renders, `charts` and `tables` draw, `assets/` holds the
templates, style and scripts. Each file in `sections/` makes one section.
"""
