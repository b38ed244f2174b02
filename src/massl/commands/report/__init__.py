"""`massl report`: one HTML page from run folders. `command` gathers the sections, `figures` draws the pictures."""
