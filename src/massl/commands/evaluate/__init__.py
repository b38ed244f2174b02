"""`massl evaluate`: `settings` are its options, `jobs` the list of measurements, `command` carries them out."""
