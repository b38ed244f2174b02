"""Backbone files: ours, those of other projects, and models by name (runs, files, timm)."""
