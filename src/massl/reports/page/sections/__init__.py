"""One file per section of the page. Sections never import each other."""
