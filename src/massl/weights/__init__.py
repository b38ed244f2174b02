"""Backbones as files: ours, other projects' layouts, and whatever a user names as a model."""
