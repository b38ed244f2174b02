"""Modules with weights or buffers: backbone, heads, memory, EMA teacher. No losses, no data, no files."""
