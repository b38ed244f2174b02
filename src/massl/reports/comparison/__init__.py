"""Several runs side by side: accuracy, time and memory as a table and as a figure."""
