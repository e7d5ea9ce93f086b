"""`superadam train`: a small real trainer that shows the optimizer at work and checks every bit of it.

One module for each noun: `settings` (what a run is), `plain` (records out of files), `presets` (shapes by name), `text`
(the training data), `layers`, `llama` and `model` (what is trained), `device` (where), `ranks` (the processes that
share it), `loop` (one step), `verification` (the reference that runs along), `history` (records of steps), `memory`
(what a run needs and took), `checkpoint`, `report`, `picture`, `files`, `interruption`, `display` (terminal output),
`session` (one process's work on a run), `command` (the options).
"""
