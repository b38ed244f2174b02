"""Pictures of what a model sees: attention, correspondence and neighbours as drawings, shared by `massl visualize`,
which saves `sheets`, and `massl report`, which embeds `sprites` and an `embedding_map` in its page.
"""
