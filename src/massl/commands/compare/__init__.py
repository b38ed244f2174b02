"""`massl compare`: train or read runs and put them side by side. `minutes` plans runs of equal training time."""
