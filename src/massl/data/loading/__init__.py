"""From an image source to decoded batches on the device: read, decode, cache, pack, prefetch.

Nothing here augments images (see `data.views`) or knows how an image is stored (see `data.sources`).
"""
