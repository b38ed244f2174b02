"""The commands: the only room where parts are assembled. One module or folder per command of `massl`.

A command parses nothing and computes nothing itself: it opens data, models and folders and hands them to the other
rooms. `console`, `model` and `recipe` are shared; no other room imports a command.
"""
