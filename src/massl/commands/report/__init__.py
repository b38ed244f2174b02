"""`massl report`: one HTML page from run folders. `command` gathers the sections, `figures` opens the backbones."""
