"""The HTML page. `assembly` joins sections, `templates` renders; `charts`, `tables` and `pictures` make their markup;
`assets/` holds templates, style and scripts. Each file in `sections/` makes sections; they never import each other.
"""
