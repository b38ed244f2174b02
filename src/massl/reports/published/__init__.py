"""Numbers that others have published: the paper's tables and peers' public tables, as TOML and as validated models."""
