"""What a run would need and which recipe suits the images: `rules.py` is the table, `trial.py` measures.

Plans are plain values by dotted key; the commands turn them into a recipe. Nothing here writes a file.
"""
